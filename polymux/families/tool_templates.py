"""Tools and their calls in chat templates of transformers: how they are shown, and what a template says of itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from polymux.request import Message
from polymux.tools import CallFormat, Tool, ToolCall, arguments_of


def call_format(template: str) -> CallFormat | None:
    """How a model writes calls down, by the template that shows it how. None: it takes no tools, or shows another way
    (as a call of XML elements inside of <tool_call> is)."""
    takes = re.search(r"\btools\b", template) is not None
    return "hermes" if takes and "<tool_call>" in template and "<function=" not in template else None


def offered(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools for a template, in the form that transformers names."""
    return [{"type": "function", "function": _described(tool)} for tool in tools] or None


def with_calls(message: Message, shown: dict[str, Any]) -> dict[str, Any]:
    """A message for a template, with the calls that it holds, or that it answers."""
    if message.tool_calls:
        shown = shown | {"tool_calls": [_call(call) for call in message.tool_calls]}
    return shown if message.tool_call_id is None else shown | {"tool_call_id": message.tool_call_id}


def _described(tool: Tool) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        shown["description"] = tool.description
    return shown | {"parameters": tool.parameters or {"type": "object", "properties": {}}}


def _call(call: ToolCall) -> dict[str, Any]:
    """Arguments as an object: templates write it as JSON."""
    function = {"name": call.name, "arguments": arguments_of(call, "messages")}
    return {"id": call.id, "type": "function", "function": function}
