"""A server whose model runs on two ranks: many requests at once, a rank that dies, and an orderly end."""

from __future__ import annotations

import json
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from server_process import BASE, ENDLESS, Server, alive, error_of, pixels, send_raw, serving, shared_memory, until

FLAGS = ("--cfg-parallel-size", "2", "--restart-stages", "--max-num-seqs", "4", "--max-inference-steps", "200000")
REQUESTS = 24
SIZES = ("64x64", "64x96", "96x64", "128x64")


def test_two_ranks(tmp_path: Path) -> None:
    shared = shared_memory()
    with serving("demo", tmp_path, *FLAGS) as server:
        stage, rank = server.stages()
        many_requests_of_mixed_shapes(server)
        before = pixels(server.post(BASE))
        without_a_seed(server)
        with send_raw(server, json.dumps(ENDLESS).encode()):
            until(lambda: server.running() == 1)
        until(lambda: server.running() == 0)

        with ThreadPoolExecutor(2) as pool:
            clients = [pool.submit(server.post, ENDLESS) for _ in range(2)]
            until(lambda: server.running() == 2)
            begin = time.monotonic()
            rank.kill()
            for client in clients:
                answer = client.result(timeout=10)
                assert (answer.status_code, error_of(answer)["code"]) == (503, "stage_dead")
            until(lambda: not alive(stage) and not alive(rank), 10 - (time.monotonic() - begin))
        server.wait_ready()
        assert np.array_equal(pixels(server.post(BASE)), before)

        stages = server.stages()
        assert len(stages) == 2
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        until(lambda: not any(map(alive, stages)))
    log = server.log.read_text()
    assert f"rank 1 (process {rank.pid}) is gone: SIGKILL" in log
    assert "Traceback" not in log
    assert shared_memory() <= shared


def many_requests_of_mixed_shapes(server: Server) -> None:
    draw = random.Random(1)

    def body() -> dict[str, Any]:
        changes = {"size": draw.choice(SIZES), "num_inference_steps": draw.randint(2, 4), "seed": draw.randrange(9)}
        return BASE | changes | {"prompt": "a " * draw.randint(1, 9), "n": draw.randint(1, 2)}

    bodies = [body() for _ in range(REQUESTS)]
    with ThreadPoolExecutor(8) as pool:
        for asked, answer in zip(bodies, pool.map(server.post, bodies), strict=True):
            width, height = map(int, asked["size"].split("x"))
            assert pixels(answer, asked["n"] - 1).shape == (height, width, 3)


def without_a_seed(server: Server) -> None:
    body = {name: value for name, value in BASE.items() if name != "seed"}
    one, two = pixels(server.post(body)), pixels(server.post(body))
    assert not np.array_equal(one, two)
