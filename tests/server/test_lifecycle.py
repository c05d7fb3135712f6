"""Starting, dying and stopping: who waits gets an answer, and nothing is left behind."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import (
    BASE,
    ENDLESS,
    START_S,
    Server,
    alive,
    error_of,
    send_raw,
    serving,
    shared_memory,
    until,
)

LONG = ("--max-inference-steps", "200000", "--max-num-seqs", "2")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    shared = shared_memory()
    children = set(psutil.Process().children(recursive=True))
    yield
    until(lambda: shared_memory() <= shared)
    until(lambda: not [p for p in set(psutil.Process().children(recursive=True)) - children if alive(p)])


def occupy(pool: ThreadPoolExecutor, server: Server) -> list[Future[httpx.Response]]:
    """Two requests that run and one that is queued, none of which ends by itself."""
    clients = [pool.submit(server.post, ENDLESS) for _ in range(3)]
    until(lambda: (server.running(), server.waiting()) == (2, 1))
    return clients


def serve(*words: str) -> subprocess.CompletedProcess[str]:
    """A server that is expected to end by itself."""
    command = [sys.executable, "-m", "polymux.cli", "serve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S)


def test_while_the_model_loads(tmp_path: Path) -> None:
    with serving("demo", tmp_path, ready=False) as server:
        answer = server.http.get("/health")
        assert answer.status_code == 503
        assert answer.json()["status"] == "loading"
        assert [server.http.get(path).status_code for path in ("/live", "/ready")] == [200, 503]
        assert server.http.get("/metrics").status_code == 200
        assert server.http.get("/v1/models").json()["data"][0]["ready"] is False
        refused = server.post(BASE)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "not_ready")
        until(lambda: bool(server.stages()))
        stages = server.stages()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        until(lambda: not any(map(alive, stages)))


def test_keys_stay_where_they_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("sk-SECRET-1\n")
    monkeypatch.setenv("POLYMUX_API_KEY", "sk-SECRET-2")
    flags = ("--api-key-file", str(tmp_path / "keys"), "--log-format", "json", "--log-level", "debug", "--log-requests")
    with serving("demo", tmp_path, *flags, ready=False) as server:
        for key, status in (("sk-SECRET-1", 200), ("sk-SECRET-2", 200), ("sk-SECRET-3", 401)):
            answer = server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status
            assert "SECRET" not in answer.text
        assert server.http.get("/live").status_code == 200
        until(lambda: bool(server.stages()))
        for process in (psutil.Process(server.pid), *server.stages()):
            assert "SECRET" not in " ".join(process.cmdline())
        assert all("SECRET" not in "".join(stage.environ().values()) for stage in server.stages())
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    log = server.log.read_text()
    assert "SECRET" not in log
    assert {json.loads(line)["level"] for line in log.splitlines()} >= {"info", "debug"}


def test_a_dead_stage_ends_the_server(tmp_path: Path) -> None:
    with serving("demo", tmp_path, *LONG) as server, ThreadPoolExecutor(3) as pool:
        clients = occupy(pool, server)
        (stage,) = server.stages()
        stage.kill()
        for client in clients:
            answer = client.result(timeout=5)
            assert (answer.status_code, error_of(answer)["code"]) == (503, "stage_dead")
        assert server.health() in (503, 0)  # it says so, or it is gone already
        assert server.wait() == 1
        assert "Traceback" not in server.log.read_text()


def test_restart_stages(tmp_path: Path) -> None:
    with serving("demo", tmp_path, *LONG, "--restart-stages") as server, ThreadPoolExecutor(3) as pool:
        before = server.post(BASE).json()["data"]
        clients = occupy(pool, server)
        (stage,) = server.stages()
        steps = server.steps()
        stage.kill()
        for client in clients:
            assert client.result(timeout=5).status_code == 503
        assert server.health() == 503
        assert server.post(BASE).status_code == 503
        assert server.steps() >= steps and server.metrics()["polymux:stage_ready"] == 0
        server.wait_ready()
        assert server.post(BASE).json()["data"] == before
        assert server.metrics()["polymux:stage_restarts_total"] == 1
        assert server.steps() >= steps + BASE["num_inference_steps"], "a counter went back"
        assert server.outcomes() == {"completed": 2, "failed": 3, "aborted": 0, "refused": 1}
        assert (server.running(), server.waiting()) == (0, 0)
        assert len(server.stages()) == 1


def test_a_killed_server_leaves_no_stage(tmp_path: Path) -> None:
    with serving("demo", tmp_path, *LONG) as server, send_raw(server, json.dumps(ENDLESS).encode()):
        until(lambda: server.running() == 1)
        stages = server.stages()
        assert stages
        server.signal(signal.SIGKILL)
        server.wait()
        until(lambda: not any(map(alive, stages)), 5)


def test_sigterm_lets_requests_finish(tmp_path: Path) -> None:
    with serving("demo", tmp_path, *LONG, "--shutdown-grace", "300") as server, ThreadPoolExecutor(1) as pool:
        late = httpx.Client(base_url=server.url, timeout=30)
        assert late.get("/health").status_code == 200
        body = BASE | {"num_inference_steps": 300}
        client = pool.submit(server.post, body)
        until(lambda: server.running() == 1)
        server.signal(signal.SIGTERM)
        until(lambda: late.get("/health").json()["status"] == "draining")
        refused = late.post("/v1/images/generations", json=BASE)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "not_ready")
        assert client.result().status_code == 200
        assert server.wait() == 0
        late.close()


def test_sigterm_does_not_wait_longer_than_the_grace_period(tmp_path: Path) -> None:
    with serving("demo", tmp_path, *LONG, "--shutdown-grace", "1") as server, ThreadPoolExecutor(3) as pool:
        clients = occupy(pool, server)
        server.signal(signal.SIGTERM)
        for client in clients:
            assert (client.result().status_code, error_of(client.result())["code"]) == (503, "not_ready")
        assert server.wait() == 0


def test_a_second_signal_ends_the_grace_period(tmp_path: Path) -> None:
    with serving("demo", tmp_path, *LONG, "--shutdown-grace", "1000") as server, ThreadPoolExecutor(1) as pool:
        client = pool.submit(server.post, ENDLESS)
        until(lambda: server.running() == 1)
        server.signal(signal.SIGINT)
        until(lambda: server.health() == 503)
        assert not client.done()
        server.signal(signal.SIGINT)
        assert client.result().status_code == 503
        assert server.wait() == 0


def test_a_full_queue_is_a_429(tmp_path: Path) -> None:
    flags = ("--max-inference-steps", "200000", "--max-num-seqs", "1", "--max-queue", "1")
    with serving("demo", tmp_path, *flags) as server:
        body = json.dumps(ENDLESS).encode()
        with send_raw(server, body):
            until(lambda: server.running() == 1)
            with send_raw(server, body):
                until(lambda: server.waiting() == 1)
                refused = server.post(BASE)
                assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
                assert int(refused.headers["retry-after"]) >= 1
        until(lambda: server.running() == server.waiting() == 0)
        assert server.post(BASE).status_code == 200


def test_a_checkpoint_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    done = serve(str(tmp_path), "--port", "0")
    assert done.returncode == 1
    assert done.stdout.startswith("Listening on http://")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("polymux serve: error: ")
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_refused_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = serve("demo", "--port", port)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert port in line
    assert done.stdout == ""
