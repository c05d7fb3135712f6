"""A request's own time: over it is given up, wherever it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_omni import FakeOmni, client

from polymux.errors import ConfigError
from polymux.server_config import HttpConfig

URL = "/v1/images/generations"


def call(omni: FakeOmni, timeout: str | None, url: str = URL, **server: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client(omni, **server) as http:
            body = {"prompt": "a"} if url == URL else None
            return await http.post(url, json=body, headers={"x-request-timeout": timeout} if timeout else {})

    return asyncio.run(send())


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("timeout", "server"),
    [
        ("0.05", {}),
        (None, {"request_timeout": 0.1}),
        ("5", {"request_timeout": 0.1}),
        ("1e-9", {"request_timeout": 5.0}),
    ],
)
def test_a_generation_that_takes_longer_is_aborted(timeout: str | None, server: dict[str, Any]) -> None:
    omni = FakeOmni()
    omni.hold.clear()
    response = call(omni, timeout, **server)
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
    assert error_of(response)["type"] == "server_error"
    assert response.headers["x-should-retry"] == "false"
    assert omni.aborted == [request.request_id for request in omni.requests]


@pytest.mark.parametrize("timeout", ["60", "60.5", " 60 ", "1e3", None])
def test_one_that_is_done_before_is_answered(timeout: str | None) -> None:
    assert call(FakeOmni(), timeout).status_code == 200


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf", "abc", "1s", "1,5", "1_0", "0x10", "9" * 400])
@pytest.mark.parametrize("url", [URL, "/v1/omni/wakeup"])
def test_a_value_that_is_no_time_is_refused_on_every_route(timeout: str, url: str) -> None:
    omni = FakeOmni()
    response = call(omni, timeout, url)
    assert (response.status_code, error_of(response)["param"]) == (400, "x-request-timeout")
    assert omni.requests == []


def test_sleep_and_wake_up_go_on_without_who_asked() -> None:
    class Slow(FakeOmni):
        async def sleep(self, level: int) -> int:
            await asyncio.sleep(60)
            return 0

    response = call(Slow(), "0.05", "/v1/omni/sleep")
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")


def test_a_stream_ends_with_the_error() -> None:
    omni = FakeOmni()
    omni.hold.clear()

    async def send() -> httpx.Response:
        async with client(omni) as http:
            body = {"prompt": "a", "stream": True, "stream_progress": True}
            return await http.post(URL, json=body, headers={"x-request-timeout": "0.2"})

    response = asyncio.run(send())
    assert response.status_code == 200
    events = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert len(events) > 1
    assert omni.aborted == [request.request_id for request in omni.requests]


@pytest.mark.parametrize("seconds", [0, 0.05, -1])
def test_the_operator_gives_no_less_time_than_makes_sense(seconds: float) -> None:
    """0 reads as "no limit", and would give every request none."""
    with pytest.raises(ConfigError, match="request_timeout"):
        HttpConfig(request_timeout=seconds)
