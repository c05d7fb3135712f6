"""Wan 2.1 and 2.2, and SkyReels-V2, which shares their denoiser."""

from polymux.families import step_caches, video_tokens
from polymux.families.base import Family
from polymux.families.sharding import (
    Cut,
    Gather,
    SequencePlan,
    Sharding,
    Split,
    TensorPlan,
    attention_cuts,
    feed_forward_cuts,
)

_OTHER_FPS = (("", "expand_timesteps", 24.0),)  # the 5 B model, which makes video from text and from pictures
_TWO_DENOISERS = ("guidance_scale_2", "", "boundary_ratio")

WAN = Family(
    name="wan",
    pipelines=("WanPipeline", "WanModularPipeline"),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=16,
    frames_multiple=4,
    streamed_decode=True,
    fps=16.0,
    other_fps=_OTHER_FPS,
    refused=(_TWO_DENOISERS,),
    step_caches=step_caches.WAN,
    video_tokens=video_tokens.WAN,
)

WAN_I2V = Family(
    name="wan-i2v",
    pipelines=("WanImageToVideoPipeline",),
    modality="video",
    tasks=("image-to-video",),
    size_multiple=16,
    frames_multiple=4,
    streamed_decode=True,
    fps=16.0,
    other_fps=_OTHER_FPS,
    media=(("image", 1),),
    refused=(
        _TWO_DENOISERS,
        ("last_image", "", "not expand_timesteps"),  # the 5 B model takes the first picture alone
        # Of those that see the picture through CLIP, the first-last-frame model alone has a place for two.
        ("last_image", "transformer", "pos_embed_seq_len or not image_dim"),
    ),
    needed=(("last_image", "transformer", "pos_embed_seq_len"),),
    step_caches=step_caches.WITHOUT_MEASUREMENTS,
    video_tokens=video_tokens.WAN,
)

WAN_VACE = Family(
    name="wan-vace",
    pipelines=("WanVACEPipeline",),
    modality="video",
    tasks=("text-to-video", "video-to-video"),
    size_multiple=16,
    frames_multiple=4,
    streamed_decode=True,
    fps=16.0,
    blocks=("vace_blocks", "blocks"),
    step_caches=step_caches.BY_DIFFUSERS,
)

SKYREELS_V2 = Family(
    name="skyreels-v2",
    pipelines=("SkyReelsV2Pipeline",),
    modality="video",
    tasks=("text-to-video",),
    size_multiple=16,
    frames_multiple=4,
    streamed_decode=True,
    fps=24.0,
    step_caches=step_caches.NOT_BY_DIFFUSERS,
)

FAMILIES = (
    WAN,
    WAN_I2V,
    WAN_VACE,
    SKYREELS_V2,
)


def _cuts(block: str) -> tuple[Cut, ...]:
    picture = f"{block}.attn2"  # what comes of the input picture
    return (
        *attention_cuts(f"{block}.attn1", norms=True),
        *attention_cuts(f"{block}.attn2", norms=True),
        Cut(layer=f"{picture}.add_k_proj", by="column"),
        Cut(layer=f"{picture}.add_v_proj", by="column"),
        Cut(layer=f"{picture}.norm_added_k", by="norm"),
        *feed_forward_cuts(f"{block}.ffn"),
    )


_HEADS = ("blocks.*.attn1.heads", "blocks.*.attn2.heads")

_ROPE = tuple(Split(module="rope", output=position, dim=1, ndim=4) for position in (0, 1))

SHARDING = (
    Sharding(
        models=("WanTransformer3DModel",),
        tensor=TensorPlan(cuts=_cuts("blocks.*"), heads=_HEADS),
    ),
    Sharding(
        models=("SkyReelsV2Transformer3DModel",),
        sequence=SequencePlan(
            steps=(*_ROPE, Split(module="blocks.0", argument="hidden_states"), Gather(module="proj_out")),
            attention=("blocks.*.attn1",),
        ),
        tensor=TensorPlan(cuts=_cuts("blocks.*"), heads=_HEADS),
    ),
    Sharding(
        models=("WanVACETransformer3DModel",),
        sequence=SequencePlan(
            steps=(
                *_ROPE,
                Split(module="vace_blocks.*", argument="hidden_states"),
                Split(module="vace_blocks.0", argument="control_hidden_states"),
                Split(module="blocks.0", argument="hidden_states"),
                Gather(module="proj_out"),
            )
        ),
        tensor=TensorPlan(
            cuts=(*_cuts("blocks.*"), *_cuts("vace_blocks.*")),
            heads=(*_HEADS, "vace_blocks.*.attn1.heads", "vace_blocks.*.attn2.heads"),
        ),
    ),
)
