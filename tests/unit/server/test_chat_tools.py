"""Tools and forms of answers over HTTP, in OpenAI's shape: what becomes of them, and how they are told. No model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from conversations import URL, error_of, events_of, user
from fake_omni import CAPABILITIES, FakeOmni, client
from openai.types.chat import ChatCompletion

from polymux.omni import Streamed
from polymux.omni_output import OmniRequestOutput
from polymux.prompts import Params, Prompt, request_of
from polymux.request import Message, Part, Progress, Request, TextPiece
from polymux.sampling import FIELDS
from polymux.tools import Tool, ToolCall, ToolUse
from polymux.validation import validate

ABLE = msgspec.structs.replace(
    CAPABILITIES,
    modality="text",
    arguments=("prompt", *FIELDS),
    media={},
    samples=True,
    chats=True,
    makes=("text", "audio"),
    tool_calls="hermes",
)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
LOOK = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": SCHEMA}}
GO = {"type": "function", "function": {"name": "go"}}
TEXT = """Let me see.
<tool_call>
{"name": "look", "arguments": {"n": 1}}
</tool_call>
<tool_call>
{"name": "go"}
</tool_call>"""
MADE = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
BROKEN = MADE | {"function": {"name": "look", "arguments": "["}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [MADE], "refusal": None}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a cat"}


class Writer(FakeOmni):
    """Writes a text, four signs at a time."""

    def __init__(self, text: str = TEXT, reason: Any = "stop", **changes: Any) -> None:
        super().__init__()
        self.capabilities = msgspec.structs.replace(ABLE, **changes)
        self.text, self.reason = text, reason

    async def generate(self, prompt: Prompt, sampling_params: Params, **more: Any) -> AsyncGenerator[Any]:  # type: ignore[override]
        async for event in self.stream(prompt, sampling_params, request_id=more.get("request_id")):
            if isinstance(event, OmniRequestOutput):
                yield event

    async def stream(
        self, prompt: Prompt, sampling_params: Params, *, request_id: str | None = None
    ) -> AsyncGenerator[Streamed]:
        request = request_of(prompt, sampling_params, request_id or "r")
        assert self.capabilities is not None
        validate(request, self.capabilities, self.config.limits)
        self.requests.append(request)
        name = request.request_id
        yield Progress(name, "queued", 0, 0)
        for i in range(0, len(self.text), 4):
            yield TextPiece(name, self.text[i : i + 4])
        ended = {"text": [self.text], "finish_reason": [self.reason], "seeds": [5]}
        yield OmniRequestOutput(request_id=name, prompt=None, modality="text", **ended)


def _odd(keyword: str) -> dict[str, Any]:
    """A function whose arguments nothing can be held to."""
    return {"type": "function", "function": {"name": "odd", "parameters": {keyword: []}}}


def ask(omni: FakeOmni | None = None, **fields: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client(omni or Writer()) as http:
            return await http.post(URL, json={"messages": [user("hello")]} | fields)

    return asyncio.run(send())


def request_for(**fields: Any) -> Request:
    omni = Writer()
    answer = ask(omni, **fields)
    assert answer.status_code == 200, answer.text
    (request,) = omni.requests
    return request


def test_tools_and_how_to_choose() -> None:
    tools = (Tool("look", "looks", SCHEMA), Tool("go"))
    given: dict[str, Any] = {"tools": [LOOK, GO]}
    assert request_for(**given).tools == ToolUse(tools)
    assert request_for(**given, tool_choice="auto", parallel_tool_calls=False).tools == ToolUse(tools, parallel=False)
    assert request_for(**given, tool_choice="required").tools == ToolUse(tools, "required")
    named = {"type": "function", "function": {"name": "go"}}
    assert request_for(**given, tool_choice=named).tools == ToolUse(tools, only="go")
    strict = {"type": "function", "function": LOOK["function"] | {"strict": True}}
    assert request_for(tools=[strict]).tools == ToolUse((Tool("look", "looks", SCHEMA, strict=True),))
    both = request_for(**given, response_format={"type": "json_object"})
    assert both.tools == ToolUse(tools) and both.sampling is not None and both.sampling.json_schema is not None
    for nothing in ({"tools": [LOOK], "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}):
        assert request_for(**nothing).tools is None


def test_calls_and_results_in_messages() -> None:
    request = request_for(messages=[user("hello"), CALLED, RESULT], tools=[LOOK])
    call = ToolCall("c1", "look", '{"n": 1}')
    assert request.messages[1:] == [
        Message("assistant", [], [call]),
        Message("tool", [Part("text", "a cat")], tool_call_id="c1"),
    ]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("llama3_json", '{"name": "look", "parameters": {"n": 1}}'),
        ("function_xml", "<tool_call>\n<function=look>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"),
    ],
)
def test_calls_in_other_formats(format: str, text: str) -> None:
    for fields in ({}, {"stream": True}):
        answer = ask(Writer(text, tool_calls=format), tools=[LOOK], **fields)
        assert answer.status_code == 200, answer.text
        if fields:
            choices = [choice for event in events_of(answer) if event != "[DONE]" for choice in event["choices"]]
            (calls,) = [c["delta"]["tool_calls"] for c in choices if c["delta"].get("tool_calls")]
            assert not any(c["delta"].get("content") for c in choices)
            reason = choices[-1]["finish_reason"]
        else:
            (choice,) = answer.json()["choices"]
            calls, reason = choice["message"]["tool_calls"], choice["finish_reason"]
        (made,) = calls
        assert made["function"] == {"name": "look", "arguments": '{"n": 1}'} and reason == "tool_calls"


def test_forms_of_an_answer() -> None:
    def form(value: dict[str, Any]) -> Any:
        sampling = request_for(response_format=value).sampling
        assert sampling is not None
        return sampling.json_schema

    assert form({"type": "text"}) is None
    assert form({"type": "json_object"}) == {"type": "object"}
    named = {"name": "x", "description": "d", "strict": True, "schema": SCHEMA}
    assert form({"type": "json_schema", "json_schema": named}) == SCHEMA


def test_an_answer_that_calls() -> None:
    answer = ask(tools=[LOOK])
    completion = ChatCompletion.model_validate(answer.json())
    (choice,) = completion.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    calls = choice.message.tool_calls or []
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [  # type: ignore[union-attr]
        ("function", "look", {"n": 1}),
        ("function", "go", {}),
    ]
    alone = ask(Writer(TEXT.partition("\n")[2]), tools=[LOOK]).json()["choices"][0]
    assert alone["message"]["content"] is None and len(alone["message"]["tool_calls"]) == 2
    cut = ask(Writer(TEXT[:-3], "length"), tools=[LOOK]).json()["choices"][0]
    assert cut["finish_reason"] == "length" and len(cut["message"]["tool_calls"]) == 1
    for untouched in (ask(), ask(tools=[LOOK], tool_choice="none")):
        message = untouched.json()["choices"][0]
        assert (message["finish_reason"], message["message"]["content"]) == ("stop", TEXT)
        assert message["message"]["tool_calls"] is None


def test_a_stream_that_calls() -> None:
    """Read by OpenAI's own client."""

    async def read() -> Any:
        async with client(Writer()) as http:
            sdk = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", http_client=http)
            messages: Any = [user("hello")]
            tools: Any = [LOOK]
            async with sdk.chat.completions.stream(model="fake/model", messages=messages, tools=tools) as stream:
                return await stream.get_final_completion()

    (choice,) = asyncio.run(read()).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("look", '{"n": 1}'),
        ("go", "{}"),
    ]
    events = events_of(ask(Writer(TEXT[:-3], "length"), tools=[LOOK], stream=True))
    deltas = [event["choices"][0]["delta"] for event in events if isinstance(event, dict)]
    said = "".join(delta.get("content") or "" for delta in deltas)
    assert said.startswith("Let me see.<tool_call>") and said.endswith("</tool_ca"), "a call that is cut is text"
    assert sum("tool_calls" in delta for delta in deltas) == 1


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [LOOK], "tool_choice": "any"}, "tool_choice", "must be"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "look"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"tools": [LOOK, LOOK]}, "tools", "there is one"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters"),
        ({"tools": [GO] * 129}, "tools", "128"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"not": {}}}}]},
            "tools.0.parameters",
            "would not be kept",
        ),
        (
            {"tools": [_odd("oneOf")], "response_format": {"type": "json_object"}},
            "tools.0.parameters",
            "at oneOf: would not be kept",
        ),
        ({"tools": [LOOK], "modalities": ["text", "audio"]}, "tools", "audio"),
        ({"messages": [user("hello"), CALLED, user("and?")]}, "messages.2", "has no result"),
        ({"messages": [user("hello"), CALLED]}, "messages", "user's, or a tool's"),
        ({"messages": [user("hello"), RESULT]}, "messages.1", "tool_call_id"),
        ({"messages": [user("hello"), CALLED, RESULT, RESULT]}, "messages.3", "tool_call_id"),
        ({"messages": [user("hello"), {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id", "missing"),
        (
            {"messages": [user("a"), CALLED | {"tool_calls": [BROKEN]}, RESULT]},
            "messages.1.tool_calls",
            "object as JSON",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"oneOf": []}}}},
            "response_format.json_schema.schema",
            "at oneOf",
        ),
    ],
)  # fmt: skip
def test_refused(fields: dict[str, Any], param: str, why: str) -> None:
    answer = ask(**fields)
    error = error_of(answer)
    assert answer.status_code == 400 and error["param"] == param, error
    assert why in error["message"]


def test_what_the_model_cannot() -> None:
    for fields in ({"tools": [LOOK]}, {"messages": [user("hello"), CALLED, RESULT]}):
        assert "takes none" in error_of(ask(Writer(tool_calls=None), **fields))["message"]
    lacking = {"arguments": ("prompt",), "refused": {"json_schema": "the server lacks xgrammar"}}
    for fields in ({"tools": [LOOK], "tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        assert "lacks xgrammar" in error_of(ask(Writer(**lacking), **fields))["message"]
    assert ask(Writer(**lacking), tools=[LOOK]).status_code == 200
