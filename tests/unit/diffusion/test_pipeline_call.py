"""From a request to a pipeline's arguments, and from a pipeline to what requests may ask."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_pipeline import MadeUpPipeline, StableDiffusionPipeline, pipeline_of
from PIL import Image

from polymux.diffusion.pipeline_call import CallShape, call_arguments, declared_family, describe, is_for_requests
from polymux.errors import InvalidRequestError
from polymux.families.base import UNKNOWN, Family
from polymux.families.ltx import LTX_2
from polymux.families.wan import WAN_I2V
from polymux.media.wire import to_wire
from polymux.request import OmniDiffusionSamplingParams, Request


def shape(*accepted: str) -> CallShape:
    return CallShape(accepted, (), False)


def arguments(
    accepted: CallShape, family: Family = UNKNOWN, request: dict[str, Any] | None = None, **params: Any
) -> dict[str, Any]:
    made = Request(request_id="a", params=OmniDiffusionSamplingParams(**params), **(request or {}))
    return call_arguments(made, accepted, family)


# What a pipeline's call takes.


class Calls:
    def __call__(self, image: Any, prompt: str | None = None, *args: Any, size: int = 3, **kwargs: Any) -> None: ...


def test_a_classic_pipeline_s_arguments_are_those_of_its_call() -> None:
    made = CallShape.of(Calls(), "image")
    assert (made.accepted, made.required, made.modular) == (("image", "prompt", "size"), ("image",), False)
    assert made.takes("size") and not made.takes("kwargs")


def test_a_modular_pipeline_s_arguments_are_its_blocks() -> None:
    def part(name: str | None, required: bool = False) -> Any:
        return SimpleNamespace(name=name, required=required, default=None)

    blocks = SimpleNamespace(
        inputs=[part("prompt", True), part("latents", True), part(None), part("height")],
        outputs=[part("videos"), part("audio"), part("latents")],
        intermediate_outputs=[part("latents")],
    )
    pipeline = SimpleNamespace(_blocks=blocks)
    made = CallShape.of(pipeline, "video")
    assert made.accepted == ("prompt", "latents", "height")
    assert made.required == ("prompt",), "latents are made by a block"
    assert made.results == ("videos", "audio") and made.modular
    assert CallShape.of(pipeline, "image").results == ()


@pytest.mark.parametrize(
    "name",
    [
        "generator",
        "latents",
        "return_dict",
        "output_type",
        "prompt_embeds",
        "pooled_prompt_embeds",
        "negative_prompt_attention_mask",
        "attention_mask",
        "callback_on_step_end",
        "ip_adapter_image",
        "attention_kwargs",
        "image_latents",
        "num_images_per_prompt",
    ],
)
def test_what_a_request_may_not_set(name: str) -> None:
    assert not is_for_requests(name)
    with pytest.raises(InvalidRequestError, match=f"takes no {name}"):
        arguments(shape("prompt", name), extra_args={name: 1})


def test_the_description_of_a_pipeline() -> None:
    pipeline = pipeline_of(StableDiffusionPipeline)
    made = describe(pipeline, declared_family(pipeline), CallShape.of(pipeline, "image"))
    taken = ("flavour", "height", "negative_prompt", "num_inference_steps", "output_type", "prompt", "width")
    assert made.arguments == taken
    assert made.required == ("prompt",) and made.merges and made.media == {}
    assert (made.device, made.dtype, made.parameters) == ("cpu", "float32", 3)
    assert made.size_multiple == 16, "eight pixels a latent, two latents a patch"
    assert made.pipeline == "StableDiffusionPipeline" and made.family is not None


def test_what_a_checkpoint_would_ignore_is_refused() -> None:
    pipeline = pipeline_of()
    pipeline.transformer.config = {"guidance_embeds": False}
    family = replace(declared_family(pipeline), refused=(("guidance_scale", "transformer", "guidance_embeds"),))
    made = describe(pipeline, family, CallShape.of(pipeline, "image"))
    assert made.refused == {"guidance_scale": "this checkpoint's transformer has no guidance_embeds"}
    pipeline.transformer.config = {"guidance_embeds": True}
    assert describe(pipeline, family, CallShape.of(pipeline, "image")).refused == {}


WAN_CHECKPOINTS = {  # what published ones have in the configs of transformer and pipeline
    "2.1 I2V": ({"image_dim": 1280, "pos_embed_seq_len": None}, {}, "refused"),
    "2.1 FLF2V": ({"image_dim": 1280, "pos_embed_seq_len": 514}, {}, "needed"),
    "2.2 I2V A14B": ({"image_dim": None}, {"boundary_ratio": 0.9}, "taken"),
    "2.2 TI2V 5B": ({"image_dim": None}, {"expand_timesteps": True}, "refused"),
}


@pytest.mark.parametrize(("transformer", "config", "last"), WAN_CHECKPOINTS.values(), ids=WAN_CHECKPOINTS)
def test_which_wan_checkpoints_end_with_a_given_picture(
    transformer: dict[str, Any], config: dict[str, Any], last: str
) -> None:
    pipeline = SimpleNamespace(components={"transformer": SimpleNamespace(config=transformer)}, config=config)
    made = describe(pipeline, WAN_I2V, shape("prompt", "image", "last_image", "guidance_scale_2"))
    refused, needed = "last_image" in made.refused, "last_image" in made.required
    assert (refused, needed) == (last == "refused", last == "needed")
    assert ("last_image" in made.media) != refused, "what is refused is not offered"
    assert ("guidance_scale_2" in made.refused) == ("boundary_ratio" not in config)


@pytest.mark.parametrize("takes", [True, False])
def test_eta_is_refused_where_the_scheduler_would_not_get_it(takes: bool) -> None:
    def with_eta(sample: float, eta: float = 0.0) -> None: ...

    def without(sample: float) -> None: ...

    scheduler = SimpleNamespace(step=with_eta if takes else without, config={})
    pipeline = SimpleNamespace(components={"scheduler": scheduler}, prepare_extra_step_kwargs=None)
    made = describe(pipeline, UNKNOWN, shape("prompt", "eta"))
    assert ("eta" in made.refused) != takes


def test_what_another_argument_decides_is_refused_beside_it() -> None:
    family = replace(UNKNOWN, overruled=(("audio_duration", "task"),))
    made = shape("audio_duration", "task")
    assert arguments(made, family, seconds=2.0) == {"audio_duration": 2.0}
    with pytest.raises(InvalidRequestError, match="seconds cannot be combined with task") as raised:
        arguments(made, family, seconds=2.0, extra_args={"task": "x"})
    assert raised.value.param == "seconds"


class Frames:
    def __call__(self, num_frames: int = 3, audio_length: float = 1.0) -> None: ...


class Restyled:
    def __call__(self, video: Any = None, strength: float = 0.5) -> None: ...


class Sound:
    def __call__(self, audio_length_in_s: float = 1.0) -> None: ...


def test_what_an_unknown_pipeline_makes_is_told_by_its_arguments() -> None:
    families = [declared_family(p) for p in (Frames(), Restyled(), Sound(), pipeline_of(MadeUpPipeline))]
    assert [family.modality for family in families] == ["video", "video", "audio", "image"]
    assert all(not family.merge and not family.pipelines and not family.collect_guidance for family in families)


# From a request.


def test_only_what_is_given_is_passed() -> None:
    taken = shape("prompt", "height", "guidance_scale", "num_inference_steps")
    assert arguments(taken, request={"prompt": "a"}) == {"prompt": "a"}
    assert arguments(taken, height=64, guidance_scale=0.0) == {"height": 64, "guidance_scale": 0.0}


def test_fields_go_by_the_name_that_the_pipeline_has() -> None:
    assert arguments(shape("frame_rate"), fps=24.0) == {"frame_rate": 24.0}
    assert arguments(shape("fps", "frame_rate"), fps=24.0) == {"fps": 24.0}
    for name in ("audio_end_in_s", "audio_duration", "audio_duration_s"):
        assert arguments(shape(name), seconds=2.5) == {name: 2.5}
    assert arguments(shape("sigmas"), sigmas=(1.0, 0.5)) == {"sigmas": [1.0, 0.5]}


def test_the_request_s_own_negative_prompt_wins() -> None:
    taken = shape("negative_prompt")
    assert arguments(taken, negative_prompt="b") == {"negative_prompt": "b"}
    given = {"negative_prompt": ""}
    assert arguments(taken, request=given, negative_prompt="b") == {"negative_prompt": ""}


def test_what_the_pipeline_does_not_take_is_refused_with_what_it_takes() -> None:
    taken = shape("prompt", "height", "generator", "return_dict")
    for given in ({"guidance_scale": 2.0}, {"extra_args": {"colour": "red"}}, {"fps": 24.0}):
        with pytest.raises(InvalidRequestError, match=r"it takes height, prompt$") as error:
            arguments(taken, **given)
        assert error.value.param in ("guidance_scale", "colour", "fps")


def test_an_argument_may_not_be_given_twice() -> None:
    with pytest.raises(InvalidRequestError, match=r"extra_args\.height"):
        arguments(shape("height"), height=64, extra_args={"height": 32})


def picture(mode: str) -> Any:
    return to_wire(Image.new(mode, (4, 2), 100))


def test_pictures_have_the_mode_that_pipelines_expect() -> None:
    media = {"image": [picture("RGBA")], "mask_image": [picture("RGB")]}
    made = arguments(shape("image", "mask_image"), request={"media": media})
    assert (made["image"].mode, made["mask_image"].mode) == ("RGB", "L")
    made = arguments(shape("image"), replace(UNKNOWN, alpha=True), request={"media": {"image": [picture("RGB")]}})
    assert made["image"].mode == "RGBA"


def test_one_medium_is_passed_as_itself_and_several_as_a_list() -> None:
    one, two = [picture("RGB")], [picture("RGB"), picture("L")]
    taken = shape("image", "images")
    assert isinstance(arguments(taken, request={"media": {"image": one}})["image"], Image.Image)
    assert [p.mode for p in arguments(taken, request={"media": {"image": two}})["image"]] == ["RGB", "RGB"]
    assert len(arguments(taken, request={"media": {"images": one}})["images"]) == 1


def test_arrays_arrive_as_they_are() -> None:
    sound = np.linspace(-1, 1, 10, dtype=np.float32).reshape(2, 5)
    made = arguments(shape("audio"), request={"media": {"audio": [to_wire(sound)]}})
    np.testing.assert_array_equal(made["audio"], sound)


def test_companions() -> None:
    taken = shape("true_cfg_scale", "negative_prompt")
    filled = replace(UNKNOWN, companions=(("true_cfg_scale", "negative_prompt", " "),))
    assert arguments(taken, filled, true_cfg_scale=4.0) == {"true_cfg_scale": 4.0, "negative_prompt": " "}
    assert arguments(taken, filled, true_cfg_scale=4.0, negative_prompt="x")["negative_prompt"] == "x"
    assert arguments(taken, filled) == {}
    strict = replace(UNKNOWN, companions=(("negative_prompt", "true_cfg_scale", None),))
    with pytest.raises(InvalidRequestError, match="negative_prompt acts only together with true_cfg_scale") as error:
        arguments(taken, strict, negative_prompt="x")
    assert error.value.param == "true_cfg_scale"


def test_kinds_of_output() -> None:
    taken = shape("output_type")
    assert arguments(taken) == {"output_type": "pil"}
    assert arguments(taken, output_type="latent") == {"output_type": "latent"}
    assert arguments(taken, replace(UNKNOWN, modality="audio")) == {"output_type": "np"}
    assert arguments(taken, replace(UNKNOWN, modality="video")) == {"output_type": "np"}
    video = replace(UNKNOWN, modality="video", pipelines=("A",))
    assert arguments(taken, video) == {"output_type": "pt"}, "on the device, until they are bytes"
    assert arguments(taken, video, output_type="np") == {"output_type": "np"}
    assert arguments(shape()) == {}
    with pytest.raises(InvalidRequestError, match="one kind of output"):
        arguments(shape(), output_type="np")
    assert arguments(CallShape((), (), True, ("images",)))["output"] == ["images"]


def test_parameters_of_modules_are_counted() -> None:
    pipeline = pipeline_of()
    pipeline.transformer.more = torch.nn.Linear(3, 2)
    made = describe(pipeline, UNKNOWN, CallShape.of(pipeline, "image"))
    assert made.parameters == 3 + 8 and made.family is None


def test_what_a_component_that_is_not_there_would_do_is_refused() -> None:
    names = shape("prompt", "num_frames", "min_seconds", "decode_timestep")
    vae = SimpleNamespace(config={"timestep_conditioning": False})
    made = describe(SimpleNamespace(components={"vae": vae, "duration_head": None}), LTX_2, names)
    assert made.refused["min_seconds"] == "this checkpoint has no duration_head"
    assert made.refused["decode_timestep"] == "this checkpoint's vae has no timestep_conditioning"
    vae.config["timestep_conditioning"] = True
    made = describe(SimpleNamespace(components={"vae": vae, "duration_head": object()}), LTX_2, names)
    assert made.refused.keys() == {"partial_images"}
