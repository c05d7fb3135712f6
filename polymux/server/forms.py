"""Multipart forms into the typed objects that JSON bodies become, with the same strictness.

A form knows no types, so a field that is text is taken as it is, and every other one as JSON: "2" is a number, "2.0x"
is none. Files are spooled to disk while they arrive. Knows neither routes nor what a file holds.
"""

from __future__ import annotations

import types
import typing
from collections.abc import AsyncGenerator, Collection
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from polymux.errors import InvalidRequestError, MediaTypeError
from polymux.server.errors import from_validation
from polymux.server.json_guard import check_json
from polymux.server.log import note
from polymux.server_config import HttpConfig

Model = TypeVar("Model", bound=BaseModel)
Files = dict[str, list[str | bytes]]  # by field: an upload's bytes, or the text of a field that names a file elsewhere

MEDIA_TYPE = "multipart/form-data"
MAX_FIELDS = 100
MAX_FILES = 32
MAX_FIELD_BYTES = 2**20  # of a field that is no file


def is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == MEDIA_TYPE


async def parse_form(request: Request, model: type[Model], files: Collection[str]) -> tuple[Model, Files]:
    """The form's plain fields as a `model`, and what came in the fields named `files`, in order.

    A field of files may be repeated, and may be called `name[]`; so may, as `name[]`, one that is a list. Raises
    InvalidRequestError.
    """
    if not is_form(request):
        raise MediaTypeError(f"Content-Type {request.headers.get('content-type', '')[:80]!r}: must be {MEDIA_TYPE}")
    form = await _read(request)
    try:
        body, found = await _sorted(form, model, files, request.state.limits)
        note(request, body)
        return body, found
    finally:
        await form.close()


async def _read(request: Request) -> FormData:
    _, options = parse_options_header(request.headers["content-type"])
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in ("utf-8", "utf8"):
        raise InvalidRequestError(f"charset {charset[:80]!r} of the form: must be utf-8")
    parser = _Parser(request, max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequestError(f"the form: {error.message}") from None
    if not parser.ended:
        await form.close()
        raise InvalidRequestError("the form is cut off: its last boundary is missing")
    return form


class _Parser(MultiPartParser):
    """Stricter than its base, which takes a form that is cut off for one with fewer fields, and no UTF-8 as Latin-1."""

    def __init__(self, request: Request, **limits: Any) -> None:
        stream: AsyncGenerator[bytes] = request.stream()
        super().__init__(request.headers, stream, **limits)
        self.ended = False

    def on_part_end(self) -> None:
        part = self._current_part
        if part.file is None:
            try:
                part.data.decode()
            except UnicodeDecodeError:
                name = part.field_name[:80]
                raise InvalidRequestError(f"{name}: is not UTF-8", param=name) from None
        super().on_part_end()

    def on_end(self) -> None:
        self.ended = True


async def _sorted(
    form: FormData, model: type[Model], files: Collection[str], limits: HttpConfig
) -> tuple[Model, Files]:
    fields: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}  # those that come item by item
    found: Files = {name: [] for name in files}
    for name, value in form.multi_items():
        plain = name.removesuffix("[]")
        if plain in found:
            found[plain].append(await value.read() if isinstance(value, UploadFile) else value)
            continue
        if isinstance(value, UploadFile):
            raise InvalidRequestError(f"{name[:80]}: must be a plain field, without a filename", param=name[:80])
        if name != plain and _is_list(model, plain):
            lists.setdefault(plain, []).append(_json(value, limits))
        elif name in fields:
            raise InvalidRequestError(f"{name[:80]} is given more than once", param=name[:80])
        else:
            fields[name] = value if _is_text(model, name) else _json(value, limits)
    for name in lists.keys() & fields.keys():
        raise InvalidRequestError(f"{name} is given more than once, also as {name}[]", param=name)
    try:
        # By way of JSON, whose lists are what a strict model takes as such.
        return model.model_validate_json(pydantic_core.to_json(fields | lists)), found
    except ValidationError as error:
        raise from_validation(error, model) from None


def _json(text: str, limits: HttpConfig) -> Any:
    """The value that a text stands for; a text that is no JSON stands for itself, and a strict model refuses it."""
    check_json(text.encode(), max_depth=limits.max_json_depth, max_values=limits.max_json_values)
    try:
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError:
        return text


def _is_text(model: type[BaseModel], name: str) -> bool:
    """Whether a field takes strings. So does an unknown one, whose value does not matter."""
    return name not in model.model_fields or str in _kinds(model.model_fields[name].annotation)


def _is_list(model: type[BaseModel], name: str) -> bool:
    return name in model.model_fields and bool({tuple, list} & _kinds(model.model_fields[name].annotation))


def _kinds(annotation: Any) -> set[type]:
    """The types of the values that an annotation allows."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        return set().union(*map(_kinds, typing.get_args(annotation)))
    if origin is Literal:
        return {type(value) for value in typing.get_args(annotation)}
    return {origin or annotation}
