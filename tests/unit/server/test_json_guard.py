"""JSON that would cost too much, or is not what it looks like, is refused before it is parsed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_omni import FakeOmni, client
from hypothesis import given
from hypothesis import strategies as st

from polymux.errors import InvalidRequestError
from polymux.server.json_guard import check_json

URL = "/v1/images/generations"


def post(body: bytes, omni: FakeOmni | None = None, **server: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client(omni or FakeOmni(), **server) as http:
            return await http.post(URL, content=body, headers={"content-type": "application/json"})

    return asyncio.run(send())


def nested(depth: int) -> bytes:
    """A body of so many levels; the outermost is the object."""
    return b'{"prompt":"a","extra_args":{"eta":' + b"[" * (depth - 2) + b"]" * (depth - 2) + b"}}"


@pytest.mark.parametrize(("depth", "refused"), [(5, False), (6, True), (100_000, True)])
def test_depth(depth: int, refused: bool) -> None:
    response = post(nested(depth), max_json_depth=5)
    assert response.status_code == (400 if refused else 200)
    assert not refused or "--max-json-depth" in response.json()["error"]["message"]


@pytest.mark.parametrize("opened", [b"[", b'{"a":', b'{"prompt":' + b"[" * 10, b'{"a":[' * 3])
def test_depth_that_never_ends(opened: bytes) -> None:
    assert post(opened * 50_000).status_code == 400


@pytest.mark.parametrize("inner", [b"1", b"[]", b'"],"', b'"\\",[{"', b"null", b"{}"])
def test_number_of_values(inner: bytes) -> None:
    def body(count: int) -> bytes:
        return b'{"prompt":"a","extra_args":{"eta":[' + b",".join([inner] * count) + b"]}}"

    assert post(body(40), max_json_values=100).status_code == 200
    response = post(body(200), max_json_values=100)
    assert response.status_code == 400
    assert "--max-json-values" in response.json()["error"]["message"]


def test_marks_inside_strings_are_no_marks() -> None:
    prompt = '[[{"a\\": \\\\' * 500
    omni = FakeOmni()
    assert post(json.dumps({"prompt": prompt}).encode(), omni, max_json_depth=2, max_json_values=100).status_code == 200
    assert omni.requests[0].prompt == prompt


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"prompt":"a","prompt":"b"}', "prompt"),
        (b'{"prompt":"a","extra_args":{"eta":1,"eta":1}}', "eta"),
        (b'{"prompt":"a","pro\\u006dpt":"b"}', "prompt"),
        (b'{"prompt":"a","seed":' + b"1" * 5000 + b',"prompt":"b"}', "prompt"),
    ],
)
def test_a_name_twice_in_one_object(body: bytes, name: str) -> None:
    response = post(body)
    assert response.status_code == 400
    assert (response.json()["error"]["param"], "twice" in response.json()["error"]["message"]) == (name, True)


def test_the_same_name_in_two_objects() -> None:
    assert post(b'{"prompt":"a","extra_args":{"eta":{"x":1,"y":{"x":1}}}}').status_code == 200


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "latin-1"]
)
def test_other_encodings_are_refused_and_not_misread(encoding: str) -> None:
    omni = FakeOmni()
    assert post('{"prompt":"é"}'.encode(encoding), omni).status_code == 400
    assert omni.requests == []


@pytest.mark.parametrize("prompt", [r"\ud800", r"a\udfff", r"\udc00\ud800"])
def test_a_lone_surrogate_in_a_prompt(prompt: str) -> None:
    response = post(f'{{"prompt":"{prompt}"}}'.encode())
    assert response.status_code == 400
    response.text.encode()


@pytest.mark.parametrize("prompt", [r"a\u0000b", r"\u202e", r"\ud83d\ude00", r"\u001b[31m", "\u2028"])
def test_odd_but_valid_characters_arrive_as_they_are(prompt: str) -> None:
    omni = FakeOmni()
    assert post(f'{{"prompt":"{prompt}"}}'.encode(), omni).status_code == 200
    assert omni.requests[0].prompt == json.loads(f'"{prompt}"')


@pytest.mark.parametrize(
    ("value", "said"),
    [("[" * 40, "--max-json-depth"), ("[1" + ",1" * 20_000 + "]", "--max-json-values"), ('{"a":1,"a":2}', "twice")],
)
def test_fields_of_forms_too(value: str, said: str) -> None:
    async def send() -> httpx.Response:
        async with client(FakeOmni()) as http:
            form = {"prompt": "a", "extra_args": value}
            return await http.post("/v1/images/edits", data=form, files={"image": b"x"})

    response = asyncio.run(send())
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    if not isinstance(value, (list, dict)):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


@given(_JSON, st.sampled_from([None, 1]), st.booleans())
def test_depth_is_what_the_parser_would_find(value: Any, indent: int | None, ascii: bool) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=ascii).encode("utf-8", "replace")
    depth = depth_of(value)
    check_json(body, max_depth=depth, max_values=10_000)
    if depth > 0:
        with pytest.raises(InvalidRequestError):
            check_json(body, max_depth=depth - 1, max_values=10_000)


@given(st.binary() | st.text(alphabet='[]{},:"\\1a ').map(str.encode))
def test_whatever_comes_it_is_accepted_or_refused(body: bytes) -> None:
    try:
        check_json(body, max_depth=3, max_values=10)
    except InvalidRequestError as error:
        assert error.message.encode()
