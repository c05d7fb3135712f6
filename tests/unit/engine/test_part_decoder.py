"""Parts that are recorded are those of the codec itself, whatever the number of sentences. No GPU: a recording that
runs the same again in the same tensors stands in for a graph.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymux.engine.part_decoder import PartDecoder
from polymux.testing.tape import TapeRecorder

ROWS, GROUPS, FRAMES = 5, 3, 4


def decode(codes: torch.Tensor, kept: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Each sample is the sum of all codes up to it."""
    before = kept[0] if kept else codes.new_zeros(len(codes), 1)
    sums = codes.sum(1).cumsum(1) + before
    return sums[:, None].float(), (sums[:, -1:],)


def test_parts_are_what_they_are_unrecorded() -> None:
    recorded = PartDecoder(decode, (ROWS, GROUPS, FRAMES), TapeRecorder())
    recorded.prepare(torch.device("cpu"))
    assert len(recorded._recordings) == 2 * len([1, 2, 4, 5])
    for rows in range(1, ROWS + 1):
        kept: tuple[torch.Tensor, ...] = ()
        known: tuple[torch.Tensor, ...] = ()
        earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
        for frames in (FRAMES, FRAMES, FRAMES, 2):
            codes = torch.randint(9, (rows, GROUPS, frames))
            made, kept = recorded(codes, kept)
            wanted, known = decode(codes, known)
            earlier.append((made, wanted))
        for made, wanted in earlier:  # none is overwritten by a later one
            assert torch.equal(made, wanted)


def test_what_cannot_be_recorded_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def asks(codes: torch.Tensor, kept: tuple[torch.Tensor, ...]) -> Any:
        return decode(codes * int(codes.max() >= 0), kept)

    decoder = PartDecoder(asks, (ROWS, GROUPS, FRAMES), TapeRecorder())
    decoder.prepare(torch.device("cpu"))
    assert "the codec is not recorded, and runs kernel by kernel" in caplog.text
    codes = torch.randint(9, (2, GROUPS, FRAMES))
    assert torch.equal(decoder(codes, ())[0], decode(codes, ())[0])
