"""GET /openapi.json: what FastAPI finds in the routes, and what stands in front of them.

Every request may bring a key, an id and a time, and may be refused before its route sees it. That is added here, once.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from polymux.server import session
from polymux.server.access import OPEN, OPEN_FOLDERS, SAFE_METHODS
from polymux.server.deadline import HEADER

_ID = {
    "name": "x-request-id",
    "in": "header",
    "required": False,
    "description": "1 to 128 letters, digits and ._:- come back with the answer; others are replaced",
    "schema": {"type": "string"},
}
_TIME = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": "seconds, until the request is given up with 504",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
_SESSION = {
    "name": session.HEADER,
    "in": "header",
    "required": False,
    "description": "requests of one session may be kept at one replica; 1 to 128 letters, digits and ._:-",
    "schema": {"type": "string"},
}
_ALWAYS = (400, 408, 413, 415, 431, 500, 503)


class Api(FastAPI):
    """FastAPI with a schema that tells all of it."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _completed(super().openapi())
        return self.openapi_schema


def _completed(schema: dict[str, Any]) -> dict[str, Any]:
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            _complete(operation, path, method.upper())
    components = schema["components"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's; ours is another
        components["schemas"].pop(name, None)
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "needed if the server has API keys"}
    }
    return schema


def _complete(operation: dict[str, Any], path: str, method: str) -> None:
    operation["parameters"] = [*operation.get("parameters", []), _ID, _TIME, _SESSION]
    refusals = set(_ALWAYS)
    if not (method in SAFE_METHODS and (path in OPEN or path.startswith(OPEN_FOLDERS))):
        operation["security"] = [{}, {"key": []}]
        refusals.add(401)
    if method not in SAFE_METHODS:
        refusals |= {403, 504}
    answers = operation["responses"]
    answers.pop("422", None)
    for status in refusals:
        answers.setdefault(str(status), {"description": HTTPStatus(status).phrase, "content": _ERROR})
    operation["responses"] = dict(sorted(answers.items()))


_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
