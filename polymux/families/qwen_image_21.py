"""Qwen-Image 2.1."""

from polymux.families.base import Family

QWEN_IMAGE_2_1 = Family(
    name="qwen-image-2.1",
    pipelines=("QwenImage21Pipeline",),
    modality="image",
    tasks=("text-to-image",),
    merge=frozenset({"encoder", "decoder"}),
    unmerged_because="each of its requests carries a key-value cache through the steps",
    collect_guidance=False,
    companions=(("true_cfg_scale", "negative_prompt", " "), ("negative_prompt", "true_cfg_scale", None)),
)

FAMILIES = (QWEN_IMAGE_2_1,)
