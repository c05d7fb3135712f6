"""A language model on vLLM, over HTTP: answers, streams, usage, forms, clients that leave, its death. vLLM is a
stand-in (`tests/fake_vllm`) that answers by transformers' `generate`; the server and its stage are real."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import MODEL, Server, error_of, serving, until

URL = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 20,
    "temperature": 1.5,
    "seed": 6,
}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
FAKE = Path(__file__).parents[1] / "fake_vllm"


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-num-seqs", "4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep))
        folder = tmp_path_factory.mktemp("vllm")
        (folder / "deploy.yaml").write_text("stages: [{stage_id: 0, decoding: vllm}]\n")
        deploy = ("--deploy-config", str(folder / "deploy.yaml"))
        with serving(tiny_checkpoint("qwen3-lm"), folder, *flags, *deploy) as running:
            yield running


def ask(server: Server, **fields: Any) -> httpx.Response:
    return server.http.post(URL, json=BODY | fields)


def choice(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    (made,) = answer.json()["choices"]
    return dict(made)


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_answers_and_streams(server: Server) -> None:
    whole = ask(server)
    text, usage = choice(whole)["message"]["content"], whole.json()["usage"]
    assert choice(whole)["finish_reason"] == "length" and usage["completion_tokens"] == 20
    assert usage["total_tokens"] == usage["prompt_tokens"] + 20 and usage["prompt_tokens"] > 5
    parts = chunks(ask(server, stream=True, stream_options={"include_usage": True}))
    deltas = [one["delta"].get("content") or "" for part in parts for one in part["choices"]]
    assert "".join(deltas) == text and sum(map(bool, deltas)) > 2 and parts[-1]["usage"] == usage
    stopped = choice(ask(server, stop=text[6:9]))
    assert stopped["finish_reason"] == "stop" and stopped["message"]["content"] == text[: text.index(text[6:9])]
    card = server.http.get("/v1/models").json()["data"][0]
    assert card["capabilities"]["context"] == 600


def test_many_at_once_are_as_alone(server: Server) -> None:
    alone = [choice(ask(server, seed=seed))["message"]["content"] for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda seed: choice(ask(server, seed=seed))["message"]["content"], range(6)))
    assert together == alone and len(set(alone)) > 3


def test_what_is_refused(server: Server) -> None:
    picture = [{"type": "image_url", "image_url": {"url": "data:;base64,aaaa"}}, {"type": "text", "text": "what?"}]
    for fields, param in (
        ({"temperature": 2.5}, "temperature"),
        ({"presence_penalty": -2}, "presence_penalty"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "a", "format": "wav"}}, None),
        ({"messages": [{"role": "user", "content": picture}]}, None),
    ):
        answer = ask(server, **fields)  # type: ignore[arg-type]
        error = error_of(answer)
        assert answer.status_code == 400 and (param is None or error["param"] == param), error
    failed = ask(server, seed=13)
    assert failed.status_code == 500 and "broken" in error_of(failed)["message"]


def test_forms(server: Server) -> None:
    pytest.importorskip("xgrammar")
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    made = choice(ask(server, response_format=form, max_tokens=200))
    assert made["finish_reason"] == "stop" and json.loads(made["message"]["content"])["n"] in (1, 2)
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    asked = ask(server, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    (call,) = choice(asked)["message"]["tool_calls"]
    assert call["function"]["name"] == "look" and json.loads(call["function"]["arguments"])["n"] in (1, 2)
    assert choice(asked)["finish_reason"] == "tool_calls"


def test_a_client_that_leaves_cancels(server: Server) -> None:
    aborted = server.outcomes()["aborted"]
    with server.http.stream("POST", URL, json=BODY | {"stream": True, "max_tokens": 250}) as answer:
        next(answer.iter_lines())
    until(lambda: server.outcomes()["aborted"] == aborted + 1)
    until(lambda: server.running() == 0)
    assert choice(ask(server))["message"]["content"]


def test_its_death_is_the_stages(server: Server) -> None:
    """The last test: the server ends with its only stage."""
    answer = ask(server, seed=666)
    assert answer.status_code == 503 and error_of(answer)["code"] == "stage_dead"
    assert server.wait() == 1
