"""Frames of a video that is still being decoded: few of them wait, and what goes wrong is told."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from polymux.engine.outbound import PARTS, FrameStream, OutputThread
from polymux.errors import NonFiniteOutputError
from polymux.media.wire import from_wire

CPU = torch.device("cpu")
VIDEO = torch.rand(6, 3, 4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def thread() -> OutputThread:
    return OutputThread(CPU, chunk_bytes=4 * 8 * 3)  # a frame


def fill(stream: FrameStream, size: int) -> None:
    for start in range(0, len(VIDEO), size):
        stream.put(VIDEO[start : start + size], start, len(VIDEO))


def test_parts_become_rows_in_order(thread: OutputThread) -> None:
    stream = thread.stream("a", 1)
    fill(stream, 2)
    stream.end()
    assert stream.outbound.media.result() == [] and not stream.outbound.empty
    chunks = stream.outbound.take(10)
    assert [chunk.start for chunk in chunks] == list(range(6)) and stream.outbound.empty
    assert {(chunk.request_id, chunk.output, chunk.medium, chunk.shape) for chunk in chunks} == {
        ("a", 1, 0, (6, 4, 8, 3))
    }
    rows = np.concatenate([np.asarray(from_wire(chunk.rows)) for chunk in chunks])
    assert np.array_equal(rows, (VIDEO.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy())


def test_whoever_decodes_waits_for_the_parts_before(thread: OutputThread) -> None:
    stream, hold = thread.stream("a", 0), threading.Event()
    put = stream.outbound.put

    def held(*args: object) -> None:
        assert hold.wait(60)
        put(*args)  # type: ignore[arg-type]

    stream.outbound.put = held  # type: ignore[method-assign]
    decoder = threading.Thread(target=fill, args=(stream, 1))
    decoder.start()
    decoder.join(0.2)
    assert decoder.is_alive() and len(stream._parts) <= PARTS
    hold.set()
    decoder.join(60)
    stream.end()
    stream.outbound.media.result()
    assert len(stream.outbound.take(10)) == 6


@pytest.mark.parametrize("place", [0, 5])
def test_what_is_not_finite_is_told_at_the_latest_in_the_end(thread: OutputThread, place: int) -> None:
    stream, frames = thread.stream("a", 0), VIDEO.clone()
    frames[place, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteOutputError):
        for start in range(6):
            stream.put(frames[start : start + 1], start, 6)
        stream.end()
        stream.outbound.media.result()


def test_frames_that_nobody_waits_for_are_dropped(thread: OutputThread) -> None:
    stream = thread.stream("a", 0)
    stream.put(VIDEO[:1], 0, 6)
    stream.outbound.drop()
    thread.close()
    assert not stream.outbound.chunks
