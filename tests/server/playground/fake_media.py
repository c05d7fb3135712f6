"""The routes for videos and sound of the server without a model. Files are real; a job goes on when it is asked for."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from polymux.media.audio import MEDIA_TYPES as AUDIO_TYPES
from polymux.media.audio import AudioFormat, encode_audio
from polymux.media.video import MEDIA_TYPES, encode_video
from polymux.media.video_track import VideoFormat

VIDEO: dict[str, Any] = {
    "modality": "video",
    "frame_interpolation": False,
    "fields": ["guidance_scale", "height", "negative_prompt", "num_frames", "num_inference_steps", "width"],
    "refused": {},
    "previews": False,
    "frames_multiple": 4,
    "fps": 16.0,
}
ANIMATE = VIDEO | {
    "fields": [*VIDEO["fields"], "strength"],
    "media": {"image": 1, "last_image": 1, "reference_images": 2, "video": 1},
}
SOUND: dict[str, Any] = {
    "modality": "audio",
    "fields": ["guidance_scale", "negative_prompt", "num_inference_steps", "seconds"],
    "refused": {},
    "previews": False,
    "sample_rate": 16000,
    "max_seconds": 47.5,
}


@dataclass
class Jobs:
    """The videos, and what was asked about them."""

    videos: dict[str, dict[str, Any]] = field(default_factory=dict)  # the oldest first
    deleted: list[str] = field(default_factory=list)
    polls: int = 0
    fetched: list[str] = field(default_factory=list)
    percents: tuple[int, ...] = (0, 40, 87, 95)  # one after the other; `hold_at` stops at the first that is not below
    trouble: list[Response] = field(default_factory=list)  # the next polls are answered with them
    ends_with: dict[str, Any] | None = None  # the error that every job fails with


def routes(fake: Any, checked: Callable[[Request], Response | None]) -> APIRouter:
    """`fake` is the Fake of fake_server.py; `checked` gives the refusal of a request, if there is one."""
    router = APIRouter()
    _add_files(router, fake, checked)
    _add_jobs(router, fake, checked)
    return router


def _add_files(router: APIRouter, fake: Any, checked: Callable[[Request], Response | None]) -> None:
    @router.post("/v1/audio/generate")
    async def sound(request: Request) -> Response:
        body = await _read(fake, request)
        if (refusal := checked(request)) is not None:
            return refusal
        while fake.hold_at is not None and not fake.go.is_set():
            if await request.is_disconnected():
                fake.left.set()
            await asyncio.sleep(0.02)
        seconds, format = body.get("seconds", 0.5), body.get("response_format", "wav")
        headers = {"x-seed": str(body.get("seed", 2**64 - 9)), "x-duration": f"{seconds:.6f}"}
        headers |= {"x-sample-rate": "16000", "x-channels": "1", "x-clipped-samples": "0"}
        return Response(sound_file(seconds, format), media_type=AUDIO_TYPES[format], headers=headers)

    @router.post("/v1/videos/sync")
    async def video(request: Request) -> Response:
        body = await _read(fake, request)
        if (refusal := checked(request)) is not None:
            return refusal
        job = _job(body)
        return Response(_content(job), media_type=MEDIA_TYPES[job["output_format"]])

    @router.post("/v1/videos")
    async def create(request: Request) -> Response:
        body = await _read(fake, request)
        if (refusal := checked(request)) is not None:
            return refusal
        while fake.hold_at == 0 and not fake.go.is_set():
            await asyncio.sleep(0.02)
        job = _job(body)
        fake.jobs.videos[job["id"]] = job
        return JSONResponse(job)


def _add_jobs(router: APIRouter, fake: Any, checked: Callable[[Request], Response | None]) -> None:
    @router.get("/v1/videos")
    def listed(request: Request) -> Response:
        refusal = checked(request)
        return refusal or JSONResponse(
            {"object": "list", "data": [*fake.jobs.videos.values()][::-1], "has_more": False}
        )

    @router.get("/v1/videos/{video_id}")
    def state(request: Request, video_id: str) -> Response:
        fake.jobs.polls += 1
        if (refusal := checked(request)) is not None:
            return refusal
        if fake.jobs.trouble:
            return fake.jobs.trouble.pop(0)
        job = fake.jobs.videos[video_id]
        _go_on(fake, job)
        return JSONResponse(job)

    @router.get("/v1/videos/{video_id}/content")
    def content(request: Request, video_id: str) -> Response:
        if (refusal := checked(request)) is not None:
            return refusal
        fake.jobs.fetched.append(video_id)
        job = fake.jobs.videos[video_id]
        return Response(_content(job), media_type=MEDIA_TYPES[job["output_format"]])

    @router.delete("/v1/videos/{video_id}")
    def delete(request: Request, video_id: str) -> Response:
        if (refusal := checked(request)) is not None:
            return refusal
        del fake.jobs.videos[video_id]
        fake.jobs.deleted.append(video_id)
        return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": True})


async def _read(fake: Any, request: Request) -> dict[str, Any]:
    """The body; files as the bytes that their data: URLs hold."""
    body: dict[str, Any] = json.loads(await request.body())
    for name, urls in body.get("media", {}).items():
        body["media"][name] = [base64.b64decode(url.partition(";base64,")[2]) for url in urls]
    fake.sent.append(body)
    return body


def _job(body: dict[str, Any]) -> dict[str, Any]:
    fps = body.get("fps", 16.0)
    frames = body.get("num_frames") or 1 + 4 * max(1, round(body.get("seconds", 0.5) * fps / 4))
    size = body.get("size", "auto")
    return {
        "id": f"video_{uuid.uuid4().hex}",
        "object": "video",
        "model": "fake-model",
        "status": "queued",
        "progress": 0,
        "created_at": 1_800_000_000,
        "completed_at": None,
        "expires_at": None,
        "prompt": body.get("prompt"),
        "seconds": f"{frames / fps:g}",
        "size": "96x64" if size == "auto" else size,
        "fps": fps,
        "num_frames": frames,
        "seed": body.get("seed", 2**64 - 9),
        "output_format": body.get("output_format", "mp4"),
        "error": None,
    }


def add_video(fake: Any, prompt: str) -> str:
    """One that the server has kept from before. Its id."""
    job = _job({"prompt": prompt}) | {"status": "completed", "progress": 100, "completed_at": 1_800_000_012}
    fake.jobs.videos[job["id"]] = job | {"expires_at": 1_800_086_412}
    return str(job["id"])


def _go_on(fake: Any, job: dict[str, Any]) -> None:
    if job["status"] in ("completed", "failed"):
        return
    held = fake.hold_at is not None and job["progress"] >= fake.hold_at and not fake.go.is_set()
    if job["status"] == "queued":
        job["status"] = "in_progress"
    elif held:
        pass
    elif (later := [percent for percent in fake.jobs.percents if percent > job["progress"]]) != []:
        job["progress"] = later[0]
    elif fake.jobs.ends_with is not None:
        job |= {"status": "failed", "error": fake.jobs.ends_with}
    else:
        job |= {"status": "completed", "progress": 100, "completed_at": 1_800_000_012, "expires_at": 1_800_086_412}


def _content(job: dict[str, Any]) -> bytes:
    width, height = map(int, job["size"].split("x"))
    return video_file(width, height, job["num_frames"], job["fps"], job["output_format"])


@cache
def video_file(width: int, height: int, frames: int, fps: float, format: VideoFormat) -> bytes:
    """A bar that moves over a gradient."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    pictures = np.zeros((frames, height, width, 3), np.uint8)
    for i, picture in enumerate(pictures):
        bar = np.exp(-(((x - (i + 0.5) / frames) * 8) ** 2))
        picture[...] = np.stack([255 * bar, 90 + 120 * y, 120 + 100 * x], -1).clip(0, 255)
    file = io.BytesIO()
    encode_video(pictures, fps, file, format=format)
    return file.getvalue()


@cache
def sound_file(seconds: float, format: AudioFormat) -> bytes:
    time = np.arange(int(seconds * 16000), dtype=np.float32) / 16000
    return encode_audio(np.sin(2 * np.pi * 440 * time)[None] / 2, 16000, format)
