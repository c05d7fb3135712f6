"""What tests of chats send, and what they look for in the answers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

import httpx
import msgspec
from fake_omni import CAPABILITIES, FakeOmni, client
from PIL import Image

from polymux.request import ImageData

URL = "/v1/chat/completions"


def data_url(width: int, height: int = 16, colour: str = "red") -> str:
    target = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(target, "PNG")
    return "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if content and isinstance(content[0], str) else list(content)}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def able(**changes: Any) -> FakeOmni:
    omni = FakeOmni()
    omni.capabilities = msgspec.structs.replace(CAPABILITIES, **changes)
    return omni


def editor(count: int = 1, needed: bool = True, **changes: Any) -> FakeOmni:
    """A model that edits up to `count` pictures."""
    required = ("prompt", "image") if needed else ("prompt",)
    return able(media={"image": count}, required=required, **changes)


def post(body: Any, omni: FakeOmni | None = None, **server: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client(omni or FakeOmni(), **server) as http:
            return await http.post(URL, json=body)

    return asyncio.run(send())


def ask(*messages: Any, omni: FakeOmni | None = None, **fields: Any) -> httpx.Response:
    return post({"messages": list(messages), "seed": 1} | fields, omni)


def request_for(*messages: Any, omni: FakeOmni | None = None, **fields: Any) -> Any:
    omni = omni or FakeOmni()
    response = ask(*messages, omni=omni, **fields)
    assert response.status_code == 200, response.text
    return omni.requests[-1]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text[:500]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def decoded(part: dict[str, Any]) -> Image.Image:
    head, _, data = part["image_url"]["url"].partition(",")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert head == f"data:image/{str(image.format).lower()};base64"
    return image


def widths(request: Any, name: str = "image") -> list[int]:
    return [item.width for item in request.media.get(name, []) if isinstance(item, ImageData)]


def events_of(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text[:500]
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
