"""Keys on every route but those that need none, and pages of other origins."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_omni import FakeOmni, client
from fastapi.routing import APIRoute

from polymux.config import api_keys, stage_environment
from polymux.errors import ConfigError
from polymux.knobs import build
from polymux.server import access
from polymux.server.app import build_api
from polymux.server.state import ServerState
from polymux.server_config import AccessConfig, ServerConfig

KEY = "sk-SECRET-1"
URL = "/v1/images/generations"
BEARER = {"authorization": f"Bearer {KEY}"}


def call(method: str, url: str, headers: dict[str, str] | None = None, **server: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client(FakeOmni(), **server) as http:
            body = {"prompt": "a"} if method == "POST" else None
            return await http.request(method, url, headers=headers, json=body)

    return asyncio.run(send())


def all_routes() -> list[tuple[str, str]]:
    routes = [r for r in build_api(ServerState(FakeOmni(), ServerConfig())).routes if isinstance(r, APIRoute)]
    pairs = [(method, route.path.replace("{name:path}", "x")) for route in routes for method in route.methods]
    return [*pairs, ("GET", "/openapi.json"), ("GET", "/no/such/route")]


@pytest.mark.parametrize(("method", "path"), all_routes())
def test_every_route_but_the_open_ones_needs_the_key(method: str, path: str) -> None:
    response = call(method, path, api_key=(KEY,))
    assert (response.status_code == 401) == (path not in access.OPEN and not path.startswith(access.OPEN_FOLDERS))
    if response.status_code == 401 and method != "HEAD":
        assert response.headers["www-authenticate"] == "Bearer"
        assert "x-request-id" in response.headers
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert call(method, path, BEARER, api_key=(KEY,)).status_code != 401


@pytest.mark.parametrize(
    "header",
    [
        "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY} x",
        f"Bearer {KEY.lower()}", "Bearer é", f"Token {KEY}",
    ],
)  # fmt: skip
def test_a_wrong_key(header: str) -> None:
    headers: Any = [(b"authorization", header.encode("latin-1"))]
    response = call("GET", "/v1/models", headers, api_key=(KEY,))
    assert response.status_code == 401
    assert "SECRET" not in response.text


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY}", "Bearer other"])
def test_any_of_the_keys_will_do(header: str) -> None:
    assert call("GET", "/v1/models", {"authorization": header}, api_key=("other", KEY)).status_code == 200


def test_the_open_paths_are_open_for_reading_only() -> None:
    assert call("POST", "/health", api_key=(KEY,)).status_code == 401
    assert call("GET", "/health/", api_key=(KEY,)).status_code == 401


def test_metrics_may_be_opened() -> None:
    assert call("GET", "/metrics", api_key=(KEY,)).status_code == 401
    assert call("GET", "/metrics", api_key=(KEY,), metrics_without_api_key=True).status_code == 200


def test_keys_come_from_flags_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("c\n\n d \n")
    monkeypatch.setenv("POLYMUX_API_KEY", "e,f")
    config = AccessConfig(api_key=("a,b",), api_key_file=str(file))
    assert api_keys(config) == ("a", "b", "c", "d", "e", "f")
    assert "POLYMUX_API_KEY" not in stage_environment()


@pytest.mark.parametrize(
    ("values", "environment"),
    [
        ({"api_key": ("",)}, None), ({"api_key": ("a b",)}, None), ({"api_key": ("é",)}, None),
        ({"api_key": ("a,,b",)}, None), ({"api_key_file": "/no/such/file"}, None),
        ({"api_key_file": "/dev/null"}, None),
        ({}, ""), ({}, "a\nb"),
    ],
)  # fmt: skip
def test_a_key_that_would_protect_nothing_is_refused(
    values: dict[str, Any], environment: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment is not None:
        monkeypatch.setenv("POLYMUX_API_KEY", environment)
    with pytest.raises(ConfigError):
        call("GET", "/health", **values)


def test_keys_are_in_no_log_no_repr_no_error_and_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for header in (BEARER, {"authorization": f"Bearer x{KEY}"}):
        for url in ("/v1/models", "/metrics", "/openapi.json"):
            assert "SECRET" not in call("GET", url, header, api_key=(KEY,), log_requests=True).text
        call("POST", URL, header, api_key=(KEY,), log_requests=True)
    assert "SECRET" not in caplog.text
    assert "SECRET" not in repr(build(ServerConfig, {"api_key": (KEY,)}))
    with pytest.raises(ConfigError) as caught:
        build(ServerConfig, {"api_key": [KEY, 1]})
    assert "SECRET" not in caught.value.message


OWN = ["http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000", "https://10.0.0.7", "http://my-host"]


@pytest.mark.parametrize("origin", OWN)
def test_a_page_of_the_server_itself_may_ask(origin: str) -> None:
    headers = {"origin": origin, "host": origin.partition("://")[2]}
    assert call("POST", URL, headers, host="my-host").status_code == 200


FOREIGN = {
    "elsewhere": ("https://evil.example", "127.0.0.1:8000"),
    "a name that leads here": ("http://evil.example:8000", "evil.example:8000"),
    "another port": ("http://127.0.0.1:3000", "127.0.0.1:8000"),
    "a sandbox": ("null", "127.0.0.1:8000"),
    "a file": ("file://", "127.0.0.1:8000"),
    "nothing": ("", "127.0.0.1:8000"),
    "a bad address": ("http://[::1", "127.0.0.1:8000"),
    "a user": ("http://127.0.0.1:8000@evil.example", "127.0.0.1:8000"),
}


@pytest.mark.parametrize(("origin", "host"), FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("url", [URL, "/v1/omni/sleep", "/no/such/route"])
def test_a_page_from_elsewhere_may_not_change_anything(url: str, origin: str, host: str) -> None:
    response = call("POST", url, {"origin": origin, "host": host, "content-type": "text/plain"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden_origin")
    assert "access-control-allow-origin" not in response.headers


def test_a_key_protects_too() -> None:
    headers = {"origin": "https://evil.example"}
    assert call("POST", URL, headers, api_key=(KEY,)).status_code == 401
    assert call("POST", URL, headers | BEARER, api_key=(KEY,)).status_code == 200


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def test_cors_is_off_by_default() -> None:
    response = call("OPTIONS", URL, {"origin": "https://a.example"} | PREFLIGHT)
    assert response.status_code == 405
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("allowed", ["https://a.example", "*"])
def test_an_allowed_origin(allowed: str) -> None:
    server: dict[str, Any] = dict(cors_allow_origins=(allowed,), api_key=(KEY,))
    origin = {"origin": "https://a.example"}
    asked = call("OPTIONS", URL, origin | PREFLIGHT, **server)  # browsers send no key with it
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == allowed
    assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
    for headers, status in ((origin | BEARER, 200), (origin, 401)):
        response = call("POST", URL, headers, **server)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == allowed  # else the page would not see the error
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in response.headers


def test_an_allowed_origin_needs_no_key_where_there_is_none() -> None:
    server: dict[str, Any] = dict(cors_allow_origins=("https://a.example",))
    assert call("POST", URL, {"origin": "https://a.example"}, **server).status_code == 200
    assert call("POST", URL, {"origin": "https://b.example"}, **server).status_code == 403


def test_a_preflight_that_is_refused_has_the_usual_body() -> None:
    response = call(
        "OPTIONS", URL, {"origin": "https://b.example"} | PREFLIGHT, cors_allow_origins=("https://a.example",)
    )
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden_origin")


@pytest.mark.parametrize(
    "origin", ["a.example", "https://a.example/", "https://A.example", "https://*.a.example/x", ""]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AccessConfig(cors_allow_origins=(origin,))
    assert caught.value.param == "cors_allow_origins"
