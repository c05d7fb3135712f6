"""Calls of tools in a text, however it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polymux.tool_reader import CallReader, calls_in, reader_of
from polymux.tools import CallFormat, Tool, ToolCall


def call(name: str = "f", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def read(*pieces: str) -> tuple[str, list[tuple[str, Any]]]:
    reader = CallReader()
    found = [one for piece in pieces for one in reader.feed(piece)] + reader.end()
    calls = [one for one in found if isinstance(one, ToolCall)]
    assert reader.calls == len(calls) == len({one.id for one in calls})
    said = "".join(one for one in found if isinstance(one, str))
    return said, [(one.name, json.loads(one.arguments)) for one in calls]


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("", "", []),
        ("Hello  you \n", "Hello  you \n", []),
        (call(a=1), "", [("f", {"a": 1})]),
        (f"Let me see.\n{call(a=1)}\n{call('g')}\n", "Let me see.", [("f", {"a": 1}), ("g", {})]),
        (call(a="x</tool_call>y <tool_call>"), "", [("f", {"a": "x</tool_call>y <tool_call>"})]),
        (call(a={"b": ["é", "\n"]}), "", [("f", {"a": {"b": ["é", "\n"]}})]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ("a < b, <tool> and <tool_call", "a < b, <tool> and <tool_call", []),
        ("<tool_call>no</tool_call> more", "<tool_call>no</tool_call> more", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        (f"{'<tool_call>[' * 3}{call()}", f"{'<tool_call>[' * 3}{call()}", []),
    ],
)
def test_however_it_is_cut(text: str, said: str, calls: list[Any]) -> None:
    assert read(text) == (said, calls)
    assert read(*text) == (said, calls)
    for i in range(0, len(text), 7):
        assert read(text[:i], text[i:]) == (said, calls)
    whole, made = calls_in(text)
    assert (whole, len(made)) == (said, len(calls))


def test_text_waits_for_nothing() -> None:
    reader = CallReader()
    assert reader.feed("Hello <") == ["Hello"]
    assert reader.feed("b> and") == [" <b> and"]
    assert reader.feed(call()[:-1]) == []
    (made,) = reader.feed(">")
    assert isinstance(made, ToolCall) and (made.name, made.arguments) == ("f", "{}")


SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": ["string", "null"]}, "e": {"enum": ["1", "2"]},
        "u": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "l": {"type": "array", "items": {}},
    },
}  # fmt: skip
TOOLS = (Tool("f", None, SCHEMA), Tool("g"))


def element(name: str = "f", **arguments: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("format", "text", "said", "calls"),
    [
        ("function_xml", element(n="5", s="5", o="null", e="1", u="3"), "",
         [("f", {"n": 5, "s": "5", "o": None, "e": "1", "u": 3})]),
        ("function_xml", f"So.\n{element('g')}\n{element(l='[1]')}", "So.", [("g", {}), ("f", {"l": [1]})]),
        ("function_xml", element(s="a\n</tool_call>\nb"), "", [("f", {"s": "a\n</tool_call>\nb"})]),
        ("function_xml", element(u='"quoted"', n="five"), "", [("f", {"u": '"quoted"', "n": "five"})]),
        ("function_xml", element("h", x="{}", y="yes"), "", [("h", {"x": {}, "y": "yes"})]),
        ("function_xml", call(), call(), []),
        ("function_xml", "<tool_call>\n<function=f>\n<parameter", "<tool_call>\n<function=f>\n<parameter", []),
        ("llama3_json", '{"name": "f", "parameters": {"s": "}{"}}', "", [("f", {"s": "}{"})]),
        ("llama3_json", ' {"name": "g", "parameters": {}}; {"name": "g"}\n', "", [("g", {}), ("g", {})]),
        ("llama3_json", '{"name": "f", "parameters": {}} It is.', "It is.", [("f", {})]),
        ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
        ("llama3_json", '{"names": 1}', '{"names": 1}', []),
        ("llama3_json", 'It is {"name": "f", "parameters": {}}', 'It is {"name": "f", "parameters": {}}', []),
        ("llama3_json", '{"name": "f", "parameters": {', '{"name": "f", "parameters": {', []),
    ],
)  # fmt: skip
def test_other_formats(format: CallFormat, text: str, said: str, calls: list[Any]) -> None:
    for size in (1, 5, len(text)):
        reader = reader_of(format, TOOLS)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        found = [one for piece in pieces for one in reader.feed(piece)] + reader.end()
        made = [(one.name, json.loads(one.arguments)) for one in found if isinstance(one, ToolCall)]
        assert ("".join(one for one in found if isinstance(one, str)), made) == (said, calls)
    assert len(calls_in(text, format, TOOLS)[1]) == len(calls)
