"""The routes that lend the device to others."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fake_omni import FakeOmni, client


def call(*posts: tuple[str, Any], omni: FakeOmni | None = None) -> list[httpx.Response]:
    async def send() -> list[httpx.Response]:
        async with client(omni or FakeOmni()) as http:
            return [await http.post(url, content=body) for url, body in posts]

    return asyncio.run(send())


@pytest.mark.parametrize(("body", "level"), [(b"", 1), (b"{}", 1), (b'{"level": 1}', 1), (b'{"level": 2}', 2)])
def test_sleep_and_wake_up(body: bytes, level: int) -> None:
    omni = FakeOmni()
    picture = b'{"prompt": "a cat"}'
    slept, refused, woken, made = call(
        ("/v1/omni/sleep", body),
        ("/v1/images/generations", picture),
        ("/v1/omni/wakeup", b""),
        ("/v1/images/generations", picture),
        omni=omni,
    )
    assert (slept.status_code, slept.json()) == (200, {"status": "asleep", "level": level, "freed_bytes": 1000 * level})
    assert refused.status_code == 503 and "asleep" in refused.json()["error"]["message"]
    assert (woken.status_code, woken.json()) == (200, {"status": "ready"})
    assert made.status_code == 200


@pytest.mark.parametrize("body", [b'{"level": 3}', b'{"level": "1"}', b'{"level": null}', b'{"depth": 1}', b"[]", b"{"])
def test_a_body_that_is_wrong_changes_nothing(body: bytes) -> None:
    omni = FakeOmni()
    (response,) = call(("/v1/omni/sleep", body), omni=omni)
    assert response.status_code == 400 and omni.status == "ready"


def test_sleeping_twice_is_refused() -> None:
    _, second = call(("/v1/omni/sleep", b""), ("/v1/omni/sleep", b""))
    assert second.status_code == 503
