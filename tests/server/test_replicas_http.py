"""A server with two replicas: one dies, the other goes on, and the dead one comes back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_process import BASE, ENDLESS, Server, alive, error_of, serving, shared_memory, until

FLAGS = ("--data-parallel-size", "2", "--max-num-seqs", "1", "--max-inference-steps", "200000", "--restart-stages")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    before = shared_memory()
    with serving("demo", tmp_path, "--num-threads", "1", *FLAGS) as running:
        yield running
        stages = running.stages()
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        until(lambda: not any(map(alive, stages)))
    assert shared_memory() <= before


def ready(server: Server) -> list[str]:
    lines = server.http.get("/metrics").text.splitlines()
    return [line.rpartition(" ")[2] for line in lines if line.startswith("polymux:stage_ready{")]


def test_one_dies_and_comes_back(server: Server) -> None:
    assert (len(server.stages()), ready(server)) == (2, ["1.0", "1.0"])
    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(server.post, ENDLESS | {"num_inference_steps": 800}) for _ in range(2)]
        until(lambda: server.running() == 2)
        server.stages()[0].kill()
        until(lambda: sum(client.done() for client in clients) == 1, 5)
        (failed,) = [client.result() for client in clients if client.done()]
        assert (failed.status_code, error_of(failed)["code"]) == (503, "stage_dead")
        assert server.health() == 200 and sorted(ready(server)) == ["0.0", "1.0"]
        until(lambda: ready(server) == ["1.0", "1.0"], 120)
        assert server.post(BASE).status_code == 200
        assert {client.result().status_code for client in clients} == {200, 503}
    slept = server.http.post("/v1/omni/sleep", json={"level": 1})
    assert slept.status_code == 200 and ready(server) == ["0.0", "0.0"]
    assert server.post(BASE).status_code == 503
    assert server.http.post("/v1/omni/wakeup", json={}).status_code == 200
    assert ready(server) == ["1.0", "1.0"]
    assert [server.post(BASE, headers={"x-session-id": name}).status_code for name in ("a", "a b")] == [200, 400]
