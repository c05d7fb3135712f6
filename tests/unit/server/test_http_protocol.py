"""What is not HTTP, too much of it, or too slow: one answer in the usual form, and the end of the connection."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fake_omni import FakeOmni
from live_server import Answer, exchange, listening, request

from polymux.server import body as body_module

pytestmark = pytest.mark.anyio

URL = "/v1/images/generations"
JSON = {"Content_Type": "application/json"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


BROKEN = {
    "a request line": b"GET\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a space in the path": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a header without a name": b"GET /health HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n",
    "a line break in a header": b"GET /health HTTP/1.1\r\nHost: a\r\nx: a\rb\r\n\r\n",
    "a length that is no number": request("POST", URL, Content_Length="x"),
    "a length below zero": request("POST", URL, Content_Length="-1"),
    "two lengths": request("POST", URL, b"abc", Content_Length="3, 4"),
    "an unknown transfer encoding": request("POST", URL, Transfer_Encoding="gzip, chunked"),
    "a chunk without a length": request("POST", URL, Transfer_Encoding="chunked", **JSON) + b"xyz\r\n",
    "a chunk that is longer than it says": request("POST", URL, Transfer_Encoding="chunked", **JSON) + b"1\r\nab\r\n",
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN)
async def test_what_is_not_http(sent: bytes) -> None:
    omni = FakeOmni()
    async with listening(omni) as port:
        answer = await exchange(port, sent)
        assert (answer.status, answer.error["code"]) == (400, "invalid_http")
        assert answer.headers["connection"] == "close"
        assert (await exchange(port, request())).status == 200
    assert omni.requests == []


async def test_length_and_chunks_at_once() -> None:
    """A proxy in front may have believed the other one."""
    async with listening() as port:
        smuggled = b"0\r\n\r\n" + request("POST", "/v1/omni/sleep")
        sent = request("POST", URL, smuggled, Content_Length=str(len(smuggled)), Transfer_Encoding="chunked", **JSON)
        answer = await exchange(port, sent)
        assert (answer.status, answer.error["code"]) == (400, "invalid_http")


LONG = "y" * 3000
OVER = {
    "without their end": request(x=LONG)[:-4],
    "whole": request(x=LONG),
    "many": request(**{f"x{i}": "y" * 20 for i in range(100)}),
    "in the path": request(path=f"/{LONG}"),
    "in the query": request(path=f"/health?{LONG}"),
    "behind another request": request().replace(b"Connection: close\r\n", b"") + request(x=LONG),
}


@pytest.mark.parametrize("sent", OVER.values(), ids=OVER)
async def test_headers_over_the_limit(sent: bytes) -> None:
    async with listening(max_header_bytes=2048) as port:
        assert (await exchange(port, request(x="y" * 1900))).status == 200
        answer = await exchange(port, sent)
        if sent.count(b" HTTP/1.1") > 1:  # the answer to the first one stands in front
            answer = Answer(answer.body[answer.body.index(b"HTTP/1.1") :])
        assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
        assert "2048" in answer.error["message"]


async def test_headers_that_do_not_end() -> None:
    async with listening(receive_timeout=0.2) as port:
        answer = await exchange(port, b"GET /health HTTP/1.1\r\n", b"x: y\r\n")
        assert (answer.status, answer.error["code"]) == (408, "receive_timeout")


async def test_a_connection_that_says_nothing_is_closed_without_a_word() -> None:
    async with listening(receive_timeout=0.2) as port:
        assert (await exchange(port)).status == 0


async def test_a_body_that_does_not_end() -> None:
    omni = FakeOmni()
    async with listening(omni, receive_timeout=0.2) as port:
        answer = await exchange(port, request("POST", URL, b'{"prompt":', Content_Length="1000", **JSON), b'"a"')
        assert (answer.status, answer.error["code"]) == (408, "receive_timeout")
        answer = await exchange(port, request("POST", URL, Transfer_Encoding="chunked", **JSON) + b"1\r\n{\r\n")
        assert (answer.status, answer.error["code"]) == (408, "receive_timeout")
    assert omni.requests == []


async def test_a_slow_answer_is_no_slow_request() -> None:
    omni = FakeOmni()
    omni.hold.clear()
    async with listening(omni, receive_timeout=0.1) as port:
        asking = asyncio.create_task(exchange(port, request("POST", URL, b'{"prompt":"a"}', **JSON)))
        await omni.started.wait()
        await asyncio.sleep(0.3)
        omni.hold.set()
        assert (await asking).status == 200


async def test_one_connection_too_many() -> None:
    async with listening(max_connections=2) as port:
        open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        answer = await exchange(port, request())
        assert (answer.status, answer.error["code"]) == (503, "server_overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        for _, writer in open_ones:
            writer.close()
            await writer.wait_closed()
        while (answer := await exchange(port, request())).status == 503:
            pass  # until the server has seen them go
        assert answer.status == 200


async def test_bodies_that_are_too_large_together() -> None:
    """One waits in the middle of its body, and another one of the same size is refused; then the first goes on."""
    omni = FakeOmni()
    body = b'{"prompt":"a","user":"' + b"x" * 200 + b'"}'
    async with listening(omni, max_total_body_bytes=1024, max_body_bytes=1024) as port:
        holding = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in holding:
            writer.write(request("POST", URL, Content_Length="300", **JSON) + b" " * 299)
        while True:  # until the bodies so far have arrived
            answer = await exchange(port, request("POST", URL, body, **JSON))
            if answer.status != 200:
                break
        assert (answer.status, answer.error["code"]) == (503, "server_overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        assert (await exchange(port, request())).status == 200  # what has no body costs nothing
        for reader, writer in holding:
            writer.write(b" ")
            assert (await reader.read()).startswith(b"HTTP/1.1 400")  # of nothing but spaces
        assert (await exchange(port, request("POST", URL, body, **JSON))).status == 200


async def test_broken_http_is_logged_without_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with listening() as port:
        await exchange(port, b"GET /SECRET \x01 HTTP/1.1\r\n\r\n")
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 400), ("GET", {"Sec_WebSocket_Version": "13"}, 400), ("GET", {"Sec_WebSocket_Key": "a" * 24}, 400),
        ("POST", {"Sec_WebSocket_Version": "13", "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA=="}, 400),
        ("GET", {"Sec_WebSocket_Version": "13", "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA=="}, 404),
    ],
)  # fmt: skip
async def test_a_websocket_that_is_none(method: str, headers: dict[str, str], status: int) -> None:
    async with listening() as port:
        sent = request(method, "/v1/nothing", Upgrade="websocket", **headers).replace(b"close", b"Upgrade")
        answer = await exchange(port, sent)
        assert answer.status == status and answer.error["code"] == ("unknown_url" if status == 404 else "invalid_http")


async def test_an_answer_that_nobody_reads_is_given_up() -> None:
    omni = FakeOmni()
    body = b'{"prompt":"a","size":"2048x2048"}'  # of noise, so some megabytes
    async with listening(omni, send_timeout=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(request("POST", URL, body, **JSON))
        await asyncio.wait_for(omni.started.wait(), 10)
        await asyncio.sleep(1.5)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            await reader.readexactly(length)
        writer.close()


async def test_a_body_that_is_refused_for_want_of_a_key_is_not_asked_for() -> None:
    async with listening(api_key=("k",)) as port:
        sent = request("POST", URL, Content_Length="100", Expect="100-continue", **JSON).replace(
            b"Connection: close", b"x: y"
        )
        answer = await exchange(port, sent)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["connection"] == "close"


async def test_the_rest_of_a_body_does_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "LINGER_S", 0.1)
    async with listening(api_key=("k",)) as port:
        sent = request("POST", URL, Content_Length="100", **JSON).replace(b"Connection: close", b"x: y")
        answer = await exchange(port, sent, b"{")
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["connection"] == "close"
