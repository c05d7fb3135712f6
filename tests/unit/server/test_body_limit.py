"""The body limit counts what arrives, on every route, and its answer reaches clients that are still sending."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_omni import FakeOmni, client

from polymux.server import body as body_module
from polymux.server.app import build_app
from polymux.server.body import BodyLimit
from polymux.server.state import ServerState
from polymux.server_config import HttpConfig, ServerConfig

LIMIT = 2048
SCOPE = {"type": "http", "method": "POST", "query_string": b""}
LIMITS = HttpConfig(max_body_bytes=LIMIT)
URL = "/v1/images/generations"


def post(content: Any, url: str = URL, headers: dict[str, str] | None = None) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client(FakeOmni(), max_body_bytes=LIMIT) as http:
            return await http.post(url, content=content, headers=headers)

    return asyncio.run(send())


def padded(size: int) -> bytes:
    body = b'{"prompt":"a","negative_prompt":"'
    return body + b"x" * (size - len(body) - 2) + b'"}'


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for i in range(0, len(data), 100):
        yield data[i : i + 100]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("size", "status"), [(LIMIT, 200), (LIMIT + 1, 413), (50 * LIMIT, 413)])
def test_the_limit_is_exact(chunked: bool, size: int, status: int) -> None:
    response = post(pieces(padded(size)) if chunked else padded(size))
    assert response.status_code == status, response.text
    if status == 413:
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("payload_too_large", "invalid_request_error")
        assert str(LIMIT) in error["message"]
        assert "x-request-id" in response.headers


@pytest.mark.parametrize("declared", ["1", "0"])
def test_a_wrong_content_length_does_not_get_around_it(declared: str) -> None:
    assert post(pieces(padded(LIMIT + 1)), headers={"content-length": declared}).status_code == 413


def test_it_holds_on_routes_that_read_no_body() -> None:
    assert post(padded(LIMIT + 1), url="/no/such/route").status_code == 413


@pytest.mark.parametrize("declared", ["-1", "1e3", "٣", str(LIMIT + 1), "9" * 30])
async def test_a_declared_size_over_the_limit_is_refused_unread(declared: str) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the application must not see it")

    received = 0

    async def receive() -> dict[str, Any]:
        nonlocal received
        received += 1
        if not sent:
            raise AssertionError("nothing may be read before the answer is out")
        return {"type": "http.disconnect"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {**SCOPE, "headers": [(b"content-length", declared.encode())]}
    await BodyLimit(application, LIMITS)(scope, receive, send)
    assert sent[0]["status"] == 413
    assert received == 1


async def test_a_client_that_never_stops_sending_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "LINGER_S", 0.05)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"not me"})

    await asyncio.wait_for(
        BodyLimit(application, LIMITS)({**SCOPE, "headers": []}, receive, send),
        5,
    )
    assert [message["status"] for message in sent if "status" in message] == [413]
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_an_answer_waits_for_the_rest_of_the_body() -> None:
    chunks = [b"x" * 100] * 5
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": chunks.pop(), "more_body": bool(chunks)}

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    async def send(message: Any) -> None:
        assert not chunks, "with data in the socket, the connection would be reset"
        sent.append(message)

    await BodyLimit(application, LIMITS)({**SCOPE, "headers": []}, receive, send)
    assert sent[0]["status"] == 400


async def test_a_client_that_leaves_while_it_sends() -> None:
    omni = FakeOmni()
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b'{"prompt":', "more_body": True}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": URL, "headers": headers, "query_string": b""}
    await build_app(ServerState(omni, ServerConfig()))(scope, receive, send)
    assert sent == []
    assert omni.requests == []


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = pytest.mark.anyio
