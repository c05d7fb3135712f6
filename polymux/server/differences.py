"""Where the server differs from OpenAI's, in words: a part of docs/api.md that no schema can tell."""

DIFFERENCES = """\
The official SDKs work unchanged. What they will notice:

- One server has one model. `model` may be left out, and no other name is taken for it.
- Fields are refused that would change nothing: a `quality` that no diffusion model knows, tools; of a model that makes
  pictures, a `temperature` other than 1.
- Sampling fields that OpenAI does not have (`seed`, `num_inference_steps`, `guidance_scale`, `negative_prompt`,
  `strength`, ...) are fields of the body like the others. The SDKs send them with `extra_body`.
- `size` may be any size that the model makes. Left out, it is the model's own, not 1024x1024.
- Answers say what was made: `size`, `output_format` and `seed` are those of the decoded picture. `usage` is left out by
  the routes for pictures, and 0 in conversations with models that make them: nothing is counted in tokens.
- A spoken answer has its text in `content` too, not only as the `transcript`. Speech can be streamed in every format.
- `response_format` is `b64_json` if left out, for every model.
- Errors have OpenAI's shape. A wrong value is 400, also where OpenAI has other codes; 503 and 504 exist, and mean that
  the same request may work later.
- Two requests may have the same `x-request-id`: it is for logs.
"""
