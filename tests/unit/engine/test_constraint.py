"""Answers that are held to a form while they are written, by a model of random weights that would write anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

from polymux.config import EngineConfig
from polymux.engine import chat_model
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.constraint import Constraint, Grammars
from polymux.errors import GenerationError, InvalidRequestError
from polymux.json_schema import FORMATS, check_schema
from polymux.request import Failed, Finished, Message, Part, Request, SamplingParams
from polymux.tool_reader import calls_in
from polymux.tools import CallFormat, Tool, ToolCall, ToolUse

pytest.importorskip("xgrammar")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "next": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
}
LOOK = Tool("look", "looks", {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]})
GO = Tool("go")


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Callable[..., Path]) -> Iterator[ChatEngine]:
    made = ChatEngine.load(EngineConfig.from_flat(model=str(tiny_checkpoint("qwen3-lm")), max_num_seqs=8))
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Callable[..., Path]) -> Any:
    return T.AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3-lm"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, len(tokenizer) + 7)


def answers(engine: ChatEngine, *given: dict[str, Any]) -> list[Finished]:
    """To each at once."""
    for i, one in enumerate(given):
        fields = {name: one[name] for name in ("tools",) if name in one}
        rest = {name: value for name, value in one.items() if name not in fields}
        sampling = SamplingParams(**{"max_new_tokens": 400, "temperature": 1.0, "seed": i} | rest)
        messages = [Message("user", [Part("text", "hello")])]
        engine.add(Request(request_id=str(i), messages=messages, sampling=sampling, **fields))
    ends: dict[str, Finished] = {}
    while engine.busy:
        ends |= {e.request_id: e for e in engine.step() if isinstance(e, Finished)}
    return [ends[str(i)] for i in range(len(given))]


def test_an_answer_fits_its_schema(engine: ChatEngine) -> None:
    made = answers(engine, *[{"json_schema": SCHEMA}] * 3, {"max_new_tokens": 5})
    for answer in made[:-1]:
        value = json.loads(answer.text or "")
        assert answer.finish_reason == "stop" and list(value) == list(SCHEMA["properties"])
        assert len(value["name"]) <= 6 and 0 <= value["age"] <= 120 and len(value["tags"]) <= 2
        assert value["next"] is None or type(value["next"]["x"]) is bool
    assert len({answer.text for answer in made}) > 2
    assert len(made[-1].text or "") and not (made[-1].text or "").startswith("{"), "a neighbour is free"
    likeliest = answers(engine, {"json_schema": SCHEMA, "temperature": 0})[0]
    assert isinstance(json.loads(likeliest.text or ""), dict)


def test_calls_that_are_required(engine: ChatEngine) -> None:
    tools = (LOOK, GO)
    uses = [ToolUse(tools, "required"), ToolUse(tools, only="look"), ToolUse(tools, "required", parallel=False)]
    several, named, single = answers(engine, *({"tools": use, "max_new_tokens": 200} for use in uses))
    for answer, most in ((named, 1), (single, 1), (several, 99)):
        said, calls = calls_in(answer.text or "")
        assert answer.finish_reason == "stop" or answer is several
        assert (said == "" or answer.finish_reason == "length") and 1 <= len(calls) <= most
        for call in calls:
            arguments = json.loads(call.arguments)
            assert arguments["n"] in (1, 2) if call.name == "look" else arguments == {}
    assert calls_in(named.text or "")[1][0].name == "look"


def fits(constraint: Constraint, ids: list[int], end: int) -> bool:
    """Whether each token of a text may come where it comes, and its end after them."""
    return all(bool(constraint.allowed(ids[:i])[token]) for i, token in enumerate([*ids, end]))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object"}, '{"a": [1]}', "[1]"),
        ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, '{"a": 1, "b": 2}', '{"a": 1}'),
        ({"properties": {"a": {}}}, '{"a": 1}', '{"b": 1}'),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "null"}}, '{"a": 1, "b": null}', '{"b": 1}'),
        ({"type": "object", "additionalProperties": False}, "{}", '{"a": 1}'),
        ({"type": "string", "minLength": 2, "maxLength": 3}, '"ab"', '"a"'),
        ({"type": "string", "pattern": "^a+$"}, '"aa"', '"b"'),
        ({"type": ["string", "null"], "maxLength": 1}, "null", '"ab"'),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 9}, "8", "9"),
        ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 1.5}, "0.75", "0.5"),
        ({"type": "integer", "multipleOf": 4}, "8", "6"),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, "[1, 2]", "[1]"),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": {"const": "a"}}, '[1, "a"]', '["a"]'),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, "[1]", "[1, 2]"),
        ({"enum": [1, {"a": None}]}, '{"a":null}', "2"),
        ({"const": "é\n"}, '"é\\n"', '"e"'),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "true", "null"),
        ({"allOf": [{"type": "integer", "minimum": 3}]}, "3", "1"),
        ({"properties": {"a": {"$ref": "#"}}}, '{"a": {"a": {}}}', '{"a": {"b": {}}}'),
        *(({"type": "string", "format": name}, f'"{good}"', '"*?"') for name, good in [
            ("date", "2024-01-02"), ("time", "10:00:00Z"), ("date-time", "2024-01-02T10:00:00Z"), ("duration", "P1D"),
            ("email", "a@b.co"), ("hostname", "a.b"), ("ipv4", "1.2.3.4"), ("ipv6", "::1"), ("uri", "http://a.b/c"),
            ("uuid", "123e4567-e89b-12d3-a456-426614174000"), ("json-pointer", "/a"),
        ]),
        ({"type": "string", "format": "uri-reference"}, '"a/b"', '"\\n"'),
    ],
)  # fmt: skip
def test_what_passes_the_check_is_kept(
    schema: dict[str, Any], good: str, bad: str, grammars: Grammars, tokenizer: Any
) -> None:
    check_schema(schema, "s")
    end = tokenizer.eos_token_id
    for text, fit in ((good, True), (bad, False)):
        assert fits(grammars.json(schema, [end]), tokenizer.encode(text), end) == fit


def test_formats_are_all_tried() -> None:
    (mark,) = (m for m in test_what_passes_the_check_is_kept.pytestmark if m.name == "parametrize")
    assert {case[0].get("format") for case in mark.args[1]} - {None} == set(FORMATS)


def test_text_may_come_before_a_call_that_is_held(grammars: Grammars, tokenizer: Any) -> None:
    use = ToolUse((Tool("look", None, LOOK.parameters, strict=True), GO))
    good = 'Well.<tool_call>\n{"name": "look", "arguments": {"n": 2}}\n</tool_call>'
    end = tokenizer.eos_token_id
    for text, fit in ((good, True), ("Well.", True), (good.replace("2", "3"), False), (good + good, True)):
        assert fits(grammars.calls(use, [end]), tokenizer.encode(text), end) == fit
    once = ToolUse((LOOK,), parallel=False)
    assert not fits(grammars.calls(once, [end]), tokenizer.encode(good + good), end)


def test_calls_or_json(grammars: Grammars, tokenizer: Any) -> None:
    """With tools and a form for the answer: one of both, unless calls are required."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    look = '<tool_call>\n{"name": "look", "arguments": {"n": 2}}\n</tool_call>'
    go = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
    value, end = '{"a": "<tool_call>"}', tokenizer.eos_token_id
    free, single, must = (ToolUse((LOOK, GO), **how) for how in ({}, {"parallel": False}, {"choice": "required"}))
    for use, texts in (
        (free, {value: True, look: True, f"{look}\n{go}": True, "Well.": False, f"Well.{look}": False, "[1]": False}),
        (free, {look.replace("2", "3"): False, value + look: False, look + value: False, '{"a": 1}': False}),
        (single, {value: True, look: True, f"{look}\n{go}": False}),
        (must, {value: False, look: True}),
    ):
        found = {text: fits(grammars.calls(use, [end], schema), tokenizer.encode(text), end) for text in texts}
        assert found == texts


