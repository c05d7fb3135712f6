"""docs/api.md: every route and field, from the application's own schema.

    python -m polymux.server.reference > docs/api.md

Knows OpenAPI, and no route. What the values mean beyond their descriptions is explained in docs/server.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from polymux.config import EngineConfig
from polymux.omni import AsyncOmni
from polymux.server.app import build_api
from polymux.server.differences import DIFFERENCES
from polymux.server.state import ServerState
from polymux.server_config import ServerConfig

Schema = dict[str, Any]

_HEAD = """\
# API reference

Every route and field, made from the server's own schema (`GET /openapi.json`) by `python -m polymux.server.reference`;
a test fails when this page is stale. [server.md](server.md) explains, this page lists.

Requests are refused that have fields which are not listed here. In requests, `null` counts as not given. Every answer
that is not a success is an [ErrorResponse](#errorresponse); what the codes mean stands in
[server.md](server.md#errors).
"""
_SHARED = {"x-request-id", "x-request-timeout", "x-session-id"}


def main() -> None:
    omni = AsyncOmni.from_config(EngineConfig.from_flat(model="demo"))  # not started: nobody asks it anything
    sys.stdout.write(reference(build_api(ServerState(omni, ServerConfig())).openapi()))


def reference(schema: Schema) -> str:
    """The page."""
    page = [_HEAD, *_headers(schema)]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            page += [f"## {method.upper()} {path}\n", *_operation(operation)]
    page += ["## Objects\n"]
    for name, one in sorted(schema["components"]["schemas"].items()):
        page += [f"### {name}\n", *_fields(one)]
    page += ["## Differences to OpenAI's API\n", DIFFERENCES]
    return "\n".join(page)


def _headers(schema: Schema) -> Iterator[str]:
    operations = [operation for path in schema["paths"].values() for operation in path.values()]
    yield "Every request may bring these headers:\n"
    yield "| header | |\n|---|---|"
    yield "| `Authorization: Bearer KEY` | needed if the server has API keys, see [server.md](server.md#access) |"
    for parameter in operations[0]["parameters"]:
        if parameter["name"] in _SHARED:
            yield f"| `{parameter['name']}` | {_kind(parameter['schema'])}; {parameter['description']} |"
    yield ""


def _operation(operation: Schema) -> Iterator[str]:
    yield f"{operation.get('description', operation['summary'])}\n"
    own = [parameter for parameter in operation["parameters"] if parameter["name"] not in _SHARED]
    if own:
        yield "| parameter | in | type |\n|---|---|---|"
        for parameter in own:
            yield f"| `{parameter['name']}` | {parameter['in']} | {_kind(parameter['schema'])} |"
        yield ""
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        needed = "" if operation["requestBody"].get("required") else ", not required"
        bodies = content["schema"].get("anyOf", [content["schema"]])
        for body in bodies:
            which = f", {body['title']}" if len(bodies) > 1 else ""
            yield f"Request, `{media_type}`{which}{needed}:\n"
            if which:
                yield f"{body['description']}\n"
            yield from _fields(body, request=True, top=True)
    yield "| status | answer |\n|---|---|"
    plain = []
    for status, answer in operation["responses"].items():
        kinds = [f"`{media_type}`: {_answer(c)}" for media_type, c in answer.get("content", {}).items()]
        if kinds == ["`application/json`: [ErrorResponse](#errorresponse)"]:
            plain.append(status)
        else:
            yield f"| {status} | {'<br>'.join(kinds)} |"
    if plain:
        yield f"| {', '.join(plain)} | [ErrorResponse](#errorresponse) |"
    yield ""


def _answer(content: Schema) -> str:
    schema = content.get("schema", {})
    return ", ".join(text for text in (_kind(schema), _cell(schema.get("description", ""))) if text)


def _fields(schema: Schema, *, request: bool = False, top: bool = False) -> Iterator[str]:
    """A table of an object's fields, and then tables of the objects in it that have no name of their own. `top`: of a
    request, whose description is the route's."""
    needed = set(schema.get("required", ()))
    if "description" in schema and not top:
        yield schema["description"] + "\n"
    if not schema.get("properties"):
        yield "No fields.\n" if schema.get("type") == "object" else f"{_kind(schema)}\n"
        return
    yield "| field | type | |\n|---|---|---|"
    for name, field in schema["properties"].items():
        notes = ["required"] if name in needed and request else []
        notes += [_cell(field["description"])] if "description" in field else []
        if field.get("default") is not None and request:
            notes.append(f"default {field['default']}")
        yield f"| `{name}` | {_kind(_without_null(field) if request else field)} | {'; '.join(notes)} |"
    if schema.get("additionalProperties") not in (False, None):
        yield "| any other | any | |"
    yield ""
    if top or not request:
        for title, inner in dict(_unnamed(schema["properties"].values())).items():
            yield f"`{title}`:\n"
            yield from _fields(inner, request=request)


def _unnamed(schemas: Iterable[Schema]) -> Iterator[tuple[str, Schema]]:
    """Objects with fields that stand inside others and not among the named ones, with the titles of their models."""
    for schema in schemas:
        if "title" in schema and schema.get("properties"):
            yield schema["title"], schema
        inside = [*schema.get("properties", {}).values(), *schema.get("anyOf", ()), *schema.get("oneOf", ())]
        yield from _unnamed([*inside, *([schema["items"]] if "items" in schema else [])])


def _kind(schema: Schema) -> str:
    """A schema in a few words."""
    match schema:
        case {"$ref": str(ref)}:
            name = ref.rpartition("/")[2]
            return f"[{name}](#{name.lower()})"
        case {"const": value}:
            return _code(value)
        case {"enum": values}:
            return ", ".join(map(_code, values))
        case {"anyOf": list(kinds)} | {"oneOf": list(kinds)}:
            return " or ".join(dict.fromkeys(_kind(kind) for kind in kinds))
        case {"type": "array", "items": {"format": "binary"}}:
            return "file, or several"
        case {"type": "array"}:
            return _list(schema)
        case {"type": "object", "properties": dict(properties)} if properties:
            return f"`{schema['title']}`" if "title" in schema else f"object of {', '.join(properties)}"
        case {"type": "object"}:
            return "empty object" if schema.get("maxProperties") == 0 else "object"
        case {"type": "null"}:
            return "`null`"
        case {"type": str(kind)}:
            return kind + _range(schema)
    return "any"


def _list(schema: Schema) -> str:
    if schema.get("maxItems") == 0:
        return "empty list"
    return f"list of {_kind(schema.get('items', {}))}"


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and low == high:
        return f" {low:g}"
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    if low is not None:
        return f", at least {low:g}"
    if "exclusiveMinimum" in schema:
        return f" above {schema['exclusiveMinimum']:g}"
    if "maxLength" in schema:
        return f" of at most {schema['maxLength']} characters"
    return ""


def _without_null(schema: Schema) -> Schema:
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    return {**schema, "anyOf": kinds} if kinds else schema


def _code(value: object) -> str:
    return f"`{value}`" if isinstance(value, str) else f"`{value!r}`".replace("False", "false").replace("True", "true")


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


if __name__ == "__main__":
    main()
