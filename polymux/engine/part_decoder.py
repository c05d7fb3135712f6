"""What makes sound of codes, some frames of some sentences at once; on a GPU recorded for 1, 2, 4, ... sentences.

A codec is many small kernels, and to launch them takes longer than to run them. Knows codes by their shape only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from polymux.ar.step_graphs import sizes_of
from polymux.diffusion.recording import Arguments, Recorder, Recording
from polymux.diffusion.rehearsal import NotRecordable

log = logging.getLogger(__name__)

Tensor = torch.Tensor
Kept = tuple[Tensor, ...]
Decode = Callable[[Tensor, Kept], tuple[Tensor, Kept]]
"""Codes (rows, groups, frames) and what was kept of the frames before, or nothing; samples, and what is to be kept."""


class PartDecoder:
    """Runs `decode`. `most`: rows, groups and frames of the largest part; recorded are parts of that many frames."""

    def __init__(self, decode: Decode, most: tuple[int, int, int], recorder: Recorder | None) -> None:
        self._decode, self._most, self._recorder = decode, most, recorder
        self._sizes = sizes_of(most[0])
        self._recordings: dict[tuple[int, bool], Recording] = {}  # by rows, and whether something was kept

    def __call__(self, codes: Tensor, kept: Kept) -> tuple[Tensor, Kept]:
        rows, _, frames = codes.shape
        size = next(n for n in self._sizes if n >= rows)
        recording = self._recordings.get((size, bool(kept))) if frames == self._most[2] else None
        if recording is None:
            return self._decode(codes, kept)
        samples, now = recording.run({"codes": _filled(codes, size), "kept": tuple(_filled(x, size) for x in kept)})
        return samples[:rows], tuple(x[:rows] for x in now)

    def prepare(self, device: torch.device) -> None:
        """Record what can be recorded; the largest first, in whose memory the others have room."""
        if self._recorder is None:
            return
        codes = torch.zeros(self._most, dtype=torch.long, device=device)
        _, kept = self._decode(codes[:1], ())
        try:
            for size in reversed(self._sizes):
                for before in ((), tuple(_filled(x, size) for x in kept)):
                    arguments: Arguments = {"codes": codes[:size], "kept": before}
                    self._recordings[size, bool(before)] = Recording(self._plain, arguments, self._recorder)
        except (NotRecordable, RuntimeError) as error:  # the latter of a device or its libraries
            log.warning("the codec is not recorded, and runs kernel by kernel: %s", str(error).partition("\n")[0])
            self._recordings.clear()
            self._recorder = None

    def _plain(self, arguments: Arguments) -> tuple[Tensor, Kept]:
        return self._decode(arguments["codes"], arguments["kept"])


def _filled(x: Tensor, rows: int) -> Tensor:
    """With its last row again and again."""
    return x if len(x) == rows else torch.cat([x, x[-1:].expand(rows - len(x), *x.shape[1:])])
