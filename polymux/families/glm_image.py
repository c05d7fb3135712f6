"""GLM-Image: a language model writes what the picture is of, and a transformer denoises the picture after it."""

from polymux.families.base import Family

GLM_IMAGE = Family(
    name="glm-image",
    pipelines=("GlmImagePipeline",),
    modality="image",
    tasks=("text-to-image",),
    merge=frozenset({"decoder"}),
    unmerged_because="its language model and its denoiser have caches of their own",
    collect_guidance=False,
    loops=(("vision_language_encoder", ("model.visual", "model.vqmodel", "model.language_model", "lm_head")),),
    companions=(("sigmas", "num_inference_steps", None),),
    ignored=(
        ("image", "its language model reads no pictures with the installed versions of diffusers and transformers"),
    ),
    size=(1024, 1024),
    size_multiple=32,
    unusable=(
        ("_upsample_token_ids", "its language model came to an end before it had written all tokens of the picture"),
    ),
    no_previews="a preview would have the language model write all tokens again",
)

FAMILIES = (GLM_IMAGE,)
