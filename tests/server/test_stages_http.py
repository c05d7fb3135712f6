"""A server whose model runs in two stages: the same sound, and what becomes of requests when a stage is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server_process import Server, alive, error_of, serving, shared_memory, until

FLAGS = ("--split-stages", "--num-threads", "1", "--max-num-seqs", "2")
HOW = {"seed": 3, "response_format": "pcm", "max_new_tokens": 90}
LONG = "this is one sentence. this is the next one. " * 20


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """By the deploy file that `polymux deploy-config` prints for these flags."""
    shared, folder, model = shared_memory(), tmp_path_factory.mktemp("stages"), tiny_checkpoint("dia")
    command = [sys.executable, "-m", "polymux.cli", "deploy-config", str(model), *FLAGS]
    (folder / "deploy.yaml").write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
    with serving(model, folder, "--restart-stages", "--deploy-config", str(folder / "deploy.yaml")) as running:
        yield running
        stages = running.stages()
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        until(lambda: not any(map(alive, stages)))
    assert shared_memory() <= shared


def speak(server: Server, text: str) -> httpx.Response:
    return server.http.post("/v1/audio/speech", json={"input": text} | HOW)


def restarts(server: Server) -> list[float]:
    """By stage."""
    lines = server.http.get("/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("polymux:stage_restarts_total{")]


def test_it_speaks(server: Server) -> None:
    answer = speak(server, "hello there. good day.")
    assert answer.status_code == 200 and len(answer.content) > 0
    assert speak(server, "hello there. good day.").content == answer.content
    assert server.metrics()['polymux:transfer_bytes_total{from_stage="0",to_stage="1"}'] > 0
    with server.http.stream(
        "POST", "/v1/audio/speech", json={"input": "hello there. good day.", "stream_format": "audio"} | HOW
    ) as streamed:
        assert streamed.read() == answer.content


def test_no_process_knows_where_all_of_the_time_went(server: Server) -> None:
    answer = server.http.post("/v1/audio/speech", json={"input": "hi.", "profile": True} | HOW)
    assert answer.status_code == 400 and error_of(answer)["param"] == "profile", answer.text
    assert "several stages" in error_of(answer)["message"]


def test_a_model_that_cannot_hear_takes_no_voices(server: Server) -> None:
    """The codec, which would hear them, is in the other process."""
    sound = b"RIFF" + bytes(60)
    form = {"name": (None, "anna"), "consent": (None, "written"), "audio_sample": ("a.wav", sound)}
    for answer in (
        server.http.post("/v1/audio/voices", files=form),
        server.http.post("/v1/audio/speech", json={"input": "hi.", "ref_audio": "data:audio/wav;base64,AAAA"} | HOW),
    ):
        assert answer.status_code == 400 and "--split-stages" in error_of(answer)["message"]


def test_each_stage_is_killed(server: Server) -> None:
    for count in range(2):
        oldest, other = sorted(server.stages(), key=lambda process: process.create_time())
        with ThreadPoolExecutor(2) as pool:
            clients = [pool.submit(speak, server, LONG) for _ in range(2)]
            until(lambda: server.running() == 2)
            oldest.kill()  # the first stage; then, that is in its second process, the second one
            until(lambda clients=clients: all(client.done() for client in clients), 5)
            for client in clients:
                assert (client.result().status_code, error_of(client.result())["code"]) == (503, "stage_dead")
        until(lambda: server.health() == 200, 120)
        assert restarts(server) == [1, count]
        assert not alive(oldest) and alive(other)
        assert speak(server, "hello there.").status_code == 200


def test_it_sleeps_and_wakes_up(server: Server) -> None:
    assert server.http.post("/v1/omni/sleep", json={"level": 2}).status_code == 200
    assert speak(server, "hello there.").status_code == 503
    assert server.http.post("/v1/omni/wakeup", json={}).status_code == 200
    assert speak(server, "hello there.").status_code == 200
