"""Outputs that are made: sent in parts, while the engine works on others, and no faster than they are used."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_pipeline import PIXELS, FakePipeline, drive, engine_of, kind_of, pipeline_of, request_of, solo

from polymux.diffusion.host_copy import HostCopy
from polymux.diffusion.outputs import RawOutput
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.engine.outbound import WINDOW
from polymux.media.wire import from_wire
from polymux.request import ArrayData, Event, Failed, Finished, OutputChunk


class MochiPipeline(FakePipeline):
    """By its name one that makes video, decoded in one go: each row of a picture is a frame."""

    def __call__(  # type: ignore[override]
        self,
        prompt: str,
        height: int,
        width: int,
        num_inference_steps: int,
        generator: Any = None,
        output_type: str = "np",
    ) -> Any:
        steps = num_inference_steps
        pictures = super().__call__(prompt, "", height, width, steps, generator=generator, output_type="np").images
        if "hole" in prompt:
            pictures[0, 0, 0, 0] = float("nan")
        frames = pictures[:, :, None].repeat(PIXELS, axis=2)  # (1, frames, height, width, channels)
        if output_type == "pt":
            return SimpleNamespace(frames=torch.from_numpy(frames).permute(0, 1, 4, 2, 3))
        return SimpleNamespace(frames=frames, images=pictures)


FRAME = PIXELS * PIXELS * 3


def video_engine(frames_per_chunk: int, **knobs: Any) -> DiffusionEngine:
    return engine_of(pipeline_of(MochiPipeline), output_chunk_bytes=frames_per_chunk * FRAME, **knobs)


def video(name: str, frames: int = 16, **rest: Any) -> Any:
    """A request for a video with `frames` frames."""
    return request_of(name, height=frames * PIXELS, width=PIXELS * PIXELS, output_type="pil", **rest)


def expected(request: Any, index: int = 0) -> np.ndarray[Any, Any]:
    rows = (solo(pipeline_of(MochiPipeline), request, index) * 255).round().clip(0, 255).astype(np.uint8)
    return rows[:, None].repeat(PIXELS, axis=1)


def settle(engine: DiffusionEngine, done: Any) -> list[Event]:
    """Step, using up nothing, until `done` and then some more."""
    events: list[Event] = []
    while not done(events):
        events += engine.step()
    for _ in range(20):
        events += engine.step()
    return events


def chunks_in(events: list[Event]) -> list[OutputChunk]:
    return [event for event in events if isinstance(event, OutputChunk)]


def test_a_small_output_is_in_the_end() -> None:
    engine = video_engine(frames_per_chunk=16)
    engine.add(video("a"))
    end = drive(engine)["a"][-1]
    assert isinstance(end, Finished)
    assert np.array_equal(np.asarray(from_wire(end.outputs[0][0])), expected(video("a")))


def test_a_large_output_comes_in_parts_no_faster_than_they_are_used() -> None:
    engine = video_engine(frames_per_chunk=2)
    wish = video("a", num_outputs_per_prompt=2)
    engine.add(wish)
    got = chunks_in(settle(engine, lambda events: len(chunks_in(events)) == WINDOW))
    assert len(got) == WINDOW and engine.busy
    end: Event | None = None
    while end is None:
        engine.taken("a")
        for event in engine.step():
            got += chunks_in([event])
            end = event if isinstance(event, Finished) else end
    assert isinstance(end, Finished) and end.outputs == [[], []] and not engine.busy
    for output in (0, 1):
        mine = [chunk for chunk in got if chunk.output == output]
        assert [chunk.start for chunk in mine] == list(range(0, 16, 2))
        assert {chunk.shape for chunk in mine} == {(16, PIXELS, PIXELS, 3)}
        whole = np.concatenate([np.asarray(from_wire(chunk.rows)) for chunk in mine])
        assert np.array_equal(whole, expected(wish, output))


def test_who_does_not_use_his_output_up_holds_nobody_else_up() -> None:
    engine = video_engine(frames_per_chunk=1, max_num_seqs=1)
    engine.add(video("slow"))
    settle(engine, lambda events: len(chunks_in(events)) == WINDOW)
    engine.add(video("next", frames=2))
    events = settle(engine, lambda events: any(isinstance(event, Finished) for event in events))
    assert {event.request_id for event in events} == {"next"}
    engine.abort("slow")
    assert kind_of(drive(engine)["slow"][-1]) == "RequestAbortedError"
    assert not engine.busy


def test_the_engine_rests_while_it_waits_for_a_consumer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = video_engine(frames_per_chunk=1)
    engine.add(video("slow"))
    settle(engine, lambda events: len(chunks_in(events)) == WINDOW)
    rests: list[float] = []
    monkeypatch.setattr("polymux.engine.outbound.time.sleep", rests.append)
    for _ in range(5):
        assert not engine.step()
    assert len(rests) == 5
    engine.taken("slow")
    assert len(chunks_in(engine.step())) == 1 and len(rests) == 5, "what can go on goes on at once"
    engine.close()


def test_the_next_request_runs_while_an_output_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    copy = HostCopy.run

    def held(self: HostCopy, raw: RawOutput, after: Any, put: Any) -> Any:
        assert hold.wait(60)
        return copy(self, raw, after, put)

    monkeypatch.setattr(HostCopy, "run", held)
    engine = video_engine(frames_per_chunk=16, max_num_seqs=1)
    engine.add(video("a"))
    engine.add(video("b"))
    while engine.stats.steps < 8:  # four each: the second one is through, the first one not out
        assert not any(isinstance(event, Finished) for event in engine.step())
    hold.set()
    events = drive(engine)
    for name in ("a", "b"):
        end = events[name][-1]
        assert isinstance(end, Finished)
        assert np.array_equal(np.asarray(from_wire(end.outputs[0][0])), expected(video(name)))


def test_an_output_that_is_not_finite_fails_its_request_alone() -> None:
    engine = video_engine(frames_per_chunk=1)
    engine.add(video("bad", prompt="a hole"))
    engine.add(video("good", frames=2))
    events = drive(engine)
    assert kind_of(events["bad"][-1]) == "NonFiniteOutputError"
    assert isinstance(events["good"][-1], Finished)


def test_an_output_that_nobody_waits_for_is_dropped() -> None:
    engine = video_engine(frames_per_chunk=1)
    engine.add(video("a"))
    settle(engine, lambda events: len(chunks_in(events)) == WINDOW)
    engine.abort("a")
    (end,) = engine.step()
    assert isinstance(end, Failed) and not engine.busy
    engine.taken("a")  # it had been on its way
    engine.add(video("a", frames=2))
    assert isinstance(drive(engine)["a"][-1], Finished), "the id is free again"
    engine.close()


def test_arrays_of_floats_come_in_parts_too() -> None:
    engine = video_engine(frames_per_chunk=8)
    engine.add(request_of("a", height=16 * PIXELS, width=PIXELS * PIXELS, output_type="np"))
    got = chunks_in(settle(engine, lambda events: len(chunks_in(events)) == WINDOW))
    assert [chunk.start for chunk in got] == [0, 2, 4, 6]
    assert all(isinstance(chunk.rows, ArrayData) and chunk.rows.dtype == "float32" for chunk in got)
