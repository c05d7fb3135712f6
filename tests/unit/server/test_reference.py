"""docs/api.md is what the server's schema says, and the schema is what the server does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polymux.server import reference

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


def test_the_page_is_made_from_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m polymux.server.reference > docs/api.md` makes it."""
    reference.main()
    assert capsys.readouterr().out == PAGE.read_text(encoding="utf-8")


def page_of(schema: dict[str, Any], **field: Any) -> str:
    """The page of an API with one route, whose body has one field."""
    body = {"type": "object", "properties": {"f": schema}, **field}
    operation = {
        "summary": "Do it",
        "parameters": [],
        "requestBody": {"content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "OK"}},
    }
    return reference.reference({"paths": {"/x": {"post": operation}}, "components": {"schemas": {}}})


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "string", "description": "a | b\n c"}, r"| `f` | string | a \| b c |"),
        ({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}, "| `f` | integer, at least 1 |  |"),
        ({"type": "number", "minimum": 0, "maximum": 1, "default": 0.5}, "| `f` | number from 0 to 1 | default 0.5 |"),
        ({"enum": ["a", 1, False]}, "| `f` | `a`, `1`, `false` |  |"),
        ({"const": "x"}, "| `f` | `x` |  |"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/Part"}}, "| `f` | list of [Part](#part) |  |"),
        ({"type": "array", "maxItems": 0}, "| `f` | empty list |  |"),
        ({"type": "array", "items": {"type": "string", "format": "binary"}}, "| `f` | file, or several |  |"),
        (
            {"type": "object", "title": "In", "properties": {"g": {}}},
            "`In`:\n\n| field | type | |\n|---|---|---|\n| `g` |",
        ),
        ({}, "| `f` | any |  |"),
    ],
)
def test_types_in_words(schema: dict[str, Any], written: str) -> None:
    assert written in page_of(schema)


def test_what_is_required_says_so() -> None:
    assert "| `f` | string | required |" in page_of({"type": "string"}, required=["f"])
