"""For a model that writes tokens, or speaks: refused for every wrong field, and what passes arrives as it is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest

from polymux.config import LimitsConfig
from polymux.errors import InvalidRequestError
from polymux.families import all_generate_families
from polymux.further_arguments import bounds_of
from polymux.messages import Add, frame, to_stage
from polymux.request import Bounds, Capabilities, ImageData, OmniDiffusionSamplingParams, Request, SamplingParams
from polymux.sampling import FIELDS, generation_arguments, sampling_of
from polymux.validation import validate

LIMITS = LimitsConfig(max_audio_seconds=5, max_prompt_length=20)
SPEAKS = Capabilities(
    family="test",
    pipeline="TestModel",
    modality="audio",
    arguments=("prompt", *FIELDS, "noise"),
    required=("prompt",),
    media={},
    samples=True,
    voices=("anna", "ben"),
    languages=("en",),
    max_new_tokens=100,
    extra=("noise",),
)
NOTHING = msgspec.structs.replace(SPEAKS, arguments=("prompt",), extra=(), voices=(), languages=())


def check(capabilities: Capabilities = SPEAKS, prompt: str | None = "a", **fields: Any) -> None:
    request = Request(request_id="r", prompt=prompt, sampling=SamplingParams(**fields))
    validate(request, capabilities, LIMITS)
    arrived = to_stage.decode(frame(Add(request))[4:])
    assert isinstance(arrived, Add) and arrived.request == request


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"voice": "ben", "language": "en", "instructions": "slowly", "speed": 0.25, "seed": 2**64 - 1},
        {"speed": 4},
        {"seconds": 5},
        {"max_new_tokens": 100, "do_sample": True, "temperature": 0.7, "top_k": 1, "top_p": 1, "guidance_scale": 0},
        {"temperature": 0},
        {"temperature": 0, "do_sample": False},
        {"repetition_penalty": 1.2, "extra_args": {"noise": 0.5}},
    ],
)
def test_good(fields: dict[str, Any]) -> None:
    check(**fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("voice", "carl"), ("voice", 1), ("language", "de"), ("instructions", 1), ("instructions", "\ud800"),
        ("speed", 0), ("speed", -1), ("speed", 99), ("speed", "fast"), ("speed", float("nan")), ("speed", True),
        ("seed", -1), ("seed", 2**64), ("seed", 1.5), ("seconds", 0), ("seconds", 6), ("seconds", float("inf")),
        ("max_new_tokens", 0), ("max_new_tokens", 101), ("max_new_tokens", 1.0), ("do_sample", 1),
        ("temperature", -0.1), ("temperature", 101), ("top_k", 0), ("top_p", 0), ("top_p", 1.1),
        ("repetition_penalty", 0), ("guidance_scale", -1), ("extra_args", []),
    ],
)  # fmt: skip
def test_bad(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as error:
        check(**{name: value})
    assert error.value.param == name and name in error.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_args": {"other": 1}}, "extra_args.other"),
        ({"extra_args": {"noise": "loud"}}, "extra_args.noise"),
        ({"extra_args": {"noise": 10**30}}, "extra_args.noise"),
        ({"seconds": 1, "max_new_tokens": 3}, "seconds"),
        ({"do_sample": False, "top_k": 3}, "top_k"),
        ({"temperature": 0, "top_p": 0.5}, "top_p"),
        ({"temperature": 0, "do_sample": True}, "temperature"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "  "}, "prompt"),
        ({"prompt": "a" * 21}, "prompt"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        check(**fields)
    assert error.value.param == param


@pytest.mark.parametrize("name", FIELDS)
def test_what_the_model_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="does not take it") as error:
        check(NOTHING, **{name: 1})
    assert error.value.param == name


def test_of_the_parameters_of_diffusion_those_that_mean_the_same_are_taken() -> None:
    def request(**fields: Any) -> Request:
        return Request(request_id="r", prompt="a", params=OmniDiffusionSamplingParams(**fields))

    shared = {"seed": 3, "seconds": 2.0, "guidance_scale": 2.0, "extra_args": {"noise": 1}}
    assert sampling_of(request(**shared), SPEAKS) == SamplingParams(**shared)
    for field in dataclasses.fields(OmniDiffusionSamplingParams):
        if field.name not in shared:
            with pytest.raises(InvalidRequestError) as error:
                validate(request(**{field.name: 7}), SPEAKS, LIMITS)
            assert error.value.param == field.name


def test_media_and_previews_are_refused() -> None:
    picture = ImageData("RGB", 2, 1, bytes(6))
    for name, request in {
        "image": Request(request_id="r", prompt="a", media={"image": [picture]}),
        "partial_images": Request(request_id="r", prompt="a", partial_images=1),
        "negative_prompt": Request(request_id="r", prompt="a", negative_prompt="b"),
    }.items():
        with pytest.raises(InvalidRequestError) as error:
            validate(request, SPEAKS, LIMITS)
        assert error.value.param == name


def test_a_diffusion_model_refuses_them() -> None:
    diffusion = msgspec.structs.replace(SPEAKS, samples=False)
    with pytest.raises(InvalidRequestError, match="OmniDiffusionSamplingParams"):
        check(diffusion)


def test_to_name_how_tokens_are_drawn_is_to_ask_that_they_are() -> None:
    assert generation_arguments(SamplingParams()) == {}
    assert generation_arguments(SamplingParams(top_k=3)) == {"top_k": 3, "do_sample": True}
    assert generation_arguments(SamplingParams(temperature=0)) == {"do_sample": False}
    assert generation_arguments(SamplingParams(max_new_tokens=4, seconds=1)) == {"max_new_tokens": 4}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("talker_temperature", (1, 1e-6), (0, -1, 1e-40, 101, True)),
        ("talker_top_k", (1,), (0, -1, 1.5)),
        ("talker_top_p", (0.5, 1), (0, 2)),
        ("talker_repetition_penalty", (1.1,), (0, -1)),
        ("talker_max_new_tokens", (1, 100), (0, -1, 1.5, True, 101)),
        ("talker_do_sample", (True, False), (0, 1)),
        ("steps", (2, 9), (1, 10, 2.5, True)),
        ("way", (-0.5,), (-2, float("nan"))),
        ("thinks", (True,), (1, "x")),
    ],
)
def test_further_arguments(name: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    bounds = {"steps": Bounds(2, 9, "integer"), "way": Bounds(-1, 1), "thinks": Bounds(kind="flag")}
    capabilities = msgspec.structs.replace(SPEAKS, extra=(name,), bounds=bounds)
    for value in good:
        check(capabilities, extra_args={name: value})
    for value in bad:
        with pytest.raises(InvalidRequestError) as error:
            check(capabilities, extra_args={name: value})
        assert error.value.param == f"extra_args.{name}"


def test_a_further_argument_of_drawing_without_drawing_is_refused() -> None:
    capabilities = msgspec.structs.replace(SPEAKS, extra=("talker_top_k", "talker_do_sample", "other_top_k"))
    check(capabilities, extra_args={"talker_do_sample": False, "other_top_k": 1})
    with pytest.raises(InvalidRequestError, match="no effect") as error:
        check(capabilities, extra_args={"talker_do_sample": False, "talker_top_k": 1})
    assert error.value.param == "extra_args.talker_top_k"


def test_what_every_further_argument_of_every_family_may_be_is_known() -> None:
    for family in all_generate_families():
        capabilities = msgspec.structs.replace(SPEAKS, extra=family.extra, bounds=family.bounds)
        unknown = [name for name in family.extra if math.isinf(bounds_of(name, capabilities).high)]
        assert not unknown, f"{family.name}: {unknown}"
        assert set(family.bounds) <= set(family.extra)
