"""The playground over a server without a model: it speaks the routes that the page uses, and does what a test says.

Pictures are noise of the size that was asked for. What the page sent is kept, for tests to look at.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import fake_media
import uvicorn
from fake_media import Jobs
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from PIL import Image, ImageDraw, ImageFilter

from polymux.server import playground
from polymux.server.state import ServerState
from polymux.server_config import ServerConfig

LIMITS = {
    "max_inference_steps": 100,
    "max_num_outputs": 4,
    "max_generated_image_size": 1024 * 1024,
    "max_num_frames": 1024,
    "max_audio_seconds": 600.0,
    "max_prompt_length": 2000,
}
CAPABILITIES: dict[str, Any] = {
    "family": "fake",
    "pipeline": "FakePipeline",
    "modality": "image",
    "fields": ["guidance_scale", "height", "negative_prompt", "num_inference_steps", "width"],
    "extra_args": [],
    "refused": {"true_cfg_scale": "this checkpoint is distilled"},
    "required": ["prompt"],
    "media": {},
    "size_multiple": 16,
    "frames_multiple": 1,
    "fps": None,
    "sample_rate": None,
    "max_seconds": None,
    "previews": True,
    "merges": True,
    "dtype": "float32",
    "parameters": 123456,
}
EDITS = CAPABILITIES | {
    "fields": [*CAPABILITIES["fields"], "strength"],
    "media": {"image": 2, "mask_image": 1},
}


@dataclass
class Fake:
    """What the server says and does, and what it was sent."""

    capabilities: dict[str, Any] | None = field(default_factory=lambda: dict(CAPABILITIES))
    status: str = "ready"
    api_key: str | None = None
    steps: int = 4
    hold_at: int | None = None  # a generation waits before this step (a job: at this percent), until `go` is set
    step_s: float = 0.0
    error: tuple[int, dict[str, Any]] | None = None  # the next generation is answered with it
    layers: bool = False  # the pictures of an answer are made by one seed
    late_error: dict[str, Any] | None = None  # the next stream ends with it
    go: threading.Event = field(default_factory=threading.Event)
    sent: list[dict[str, Any]] = field(default_factory=list)  # fields; pictures as (name, size)
    left: threading.Event = field(default_factory=threading.Event)  # a client left before its answer was complete
    url: str = ""
    jobs: Jobs = field(default_factory=Jobs)


@contextlib.contextmanager
def serving_fake() -> Iterator[Fake]:
    fake = Fake()
    config = uvicorn.Config(_app(fake), host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield fake
    finally:
        fake.go.set()
        server.should_exit = True
        thread.join()


def _app(fake: Fake) -> FastAPI:
    app = FastAPI()
    app.include_router(playground.routes(ServerState(None, ServerConfig())))  # type: ignore[arg-type]
    app.include_router(fake_media.routes(fake, lambda request: _refusal(fake, request) or _fault(fake, request)))

    @app.get("/health")
    def health() -> Response:
        return JSONResponse({"status": fake.status}, 200 if fake.status == "ready" else 503)

    @app.post("/v1/omni/wakeup")
    def wakeup() -> dict[str, str]:
        fake.status = "ready"
        return {"status": "ready"}

    @app.get("/v1/models")
    def models(request: Request) -> Response:
        if (refusal := _refusal(fake, request)) is not None:
            return refusal
        model = {"id": "fake-model", "object": "model", "limits": LIMITS, "capabilities": fake.capabilities}
        return JSONResponse({"object": "list", "data": [model]})

    @app.post("/v1/images/generations")
    async def generations(request: Request) -> Response:
        return await _create(fake, request, await request.json(), "image_generation")

    @app.post("/v1/images/edits")
    async def edits(request: Request) -> Response:
        form = await request.form()
        body: dict[str, Any] = {name: value for name, value in form.items() if isinstance(value, str)}
        for name in ("image", "image[]", "mask"):
            files = [file for file in form.getlist(name) if not isinstance(file, str)]
            if files:
                body[name] = [(file.filename, Image.open(file.file).size) for file in files]
        numbers = ("seed", "n", "num_inference_steps", "partial_images")
        body |= {name: json.loads(body[name]) for name in (*numbers, "stream", "stream_progress") if name in body}
        return await _create(fake, request, body, "image_edit")

    return app


def _refusal(fake: Fake, request: Request) -> Response | None:
    if fake.api_key is not None and request.headers.get("authorization") != f"Bearer {fake.api_key}":
        return _error(401, {"message": "the API key is missing or wrong", "param": None, "code": "invalid_api_key"})
    return None


def _fault(fake: Fake, request: Request) -> Response | None:
    """What the next generation is answered with, if a test says so."""
    if fake.error is None or request.method != "POST":
        return None
    (status, error), fake.error = fake.error, None
    return _error(status, error)


def _error(status: int, error: dict[str, Any]) -> Response:
    headers = {"retry-after": "7"} if status == 429 else None
    return JSONResponse(
        {"error": {"type": "invalid_request_error", "param": None, "code": "x"} | error}, status, headers
    )


async def _create(fake: Fake, request: Request, body: dict[str, Any], name: str) -> Response:
    fake.sent.append(body)
    if (refusal := _refusal(fake, request)) is not None:
        return refusal
    if (fault := _fault(fake, request)) is not None:
        return fault
    if not body.get("stream"):
        size, seed, count = _size(body), body.get("seed", 7), body.get("n", 1)
        return JSONResponse({"data": [{"b64_json": picture(size, seed + i), "seed": seed + i} for i in range(count)]})
    events = _events(fake, body)
    return StreamingResponse(_wire(fake, events, name), media_type="text/event-stream")


async def _wire(fake: Fake, events: AsyncIterator[dict[str, Any]], name: str) -> AsyncIterator[str]:
    try:
        async for event in events:
            if event["type"] != "error":
                event["type"] = f"{name}.{event['type']}"
            yield f": a comment\n\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n"
    except (asyncio.CancelledError, GeneratorExit):
        fake.left.set()
        raise


async def _events(fake: Fake, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    steps = body.get("num_inference_steps", fake.steps)
    size, seed, count = _size(body), body.get("seed", 2**64 - 9), body.get("n", 1)
    yield {"type": "progress", "phase": "queued", "step": 0, "total_steps": None}
    yield {"type": "progress", "phase": "encode", "step": 0, "total_steps": steps}
    for step in range(1, steps + 1):
        while step == fake.hold_at and not fake.go.is_set():
            await asyncio.sleep(0.02)
        await asyncio.sleep(fake.step_s)
        yield {"type": "progress", "phase": "denoise", "step": step, "total_steps": steps}
        if body.get("partial_images") and step == (steps + 1) // 2:
            preview = picture(size, seed, blur=12)
            index = {"index": 0, "partial_image_index": 0}
            yield {"type": "partial_image", "b64_json": preview, "output_format": "png"} | index
    if fake.late_error is not None:
        error, fake.late_error = fake.late_error, None
        yield {"type": "error", "error": {"type": "server_error", "param": None, "code": "x"} | error}
        return
    for i in range(count):
        data, told = picture(size, seed + i), f"{size[0]}x{size[1]}"
        done = {"type": "completed", "b64_json": data, "size": told, "output_format": "png"}
        yield done | {"index": i, "seed": None if fake.layers else seed + i}


def _size(body: dict[str, Any]) -> tuple[int, int]:
    size = body.get("size", "auto")
    width, height = (512, 512) if size == "auto" else map(int, size.split("x"))
    return width, height


def picture(size: tuple[int, int], seed: int, blur: int = 0) -> str:
    """A landscape whose colours follow from the seed."""
    hue = seed * 47 % 255
    image = Image.new("HSV", size, (hue, 90, 235))
    draw = ImageDraw.Draw(image)
    width, height = size
    draw.ellipse((width * 0.6, height * 0.15, width * 0.8, height * 0.15 + width * 0.2), (hue, 30, 255))
    for i in range(4):
        top = height * (0.45 + 0.13 * i)
        hills = [(x * width / 8, top + (seed * (x + 3) * (i + 2) % 37) / 37 * height * 0.15) for x in range(9)]
        draw.polygon([*hills, (width, height), (0, height)], ((hue + 20 * i) % 255, 110 + 20 * i, 190 - 40 * i))
    file = io.BytesIO()
    image.convert("RGB").filter(ImageFilter.GaussianBlur(blur)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
