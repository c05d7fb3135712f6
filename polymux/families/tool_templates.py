"""Tools and their calls in chat templates of transformers: how they are shown, what a template says of itself, and what
a call looks like to the sign."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polymux.request import Message
from polymux.tools import CallFormat, Tool, ToolCall, arguments_of


@dataclass(frozen=True)
class WrittenCall:
    """What stands before a function's name, between that and the arguments, and after these; what stands between calls;
    and how any call begins. `style`: xgrammar's name for how the arguments are written."""

    before: str
    named: str
    after: str
    between: str
    trigger: str
    style: str = "json"


WRITTEN: dict[CallFormat, WrittenCall] = {  # names have no signs that JSON escapes
    "hermes": WrittenCall(
        '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n", trigger="<tool_call>"
    ),
    "function_xml": WrittenCall(
        "<tool_call>\n<function=", ">\n", "\n</function>\n</tool_call>", between="\n", trigger="<tool_call>",
        style="qwen_xml",
    ),
    "llama3_json": WrittenCall('{"name": "', '", "parameters": ', "}", between="; ", trigger='{"name": '),
}  # fmt: skip

# What the template tells the model to respond with.
_LEADING = re.compile(r'\{\\?"name\\?": function name, \\?"parameters\\?":')


def call_format(template: str) -> CallFormat | None:
    """How a model writes calls down, by the template that shows it how. None: it takes no tools, or shows a way that is
    not known."""
    if not takes_tools(template):
        return None
    if "<tool_call>" in template and "</tool_call>" in template:
        if "<function=" in template:
            return "function_xml" if "<parameter=" in template else None
        return "hermes" if "arguments" in template and "<arg_key>" not in template else None
    return "llama3_json" if _LEADING.search(template) else None


def takes_tools(template: str) -> bool:
    """Whether a template shows tools to the model."""
    return re.search(r"\btools\b", template) is not None


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
