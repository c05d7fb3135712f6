"""Which schemas can be promised: what would be passed over in silence is refused, with its place."""

from __future__ import annotations

from typing import Any

import pytest

from polymux.errors import InvalidRequestError
from polymux.json_schema import MAX_DEPTH, MAX_SCHEMA, check_schema

DEEP: dict[str, Any] = {"type": "null"}
for _ in range(MAX_DEPTH + 1):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$schema": "x", "title": "T", "type": "object", "description": "d"},
        {"type": "object", "properties": {"a": True, "type": {"type": "string"}}, "required": ["type"]},
        {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"type": "object", "additionalProperties": False},
        {"type": ["string", "null"], "maxLength": 3},
        {"type": "string", "pattern": r"^\d{3}-[a-z.]+$"},
        {"type": "array", "prefixItems": [{"const": 1}], "items": False},
        {"type": "integer", "multipleOf": 3, "minimum": -5},
        {"enum": [1, "a", None, [2]]},
        {"enum": [1.5, 2], "type": "number"},
        {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/a b~1c"}], "$defs": {"a b/c": {"type": "null"}}},
        {"allOf": [{"$ref": "#/definitions/n"}], "definitions": {"n": {"properties": {"next": {"$ref": "#"}}}}},
    ],
)
def test_these_are_kept(schema: dict[str, Any]) -> None:
    check_schema(schema, "s")


@pytest.mark.parametrize(
    ("schema", "place", "why"),
    [
        (["type"], "", "must be a JSON schema"),
        ({"default": float("nan")}, "", "is not JSON"),
        ({"description": "x" * MAX_SCHEMA}, "", "characters"),
        (DEEP, "", f"more than {MAX_DEPTH} deep"),
        ({"properties": {"a": False}}, "properties.a", "nothing fits"),
        ({"properties": {"a": 3}}, "properties.a", "must be a schema"),
        ({"properties": []}, "properties", "must be an object"),
        ({"type": "text"}, "type", "must be string"),
        ({"minLength": 3}, "minLength", "would not be kept"),
        ({"type": "integer", "minLength": 3}, "minLength", "would not be kept of integer"),
        ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems", "would not be kept"),
        ({"type": "array"}, "", "what its items are"),
        ({"type": "object", "minProperties": 1}, "minProperties", "would not be kept"),
        ({"type": "object", "required": ["a"]}, "required", "not among the properties"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf", "would not be kept of number"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf", "too small"),
        ({"type": "integer", "minimum": 2**60}, "minimum", "below 2^53"),
        ({"type": "string", "minLength": True}, "minLength", "an integer"),
        ({"type": "string", "maxLength": -1}, "maxLength", "too small"),
        ({"type": "string", "pattern": "a", "maxLength": 2}, "pattern", "one would not be kept"),
        ({"type": "string", "pattern": 'a"'}, "pattern", "without quotes"),
        ({"type": "string", "pattern": r"\x22"}, "pattern", "without quotes"),
        ({"type": "string", "pattern": r"\\"}, "pattern", "without quotes"),
        ({"type": "string", "format": "regex"}, "format", "known are date"),
        ({"not": {}}, "not", "would not be kept"),
        ({"oneOf": [{}]}, "oneOf", "would not be kept"),
        ({"anyOf": [{"type": "null"}], "type": "integer"}, "type", "beside anyOf"),
        ({"anyOf": []}, "anyOf", "must be a list"),
        ({"allOf": [{}, {}]}, "allOf", "several"),
        ({"enum": []}, "enum", "must be a list"),
        ({"enum": [True], "type": "integer"}, "enum", "not of the type"),
        ({"const": 1, "minimum": 2}, "minimum", "beside const"),
        ({"$ref": "http://a.b/c"}, "$ref", "nothing is fetched"),
        ({"$ref": "#/$defs/a"}, "$ref", "there is no"),
        ({"properties": {"a": {"$defs": {}}}}, "properties.a.$defs", "at the top"),
    ],
)
def test_these_are_not(schema: Any, place: str, why: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        check_schema(schema, "s")
    assert error.value.param == "s"
    assert why in error.value.message and (f" at {place}:" in error.value.message or not place)
