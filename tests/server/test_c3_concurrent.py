"""Many requests at once: each gets its own answer, equal to what it gets alone, and is counted once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
from server_process import BASE, Server, pixels, until

TOLERANCE = 1  # of 255: in a batch, other kernels may sum in another order

GOOD: list[dict[str, Any]] = [
    BASE | {"seed": seed, "size": ("64x64", "96x64")[seed % 2], "num_inference_steps": 2 + seed % 7}
    for seed in range(1, 11)
]
BAD: list[tuple[dict[str, Any], int]] = [
    (BASE | {"num_inference_steps": 0}, 400),
    (BASE | {"size": "banana"}, 400),
    (BASE | {"model": "other"}, 404),
]


def test_thirteen_at_once_five_times(server: Server) -> None:
    alone = [pixels(server.post(body)) for body in GOOD]
    for _ in range(5):
        before = server.outcomes()
        bodies = [*GOOD, *(body for body, _ in BAD)]
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers: list[httpx.Response] = list(pool.map(server.post, bodies))
        for answer, expected in zip(answers[:10], alone, strict=True):
            assert np.abs(pixels(answer) - expected).max() <= TOLERANCE
        assert [answer.status_code for answer in answers[10:]] == [status for _, status in BAD]
        after = server.outcomes()
        assert {kind: after[kind] - before[kind] for kind in after} == {
            "completed": 10, "failed": 0, "aborted": 0, "refused": 3
        }  # fmt: skip
    until(lambda: server.running() == server.waiting() == 0)


def test_the_work_was_batched(server: Server) -> None:
    """Otherwise the test above says nothing about batches."""
    calls, answered = (
        f'polymux:component_batch_size_{end}{{component="transformer",phase="denoise"}}' for end in ("count", "sum")
    )
    before = server.metrics()
    bodies = [BASE | {"seed": seed, "num_inference_steps": 20} for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert [answer.status_code for answer in pool.map(server.post, bodies)] == [200] * 4
    after = server.metrics()
    assert after[answered] - before[answered] == 80
    assert after[calls] - before[calls] < 80
