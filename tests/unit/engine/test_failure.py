"""What a pipeline raised: whose fault it is, and which field says so."""

from __future__ import annotations

from typing import Any

import pytest

from polymux.engine.failure import as_polymux_error
from polymux.errors import GenerationError, InvalidRequestError, NonFiniteOutputError
from polymux.request import ImageData, OmniDiffusionSamplingParams, Request

SCHEDULER = 'File "diffusers/schedulers/scheduling_unipc_multistep.py", line 1, in step'
PROCESSOR = 'File "transformers/models/qwen2_vl/image_processing_qwen2_vl.py", line 1, in smart_resize'


def request(media: Any = None, **params: Any) -> Request:
    return Request(request_id="a", media=media or {}, params=OmniDiffusionSamplingParams(**params))


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"sigmas": (0.5, 0.5)}, "sigmas"),
        ({"sigmas": (1.0, 0.0)}, "sigmas"),
        ({"sigmas": (1e30, 1.0)}, "sigmas"),
        ({"timesteps": (1, 900)}, "timesteps"),
        ({"sigmas": (1.0, 0.5)}, None),  # as models are made for: it is not the schedule
        ({}, None),
    ],
)
@pytest.mark.parametrize(("error", "where"), [(NonFiniteOutputError("NaN"), ""), (IndexError("2"), SCHEDULER)])
def test_an_odd_schedule(params: dict[str, Any], param: str | None, error: Exception, where: str) -> None:
    made = as_polymux_error(error, where, True, request(**params))
    if param is None:
        assert isinstance(made, GenerationError)
    else:
        assert isinstance(made, InvalidRequestError) and made.param == param
        assert made.message.startswith(f"{param}=[") and "noise has to fall" in made.message


def test_a_picture_that_cannot_be_processed() -> None:
    picture = {"image": [ImageData("RGB", 1, 500, b"")]}
    error = ValueError("absolute aspect ratio must be smaller than 200, got 500.0")
    made = as_polymux_error(error, PROCESSOR, False, request(picture))
    assert isinstance(made, InvalidRequestError) and made.param == "image"
    assert made.message.startswith("image: the pipeline refuses the request: absolute aspect ratio")
    assert as_polymux_error(error, "", False, request(picture)).param is None


def test_a_schedule_that_the_scheduler_does_not_take() -> None:
    where = 'File "pipeline.py", line 1, in retrieve_timesteps'
    for name in ("sigmas", "timesteps"):
        made = as_polymux_error(ValueError("no custom schedules"), where, False, request(**{name: (1.0, 0.5)}))
        assert isinstance(made, InvalidRequestError) and made.param == name
    assert as_polymux_error(ValueError("no"), where, False, request()).param is None
