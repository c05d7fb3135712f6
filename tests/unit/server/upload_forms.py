"""Pictures and forms for the tests of uploads."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import httpx
import msgspec
from fake_omni import CAPABILITIES, FakeOmni, client
from PIL import Image

EDITS = "/v1/images/edits"
VARIATIONS = "/v1/images/variations"
BASE = {"prompt": "a", "seed": "1"}

EDITOR = msgspec.structs.replace(
    CAPABILITIES,
    arguments=(*CAPABILITIES.arguments, "image", "strength", "sigmas"),
    required=("image", "prompt"),
    media={"image": 2},
)


def picture(mode: str = "RGB", size: tuple[int, int] = (50, 35)) -> Image.Image:
    return Image.effect_noise(size, 90).convert("RGB").convert(mode)


def file_of(image: Image.Image, format: str = "PNG", **kwargs: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, format, **kwargs)
    return target.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def editor(**changes: Any) -> FakeOmni:
    """A stand-in for a model that edits up to two pictures."""
    omni = FakeOmni()
    omni.capabilities = msgspec.structs.replace(EDITOR, **changes)
    return omni


def send(omni: FakeOmni, url: str = EDITS, server: dict[str, Any] | None = None, **kwargs: Any) -> httpx.Response:
    async def sent() -> httpx.Response:
        async with client(omni, **(server or {})) as http:
            return await http.post(url, **kwargs)

    return asyncio.run(sent())


def form(
    *files: tuple[str, bytes | str], omni: FakeOmni | None = None, url: str = EDITS, **fields: str | list[str]
) -> httpx.Response:
    """A form with uploads: (name of the field, content)."""
    uploads = [(name, ("a.png", content, "image/png")) for name, content in files]
    return send(omni or editor(), url, data=BASE | fields, files=uploads)
