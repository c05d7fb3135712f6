"""What a request may ask for, the engine whose answers go on together does as the one of loops does: every field, and
what an answer is held to, alone and in company, a step ahead, and after a preemption."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from polymux.config import EngineConfig
from polymux.engine.ar_engine import ArEngine
from polymux.engine.base import StageEngine
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.generate_model import GenerateModel
from polymux.families.chat import WRITING
from polymux.request import Failed, Finished, Message, Part, Request, SamplingParams
from polymux.tool_reader import calls_in
from polymux.tools import Tool, ToolUse

pytest.importorskip("xgrammar")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "array", "items": {"enum": [1, 22]}}},
    "required": ["name", "n"],
}
LOOK = Tool("look", "looks", {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]})
LIKELIEST: dict[str, Any] = {"do_sample": False}

# What these draw is certain, so that it is the same in both engines: their numbers are not.
FIELDS: list[dict[str, Any]] = [
    {"do_sample": True, "temperature": 1e-6},
    {"temperature": 1.5, "top_k": 1},
    {"top_p": 1e-6},
    {"min_p": 1.0, "temperature": 2.0},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"do_sample": False, "frequency_penalty": 1.2},
    {"do_sample": False, "presence_penalty": 1.2, "max_new_tokens": 20},
    {"top_k": 1, "frequency_penalty": -0.5, "presence_penalty": 0.7, "repetition_penalty": 0.8},
    {"do_sample": False, "stop": ("e", "o")},
    {"do_sample": False, "extra_args": {"enable_thinking": False}},
    {"do_sample": False, "json_schema": SCHEMA, "max_new_tokens": 150},
    {"top_k": 1, "json_schema": SCHEMA, "max_new_tokens": 150, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    {"do_sample": False, "json_schema": SCHEMA, "max_new_tokens": 7},
    {"do_sample": False, "json_schema": SCHEMA, "max_new_tokens": 150, "stop": ('": ',)},
    {"do_sample": False, "tools": ToolUse((LOOK, Tool("go")), "required", parallel=False), "max_new_tokens": 150},
    {"min_p": 1.0, "tools": ToolUse((LOOK,), only="look"), "max_new_tokens": 150},
    {"do_sample": False, "tools": ToolUse((Tool("look", None, LOOK.parameters, strict=True),)), "max_new_tokens": 30},
    {"do_sample": False, "tools": ToolUse((LOOK,))},
    {"do_sample": False, "tools": ToolUse((LOOK,)), "json_schema": SCHEMA, "max_new_tokens": 150},
]

HOT: list[dict[str, Any]] = [
    {"temperature": 1.3, "seed": 4, "max_new_tokens": 40},
    {"temperature": 1.3, "seed": 4, "max_new_tokens": 60, "json_schema": SCHEMA},
]

Asked = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("qwen3-lm")


@pytest.fixture(scope="module")
def theirs(model: Path) -> Iterator[list[Any]]:
    """How the other engine answers to all of FIELDS."""
    engine = ChatEngine.load(EngineConfig.from_flat(model=str(model), max_num_seqs=8))
    yield told(answers(engine, FIELDS))
    engine.close()


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[ArEngine]:
    engine = load(model)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def drawn(alone: ArEngine) -> list[Any]:
    """How each of HOT is answered alone."""
    return [told(answers(alone, [one]))[0] for one in HOT]


def load(model: Path, ahead: bool = False, **flags: Any) -> ArEngine:
    config, device = EngineConfig.from_flat(model=str(model), **flags), torch.device("cpu")
    return ArEngine(config, GenerateModel.load(config, device), device, ahead)


def request(name: str, fields: dict[str, Any]) -> Request:
    rest = {field: value for field, value in fields.items() if field != "tools"}
    sampling = SamplingParams(**{"max_new_tokens": 12, "seed": 6} | rest)
    said = [Message("user", [Part("text", "hello")])]
    return Request(request_id=name, messages=said, sampling=sampling, tools=fields.get("tools"))


def answers(engine: StageEngine, asked: Asked) -> list[Finished]:
    """To all at once."""
    for i, fields in enumerate(asked):
        engine.add(request(str(i), fields))
    ends: dict[str, Any] = {}
    while engine.busy:
        ends |= {e.request_id: e for e in engine.step() if isinstance(e, (Finished, Failed))}
    made = [ends[str(i)] for i in range(len(asked))]
    assert not [end for end in made if isinstance(end, Failed)]
    return made


def told(ends: list[Finished]) -> list[Any]:
    return [(e.text, e.finish_reason, e.metrics.prompt_tokens, e.metrics.completion_tokens) for e in ends]


def test_every_field_is_tried() -> None:
    assert {*WRITING} <= {name for fields in FIELDS for name in fields}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("flags", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 50}, {"blocks": 24}], ids=str)
def test_each_field_does_what_it_does_in_a_loop(
    flags: dict[str, int], ahead: bool, model: Path, theirs: list[Any], drawn: list[Any], alone: ArEngine
) -> None:
    """All at once, some that draw among them; with little room some give way to others."""
    rest = dict(flags)
    if blocks := rest.pop("blocks", None):
        rest["kv_cache_memory_bytes"] = blocks * 32 * alone._network.shape.token_bytes  # type: ignore[union-attr]
        rest["block_size"] = 32
    engine = load(model, ahead, **rest)
    made = told(answers(engine, FIELDS + HOT))
    assert made == theirs + drawn
    assert bool(engine.stats.preemptions) == ("blocks" in flags)
    engine.close()


def test_what_is_drawn_fits(alone: ArEngine) -> None:
    made = answers(
        alone, [{"json_schema": SCHEMA, "temperature": 1.0, "seed": i, "max_new_tokens": 400} for i in range(4)]
    )
    for end in made:
        value = json.loads(end.text or "")
        assert list(value) == ["name", "n"] and len(value["name"]) <= 6 and {*value["n"]} <= {1, 22}
    assert len({end.text for end in made}) > 2
    (called,) = answers(alone, [{"tools": ToolUse((LOOK,), "required", parallel=False), "max_new_tokens": 200}])
    said, calls = calls_in(called.text or "")
    assert said == "" and called.finish_reason == "stop" and json.loads(calls[0].arguments)["n"] in (1, 2)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_no_grammar_can_be_made_of_is_refused(ahead: bool, model: Path, alone: ArEngine) -> None:
    (wanted,) = answers(alone, [LIKELIEST])
    engine = load(model, ahead)
    engine.add(request("bad", {"json_schema": {"$ref": "#"}}))
    assert (end := ended(engine)["bad"]).error.kind == "InvalidRequestError" and end.error.param == "json_schema"
    engine.add(request("broken", {"json_schema": SCHEMA}))
    engine.add(request("free", LIKELIEST))
    wait([job.preparing for job in engine._jobs.values()])
    engine.step()
    sequence = engine._jobs["broken"].sequence
    assert sequence is not None
    sequence.constraint = Broken()
    ends = ended(engine)
    assert ends["broken"].error.kind == "GenerationError" and ends["free"].text == wanted.text
    assert engine.stats.kv_blocks_used == 0
    engine.close()


class Broken:
    def allowed(self, written: Any) -> torch.Tensor:
        raise RuntimeError("broken")


def ended(engine: ArEngine) -> dict[str, Any]:
    ends: dict[str, Any] = {}
    while engine.busy:
        ends |= {e.request_id: e for e in engine.step() if isinstance(e, (Finished, Failed))}
    return ends
