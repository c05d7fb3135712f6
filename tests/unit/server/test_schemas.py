"""What GET /openapi.json says can be followed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from fake_omni import FakeOmni, client

from polymux.server.chat_protocol import ChatRequest
from polymux.server.schemas import schema_of


def document() -> Any:
    async def get() -> Any:
        async with client(FakeOmni()) as http:
            return (await http.get("/openapi.json")).json()

    return asyncio.run(get())


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    for child in node if isinstance(node, list) else ():
        yield from references(child)


def test_every_reference_leads_somewhere() -> None:
    whole = document()
    found = list(references(whole))
    assert found
    for reference in found:
        target = whole
        for name in reference.removeprefix("#/").split("/"):
            target = target[name]


def test_a_body_that_a_route_reads_itself_is_described_in_place() -> None:
    schema = schema_of(ChatRequest)
    assert list(references(schema)) == []
    (user, *_) = schema["properties"]["messages"]["items"]["oneOf"]
    assert user["properties"]["role"]["const"] == "user"
    assert user["additionalProperties"] is False