@pytest.mark.parametrize(
    ("format", "look", "go"),
    [
        ("function_xml", "<tool_call>\n<function=look>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>",
         "<tool_call>\n<function=go>\n\n</function>\n</tool_call>"),
        ("llama3_json", '{"name": "look", "parameters": {"n": 2}}', '{"name": "go", "parameters": {}}'),
    ],
)  # fmt: skip
def test_calls_in_other_formats(tokenizer: Any, format: CallFormat, look: str, go: str) -> None:
    """What may be written is what is read."""
    grammars, end = Grammars(tokenizer, len(tokenizer) + 7, format), tokenizer.eos_token_id
    use = ToolUse((LOOK, GO), "required")
    for text, fit in ((look, True), (go, True), (look.replace("2", "3"), False), ("Well.", False)):
        assert fits(grammars.calls(use, [end]), tokenizer.encode(text), end) == fit, text
    made = [call for text in (look, go) for call in calls_in(text, format, use.tools)[1]]
    assert [(call.name, json.loads(call.arguments)) for call in made] == [("look", {"n": 2}), ("go", {})]
    strict = ToolUse((Tool("look", None, LOOK.parameters, strict=True), GO))
    assert fits(grammars.calls(strict, [end]), tokenizer.encode("Well."), end)


@pytest.mark.parametrize("schema", [{"enum": ["Oslo", "Rom"]}, {"const": "Oslo"}, {"type": "string", "maxLength": 4}])
def test_what_stands_around_a_value_without_quotes_is_no_part_of_it(tokenizer: Any, schema: dict[str, Any]) -> None:
    grammars, end = Grammars(tokenizer, len(tokenizer) + 7, "function_xml"), tokenizer.eos_token_id
    tool = Tool("look", None, {"type": "object", "properties": {"city": schema}, "required": ["city"]})
    constraint = ToolUse((tool,), "required")
    written = {}
    for value in ("Oslo", "\nOslo\n", " Oslo\n", "Oslo ", "\n\nOslo", "  Oslo", "\nOslo \n"):
        text = f"<tool_call>\n<function=look>\n<parameter=city>{value}</parameter>\n</function>\n</tool_call>"
        if fits(grammars.calls(constraint, [end]), tokenizer.encode(text), end):
            (call,) = calls_in(text, "function_xml", (tool,))[1]
            written[value] = json.loads(call.arguments)["city"]
    assert {"Oslo", "\nOslo\n"} <= written.keys()
    assert set(written.values()) == {"Oslo"}


