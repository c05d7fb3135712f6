"""Every answer that is not a success: one body, OpenAI's, for whatever went wrong.

The body never holds a traceback, a module's name or a file's path. An exception that nobody raised on purpose becomes a
plain 500; what it was is for the log.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from polymux.errors import (
    AuthenticationError,
    DeadlineExceededError,
    GenerationError,
    HeadersTooLargeError,
    InvalidRequestError,
    PolymuxError,
    RequestAbortedError,
)
from polymux.server.protocol import UNION_TAG, ErrorDetail, ErrorResponse
from polymux.spelling import shown

_PATH = re.compile(r"""(?<=['"])~?/[^'"]*|(?<![\w.])~?/[^\s'",;:()]+""")
_FIELDS = {"height": "size", "width": "size", "num_outputs_per_prompt": "n"}  # the engine's names -> OpenAI's
_CONSTANTS = {"None": "null", "True": "true", "False": "false"}  # Python's names -> JSON's
_CONSTANT = re.compile(rf"(?<![\w'])(?:{'|'.join(_CONSTANTS)})(?![\w'])")
_HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed"}


def install(app: FastAPI) -> None:
    """Make `app` answer every error through this module."""
    app.add_exception_handler(PolymuxError, _on_polymux_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)


def error_body(error: PolymuxError) -> ErrorResponse:
    # What failed inside may quote whatever a library said; what is wrong with a request quotes only the request.
    message = _PATH.sub("...", error.message) if error.status >= 500 else error.message
    return ErrorResponse(error=ErrorDetail(message=message, type=error.type, param=error.param, code=error.code))


def error_response(error: PolymuxError) -> Response:
    return JSONResponse(error_body(error).model_dump(), error.status, error_headers(error))


def error_headers(error: PolymuxError) -> dict[str, str]:
    """What an answer says beside its body."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, (DeadlineExceededError, GenerationError)):
        headers["x-should-retry"] = "false"  # OpenAI's SDKs would send the same again, twice
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return headers


def headers_too_large(limit: int) -> HeadersTooLargeError:
    """Found out in two places: by the parser, and behind it."""
    return HeadersTooLargeError(f"the headers have more than {limit} bytes (--max-header-bytes)")


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's documentation: the errors that it answers with."""
    return {status: {"model": ErrorResponse} for status in statuses}


def in_field_of(model: type[BaseModel], error: InvalidRequestError) -> InvalidRequestError:
    """The same error, where it says to use a field that this body calls otherwise, or does not have."""
    name = (error.param or "").removeprefix("extra_args.")
    hint = f"use the field {name}"
    if not error.message.endswith(hint):
        return error
    field = _FIELDS.get(name, name)
    better = f"use the field {field}" if field in model.model_fields else "it cannot be chosen here"
    return InvalidRequestError(error.message.removesuffix(hint) + better, param=error.param)


def from_validation(error: ValidationError, model: type[BaseModel]) -> InvalidRequestError:
    """The first fault that pydantic found in a JSON body, in our words: field, value, what is allowed."""
    fault = error.errors(include_url=False)[0]
    param = ".".join(_path(fault)) or None
    return InvalidRequestError(_message(fault, param, model), param=param)


def _path(fault: ErrorDetails) -> list[str]:
    """Where the fault is, as the client wrote it."""
    *parts, last = map(str, fault["loc"] or ("",))
    kept = [part for part in parts if not part.startswith(UNION_TAG)]
    is_tag = last.startswith(UNION_TAG) and fault["type"] != "extra_forbidden"
    return kept if is_tag or not last else [*kept, last]


def _message(fault: ErrorDetails, param: str | None, model: type[BaseModel]) -> str:
    reason = fault["msg"].removeprefix("Input should be ")
    match fault["type"]:
        case "json_invalid":
            return f"the body is not valid JSON: {fault['ctx']['error']}"
        case "missing":
            return f"{param} is missing"
        case "extra_forbidden":
            known = f"; known are {', '.join(model.model_fields)}" if len(fault["loc"]) == 1 else ""
            return f"unknown field {shown(param)}{known}"
        case "literal_error":
            reason = _CONSTANT.sub(lambda found: _CONSTANTS[found[0]], reason)
        case "int_parsing_size":
            reason = "an integer of fewer digits"
        case _ if param is None:
            return f"the body must be {reason}"
        case "too_long" | "too_short" | "string_too_long" | "string_too_short" as kind:
            return f"{param}={shown(fault['input'])}: must {_length(kind, fault['ctx'])}"
        case "size" | "reference" | "value":
            return f"{param}={shown(fault['input'])}: {reason}"
        case "string_too_long" | "string_too_short" | "too_long" | "too_short":
            reason = re.sub(r"^\w+ should (have at \w+ \d+ \w+).*", r"\1", reason)
            return f"{param}={shown(fault['input'])}: must {reason}"
    return f"{param}={shown(fault['input'])}: must be {reason}"


def _length(kind: str, limits: dict[str, Any]) -> str:
    what = "characters" if kind.startswith("string") else "items"
    if kind.endswith("long"):
        return f"have at most {limits['max_length']} {what}" if limits["max_length"] else "be empty"
    return f"have at least {limits['min_length']} {what}" if limits["min_length"] > 1 else "not be empty"


def _on_polymux_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PolymuxError)
    return error_response(error)


def _on_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    code = _HTTP_CODES.get(error.status_code, "http_error")
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    detail = ErrorDetail(message=f"{request.method}: {error.detail}", type=kind, param=None, code=code)
    return JSONResponse(ErrorResponse(error=detail).model_dump(), error.status_code, error.headers)


async def no_such_socket(socket: WebSocket) -> None:
    """For a WebSocket to a path that has none."""
    detail = ErrorDetail(
        message="WEBSOCKET: Not Found", type="invalid_request_error", param=None, code=_HTTP_CODES[404]
    )
    await socket.send_denial_response(JSONResponse(ErrorResponse(error=detail).model_dump(), 404))


def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client left while it sent the body: for the log."""
    return error_response(RequestAbortedError("the client left"))


def _on_unexpected(request: Request, error: Exception) -> Response:
    return error_response(PolymuxError("internal error"))
