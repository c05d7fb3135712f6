"""Frames between frames, as an engine makes them: on their way out, in parts, and only for who asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_pipeline import PIXELS, drive, engine_of, kind_of, outcome, pipeline_of, pixels, request_of
from test_outbound import FRAME, MochiPipeline, chunks_in, expected, settle, video

from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.engine.outbound import WINDOW
from polymux.errors import CheckpointError, ConfigError, InvalidRequestError
from polymux.media.wire import from_wire
from polymux.request import Event, Finished
from polymux.testing.flow_network import random_network, write

SMOOTH = {"enable_frame_interpolation": True, "frame_interpolation_exp": 2}


@pytest.fixture
def weights(tmp_path: Path) -> str:
    return str(write(tmp_path / "network.safetensors", random_network()))


def engine_with(weights: str, frames_per_chunk: int = 1000, **knobs: Any) -> DiffusionEngine:
    chunk = frames_per_chunk * FRAME
    return engine_of(
        pipeline_of(MochiPipeline), frame_interpolation_model_path=weights, output_chunk_bytes=chunk, **knobs
    )


def frames_of(event: Event) -> np.ndarray[Any, Any]:
    assert isinstance(event, Finished), event
    return np.asarray(from_wire(event.outputs[0][0]))


def test_the_frames_that_the_model_made_are_there_bit_for_bit(weights: str) -> None:
    engine = engine_with(weights)
    engine.add(video("smooth", **SMOOTH))
    engine.add(video("plain"))
    ends = outcome(engine)
    assert np.array_equal(frames_of(ends["plain"]), expected(video("plain")))
    made = frames_of(ends["smooth"])
    assert made.shape == (15 * 4 + 1, PIXELS, PIXELS, 3) and made.dtype == np.uint8
    assert np.array_equal(made[::4], frames_of(ends["plain"]))
    rates = [end.fps for end in ends.values() if isinstance(end, Finished)]
    assert sorted(rates) == [30.0, 120.0]  # type: ignore[type-var]


def test_they_come_in_parts_no_faster_than_they_are_used(weights: str) -> None:
    whole_engine, engine = engine_with(weights), engine_with(weights, frames_per_chunk=3)
    whole_engine.add(video("a", **SMOOTH))
    engine.add(video("a", **SMOOTH))
    got = chunks_in(settle(engine, lambda events: len(chunks_in(events)) == WINDOW))
    assert len(got) == WINDOW
    while engine.busy:
        engine.taken("a")
        got += chunks_in(engine.step())
    assert [chunk.start for chunk in got] == list(range(0, 61, 3))
    assert {chunk.shape for chunk in got} == {(61, PIXELS, PIXELS, 3)}
    rows = np.concatenate([np.asarray(from_wire(chunk.rows)) for chunk in got])
    assert np.array_equal(rows, frames_of(outcome(whole_engine)["a"]))


def test_floats_stay_floats(weights: str) -> None:
    engine = engine_with(weights)
    size = {"height": 4 * PIXELS, "width": PIXELS * PIXELS}
    engine.add(request_of("plain", **size))
    engine.add(request_of("smooth", **size, **SMOOTH))
    ends = outcome(engine)
    plain, smooth = pixels(ends["plain"]), pixels(ends["smooth"])
    assert smooth.dtype == np.float32 and np.array_equal(smooth[::4], plain) and len(smooth) == 13


def test_every_output_of_a_request_gets_them(weights: str) -> None:
    engine = engine_with(weights)
    engine.add(video("a", num_outputs_per_prompt=2, **SMOOTH))
    (end,) = (events[-1] for events in drive(engine).values())
    assert isinstance(end, Finished)
    for index, output in enumerate(end.outputs):
        assert np.array_equal(np.asarray(from_wire(output[0]))[::4], expected(video("a"), index))


def test_what_is_not_finite_fails_its_request(weights: str) -> None:
    engine = engine_with(weights)
    engine.add(video("bad", prompt="a hole", **SMOOTH))
    assert kind_of(outcome(engine)["bad"]) == "NonFiniteOutputError"


def test_without_a_network_it_is_refused() -> None:
    engine = engine_of(pipeline_of(MochiPipeline))
    assert not engine.capabilities.frame_interpolation
    with pytest.raises(InvalidRequestError, match="--frame-interpolation-model-path"):
        engine.add(video("a", **SMOOTH))
    assert not engine.busy


def test_a_model_that_makes_no_video_has_no_use_for_it(weights: str) -> None:
    with pytest.raises(ConfigError, match="makes image, not video"):
        engine_of(pipeline_of(), frame_interpolation_model_path=weights)


def test_an_engine_does_not_start_without_weights_that_it_was_promised(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        engine_with(str(tmp_path / "nothing"))


def test_the_network_sleeps_and_wakes_with_the_model(weights: str) -> None:
    engine = engine_with(weights)
    for _ in range(2):
        engine.add(video("a", frames=2, **SMOOTH))
        assert len(frames_of(outcome(engine)["a"])) == 5
        engine.sleep(1)
        engine.wake_up()
