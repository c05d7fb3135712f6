"""JSON schemas of bodies that routes read by themselves, as they may stand in an OpenAPI document.

A schema's references lead to definitions beside it, which the document does not have there: so they are put in place.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_DEFINITIONS = "#/$defs/"


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """For models that do not contain themselves."""
    schema = model.model_json_schema()
    inlined: dict[str, Any] = _inlined(schema, schema.pop("$defs", {}))
    return inlined


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    rest = {key: _inlined(value, definitions) for key, value in node.items() if key != "$ref"}
    if "$ref" not in node:
        return rest
    return _inlined(definitions[node["$ref"].removeprefix(_DEFINITIONS)], definitions) | rest
