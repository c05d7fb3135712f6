"""Data URLs: what browsers take, within a size that is known before anything is decoded."""

from __future__ import annotations

import base64
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymux.errors import InvalidRequestError
from polymux.media.data_url import decode_data_url


def decoded(url: str, max_bytes: int = 1000) -> bytes:
    return decode_data_url(url, param="image", max_bytes=max_bytes)


@pytest.mark.parametrize(
    ("url", "data"),
    [
        ("data:image/png;base64,aGVsbG8=", b"hello"),
        ("data:image/png;base64,aGVsbG8", b"hello"),
        ("data:;base64,aGVs\nbG8=\r\n", b"hello"),
        ("data:;base64,aGVsbG8%3D", b"hello"),
        ("DATA:image/png;charset=x;BASE64,aGVsbG8=", b"hello"),
        ("data:,h%65llo", b"hello"),
        ("data:text/plain,a,b", b"a,b"),
        ("data:,", b""),
    ],
)
def test_what_is_taken(url: str, data: bytes) -> None:
    assert decoded(url) == data


@pytest.mark.parametrize(
    "url",
    ["data:image/png;base64", "data", "date:,x", "data:;base64,a", "data:;base64,****", "data:,é"],
)
def test_what_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^image: ") as caught:
        decoded(url)
    assert caught.value.param == "image"


@given(st.binary(max_size=60))
def test_both_encodings_give_the_bytes_and_the_limit_is_exact(data: bytes) -> None:
    percent = "".join(f"%{byte:02X}" for byte in data)
    for url in ("data:;base64," + base64.b64encode(data).decode(), "data:;base64," + base64.encodebytes(data).decode(),
                "data:," + percent):  # fmt: skip
        assert decoded(url, len(data)) == data
        if data:
            with pytest.raises(InvalidRequestError, match=f"more than {len(data) - 1} bytes"):
                decoded(url, len(data) - 1)


@pytest.mark.parametrize("head", ["data:;base64,", "data:,"])
def test_what_is_too_large_is_not_decoded(head: str) -> None:
    url = head + "A" * 4_000_000
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match="more than 1000 bytes"):
            decoded(url)
        assert tracemalloc.get_traced_memory()[1] < 4_500_000  # the text behind the comma, and nothing made of it
    finally:
        tracemalloc.stop()