def test_tokens_may_be_taken_back(grammars: Grammars, tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    constraint = grammars.json({"type": "array", "items": {"type": "integer"}}, [end])
    first = constraint.allowed([])
    assert first.shape == (len(tokenizer) + 7,) and not first[len(tokenizer) :].any()
    ids = tokenizer.encode("[12, 3]")
    whole = constraint.allowed(ids)
    assert whole.nonzero().flatten().tolist() == [end]
    assert torch.equal(constraint.allowed([]), first)
    assert torch.equal(constraint.allowed(ids), whole)
    assert constraint.allowed([*ids, end]).all(), "it has ended"
    with pytest.raises(GenerationError, match="may not be there"):
        constraint.allowed([*ids, ids[0]])


def test_what_no_grammar_can_be_made_of(grammars: Grammars, engine: ChatEngine) -> None:
    with pytest.raises(InvalidRequestError, match="minimum greater than maximum"):
        grammars.json({"type": "integer", "minimum": 3, "maximum": 2}, [1])
    with pytest.raises(InvalidRequestError, match="no token that ends"):
        grammars.json({}, [])
    sampling = SamplingParams(json_schema={"$ref": "#"})
    engine.add(Request(request_id="a", prompt="hello", sampling=sampling))
    (end,) = [event for _ in range(50) for event in engine.step() if isinstance(event, (Failed, Finished))]
    assert isinstance(end, Failed) and (end.error.kind, end.error.param) == ("InvalidRequestError", "json_schema")


def test_without_the_package(engine: ChatEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_model, "can_constrain", lambda: False)
    described = chat_model.described(engine.loaded, engine.config)
    assert "json_schema" not in described.arguments and "xgrammar" in described.refused["json_schema"]


def test_the_template_shows_tools_calls_and_results(engine: ChatEngine, tokenizer: Any) -> None:
    assert engine.capabilities.tool_calls == "hermes"
    call = ToolCall("c", "look", '{"n":   1}')
    turns = [
        Message("user", [Part("text", "hello")]),
        Message("assistant", [], [call]),
        Message("tool", [Part("text", "a cat")], tool_call_id="c"),
    ]
    sampling = SamplingParams(max_new_tokens=1, seed=0)
    engine.add(Request(request_id="a", messages=turns, sampling=sampling, tools=ToolUse((LOOK,))))
    (job,) = engine.jobs.values()
    ids = job.preparing.result().arguments["input_ids"][0]
    text = tokenizer.decode(ids)
    assert '"name": "look"' in text.split("</tools>")[0] and "looks" in text
    assert '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>' in text
    assert "<|im_start|>tool\na cat<|im_end|>" in text
    engine.abort("a")
    engine.step()
