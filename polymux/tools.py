"""Functions that a client offers to a model, and the model's calls of them: as data, and whether they may be sent.

How a model writes a call down is told by `CallFormat`. Nothing is run here: a client runs what is called, and sends
what came of it.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import msgspec

from polymux.errors import InvalidRequestError
from polymux.json_schema import check_schema

# hermes: <tool_call>, a JSON object of name and arguments, </tool_call>.
# function_xml: <tool_call>, an element <function=NAME> with a <parameter=NAME> for each argument, </tool_call>.
# llama3_json: a JSON object of name and parameters, with which the answer begins.
CallFormat = Literal["hermes", "function_xml", "llama3_json"]
Choice = Literal["auto", "required"]
MAX_TOOLS = 128
MAX_ARGUMENTS = 10**6  # characters of one call in a message
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """One function. `parameters`: a JSON schema, of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False  # its arguments are held to the schema as they are written


class ToolUse(msgspec.Struct, frozen=True):
    """Functions that an answer may call. `only`: one of them, which it must call, once."""

    tools: tuple[Tool, ...]
    choice: Choice = "auto"
    only: str | None = None
    parallel: bool = True  # if not, at most one is called

    @property
    def constrains(self) -> bool:
        """Whether the answer has to be held to something while it is written."""
        free = self.choice == "auto" and self.only is None and self.parallel
        return not free or any(tool.strict for tool in self.tools)


class ToolCall(msgspec.Struct, frozen=True):
    """A call that a model has made. `arguments`: JSON, of an object."""

    id: str
    name: str
    arguments: str


def check_tools(use: ToolUse, held: bool) -> None:
    """Raises InvalidRequestError with the tool and what is allowed. `held`: calls are held to their schemas."""
    if not 1 <= len(use.tools) <= MAX_TOOLS:
        raise InvalidRequestError(f"tools: {len(use.tools)} given, allowed are 1 to {MAX_TOOLS}", param="tools")
    names = [tool.name for tool in use.tools]
    for i, tool in enumerate(use.tools):
        if _NAME.fullmatch(tool.name) is None:
            what = "must have 1 to 64 letters, digits, dots, dashes or underscores"
            raise InvalidRequestError(f"tools.{i}.name={tool.name[:80]!r}: {what}", param="tools")
        if names.index(tool.name) < i:
            raise InvalidRequestError(f"tools.{i}.name={tool.name!r}: there is one of this name", param="tools")
        if tool.parameters is not None and held:
            check_schema(tool.parameters, f"tools.{i}.parameters")
    if use.only is not None and use.only not in names:
        known = ", ".join(names[:20])
        raise InvalidRequestError(f"tool_choice={use.only[:80]!r}: known are {known}", param="tool_choice")


def arguments_of(call: ToolCall, name: str) -> dict[str, Any]:
    """The arguments of a call in a message, for a template. Raises InvalidRequestError for `name`."""
    try:
        value = json.loads(call.arguments) if len(call.arguments) <= MAX_ARGUMENTS else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        what = f"must be an object as JSON, of {MAX_ARGUMENTS} characters at most"
        raise InvalidRequestError(f"{name}={call.arguments[:80]!r}: {what}", param=name)
    return value
