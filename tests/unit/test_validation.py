"""A request is refused for every wrong field, and what passes arrives on the other side as it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from polymux.config import LimitsConfig
from polymux.errors import InvalidRequestError
from polymux.messages import Add, frame, to_stage
from polymux.request import ArrayData, Capabilities, ImageData, OmniDiffusionSamplingParams, Request
from polymux.validation import ARGUMENT_FIELDS, validate

LIMITS = LimitsConfig(max_inference_steps=50, max_num_outputs=4, max_generated_image_size=64 * 64, max_prompt_length=20)
EVERYTHING = Capabilities(
    family="test",
    pipeline="TestPipeline",
    modality="video",
    arguments=("prompt", "output_type", "clip_skip", "image", "video", *ARGUMENT_FIELDS),
    required=("prompt",),
    media={"image": 2, "video": 1},
    size_multiple=8,
    frames_multiple=4,
    frame_interpolation=True,
)
PICTURE = ImageData("RGB", 2, 1, bytes(6))
FRAMES = ArrayData("uint8", (3, 2, 2, 3), bytes(36))


def check(capabilities: Capabilities = EVERYTHING, **fields: Any) -> None:
    """Validate a request in which `fields` are the request's own or its parameters'."""
    own = {"prompt": "a", "request_id": "r"} | {k: v for k, v in fields.items() if k in Request.__struct_fields__}
    params = OmniDiffusionSamplingParams(**{k: v for k, v in fields.items() if k not in Request.__struct_fields__})
    request = Request(params=params, **own)
    validate(request, capabilities, LIMITS)
    arrived = to_stage.decode(frame(Add(request))[4:])
    assert isinstance(arrived, Add)
    assert msgspec.to_builtins(arrived.request) == msgspec.to_builtins(request)


SMOOTH = {"enable_frame_interpolation": True}

GOOD = [
    {},
    {"height": 64, "width": 64},
    {"height": 8},
    {"num_frames": 1},
    {"num_frames": 9, "fps": 24},
    {"fps": 0.5},
    {"enable_frame_interpolation": True},
    {"enable_frame_interpolation": True, "frame_interpolation_exp": 4, "num_frames": 61},
    {"enable_frame_interpolation": True, "frame_interpolation_scale": 0.5},
    {"seconds": 600},
    {"num_inference_steps": 50},
    {"guidance_scale": 0},
    {"guidance_scale": -1.5, "guidance_scale_2": 2, "true_cfg_scale": 4},
    {"strength": 0},
    {"strength": 1.0},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"num_outputs_per_prompt": 4, "seed": 2**64 - 4},
    {"generator_state": b"state"},
    {"sigmas": (1.0, 0.5), "num_inference_steps": 2},
    {"timesteps": (999, 0)},
    {"max_sequence_length": 20},
    {"output_type": "latent"},
    {"output_type": "np"},
    {"prompt": ""},
    {"prompt": "é" * 20},
    {"negative_prompt": ""},
    {"media": {"image": [PICTURE, PICTURE], "video": [FRAMES]}},
    {"extra_args": {"clip_skip": {"a": [1, 2.5, "x", None, True]}}},
]

BAD: list[tuple[str, dict[str, Any]]] = [
    *[(n, {n: v}) for n in ("height", "width") for v in (0, -8, 65, 12, "64", 64.0, True, float("nan"), 10**30)],
    ("size", {"height": 64, "width": 72}),
    *[("num_frames", {"num_frames": v}) for v in (0, -3, 2, 8, 10**9 + 1, True, 5.0)],
    *[("fps", {"fps": v}) for v in (0, -1, float("inf"), "x", True)],
    *[("enable_frame_interpolation", {"enable_frame_interpolation": v}) for v in (1, "true", None)],
    *[("frame_interpolation_exp", SMOOTH | {"frame_interpolation_exp": v}) for v in (0, -1, 5, 10**9, 1.0, "1", True)],
    *[("frame_interpolation_scale", SMOOTH | {"frame_interpolation_scale": v}) for v in (0, 0.3, 8.0, "1", None, True)],
    ("frame_interpolation_exp", {"frame_interpolation_exp": 2}),
    ("frame_interpolation_scale", {"frame_interpolation_scale": 0.5}),
    ("frame_interpolation_exp", SMOOTH | {"frame_interpolation_exp": 4, "num_frames": 1001}),
    ("enable_frame_interpolation", SMOOTH | {"output_type": "latent"}),
    *[("seconds", {"seconds": v}) for v in (0, -1, 600.1, float("nan"), float("inf"), "x", True)],
    *[("num_inference_steps", {"num_inference_steps": v}) for v in (0, -1, 51, 10**9, "x", 2.0, True)],
    *[("num_outputs_per_prompt", {"num_outputs_per_prompt": v}) for v in (0, -1, 5, 1000000, None, True, "1")],
    *[("seed", {"seed": v}) for v in (-1, 2**64, 1.5, "abc", True)],
    ("seed", {"seed": 2**64 - 1, "num_outputs_per_prompt": 2}),
    ("seed", {"seed": 1, "generator_state": b"state"}),
    ("generator", {"generator": object()}),
    *[
        (n, {n: v})
        for n in ("guidance_scale", "guidance_scale_2", "true_cfg_scale")
        for v in ("x", float("nan"), float("inf"), -float("inf"), True, 10**400)
    ],
    *[("strength", {"strength": v}) for v in (-0.1, 1.1, float("nan"), "x", True)],
    *[(n, {n: v}) for n in ("sigmas", "timesteps") for v in ((), (-1.0,), (float("nan"),), "12", 3, (1.0,) * 51)],
    ("timesteps", {"sigmas": (1.0,), "timesteps": (1.0,)}),
    ("num_inference_steps", {"sigmas": (1.0,), "num_inference_steps": 2}),
    *[("max_sequence_length", {"max_sequence_length": v}) for v in (0, 21, 10**9, 1.0)],
    *[("output_type", {"output_type": v}) for v in ("pt", None, 1)],
    *[("prompt", {"prompt": v}) for v in (None, {}, 3, "a" * 21, "\ud800")],
    *[("negative_prompt", {"negative_prompt": v}) for v in (3, "a" * 21, "\ud800")],
    *[("request_id", {"request_id": v}) for v in ("", None, 3, "\ud800")],
    ("image", {"media": {"image": []}}),
    ("image", {"media": {"image": [PICTURE] * 3}}),
    ("image", {"media": {"image": PICTURE}}),
    ("image", {"media": {"image": [ImageData("RGB", 2, 2, bytes(6))]}}),
    ("image", {"media": {"image": [ImageData("P", 2, 2, bytes(4))]}}),
    ("image", {"media": {"image": [ImageData("RGB", 0, 0, b"")]}}),
    ("video", {"media": {"video": [ArrayData("uint8", (3, 2, 2, 3), bytes(35))]}}),
    ("video", {"media": {"video": [ArrayData("object", (1,), bytes(8))]}}),
    ("video", {"media": {"video": [ArrayData("uint8", (-1, -1), bytes(1))]}}),
    ("mask_image", {"media": {"mask_image": [PICTURE]}}),
    ("extra_args", {"extra_args": []}),
    ("extra_args", {"extra_args": {1: 2}}),
    ("clip_skipp", {"extra_args": {"clip_skipp": 2}}),
    *[(f"extra_args.{n}", {"extra_args": {n: 1}}) for n in ("height", "seed", "prompt", "generator", "image")],
    *[("extra_args.clip_skip", {"extra_args": {"clip_skip": v}}) for v in (object(), float("nan"), 2**64, {1: 2}, b"")],
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_good_requests_pass_and_survive_the_wire(fields: dict[str, Any]) -> None:
    check(**fields)


@pytest.mark.parametrize(("param", "fields"), BAD)  # ids without an address in them: workers must agree
def test_bad_fields_are_named(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(**fields)
    assert caught.value.param == param
    assert param.removeprefix("extra_args.") in caught.value.message or param == "size"
    assert len(caught.value.message) < 500


def test_sound_that_comes_with_a_video_is_limited_too() -> None:
    sounding = changed(EVERYTHING, sample_rate=24000, defaults={"num_frames": 121})
    check(sounding, num_frames=9, fps=1.0)
    check(sounding, fps=1.0)
    check(num_frames=9, fps=0.01)
    for fields in ({"num_frames": 9, "fps": 0.01}, {"fps": 0.2}):
        with pytest.raises(InvalidRequestError, match=r"(9 frames last 900|121 frames last 605) seconds.*--max-audio"):
            check(sounding, **fields)


def test_a_sound_has_a_sample() -> None:
    sounding = changed(EVERYTHING, sample_rate=24000)
    check(sounding, seconds=1 / 24000)
    with pytest.raises(InvalidRequestError, match="of which there are 24000 per second"):
        check(sounding, seconds=1e-5)


def test_every_parameter_is_checked() -> None:
    """A field that is added without a check, or with a value nobody refuses, fails here."""
    for field in dataclasses.fields(OmniDiffusionSamplingParams):
        with pytest.raises(InvalidRequestError):
            check(**{field.name: object()})


def test_an_argument_that_the_pipeline_does_not_take_is_refused_with_what_it_takes() -> None:
    takes_little = changed(EVERYTHING, arguments=("prompt", "image", "width"), media={"image": 1})
    for fields in ({"strength": 0.5}, {"negative_prompt": "x"}, {"extra_args": {"clip_skip": 1}}):
        with pytest.raises(InvalidRequestError, match=r"TestPipeline does not take it; it takes image, prompt, width"):
            check(takes_little, **fields)
    with pytest.raises(InvalidRequestError, match="cannot return latents"):
        check(takes_little, output_type="latent")


def test_an_argument_that_would_be_ignored_is_refused_with_the_reason() -> None:
    distilled = changed(EVERYTHING, refused={"guidance_scale": "this checkpoint is distilled"})
    with pytest.raises(InvalidRequestError, match=r"guidance_scale=3\.0: this checkpoint is distilled"):
        check(distilled, guidance_scale=3.0)
    check(distilled)
    with pytest.raises(InvalidRequestError, match="it takes") as caught:
        check(distilled, extra_args={"no_such": 1})
    assert "guidance_scale," not in str(caught.value)


def test_a_sound_that_the_pipeline_would_cut_is_refused() -> None:
    short = changed(EVERYTHING, max_seconds=30.0)
    check(short, seconds=30)
    with pytest.raises(InvalidRequestError, match=r"seconds=30\.5: TestPipeline makes at most 30"):
        check(short, seconds=30.5)


def test_required_arguments_are_demanded() -> None:
    edit = changed(EVERYTHING, required=("image", "clip_skip", "height"))
    given: dict[str, Any] = {"media": {"image": [PICTURE]}, "extra_args": {"clip_skip": 1}, "height": 8}
    check(edit, **given)
    for field, missing in (("media", "image"), ("extra_args", "clip_skip"), ("height", "height")):
        with pytest.raises(InvalidRequestError, match=f"{missing} is missing") as caught:
            check(edit, **{k: v for k, v in given.items() if k != field})
        assert caught.value.param == missing


def test_messages_carry_no_texts_and_no_pixels() -> None:
    nothing = changed(EVERYTHING, arguments=(), media={}, required=())
    with pytest.raises(InvalidRequestError) as caught:
        check(nothing, prompt="secret")
    assert "secret" not in caught.value.message
    with pytest.raises(InvalidRequestError) as caught:
        check(nothing, prompt=None, media={"image": [PICTURE]})
    assert "x00" not in caught.value.message


def changed(capabilities: Capabilities, **changes: Any) -> Capabilities:
    return msgspec.structs.replace(capabilities, **changes)
