"""`response_format` "url", and GET /v1/files/images/NAME."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fake_omni import FakeOmni, client
from PIL import Image

from polymux.errors import ConfigError, InvalidRequestError
from polymux.server.image_answer import Picture
from polymux.server.image_store import ImageStore
from polymux.server_config import FilesConfig

URL = "/v1/images/generations"
BASE = {"prompt": "a", "size": "64x32", "seed": 1, "response_format": "url"}


def with_client(talk: Callable[[httpx.AsyncClient], Awaitable[None]], **server: Any) -> None:
    async def run() -> None:
        async with client(FakeOmni(), **server) as http:
            await talk(http)

    asyncio.run(run())


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_the_url_gives_the_picture(format: str) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        answer = (await http.post(URL, json=BASE | {"n": 2, "output_format": format})).json()
        assert [set(item) for item in answer["data"]] == [{"url", "seed", "size", "output_format"}] * 2
        assert abs(answer["expires_at"] - time.time() - 3600) < 60
        assert len({item["url"] for item in answer["data"]}) == 2
        for item in answer["data"]:
            assert item["url"].startswith("http://server/v1/files/images/")
            assert item["url"].endswith(f".{format}")
            got = await http.get(item["url"])
            assert (got.status_code, got.headers["content-type"]) == (200, f"image/{format}")
            picture = Image.open(io.BytesIO(got.content))
            assert (f"{picture.width}x{picture.height}", (picture.format or "").lower()) == (item["size"], format)
            assert got.headers["cache-control"].startswith("private, max-age=35")
            assert got.headers["x-content-type-options"] == "nosniff"
            head = await http.head(item["url"])
            assert (head.status_code, head.headers["content-length"]) == (200, str(len(got.content)))

    with_client(talk)


@pytest.mark.parametrize("name", ["x", "..%2f..%2fetc%2fpasswd", "a.png", "%00", "x" * 5000])
def test_other_names_are_a_404(name: str) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        answer = await http.get(f"/v1/files/images/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")

    with_client(talk)


def test_without_the_key_of_the_server() -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        key = {"authorization": "Bearer secret"}
        url = (await http.post(URL, json=BASE, headers=key)).json()["data"][0]["url"]
        assert (await http.get(url)).status_code == 200
        assert (await http.get(URL)).status_code == 401

    with_client(talk, api_key=("secret",))


@pytest.mark.parametrize(
    ("headers", "server", "base"),
    [
        ({"host": "example.com:81"}, {}, "http://example.com:81"),
        ({"host": "[::1]:8000"}, {}, "http://[::1]:8000"),
        ({"x-forwarded-host": "evil.example", "x-forwarded-proto": "https"}, {}, "http://server"),
        ({"forwarded": "host=evil.example;proto=https"}, {}, "http://server"),
        ({"host": "evil.example/x?"}, {}, "http://server"),
        ({"host": "a b"}, {}, "http://server"),
        ({"host": "other"}, {"public_url": "https://example.com/polymux/"}, "https://example.com/polymux"),
    ],
)
def test_where_the_url_begins(headers: dict[str, str], server: dict[str, Any], base: str) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        answer = await http.post(URL, json=BASE, headers=headers)
        url = answer.json()["data"][0]["url"]
        assert url.partition("/v1/files/images/")[0].removesuffix("/") == base.removesuffix("/")

    with_client(talk, **server)


@pytest.mark.parametrize(
    "url", ["example.com", "ftp://example.com", "https://", "https://a?b", "https://u@a", "https://a b"]
)
def test_a_public_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError):
        FilesConfig(public_url=url)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pictures(*sizes: int) -> list[Picture]:
    return [Picture(b"x" * size, "png", 1, 1, None) for size in sizes]


def test_a_picture_is_there_until_its_time_is_over() -> None:
    clock = Clock()
    store = ImageStore(FilesConfig(image_url_ttl=10), clock)
    (name,) = store.add(pictures(5))
    clock.now += 9.5
    found = store.get(name)
    assert found is not None
    assert (found[0].data, found[0].media_type, found[1]) == (b"xxxxx", "image/png", 0)
    clock.now += 0.5
    assert store.get(name) is None


def test_the_oldest_go_first() -> None:
    store = ImageStore(FilesConfig(image_url_bytes=1024))
    first, second = store.add(pictures(300, 300))
    (third,) = store.add(pictures(400))
    assert all(store.get(name) for name in (first, second, third))
    (fourth,) = store.add(pictures(100))
    assert store.get(first) is None
    assert all(store.get(name) for name in (second, third, fourth))


def test_what_has_expired_takes_no_room() -> None:
    clock = Clock()
    store = ImageStore(FilesConfig(image_url_ttl=10, image_url_bytes=1024), clock)
    store.add(pictures(1000))
    clock.now += 10
    names = store.add(pictures(500, 500))
    assert all(store.get(name) for name in names)


def test_pictures_of_one_answer_never_push_each_other_out() -> None:
    store = ImageStore(FilesConfig(image_url_bytes=1024))
    (old,) = store.add(pictures(10))
    with pytest.raises(InvalidRequestError) as refused:
        store.add(pictures(600, 600))
    assert refused.value.param == "response_format"
    assert store.get(old) is not None


def test_the_log_does_not_tell_names(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        with caplog.at_level("INFO", "polymux.server"):
            url = (await http.post(URL, json=BASE)).json()["data"][0]["url"]
            assert (await http.get(url)).status_code == 200
        name = url.rpartition("/")[2]
        assert f"/v1/files/images/{name[:8]}....png 200" in caplog.text
        assert name not in caplog.text

    with_client(talk)


def test_names_cannot_be_guessed() -> None:
    store = ImageStore(FilesConfig())
    names = [name for _ in range(50) for name in store.add(pictures(1))]
    assert len(set(names)) == 50
    assert min(map(len, names)) >= 32 + len(".png")
