"""Any value in any field: refused by name, or fit to be sent to the model's process."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polymux.config import LimitsConfig
from polymux.errors import InvalidRequestError
from polymux.messages import Add, frame, to_stage
from polymux.request import Capabilities, OmniDiffusionSamplingParams, Request
from polymux.validation import ARGUMENT_FIELDS, validate

FIELDS = [f.name for f in dataclasses.fields(OmniDiffusionSamplingParams) if f.name != "generator"]
CAPABILITIES = Capabilities(
    family=None,
    pipeline="P",
    modality="video",
    arguments=("prompt", "eta", "output_type", *ARGUMENT_FIELDS),
    required=("prompt",),
    media={},
    size_multiple=8,
    frames_multiple=4,
)

numbers = (
    st.integers() | st.floats() | st.integers(-5, 70) | st.sampled_from([2**63, -(2**63), 2**64 - 1, 2**64, 10**400])
)
texts = (
    st.text()
    | st.text(st.characters(categories=["Cs"]))
    | st.sampled_from(["pil", "np", "latent", "auto", "x" * 40_000])
)
scalars = st.none() | st.booleans() | numbers | texts | st.binary() | st.just(object())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.sampled_from(["eta", "x", "prompt", ""]) | scalars, inner, max_size=3)
    ),
    max_leaves=6,
)


def check(request: Request) -> bool:
    """Whether it is accepted; then it arrives on the other side as it is."""
    try:
        validate(request, CAPABILITIES, LimitsConfig())
    except InvalidRequestError as error:
        assert error.param is not None
        assert len(error.message) < 1000
        assert len(error.param) < 200
        error.message.encode()
        error.param.encode()
        return False
    arrived = to_stage.decode(frame(Add(request))[4:])
    assert isinstance(arrived, Add)
    assert as_it_travels(arrived.request) == as_it_travels(request)
    return True


def as_it_travels(value: Any) -> Any:
    """Lists for tuples, floats for integers: what msgpack and the types of the fields do not tell apart."""
    plain = msgspec.to_builtins(value)
    match plain:
        case dict():
            return {key: as_it_travels(item) for key, item in plain.items()}
        case list() | tuple():
            return [as_it_travels(item) for item in plain]
        case int() if not isinstance(plain, bool):
            return float(plain)
    return plain


@pytest.mark.parametrize("name", FIELDS)
@given(value=values)
@example(value=None)
@example(value={"\ud800": 1})
@example(value={"x" * 40_000: 1})
@example(value={"\ud800": object()})
def test_any_value_in_a_sampling_field(name: str, value: Any) -> None:
    params = OmniDiffusionSamplingParams(**{name: value})
    accepted = check(Request(request_id="r", prompt="a", params=params))
    has_default = getattr(OmniDiffusionSamplingParams(), name) is not None
    assert accepted or value is not None or has_default, "None leaves it to the pipeline, where that is the default"


@pytest.mark.parametrize("name", ["prompt", "negative_prompt", "request_id"])
@given(value=values)
def test_any_value_for_a_text(name: str, value: Any) -> None:
    check(Request(**{"request_id": "r", "prompt": "a", name: value}))


@given(value=values)
def test_any_value_for_an_argument_of_the_pipelines_own(value: Any) -> None:
    check(Request(request_id="r", prompt="a", params=OmniDiffusionSamplingParams(extra_args={"eta": value})))


@given(seed=st.integers(0, 2**64), count=st.integers(1, 10))
def test_the_seeds_of_all_outputs_are_seeds(seed: int, count: int) -> None:
    params = OmniDiffusionSamplingParams(seed=seed, num_outputs_per_prompt=count)
    assert check(Request(request_id="r", prompt="a", params=params)) == (seed + count - 1 < 2**64)


@given(width=st.integers(-8, 4000), height=st.integers(-8, 4000))
def test_sizes(width: int, height: int) -> None:
    params = OmniDiffusionSamplingParams(width=width, height=height)
    request = Request(request_id="r", prompt="a", params=params)
    fits = width > 0 and height > 0 and width % 8 == height % 8 == 0 and width * height <= 7680 * 4320
    assert check(request) == fits
