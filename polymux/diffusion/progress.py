"""Counting a session's steps.

Pipelines report each step to the progress bar that they make for themselves; a session gets a bar that counts instead
of drawing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from types import TracebackType
from typing import Any


@dataclass
class StepCounter:
    """Steps done and to do. `total` is 0 until the pipeline's loop begins."""

    done: int = 0
    total: int = 0


class CountingBar:
    """Takes the place of tqdm in a pipeline."""

    def __init__(self, counter: StepCounter, iterable: Iterable[Any] | None = None, total: int | None = None) -> None:
        self.counter, self.iterable = counter, iterable
        if total is None and isinstance(iterable, Sized):
            total = len(iterable)
        counter.total += int(total or 0)

    def update(self, n: int = 1) -> None:
        self.counter.done += n

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable or ():
            yield item
            self.update()

    def __enter__(self) -> CountingBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def set_description(self, *_: Any, **__: Any) -> None:
        """A bar's text is not shown."""

    set_postfix = set_description
    set_postfix_str = set_description
    close = set_description
    refresh = set_description


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
