"""Calls of tools in a text, however it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polymux.tool_reader import CallReader, calls_in
from polymux.tools import ToolCall


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
