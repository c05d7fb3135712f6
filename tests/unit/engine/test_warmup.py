"""The warm-up: a request that the pipeline takes, through everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from fake_pipeline import MadeUpPipeline, engine_of, pipeline_of

from polymux.diffusion.pipeline_call import CallShape
from polymux.engine.warmup import SIDE, STEPS, warmup_requests
from polymux.errors import GenerationError, InvalidRequestError
from polymux.families.base import UNKNOWN, Family
from polymux.request import ArrayData, Capabilities, ImageData, Request


def test_it_goes_through_every_component_and_leaves_nothing() -> None:
    pipeline = pipeline_of()
    engine = engine_of(pipeline)
    before = torch.get_rng_state()
    engine.warm_up()
    assert set(engine.stats.calls) == {"text_encoder", "transformer", "vae"}
    assert engine.stats.steps == STEPS and not engine.busy
    assert torch.equal(torch.get_rng_state(), before)


def test_it_raises_what_went_wrong() -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("no kernel for this")

    engine = engine_of(pipeline_of(MadeUpPipeline, predict=broken))
    with pytest.raises(GenerationError, match="no kernel for this"):
        engine.warm_up()
    assert not engine.busy


def warmup_request(known: Capabilities, family: Family, shape: CallShape) -> Request:
    """The only one."""
    (made,) = warmup_requests(known, family, shape)
    return made


def capabilities(**more: Any) -> Capabilities:
    common: dict[str, Any] = {"family": None, "pipeline": "P", "modality": "image", "arguments": (), "required": ()}
    return Capabilities(**common | {"media": {}} | more)


def test_sizes_and_frames_are_what_the_pipeline_takes() -> None:
    shape = CallShape(("prompt", "height", "width", "num_frames", "num_inference_steps"), (), False)
    made = warmup_request(capabilities(size_multiple=48, frames_multiple=8), UNKNOWN, shape)
    assert made.params.height == made.params.width == 288 and made.params.num_frames == 9
    assert made.params.num_inference_steps == STEPS and made.prompt and made.params.seed == 0
    assert SIDE <= 288


def test_what_the_pipeline_does_not_take_is_not_given() -> None:
    made = warmup_request(capabilities(), UNKNOWN, CallShape((), (), False))
    params = made.params
    assert made.prompt is None and made.media == {}
    assert (params.height, params.width, params.num_frames, params.num_inference_steps) == (None,) * 4


def test_required_media_are_given() -> None:
    shape = CallShape(("image", "mask_image", "video", "audio"), (), False)
    known = capabilities(
        media={"image": 1, "mask_image": 1, "video": 1, "audio": 1, "last_image": 1},
        required=("image", "mask_image", "audio", "video"),
    )
    media = warmup_request(known, replace(UNKNOWN, pipelines=("P",)), shape).media
    assert set(media) == {"image", "mask_image", "video", "audio"}
    picture, mask, frames, sound = (media[name][0] for name in ("image", "mask_image", "video", "audio"))
    assert isinstance(picture, ImageData) and picture.mode == "RGB"
    assert isinstance(mask, ImageData) and mask.mode == "L"
    assert isinstance(frames, ArrayData) and frames.shape == (5, SIDE, SIDE, 3)
    assert isinstance(sound, ArrayData) and len(sound.shape) == 2


def test_a_family_s_own_values_win() -> None:
    family = replace(UNKNOWN, warmup=(("num_inference_steps", 4), ("audio_length", 2.0)))
    made = warmup_request(capabilities(), family, CallShape(("num_inference_steps",), (), False))
    assert made.params.num_inference_steps == 4 and made.params.extra_args == {"audio_length": 2.0}


class NeedsPicture(DiffusionPipeline):
    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.register_modules(unet=unet)

    def __call__(self, image: Any, strength: float = 0.5) -> Any:
        return ([image],)


def test_a_picture_that_has_no_default_is_given() -> None:
    engine = engine_of(NeedsPicture(torch.nn.Identity()))
    engine.warm_up()
    assert not engine.busy


class FromPicture(MadeUpPipeline):
    """As most image-to-image pipelines: the picture has None as its default, and it cannot do without."""

    def __call__(self, prompt: str | None = None, image: Any = None, num_inference_steps: int = 2) -> Any:
        assert image is None or image.size == (SIDE, SIDE)
        if image is None:
            raise ValueError("image is in an incorrect format")
        return super().__call__(prompt, num_inference_steps=num_inference_steps)


class PictureAtMost(MadeUpPipeline):
    """Takes a picture in another kind of call only."""

    def __call__(self, prompt: str | None = None, image: Any = None, num_inference_steps: int = 2) -> Any:
        if image is not None:
            raise ValueError("image needs a mask")
        return super().__call__(prompt, num_inference_steps=num_inference_steps)


@pytest.mark.parametrize("kind", [FromPicture, PictureAtMost])
def test_of_an_unknown_pipeline_both_ways_are_tried(kind: type[MadeUpPipeline]) -> None:
    engine = engine_of(pipeline_of(kind))
    engine.warm_up()
    assert engine.stats.steps == STEPS and not engine.busy


def test_the_first_problem_is_told() -> None:
    class Neither(MadeUpPipeline):
        def __call__(self, prompt: str | None = None, image: Any = None) -> Any:
            raise ValueError(f"with {image}" if image is None else "with a picture")

    engine = engine_of(pipeline_of(Neither))
    with pytest.raises(InvalidRequestError, match="with a picture"):
        engine.warm_up()
