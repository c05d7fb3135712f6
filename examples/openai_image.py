"""Make a picture with the official OpenAI client: `python examples/openai_image.py [--base-url URL] [-o FILE] PROMPT`.

Needs a running server, for example `polymux serve demo`.
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path

import openai


def make_picture(base_url: str, prompt: str, out: Path, size: str = "128x128", steps: int = 16, seed: int = 1) -> Path:
    """Ask the server's only model for a picture, and save it as PNG."""
    client = openai.OpenAI(base_url=base_url, api_key="none")  # the client wants one, the server asks for none
    model = client.models.list().data[0].id
    answer = client.images.generate(
        model=model,
        prompt=prompt,
        size=size,
        response_format="b64_json",
        extra_body={"num_inference_steps": steps, "seed": seed},
    )
    assert answer.data is not None and answer.data[0].b64_json is not None
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(base64.b64decode(answer.data[0].b64_json))
    return out


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    ap.add_argument("prompt", nargs="?", default="a large red circle in the center on a white background")
    ap.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    ap.add_argument("-o", "--out", type=Path, default=Path("out/picture.png"))
    ap.add_argument("--size", default="128x128")
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    print(make_picture(args.base_url, args.prompt, args.out, args.size, args.steps, args.seed))


if __name__ == "__main__":
    main()
