"""Answers of the real vLLM are those of the engine here.

Only where vLLM is installed and can run; starting takes it half a minute.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from polymux.config import EngineConfig
from polymux.engine.answering import load_answering
from polymux.engine.base import StageEngine
from polymux.request import Failed, Finished, Message, Part, Progress, Request, SamplingParams, TextPiece
from polymux.tool_reader import calls_in
from polymux.tools import Tool, ToolUse

RUNS = importlib.util.find_spec("vllm") is not None and (torch.cuda.is_available() or torch.version.cuda is None)
pytestmark = pytest.mark.skipif(not RUNS, reason="vllm is not installed, or it is built for a GPU and there is none")
HEAD = 64  # channels, which all of its attentions know
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
GREEDY: list[dict[str, Any]] = [
    {"text": "hello there", "tokens": 40},
    {"text": "a cat", "tokens": 30, "repetition_penalty": 1.4},
    {"text": "a cat and a dog", "tokens": 30, "frequency_penalty": 1.0, "presence_penalty": 0.4},
    {"text": "a cat and a fox", "tokens": 40, "stop": ("e", "o", "th")},
    {"text": "what is " * 30, "tokens": 25, "extra_args": {"enable_thinking": False}},
]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with larger heads, and with weights that are far enough apart."""
    folder = Path(shutil.copytree(tiny_checkpoint("qwen3-lm"), tmp_path_factory.mktemp("vllm") / "model"))
    settings = (folder / "generation_config.json").read_text()
    config = json.loads((folder / "config.json").read_text()) | {"head_dim": HEAD}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(folder)
    (folder / "generation_config.json").write_text(settings)
    return folder


def engine(model: Path, decoding: str, **flags: Any) -> StageEngine:
    return load_answering(EngineConfig.from_flat(model=str(model), decoding=decoding, dtype="fp32", **flags))


@pytest.fixture(scope="module")
def vllm(model: Path) -> Iterator[StageEngine]:
    made = engine(model, "vllm", max_num_seqs=4, enforce_eager=True, kv_cache_memory_bytes=2**26)
    made.warm_up()
    yield made
    made.close()


def run(made: StageEngine, *requests: Request) -> dict[str, Any]:
    for one in requests:
        made.add(one)
    found: dict[str, Any] = {}
    while made.busy:
        found |= {e.request_id: e for e in made.step() if isinstance(e, (Finished, Failed))}
    return found


def request(name: str, text: str, tokens: int, **params: Any) -> Request:
    return Request(request_id=name, prompt=text, sampling=SamplingParams(max_new_tokens=tokens, **params))


def test_greedy_answers_are_the_same(vllm: StageEngine, model: Path) -> None:
    asked = [request(str(i), do_sample=False, **one) for i, one in enumerate(GREEDY)]
    other = engine(model, "paged")
    wanted, got = run(other, *asked), run(vllm, *asked)
    other.close()
    for name, end in wanted.items():
        mine = got[name]
        assert isinstance(mine, Finished), mine
        assert (mine.text, mine.finish_reason) == (end.text, end.finish_reason)
        for count in ("prompt_tokens", "completion_tokens", "steps"):
            assert getattr(mine.metrics, count) == getattr(end.metrics, count)


def test_seeds(vllm: StageEngine) -> None:
    asked = {"text": "a cat", "tokens": 20, "temperature": 1.5}
    alone = run(vllm, request("a", seed=5, **asked))["a"].text
    beside = run(vllm, *(request(name, seed=seed, **asked) for name, seed in (("a", 5), ("b", 6), ("c", 2**64 - 1))))
    assert beside["a"].text == alone and len({end.text for end in beside.values()}) == 3


def test_forms(vllm: StageEngine) -> None:
    form = run(vllm, request("a", "a cat", 120, do_sample=False, json_schema=SCHEMA))["a"]
    assert form.finish_reason == "stop" and json.loads(form.text)["n"] in (1, 2)
    use = ToolUse((Tool("look", None, SCHEMA),), choice="required", parallel=False)
    words = [Message("user", [Part("text", "hello")])]
    how = SamplingParams(max_new_tokens=200, do_sample=False)
    end = run(vllm, Request(request_id="a", messages=words, tools=use, sampling=how))["a"]
    said, (call,) = calls_in(end.text)
    assert not said and call.name == "look" and json.loads(call.arguments)["n"] in (1, 2)


def test_refusals_and_aborts(vllm: StageEngine) -> None:
    for params, param in (({"temperature": 3.0}, "temperature"), ({"temperature": 1e-3}, "temperature")):
        end = run(vllm, request("a", "a cat", 5, **params))["a"]  # type: ignore[arg-type]
        assert (end.error.kind, end.error.param) == ("InvalidRequestError", param)
    vllm.add(request("long", "a cat", 3000, do_sample=False))
    told = 0
    while told < 3:
        told += sum(isinstance(event, (TextPiece, Progress)) for event in vllm.step())
    vllm.abort("long")
    assert run(vllm, request("a", "a cat", 5))["long"].error.kind == "RequestAbortedError"


def test_sleep(vllm: StageEngine) -> None:
    asked = request("a", "a cat", 10, do_sample=False)
    wanted = run(vllm, asked)["a"].text
    for level in (1, 2) if torch.cuda.is_available() else (2,):
        assert vllm.sleep(level) >= 0
        vllm.wake_up()
        assert run(vllm, asked)["a"].text == wanted
