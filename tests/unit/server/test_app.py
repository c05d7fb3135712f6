"""The routes for watching and listing, errors of the router, request ids, and the log."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import subprocess
import sys
from typing import Any

import httpx
import msgspec
import pytest
from fake_omni import CAPABILITIES, FakeOmni, client
from prometheus_client.parser import text_string_to_metric_families

from polymux.config import LimitsConfig
from polymux.orchestrator.orchestrator import Status
from polymux.server_config import HttpConfig, MediaConfig


def call(method: str, url: str, omni: FakeOmni | None = None, server: Any = None, **kwargs: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client(omni or FakeOmni(), **(server or {})) as http:
            return await http.request(method, url, **kwargs)

    return asyncio.run(send())


def test_health_is_200_only_when_ready() -> None:
    response = call("GET", "/health")
    assert (response.status_code, response.json()) == (200, {"status": "ready"})


@pytest.mark.parametrize("path", ["/health", "/ready"])
@pytest.mark.parametrize("status", ["loading", "asleep", "draining", "dead"])
def test_health_says_why_not(status: Status, path: str) -> None:
    omni = FakeOmni()
    omni.status = status
    response = call("GET", path, omni)
    assert response.status_code == call("HEAD", path, omni).status_code == 503
    assert response.json()["status"] == status
    assert status in response.json()["error"]["message"]


@pytest.mark.parametrize("status", ["loading", "ready", "asleep", "draining", "dead"])
def test_the_process_lives_whatever_its_model_does(status: Status) -> None:
    omni = FakeOmni()
    omni.status = status
    response = call("GET", "/live", omni)
    assert (response.status_code, response.json()) == (200, {"status": "live"})


@pytest.mark.parametrize("status", ["loading", "ready", "draining", "dead"])
def test_metrics_answer_in_every_state(status: Status) -> None:
    omni = FakeOmni()
    omni.status = status
    response = call("GET", "/metrics", omni)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families["polymux:requests"].type == "counter"


def test_models_lists_the_one_model_with_its_limits_and_abilities() -> None:
    listing = call("GET", "/v1/models", FakeOmni(max_inference_steps=33)).json()
    assert listing["object"] == "list"
    (model,) = listing["data"]
    assert (model["id"], model["object"], model["ready"]) == ("fake/model", "model", True)
    assert model["limits"]["max_inference_steps"] == 33
    can = model["capabilities"]
    assert can["size_multiple"] == 16
    assert can["fields"] == ["guidance_scale", "height", "negative_prompt", "num_inference_steps", "width"]
    assert can["extra_args"] == ["eta"]


def test_models_lists_no_argument_that_would_be_refused() -> None:
    omni = FakeOmni()
    arguments = (*CAPABILITIES.arguments, "output_type", "strength")
    omni.capabilities = msgspec.structs.replace(CAPABILITIES, arguments=arguments)
    (model,) = call("GET", "/v1/models", omni).json()["data"]
    names = model["capabilities"]["extra_args"]
    assert names == ["eta"]
    for name in names:
        body = {"prompt": "a", "extra_args": {name: 0.5}}
        assert call("POST", "/v1/images/generations", omni, json=body).status_code == 200


LIMITS = (LimitsConfig, HttpConfig, MediaConfig)


@pytest.mark.parametrize(
    ("group", "name"),
    [(g, f.name) for g in LIMITS for f in dataclasses.fields(g) if re.match("max_|.*timeout", f.name)],
)
def test_models_tells_every_limit(group: type, name: str) -> None:
    value = {"max_json_depth": 99, "max_media_redirects": 7}.get(name, 1234)
    engine, server = ({name: value}, {}) if group is LimitsConfig else ({}, {name: value})
    (model,) = call("GET", "/v1/models", FakeOmni(**engine), server=server).json()["data"]
    assert model["limits"][name] == value


def test_what_would_be_ignored_is_not_offered() -> None:
    omni = FakeOmni()
    omni.capabilities = msgspec.structs.replace(CAPABILITIES, refused={"guidance_scale": "distilled"})
    can = call("GET", "/v1/models", omni).json()["data"][0]["capabilities"]
    assert "guidance_scale" not in can["fields"]
    assert can["refused"] == {"guidance_scale": "distilled"}


def test_models_while_loading() -> None:
    omni = FakeOmni()
    omni.status, omni.capabilities = "loading", None
    (model,) = call("GET", "/v1/models", omni).json()["data"]
    assert (model["ready"], model["capabilities"]) == (False, None)


@pytest.mark.parametrize(("name", "status"), [("fake/model", 200), ("other", 404), ("", 404)])
def test_one_model(name: str, status: int) -> None:
    response = call("GET", f"/v1/models/{name}", follow_redirects=False)
    assert response.status_code == status
    assert response.json()["id"] == name if status == 200 else "error" in response.json()


@pytest.mark.parametrize("asked", ["nice-name", "fake/model", None])
def test_served_model_name_and_the_model_as_given_both_work(asked: str | None) -> None:
    body = {"prompt": "a", "model": asked}
    server = {"served_model_name": "nice-name"}
    assert call("POST", "/v1/images/generations", server=server, json=body).status_code == 200
    assert call("GET", "/v1/models", server=server).json()["data"][0]["id"] == "nice-name"


@pytest.mark.parametrize(
    ("method", "url", "status", "code"),
    [
        ("GET", "/playground", 404, "unknown_url"),
        ("POST", "/v1/images/generation", 404, "unknown_url"),
        ("GET", "/docs", 404, "unknown_url"),
        ("GET", "/v1/images/generations", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
    ],
)
def test_errors_of_the_router_have_the_same_body(method: str, url: str, status: int, code: str) -> None:
    response = call(method, url)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("given", ["abc-123", "a.b:c_d", "x" * 128])
def test_a_sane_request_id_comes_back(given: str) -> None:
    assert call("GET", "/health", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\tb", "{}", "../x"])
def test_any_other_request_id_is_replaced(given: str) -> None:
    response = call("GET", "/health", headers={"x-request-id": given})
    assert response.headers["x-request-id"] not in ("", given)


def test_one_log_line_per_request_without_prompt_or_media(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"prompt": "SECRET-PROMPT", "negative_prompt": "", "user": "some one\n"}
    call("POST", "/v1/images/generations", json=body, headers={"x-request-id": "id-1"})
    call("POST", "/v1/images/generations", json={"prompt": {"SECRET-PROMPT": 1}}, headers={"x-request-id": "id-2"})
    lines = [r.getMessage() for r in caplog.records if r.name == "polymux.server"]
    assert len(lines) == 2
    assert lines[0].startswith("id-1 POST /v1/images/generations 200 ")
    assert lines[0].endswith("s user=some%20one%0A")
    assert lines[1].startswith("id-2 POST /v1/images/generations 400 ")
    assert "SECRET-PROMPT" not in caplog.text


def test_a_log_line_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    call("GET", "/x%0Aforged")
    assert "\n" not in caplog.records[-1].getMessage()


def test_an_unexpected_exception_is_in_the_log_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    omni = FakeOmni()
    omni.fails_with = ZeroDivisionError("boom")
    call("POST", "/v1/images/generations", omni, json={"prompt": "a"}, headers={"x-request-id": "id-3"})
    record = next(r for r in caplog.records if r.exc_info)
    assert "id-3" in record.getMessage()


def test_the_schema_describes_the_body() -> None:
    schema = call("GET", "/openapi.json").json()
    operation = schema["paths"]["/v1/images/generations"]["post"]
    properties = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"prompt", "size", "seed", "output_format", "extra_args"} <= set(properties)
    assert {"200", "400", "404", "413", "429", "503"} <= set(operation["responses"])


def test_the_api_process_imports_no_torch() -> None:
    code = (
        "import sys, polymux.server.run, polymux.cli.main, polymux.cli.serve, polymux.server.app; "
        "print([m for m in ('torch', 'diffusers', 'transformers', 'accelerate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
