"""How models write calls of tools down, format by format: from what stands there to a call. Knows no streams."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from polymux.tools import Tool, ToolCall

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
# One space or line break on each side is none of the value: so many may stand there when calls are held to schemas.
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\s?(.*?)\s?</parameter>", re.DOTALL)
_DECODER = json.JSONDecoder()


def json_call(body: str) -> tuple[ToolCall | None, bool]:
    """What stands between the marks, as a JSON object of name and arguments; and whether it goes on behind the second
    mark, which is part of a string in it."""
    try:
        made = json.loads(body)
    except json.JSONDecodeError as error:
        return None, error.msg.startswith("Unterminated string")
    except RecursionError:
        return None, False
    return _call_of(made, "arguments"), False


def element_call(body: str, tools: Sequence[Tool]) -> tuple[ToolCall | None, bool]:
    """The same of an element of a function with one of each argument. Text is a string where the function's schema says
    so, and else the JSON that it is."""
    found = _FUNCTION.fullmatch(body)
    if found is None:
        begun = re.match(r"\s*<function=", body) is not None
        return None, begun and not body.rstrip().endswith("</function>")
    schemas = next((tool.parameters for tool in tools if tool.name == found[1]), None) or {}
    known = schemas.get("properties", {})
    arguments = {name: _value(text, known.get(name)) for name, text in _PARAMETER.findall(found[2])}
    return _made(found[1], arguments), False


def leading_call(text: str, tools: Sequence[Tool]) -> tuple[ToolCall | None, int]:
    """The call with which a text begins, as a JSON object of name and parameters, and where it ends. (None, 0): the
    object is not complete; (None, -1): it is no call of these tools."""
    compact = re.sub(r"\s", "", text[:64])
    if not '{"name":'.startswith(compact[:8]):
        return None, -1
    try:
        made, end = _DECODER.raw_decode(text)
    except json.JSONDecodeError:
        return None, 0
    except RecursionError:
        return None, -1
    call = _call_of(made, "parameters")
    if call is None or call.name not in {tool.name for tool in tools}:
        return None, -1
    return call, end


def _call_of(made: Any, key: str) -> ToolCall | None:
    name, arguments = (made.get("name"), made.get(key, {})) if isinstance(made, dict) else (None, None)
    return _made(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _made(name: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, json.dumps(arguments, ensure_ascii=False))


def _value(text: str, schema: Any) -> Any:
    """An argument. A text that its schema allows to be several things is a string only if it is nothing else."""
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if "string" in types and (isinstance(value, str) or len(types) == 1) else value


def _types(schema: Any) -> set[str]:
    """The types that it names; empty: any."""
    if not isinstance(schema, dict):
        return set()
    if "anyOf" in schema and isinstance(schema["anyOf"], list):
        return set().union(*map(_types, schema["anyOf"]))
    if isinstance(schema.get("enum"), list) and all(isinstance(one, str) for one in schema["enum"]):
        return {"string"}
    if isinstance(schema.get("const"), str):
        return {"string"}
    given = schema.get("type", [])
    return {given} if isinstance(given, str) else {one for one in given if isinstance(one, str)}
