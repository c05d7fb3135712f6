"""A server whose language model runs on two ranks: the answers of one rank, ranks that die, sleep, an orderly end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from server_process import MODEL, Server, alive, error_of, serving, shared_memory, until

from polymux.config import EngineConfig
from polymux.engine.answering import load_answering
from polymux.request import Finished, Request, SamplingParams

CHAT = "/v1/chat/completions"
FLAGS = ("--tensor-parallel-size", "2", "--restart-stages", "--max-num-seqs", "4", "--max-num-batched-tokens", "9")
FLAGS += ("--device", "cpu")
PROMPTS = ["hello there", "a cat and a dog", "what is " * 9, "hello there, she"]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}


def body_of(i: int) -> dict[str, Any]:
    """One of four; two of them draw."""
    drawing = {"temperature": 1.2, "seed": i} if i % 2 else {"temperature": 0}
    held: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    return drawing | {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPTS[i % len(PROMPTS)]}],
        "max_tokens": 24,
    } | ({"response_format": held} if i == 2 else {})  # fmt: skip


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def all_texts(server: Server) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [
            text_of(one) for one in pool.map(lambda i: server.http.post(CHAT, json=body_of(i)), range(len(PROMPTS)))
        ]


def on_one_rank(folder: Path) -> list[str]:
    """The same questions, to an engine."""
    engine = load_answering(EngineConfig.from_flat(model=str(folder), device="cpu"))
    for i, prompt in enumerate(PROMPTS):
        schema = {"json_schema": SCHEMA} if i == 2 else {}
        drawing = {name: value for name, value in body_of(i).items() if name in ("temperature", "seed")}
        params = SamplingParams(max_new_tokens=24, **drawing, **schema)
        engine.add(Request(request_id=str(i), prompt=prompt, sampling=params))
    texts = {}
    while engine.busy:
        texts |= {int(one.request_id): one.text for one in engine.step() if isinstance(one, Finished)}
    engine.close()
    return [texts[i] or "" for i in range(len(PROMPTS))]


@contextlib.contextmanager
def endless(server: Server) -> Iterator[Any]:
    """Requests that do not end by themselves."""
    body = body_of(0) | {"max_tokens": 3000, "logit_bias": None, "messages": [{"role": "user", "content": "a"}]}
    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(server.http.post, CHAT, json=body) for _ in range(2)]
        until(lambda: server.running() == 2)
        yield clients


def a_rank_dies(server: Server, number: int) -> None:
    """Whoever waits hears of it in ten seconds, nothing is left, and the model comes back."""
    ranks = server.stages()
    with endless(server) as clients:
        begin = time.monotonic()
        ranks[number].kill()
        for client in clients:
            answer = client.result(timeout=10)
            assert (answer.status_code, error_of(answer)["code"]) == (503, "stage_dead")
        until(lambda: not any(map(alive, ranks)), 10 - (time.monotonic() - begin))
    server.wait_ready()


def test_two_ranks(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    folder, shared = tiny_checkpoint("qwen3-lm"), shared_memory()
    wanted = on_one_rank(folder)
    with serving(folder, tmp_path, *FLAGS) as server:
        assert all_texts(server) == wanted
        for level in (1, 2):
            assert server.http.post("/v1/omni/sleep", json={"level": level}).status_code == 200
            assert server.http.post("/v1/omni/wakeup").status_code == 200
            assert all_texts(server) == wanted
        body = body_of(0) | {"max_tokens": 3000, "stream": True}
        with server.http.stream("POST", CHAT, json=body) as leaving:
            lines = leaving.iter_lines()
            assert next(lines).startswith("data: ")
            until(lambda: server.running() == 1)
        until(lambda: server.running() == 0)
        for number in (1, 0):
            a_rank_dies(server, number)
            assert all_texts(server) == wanted
        ranks: list[psutil.Process] = server.stages()
        assert len(ranks) == 2
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        until(lambda: not any(map(alive, ranks)))
    log = server.log.read_text()
    assert "is gone: SIGKILL" in log
    assert "Traceback" not in log
    assert shared_memory() <= shared
