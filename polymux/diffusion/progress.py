"""Counting a session's steps.

Pipelines report each step to the progress bar that they make for themselves; a session gets a bar that counts instead
of drawing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm


@dataclass
class StepCounter:
    """Steps done and to do. `total` is 0 until the pipeline's loop begins."""

    done: int = 0
    total: int = 0


class CountingBar(tqdm):  # type: ignore[misc]
    """Takes the place of a pipeline's bar: understands all that a bar does, and draws nothing."""

    monitor_interval = 0  # no thread that watches it

    def __init__(self, counter: StepCounter, iterable: Iterable[Any] | None = None, total: int | None = None) -> None:
        if total is None and isinstance(iterable, Sized):
            total = len(iterable)
        super().__init__(iterable, total=total, disable=True)
        self.counter = counter
        counter.total += int(total or 0)

    def update(self, n: float | None = 1) -> None:
        self.n += n or 0
        self.counter.done += int(n or 0)

    def __iter__(self) -> Iterator[Any]:
        for item in () if self.iterable is None else self.iterable:
            yield item
            self.update()


def count_steps(pipeline: Any, counter: StepCounter) -> None:
    """Make `pipeline` (a session's own copy) report to `counter`."""

    def progress_bar(iterable: Iterable[Any] | None = None, total: int | None = None, **_: Any) -> CountingBar:
        return CountingBar(counter, iterable, total)

    pipeline.__dict__["progress_bar"] = progress_bar
    blocks = pipeline.__dict__.get("_blocks")
    if blocks is not None:  # a modular pipeline: its blocks make the bars
        own = copy.deepcopy(blocks)
        pipeline.__dict__["_blocks"] = own
        for block in _all_blocks(own):
            block.__dict__["progress_bar"] = progress_bar


def _all_blocks(block: Any) -> Iterator[Any]:
    yield block
    for sub in block.sub_blocks.values():
        yield from _all_blocks(sub)
