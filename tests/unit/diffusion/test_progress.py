"""A session's bar counts; whatever a pipeline does with it works as with tqdm."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polymux.diffusion.progress import CountingBar, StepCounter, count_steps


def test_updates_are_counted() -> None:
    counter = StepCounter()
    with CountingBar(counter, total=5) as bar:
        assert (counter.done, counter.total) == (0, 5)
        bar.update()
        bar.update(2)
        assert bar.n == 3 and bar.total == 5
    assert (counter.done, counter.total) == (3, 5)


@pytest.mark.parametrize("steps", [[1, 2, 3], range(3), torch.tensor([3, 2, 1])])
def test_iterating_counts_each_item_once_it_is_done(steps: Any) -> None:
    counter = StepCounter()
    seen = []
    for item in CountingBar(counter, steps):
        seen.append((int(item), counter.done))
    assert seen == [(int(item), i) for i, item in enumerate(steps)]
    assert (counter.done, counter.total) == (3, 3)


def test_a_length_that_nobody_knows() -> None:
    counter = StepCounter()
    assert list(CountingBar(counter, enumerate("ab"))) == [(0, "a"), (1, "b")]
    assert (counter.done, counter.total) == (2, 0)
    assert list(CountingBar(counter, enumerate("ab"), total=2)) == [(0, "a"), (1, "b")]
    assert (counter.done, counter.total) == (4, 2)


def test_several_loops_add_up() -> None:
    counter = StepCounter()
    for _ in CountingBar(counter, range(2)):
        pass
    for _ in CountingBar(counter, range(3)):
        pass
    assert (counter.done, counter.total) == (5, 5)


def test_all_else_that_a_bar_can_do_is_harmless(capfd: pytest.CaptureFixture[str]) -> None:
    counter, threads = StepCounter(), threading.active_count()
    bar = CountingBar(counter, total=2)
    bar.set_description("step")
    bar.set_description_str("step")
    bar.set_postfix(loss=1.0)
    bar.set_postfix_str("x")
    bar.refresh()
    bar.clear()
    assert len(CountingBar(StepCounter(), range(4))) == 4
    bar.update(None)
    bar.reset()
    bar.unpause()
    bar.close()
    assert (counter.done, counter.total) == (0, 2)
    assert capfd.readouterr() == ("", "") and threading.active_count() == threads


def test_a_loop_that_ends_early_counts_what_was_done() -> None:
    counter = StepCounter()
    with pytest.raises(RuntimeError), CountingBar(counter, total=3) as bar:
        bar.update()
        raise RuntimeError
    assert counter.done == 1


def test_a_pipeline_reports_to_its_counter() -> None:
    pipeline, counter = SimpleNamespace(), StepCounter()
    count_steps(pipeline, counter)
    with pipeline.progress_bar(total=4, desc="ignored", leave=False) as bar:
        bar.update()
    for _ in pipeline.progress_bar(range(2)):
        pass
    assert (counter.done, counter.total) == (3, 6)


def test_a_modular_pipeline_s_blocks_report_too() -> None:
    inner = SimpleNamespace(sub_blocks={})
    blocks = SimpleNamespace(sub_blocks={"denoise": SimpleNamespace(sub_blocks={"loop": inner})})
    pipeline, counter = SimpleNamespace(_blocks=blocks), StepCounter()
    count_steps(pipeline, counter)
    loop = pipeline._blocks.sub_blocks["denoise"].sub_blocks["loop"]
    for _ in loop.progress_bar(range(3)):
        pass
    assert counter.done == 3
    assert not hasattr(inner, "progress_bar"), "the shared blocks stay as they were"
