"""What the command line asks for, in the words of a model that is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from polymux.cli.generate import Task
from polymux.cli.output_files import Target
from polymux.config import EngineConfig
from polymux.errors import InvalidRequestError
from polymux.request import Capabilities, OmniDiffusionSamplingParams


def can(**fields: Any) -> Capabilities:
    usual = dict(family=None, pipeline="P", modality="video", arguments=("num_frames",), required=(), media={})
    return Capabilities(**usual | {"frames_multiple": 4, "fps": 16.0} | fields)  # type: ignore[arg-type]


def params(model: Capabilities, **asked: Any) -> OmniDiffusionSamplingParams:
    how = OmniDiffusionSamplingParams(**asked)
    prompt, made = Task(EngineConfig.from_flat(model="m"), "a", [], how, Target(None)).for_model(model)
    assert prompt == {"prompt": "a"}
    return made


def test_seconds_of_a_video_are_frames() -> None:
    made = params(can(), seconds=1)
    assert (made.num_frames, made.seconds, made.fps) == (17, None, None)
    assert params(can(), seconds=1, fps=8).num_frames == 9  # the file's rate counts
    assert params(can(modality="audio"), seconds=1).seconds == 1


def test_a_rate_that_the_model_knows_nothing_of_is_for_the_file() -> None:
    assert params(can(), fps=8).fps is None
    assert params(can(arguments=("num_frames", "fps")), fps=8).fps == 8
    assert params(can(modality="image", fps=None), fps=8).fps == 8  # to be refused by the model


def test_a_rate_that_nobody_knows() -> None:
    assert params(can(fps=None), fps=8, seconds=1).num_frames == 9
    for asked in ({}, {"seconds": 1}):
        with pytest.raises(InvalidRequestError, match="does not say") as caught:
            params(can(fps=None), **asked)
        assert caught.value.param == "fps"
