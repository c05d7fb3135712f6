"""Qwen-Image and its edit variants.

Prompts are not padded by the pipelines; the denoiser takes a mask of the real positions. The checkpoints are not
guidance-distilled: they follow true_cfg_scale, which acts only beside a negative prompt.
"""

from polymux.families import step_caches
from polymux.families.base import CAUSAL_PROMPT, Family, Padding
from polymux.families.sharding import Gather, Lengthen, SequencePlan, Sharding, Split

_PROMPT = Padding(argument="encoder_hidden_states", mask="encoder_hidden_states_mask")
_REFUSED = (("guidance_scale", "transformer", "guidance_embeds"),)
_COMPANIONS = (("true_cfg_scale", "negative_prompt", " "),)

QWEN_IMAGE = Family(
    name="qwen-image",
    pipelines=("QwenImagePipeline", "QwenImageModularPipeline"),
    modality="image",
    tasks=("text-to-image",),
    padding=(_PROMPT, CAUSAL_PROMPT),
    refused=_REFUSED,
    companions=(*_COMPANIONS, ("strength", "image", None)),  # the modular pipeline takes both
    step_caches=step_caches.WITHOUT_MEASUREMENTS,
)

QWEN_IMAGE_EDIT = Family(
    name="qwen-image-edit",
    pipelines=("QwenImageEditPipeline",),
    modality="image",
    tasks=("image-to-image",),
    padding=(_PROMPT, CAUSAL_PROMPT),
    refused=_REFUSED,
    companions=_COMPANIONS,
    media=(("image", 1),),
)

QWEN_IMAGE_EDIT_PLUS = Family(
    name="qwen-image-edit-plus",
    pipelines=("QwenImageEditPlusPipeline",),
    modality="image",
    tasks=("image-to-image",),
    padding=(_PROMPT, CAUSAL_PROMPT),
    refused=_REFUSED,
    companions=_COMPANIONS,
    media=(("image", 4),),
)

QWEN_IMAGE_LAYERED = Family(
    name="qwen-image-layered",
    pipelines=("QwenImageLayeredPipeline",),
    modality="image",
    tasks=("image-to-image",),
    padding=(_PROMPT, CAUSAL_PROMPT),
    refused=_REFUSED,
    companions=_COMPANIONS,
    media=(("image", 1),),
    alpha=True,
)

FAMILIES = (QWEN_IMAGE, QWEN_IMAGE_EDIT, QWEN_IMAGE_EDIT_PLUS, QWEN_IMAGE_LAYERED)

SHARDING = (
    Sharding(
        models=("QwenImageTransformer2DModel",),
        sequence=SequencePlan(
            steps=(
                *(Split(module="pos_embed", output=position, dim=0, ndim=2) for position in (0, 1)),
                Split(module="transformer_blocks.0", argument="hidden_states"),
                Split(module="transformer_blocks.0", argument="encoder_hidden_states"),
                Split(module="transformer_blocks.*", argument="encoder_hidden_states_mask", ndim=2),
                Split(module="transformer_blocks.*", argument="modulate_index", ndim=2),
                Gather(module="proj_out"),
            ),
            lengthen=(Lengthen(argument="encoder_hidden_states", mask="encoder_hidden_states_mask"),),
        ),
    ),
)
