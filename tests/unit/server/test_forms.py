"""Forms, whatever is in them: an answer that says what is wrong, and never a 5xx."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_omni import client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_images_route import error_of
from upload_forms import EDITS, editor, file_of, picture, send

from polymux.server.protocol import ImageEditFields

PNG = file_of(picture(size=(16, 16)))
BOUNDARY = "frontier"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + content + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
WHOLE = part("image", PNG, "a.png") + part("prompt", b"a") + END


def post(content: bytes, headers: dict[str, str] = FORM) -> httpx.Response:
    return send(editor(), EDITS, content=content, headers=headers)


def test_a_whole_form() -> None:
    assert post(WHOLE).status_code == 200


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"", FORM), (END, FORM), (b"no form at all", FORM), (WHOLE[:-10], FORM), (WHOLE[: len(WHOLE) // 2], FORM),
        (WHOLE.removesuffix(END), FORM), (part("image", PNG, "a.png"), FORM), (b"--frontier\r\n\r\nx\r\n" + END, FORM),
        (WHOLE.replace(b"; name=", b"; nome="), FORM),
        (WHOLE, {"content-type": "multipart/form-data"}), (WHOLE, {"content-type": "multipart/form-data; boundary="}),
        (WHOLE, FORM | {"content-type": FORM["content-type"] + "; charset=idna"}),
        (WHOLE, FORM | {"content-type": FORM["content-type"] + "; charset=utf-16"}),
        (b"".join(part(f"f{i}", b"x") for i in range(200)) + END, FORM),
        (b"".join(part("image", PNG, "a.png") for i in range(40)) + END, FORM),
        (part("prompt", b"x" * (2**20 + 1)) + END, FORM),
    ],
    ids=range(16),
)  # fmt: skip
def test_a_form_that_is_none(content: bytes, headers: dict[str, str]) -> None:
    response = post(content, headers)
    assert response.status_code == 400, response.text
    assert len(error_of(response)["message"]) < 300


@pytest.mark.parametrize(
    "content_type", ["application/x-www-form-urlencoded", "text/plain", "multipart/mixed; boundary=a"]
)
def test_another_kind_of_body(content_type: str) -> None:
    response = post(b"prompt=a", {"content-type": content_type})
    assert response.status_code == 415, response.text
    assert error_of(response)["message"].endswith("must be application/json or multipart/form-data")


def test_text_that_is_not_utf8() -> None:
    response = post(part("image", PNG, "a.png") + part("prompt", b"caf\xe9") + END)
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"


VALUES = """ 0 1 -1 2.0 1e999 NaN null true [] {} [1,0.5] {"a":[{}]} "\\ud800" auto 64x32 b64_json url png fake/model"""
texts = st.one_of(
    st.sampled_from(VALUES.split(" ")),
    st.sampled_from(["9" * 5000, "[" * 300, "1" + "0" * 400]),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=30),
)
names = st.one_of(
    st.sampled_from([name + end for name in (*ImageEditFields.model_fields, "image", "mask") for end in ("", "[]")]),
    st.text(min_size=1, max_size=10),
)
FUZZ = settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))


class Server:
    """One application for many requests."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._http = client(editor())

    def post(self, **kwargs: Any) -> httpx.Response:
        return self._runner.run(self._http.post(EDITS, **kwargs))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with asyncio.Runner() as runner:
        yield Server(runner)


@FUZZ
@given(fields=st.lists(st.tuples(names, texts), max_size=4), files=st.lists(names, max_size=2), whole=st.booleans())
def test_no_field_of_a_form_is_a_5xx(
    server: Server, fields: list[tuple[str, str]], files: list[str], whole: bool
) -> None:
    parts: list[Any] = [(name, (None, text)) for name, text in fields]
    parts += [(name, ("a.png", PNG, "image/png")) for name in files]
    parts += [("image", ("a.png", PNG, "image/png")), ("prompt", (None, "a"))] if whole else []
    response = server.post(files=parts or [("prompt", (None, "a"))])
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert error_of(response)["code"] in ("invalid_value", "model_not_found")


@FUZZ
@given(cut=st.integers(0, len(WHOLE)), at=st.integers(0, len(WHOLE) - 1), junk=st.binary(max_size=20))
def test_no_broken_form_is_a_5xx(server: Server, cut: int, at: int, junk: bytes) -> None:
    broken = (WHOLE[:at] + junk + WHOLE[at + len(junk) :])[: max(cut, at)]
    response = server.post(content=broken, headers=FORM)
    assert response.status_code in (200, 400), response.text


@FUZZ
@given(content=st.binary(max_size=200), boundary=st.binary(max_size=20))
def test_no_bytes_are_a_5xx(server: Server, content: bytes, boundary: bytes) -> None:
    header = b"multipart/form-data; boundary=" + boundary
    response = server.post(content=content, headers={b"content-type": header})
    assert response.status_code in (400, 415), response.text
