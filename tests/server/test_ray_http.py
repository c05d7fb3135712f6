"""A server whose ranks are actors of Ray, on a cluster of several raylets on this host.

Skipped where Ray is not installed; docs/parallel.md says how to run it.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from server_process import BASE, ENDLESS, Server, alive, error_of, pixels, serving, until

pytest.importorskip("ray")

from ray.cluster_utils import Cluster

NODES = 4  # with one CPU each, so that no two ranks share one
FLAGS = ("--worker-backend", "ray", "--restart-stages", "--max-inference-steps", "200000")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(1, NODES):
            made.add_node(num_cpus=1)
        made.wait_for_nodes()
        yield made
    finally:
        made.shutdown()


def actors() -> list[psutil.Process]:
    """The ranks, by age: those of the same session as nobody else's tests."""
    found = [p for p in psutil.process_iter() if "ray::RayRank" in " ".join(words(p))]
    return sorted(found, key=psutil.Process.create_time)


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def loses(server: Server, attack: Callable[[], None]) -> list[psutil.Process]:
    """The ranks that take the place of those that were there."""
    before = actors()
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(server.post, ENDLESS)
        until(lambda: server.running() == 1)
        begin = time.monotonic()
        attack()
        answer = client.result(timeout=15)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "stage_dead")
        until(lambda: not any(map(alive, before)), 12 - (time.monotonic() - begin))
    until(lambda: server.health() == 200, 300)
    return actors()


def test_ranks_on_several_raylets(cluster: Any, tmp_path: Path) -> None:
    with serving("demo", tmp_path) as server:
        alone = pixels(server.post(BASE))
    flags = (*FLAGS, "--ray-address", cluster.address, "--cfg-parallel-size", "2")
    with serving("demo", tmp_path, *flags) as server:
        first, second = actors()
        assert first.ppid() != second.ppid()  # their raylets
        assert np.abs(pixels(server.post(BASE)) - alone).max() <= 1
        for number, which in ((signal.SIGKILL, 1), (signal.SIGKILL, 0), (signal.SIGSTOP, 1)):
            victim = actors()[which]
            assert len(loses(server, lambda victim=victim, number=number: victim.send_signal(number))) == 2
        nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
        (raylet, *_) = [actor.ppid() for actor in actors() if actor.ppid() in nodes]
        assert len(loses(server, lambda: cluster.remove_node(nodes[raylet], allow_graceful=False))) == 2
        assert np.abs(pixels(server.post(BASE)) - alone).max() <= 1
        last = actors()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        until(lambda: not any(map(alive, last)))
    log = server.log.read_text()
    assert "is gone" in log and "no sign of life" in log


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ray-address", "127.0.0.1:1"), "ray_address='127.0.0.1:1' cannot be reached"),
        (("--cfg-parallel-size", "3", "--ulysses-degree", "3"), "need 9 CPU, and the Ray cluster has [34] CPU"),
        (("--device", "cuda"), "need 1 CPU and 1 GPU, and the Ray cluster has"),
    ],
)
def test_what_cannot_be_had_is_refused(cluster: Any, flags: tuple[str, ...], message: str) -> None:
    address = () if "--ray-address" in flags else ("--ray-address", cluster.address)
    command = [sys.executable, "-m", "polymux.cli", "serve", "demo", "--port", "0", *FLAGS, *address, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert re.search(message, done.stderr)


def test_stages_on_two_raylets(cluster: Any, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """What the first stage makes goes to the second one over TCP."""
    body = {"input": "hello there. good day.", "seed": 3, "response_format": "pcm", "max_new_tokens": 90}
    sounds = []
    for flags in ((), (*FLAGS, "--split-stages", "--ray-address", cluster.address)):
        with serving(tiny_checkpoint("dia"), tmp_path, "--num-threads", "1", *flags) as server:
            sounds.append(server.http.post("/v1/audio/speech", json=body).content)
            assert len(actors()) == (2 if flags else 0)
    assert sounds[0] == sounds[1] and sounds[0]
