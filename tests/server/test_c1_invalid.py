"""Bad requests cost one 4xx each, and nothing else."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from server_process import BASE, IMAGES, Server, error_of, send_raw

CASES: list[tuple[str, Any]] = [
    ("size", "100000x10000"), ("size", "0x64"), ("size", "-64x64"), ("size", "abc"), ("size", "64"), ("size", 64),
    ("size", "65x63"), ("size", "64x64x64"), ("size", ""),
    ("num_inference_steps", 0), ("num_inference_steps", -1), ("num_inference_steps", "x"),
    ("num_inference_steps", 1_000_000_000), ("num_inference_steps", 1e3), ("num_inference_steps", True),
    ("n", 0), ("n", -1), ("n", 1_000_000), ("n", "2"),
    ("seed", "abc"), ("seed", 1.5), ("seed", 2**64), ("seed", -1),
    ("guidance_scale", "x"), ("true_cfg_scale", "x"),
    ("response_format", "banana"),
    ("output_format", "gif"), ("output_compression", 50), ("quality", "hd"), ("background", "transparent"),
    ("prompt", None), ("prompt", {}), ("prompt", ["a"]), ("prompt", "x" * 40_000),
    ("negative_prompt", 1), ("style", "vivid"), ("no_such_field", 1),
    ("extra_args", {"no_such_argument": 1}), ("extra_args", 1),
    ("extra_args", {"callback_on_step_end": "x"}), ("extra_args", {"max_sequence_length": 10}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), CASES, ids=lambda value: repr(value)[:40])
def test_one_wrong_field(server: Server, field: str, value: Any) -> None:
    steps, failures = server.steps(), server.outcomes()["failed"]
    response = server.post(BASE | {field: value})
    assert response.status_code == 400, response.text[:500]
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None
    assert field == "extra_args" or error["param"] == field
    assert server.steps() == steps
    assert server.outcomes()["failed"] == failures  # the request was refused; nothing failed
    assert server.health() == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("field", ["guidance_scale", "true_cfg_scale"])
def test_numbers_that_json_does_not_have(server: Server, field: str, number: str) -> None:
    response = server.post(f'{{"prompt":"a","{field}":{number}}}'.encode())
    assert response.status_code == 400
    assert error_of(response)["param"] == field


def test_a_missing_prompt(server: Server) -> None:
    response = server.post({name: value for name, value in BASE.items() if name != "prompt"})
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"


def test_an_unknown_model(server: Server) -> None:
    response = server.post(BASE | {"model": "other"})
    assert response.status_code == 404
    assert (error_of(response)["param"], error_of(response)["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    "body",
    [b'{"prompt":', b"[]", b"", b"null", b'"x"', b"\xff", b"[" * 10_000, b'{"prompt":' + b"[" * 10_000 + b"]" * 10_000],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_is_no_object(server: Server, body: bytes) -> None:
    response = server.post(body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize(("method", "url", "status"), [("GET", IMAGES, 405), ("POST", "/v1/images", 404)])
def test_the_router_answers_in_the_same_form(server: Server, method: str, url: str, status: int) -> None:
    response = server.http.request(method, url)
    assert response.status_code == status
    error_of(response)


def test_a_body_over_the_limit_is_answered_while_it_is_sent(server: Server) -> None:
    body = b'{"prompt":"' + b"x" * 5_000_000 + b'"}'
    response = server.post(body)
    assert response.status_code == 413
    assert error_of(response)["code"] == "payload_too_large"


def test_a_chunked_body_over_the_limit(server: Server) -> None:
    with send_raw(server, b"", ["Transfer-Encoding: chunked"]) as connection:
        for _ in range(20):
            connection.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 413")


def test_a_declared_size_over_the_limit_is_answered_before_it_is_sent(server: Server) -> None:
    with send_raw(server, b"", ["Content-Length: 100000000000"]) as connection:
        assert answer(connection).startswith(b"HTTP/1.1 413")


def answer(connection: socket.socket) -> bytes:
    return connection.recv(65536)


def test_what_is_not_http_does_not_hurt(server: Server) -> None:
    for rubbish in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b""):
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(rubbish)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(65536)
    assert server.health() == 200


def test_good_requests_still_work(server: Server) -> None:
    assert server.post(BASE).status_code == 200
    assert server.post(BASE | {"seed": None}).status_code == 200
