"""Which JSON schemas can be promised: those of which every keyword is kept while an answer is written.

What checks text while it is written knows a part of JSON Schema and passes over the rest in silence. So a schema is
walked through here first, and what would be passed over is refused, by its place. Knows neither models nor grammars.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.spelling import shown

MAX_SCHEMA = 64 * 1024  # characters as JSON: a grammar of that size is built in a second or two
MAX_DEPTH = 64
FORMATS = (
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uuid",
    "json-pointer",
)  # fmt: skip
_NOTES = {"$schema", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_DEFINITIONS = ("$defs", "definitions")
_LENGTHS = {"minLength", "maxLength"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_OF_TYPE: dict[str, set[str]] = {
    "string": {*_LENGTHS, "pattern", "format"},
    "integer": {*_BOUNDS, "multipleOf"},
    "number": _BOUNDS,
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_KINDS = ("$ref", "anyOf", "allOf", "enum", "const")  # a schema is one of these, or has a type
_COUNTS = {*_LENGTHS, "minItems", "maxItems"}
# A pattern says which signs a text has, and is matched against the JSON of it: there these would stand escaped.
_ESCAPES = re.compile(r"\\(?![dDwWsS.\-+*?()\[\]{}|^$/])")


def check_schema(schema: Any, name: str) -> None:
    """Raises InvalidRequestError for `name` with the place in the schema that cannot be promised, and why."""
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{name}: must be a JSON schema, as an object", param=name)
    try:
        length = len(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError(f"{name}: is not JSON", param=name) from None
    if length > MAX_SCHEMA:
        raise InvalidRequestError(f"{name} has {length} characters as JSON: allowed are {MAX_SCHEMA}", param=name)
    _Walk(schema, name).check(schema, (), 0)


class _Walk:
    def __init__(self, root: dict[str, Any], name: str) -> None:
        self._root, self._name = root, name

    def check(self, schema: Any, place: tuple[str, ...], depth: int) -> None:
        """`place`: the keys that lead to it."""
        if isinstance(schema, bool):
            if not schema:
                raise self._error(place, "nothing fits false")
            return
        if not isinstance(schema, dict):
            raise self._error(place, "must be a schema")
        if depth > MAX_DEPTH:
            raise self._error(place, f"is nested more than {MAX_DEPTH} deep")
        keys = {*schema} - _NOTES
        for key in _DEFINITIONS:
            if key in keys:
                if place:
                    raise self._error((*place, key), "may stand at the top alone")
                self._each(schema[key], (key,), depth)
        keys -= {*_DEFINITIONS}
        kinds = [kind for kind in _KINDS if kind in keys]
        if kinds:
            self._kind(schema, kinds[0], keys, place, depth)
        elif keys:
            self._typed(schema, keys, place, depth)

    def _kind(self, schema: dict[str, Any], kind: str, keys: set[str], place: tuple[str, ...], depth: int) -> None:
        beside = {"type"} if kind in ("enum", "const") else set()
        if others := sorted(keys - {kind} - beside):
            raise self._error((*place, others[0]), f"beside {kind} it would not be kept")
        value = schema[kind]
        if kind == "$ref":
            self._reference(value, (*place, kind))
        elif kind == "const" or kind == "enum":
            self._values(schema, kind, place)
        else:
            if not isinstance(value, list) or not value:
                raise self._error((*place, kind), "must be a list of schemas")
            if kind == "allOf" and len(value) > 1:
                raise self._error((*place, kind), "may hold one schema: several would not be kept together")
            for i, one in enumerate(value):
                self.check(one, (*place, kind, str(i)), depth + 1)

    def _reference(self, value: Any, place: tuple[str, ...]) -> None:
        if value == "#":
            return
        found = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", value) if isinstance(value, str) else None
        if found is None:
            raise self._error(place, 'must be "#" or "#/$defs/NAME": nothing is fetched')
        known = self._root.get(found[1])
        if not isinstance(known, dict) or found[2].replace("~1", "/").replace("~0", "~") not in known:
            raise self._error(place, f"there is no {value[:80]}")

    def _values(self, schema: dict[str, Any], kind: str, place: tuple[str, ...]) -> None:
        values = schema[kind] if kind == "enum" else [schema[kind]]
        if not isinstance(values, list) or not values:
            raise self._error((*place, kind), "must be a list of values")
        if "type" in schema:
            types = self._types(schema, place)
            if wrong := [one for one in values if not any(_is(one, name) for name in types)]:
                raise self._error((*place, kind), f"{shown(wrong[0])} is not of the type that stands beside it")

    def _typed(self, schema: dict[str, Any], keys: set[str], place: tuple[str, ...], depth: int) -> None:
        types = self._types(schema, place) if "type" in keys else ["object"] if "properties" in keys else []
        if not types:
            raise self._error((*place, min(keys)), "would not be kept; known are type and what goes with it")
        allowed = {"type"}.union(*(_OF_TYPE[one] for one in types))
        if others := sorted(keys - allowed):
            raise self._error((*place, others[0]), f"would not be kept of {' or '.join(types)}")
        for key in keys & (_COUNTS | _BOUNDS | {"multipleOf"}):
            self._number(key, schema[key], place)
        if "string" in types:
            self._string(schema, place)
        if "array" in types:
            self._array(schema, place, depth)
        if "object" in types:
            self._object(schema, place, depth)

    def _types(self, schema: dict[str, Any], place: tuple[str, ...]) -> list[str]:
        given = schema["type"]
        types = given if isinstance(given, list) else [given]
        if not types or not all(isinstance(one, str) and one in _OF_TYPE for one in types):
            raise self._error((*place, "type"), f"must be {', '.join(_OF_TYPE)}, or a list of these")
        return types

    def _number(self, key: str, value: Any, place: tuple[str, ...]) -> None:
        whole = key in _COUNTS or key == "multipleOf"
        if type(value) not in ((int,) if whole else (int, float)) or not math.isfinite(value) or abs(value) >= 2**53:
            raise self._error((*place, key), f"must be {'an integer' if whole else 'a number'} below 2^53")
        if whole and value < (1 if key == "multipleOf" else 0):
            raise self._error((*place, key), "is too small")

    def _string(self, schema: dict[str, Any], place: tuple[str, ...]) -> None:
        rules = [key for key in ("pattern", "format") if key in schema]
        if len(rules) > 1 or (rules and not _LENGTHS.isdisjoint(schema)):
            raise self._error((*place, rules[0]), "with another rule for the same text, one would not be kept")
        if "format" in schema and schema["format"] not in FORMATS:
            raise self._error((*place, "format"), f"known are {', '.join(FORMATS)}")
        pattern = schema.get("pattern", "")
        if not isinstance(pattern, str) or '"' in pattern or _ESCAPES.search(pattern):
            raise self._error((*place, "pattern"), r"must be an expression without quotes, and with \d, \w, \s at most")

    def _array(self, schema: dict[str, Any], place: tuple[str, ...], depth: int) -> None:
        before = schema.get("prefixItems", [])
        if not isinstance(before, list) or ("prefixItems" not in schema and "items" not in schema):
            raise self._error(place, "an array must say what its items are")
        for i, one in enumerate(before):
            self.check(one, (*place, "prefixItems", str(i)), depth + 1)
        if "items" in schema and not (schema["items"] is False and before):
            self.check(schema["items"], (*place, "items"), depth + 1)

    def _object(self, schema: dict[str, Any], place: tuple[str, ...], depth: int) -> None:
        properties = schema.get("properties", {})
        self._each(properties, (*place, "properties"), depth)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            raise self._error((*place, "required"), "must be a list of names")
        if unknown := [one for one in required if one not in properties]:
            raise self._error((*place, "required"), f"{unknown[0][:80]!r} is not among the properties")
        if schema.get("additionalProperties") is not False:
            self.check(schema.get("additionalProperties", True), (*place, "additionalProperties"), depth + 1)

    def _each(self, schemas: Any, place: tuple[str, ...], depth: int) -> None:
        if not isinstance(schemas, dict):
            raise self._error(place, "must be an object of schemas")
        for key, one in schemas.items():
            self.check(one, (*place, key), depth + 1)

    def _error(self, place: tuple[str, ...], why: str) -> InvalidRequestError:
        where = ".".join(key[:40] for key in place[-8:])
        return InvalidRequestError(f"{self._name}{f' at {where}' if where else ''}: {why}", param=self._name)


def _is(value: Any, kind: str) -> bool:
    match value:
        case None:
            return kind == "null"
        case bool():
            return kind == "boolean"
        case int():
            return kind in ("integer", "number")
        case float():
            return kind == "number"
        case str():
            return kind == "string"
        case list():
            return kind == "array"
    return kind == "object"
