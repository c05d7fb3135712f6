"""HTTP requests are counted by what the server knows beforehand, never by what a client makes up."""

from __future__ import annotations

import asyncio
from typing import Any

from fake_omni import FakeOmni, client
from prometheus_client.parser import text_string_to_metric_families


async def counted(omni: FakeOmni, *requests: tuple[str, str, Any]) -> dict[tuple[str, str, str], float]:
    async with client(omni) as http:
        for method, url, body in requests:
            await http.request(method, url, json=body)
        text = (await http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert "polymux:requests" in families, "the engine's are there too"
    samples = [s for s in families["polymux:http_requests"].samples if s.name.endswith("_total")]
    return {(s.labels["method"], s.labels["route"], s.labels["status"]): s.value for s in samples}


def test_requests_by_route_and_status() -> None:
    body = {"prompt": "a secret", "size": "32x32"}
    got = asyncio.run(
        counted(
            FakeOmni(),
            ("POST", "/v1/images/generations", body),
            ("POST", "/v1/images/generations", body),
            ("POST", "/v1/images/generations", {"prompt": 1}),
            ("GET", "/v1/models/fake/model", None),
            ("GET", "/made/up?secret", None),
            ("BREW", "/health", None),
        )
    )
    assert got == {
        ("POST", "/v1/images/generations", "200"): 2,
        ("POST", "/v1/images/generations", "400"): 1,
        ("GET", "/v1/models/{name:path}", "200"): 1,
        ("GET", "none", "404"): 1,
        ("other", "/health", "405"): 1,
    }


def test_two_servers_in_one_process_count_for_themselves() -> None:
    one = asyncio.run(counted(FakeOmni(), ("GET", "/health", None)))
    two = asyncio.run(counted(FakeOmni()))
    assert (one, two) == ({("GET", "/health", "200"): 1}, {})
