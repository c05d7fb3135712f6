"""A client that leaves takes its work with it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from server_process import BASE, ENDLESS, Server, pixels, send_raw, shared_memory, until

BODY = json.dumps(ENDLESS).encode()
PLACES = 4  # requests that the shared server runs at once


@contextlib.contextmanager
def health_stays_good(server: Server) -> Iterator[None]:
    """Asks all the time, and fails if one answer is not 200."""
    answers: list[int] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            answers.append(server.health())
            time.sleep(0.1)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert set(answers) == {200}


def test_leaving_frees_the_engine_at_once(server: Server) -> None:
    with health_stays_good(server):
        connection = send_raw(server, BODY)
        until(lambda: server.running() == 1)
        time.sleep(0.5)
        connection.close()
        assert server.post(BASE, timeout=10).status_code == 200
    until(lambda: server.running() == 0)


def test_a_queued_request_whose_client_left_never_starts(server: Server) -> None:
    before = server.outcomes()
    running = [send_raw(server, BODY) for _ in range(PLACES)]
    until(lambda: server.running() == PLACES)
    queued = send_raw(server, BODY)
    until(lambda: server.waiting() == 1)
    queued.close()
    until(lambda: server.waiting() == 0)
    assert server.running() == PLACES
    for connection in running:
        connection.close()
    until(lambda: server.running() == server.waiting() == 0)
    steps = server.steps()
    assert server.post(BASE).status_code == 200
    until(lambda: server.steps() > steps)
    assert server.steps() == steps + BASE["num_inference_steps"]  # nobody else computes
    after = server.outcomes()
    assert after["aborted"] - before["aborted"] == PLACES + 1


def test_leaving_while_the_body_is_sent(server: Server) -> None:
    before = server.outcomes()
    for _ in range(10):
        send_raw(server, BODY[:20], [f"Content-Length: {len(BODY)}"]).close()
    assert server.post(BASE).status_code == 200
    after = server.outcomes()
    assert after == before | {"completed": before["completed"] + 1}


def test_fifty_times_leave_no_trace(server: Server) -> None:
    def leave() -> None:
        connection = send_raw(server, BODY)
        until(lambda: server.running() >= 1)
        connection.close()
        assert server.post(BASE, timeout=10).status_code == 200

    for _ in range(10):  # caches fill
        leave()
    until(lambda: server.running() == server.waiting() == 0)
    processes = [psutil.Process(server.pid), *server.stages()]
    memory = [process.memory_info().rss for process in processes]
    shared = shared_memory()
    before = server.outcomes()
    with health_stays_good(server):
        for _ in range(50):
            leave()
        assert {server.post(BASE).status_code for _ in range(20)} == {200}
    until(lambda: server.running() == server.waiting() == 0)
    after = server.outcomes()
    assert after == before | {"completed": before["completed"] + 70, "aborted": before["aborted"] + 50}
    for process, bytes_before in zip(processes, memory, strict=True):
        assert process.memory_info().rss < bytes_before * 1.05
    assert shared_memory() == shared


@pytest.mark.parametrize("steps_before", [2, 50])
def test_batch_mates_of_a_client_that_left_are_unharmed(server: Server, steps_before: int) -> None:
    body = BASE | {"num_inference_steps": 60, "seed": 3}
    alone = pixels(server.post(body))
    with ThreadPoolExecutor(1) as pool, send_raw(server, BODY) as leaver:
        until(lambda: server.running() == 1)
        steps = server.steps()
        until(lambda: server.steps() >= steps + steps_before)
        answer = pool.submit(server.post, body)
        until(lambda: server.running() == 2 or answer.done())
        leaver.close()
        assert np.abs(pixels(answer.result()) - alone).max() <= 1
