"""A server whose model thinks, talks and decodes in three processes: its answers, and what a dead one takes with it."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import Server, alive, error_of, serving, shared_memory, until

from polymux.testing.tiny.inputs import have_torchvision

FLAGS = ("--split-stages", "--restart-stages", "--num-threads", "1", "--max-num-seqs", "4")
SAY: list[Any] = [{"role": "user", "content": "hello"}]
SPOKEN = {"modalities": ["text", "audio"], "max_tokens": 6, "seed": 3}
EDGES = [f'polymux:transfer_chunk_bytes_count{{from_stage="{i}",to_stage="{i + 1}"}}' for i in range(2)]


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not have_torchvision():
        pytest.skip("its processor needs torchvision")
    shared = shared_memory()
    with serving(tiny_checkpoint("qwen3-omni-moe"), tmp_path_factory.mktemp("omni"), *FLAGS) as running:
        yield running
        stages = running.stages()
        assert len(stages) == 3
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        until(lambda: not any(map(alive, stages)))
    assert shared_memory() <= shared


def ask(server: Server, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/chat/completions", json={"messages": SAY} | fields)


def steps(count: int) -> dict[str, Any]:
    return {"extra_args": {"talker_max_new_tokens": count}}


def test_a_stream_is_the_whole_and_begins_early(server: Server) -> None:
    whole = ask(server, **SPOKEN, **steps(40), audio={"format": "pcm16"}).json()
    body = {"messages": SAY, "stream": True, "audio": {"format": "pcm16"}} | SPOKEN | steps(40)
    with server.http.stream("POST", "/v1/chat/completions", json=body) as streamed:
        lines = [line[6:] for line in streamed.iter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    sound = [base64.b64decode(d["audio"]["data"]) for d in deltas if d.get("audio") and d["audio"].get("data")]
    message = whole["choices"][0]["message"]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    assert b"".join(sound) == base64.b64decode(message["audio"]["data"]) and len(sound) >= 3
    assert whole["usage"]["completion_tokens_details"] == {"audio_tokens": 40, "text_tokens": 6}
    metrics = server.metrics()
    assert [metrics[edge] for edge in EDGES] == [2, 6]  # 4, 25 and 10 frames, twice
    assert metrics["polymux:time_to_first_audio_seconds_count"] == metrics["polymux:audio_real_time_factor_count"] == 2
    mute = ask(server, max_tokens=6, seed=3).json()
    assert mute["choices"][0]["message"]["content"] == message["content"]
    assert [server.metrics()[edge] for edge in EDGES] == [2, 6]  # it went to no other stage


def test_the_death_of_the_talker_is_felt_by_whom_it_speaks_for(server: Server) -> None:
    _, talker, _ = sorted(server.stages(), key=lambda process: process.create_time())
    with ThreadPoolExecutor(2) as pool:
        before = server.metrics()[EDGES[0]]
        spoken = pool.submit(ask, server, **SPOKEN, **steps(3000))
        until(lambda: server.metrics()[EDGES[0]] == before + 1)
        mute = pool.submit(ask, server, max_tokens=300, seed=1)
        until(lambda: server.running() == 2)
        talker.kill()
        answer = spoken.result(10)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "stage_dead")
        assert mute.result(60).status_code == 200
    until(lambda: server.health() == 200, 120)
    assert ask(server, **SPOKEN, **steps(4)).status_code == 200
