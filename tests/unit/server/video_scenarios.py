"""What the tests of video jobs have in common: a scenario runs against an application without a model."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
from fake_video_omni import FakeVideoOmni, serving

VIDEOS = "/v1/videos"
Scenario = Callable[[httpx.AsyncClient, FakeVideoOmni], Awaitable[None]]


def run(scenario: Scenario, folder: Path, omni: FakeVideoOmni | None = None, **server_args: Any) -> None:
    async def all_of_it() -> None:
        used = omni or FakeVideoOmni()
        async with serving(used, folder, **server_args) as http:
            await scenario(http, used)

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


async def create(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post(VIDEOS, json={"prompt": "a"} | fields)
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


async def get(http: httpx.AsyncClient, video: dict[str, Any]) -> dict[str, Any]:
    response = await http.get(f"{VIDEOS}/{video['id']}")
    found: dict[str, Any] = response.json()
    return found


async def ended(http: httpx.AsyncClient, video: dict[str, Any]) -> dict[str, Any]:
    seen = [video]
    while seen[-1]["status"] not in ("completed", "failed"):
        await asyncio.sleep(0.005)
        seen.append(await get(http, video))
    progress = [state["progress"] for state in seen]
    assert progress == sorted(progress)
    return seen[-1]


async def reaches(omni: FakeVideoOmni, video: dict[str, Any], gate: str) -> None:
    while omni.at.get(video["id"]) != gate:
        await asyncio.sleep(0.005)


def files(folder: Path) -> set[str]:
    return {path.name for part in ("files", "partial") for path in (folder / part).iterdir()}


def decoded(content: bytes) -> tuple[list[np.ndarray[Any, Any]], float, int]:
    """Frames, frames per second, and samples of sound."""
    with av.open(io.BytesIO(content)) as container:
        rate = container.streams.video[0].average_rate
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    samples = 0
    with av.open(io.BytesIO(content)) as container:
        if container.streams.audio:
            samples = sum(frame.samples for frame in container.decode(audio=0))
    return frames, float(rate or 0), samples
