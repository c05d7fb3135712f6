"""The real routes over a generator without a model: what it paints follows from everything that it is asked."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import numpy as np
import uvicorn
from PIL import Image

from polymux.config import EngineConfig
from polymux.knobs import build
from polymux.metrics import Metrics
from polymux.omni_output import OmniPreview, OmniRequestOutput
from polymux.prompts import Prompt, request_of
from polymux.request import Capabilities, OmniDiffusionSamplingParams, Progress, Request
from polymux.server.run import http_config
from polymux.server.state import ServerState
from polymux.server_config import ServerConfig
from polymux.validation import validate

ARGUMENTS = ("prompt", "negative_prompt", "height", "width", "num_inference_steps", "strength", "image", "mask_image")


class Painter:
    """Stands in for AsyncOmni."""

    status = "ready"
    capabilities = Capabilities(
        family="painter",
        pipeline="PainterPipeline",
        modality="image",
        arguments=ARGUMENTS,
        required=("prompt", "image", "mask_image"),
        media={"image": 2, "mask_image": 1},
        size_multiple=8,
        previews=True,
    )

    def __init__(self) -> None:
        self.config = EngineConfig.from_flat(model="painter")
        self.metrics = Metrics("painter")

    async def health(self) -> None:
        pass

    async def sleep(self, level: int) -> int:
        return 0

    async def wake_up(self) -> None:
        pass

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: OmniDiffusionSamplingParams,
        *,
        request_id: str | None = None,
        partial_images: int = 0,
        session_id: str | None = None,
    ) -> AsyncGenerator[Progress | OmniPreview | OmniRequestOutput]:
        assert request_id is not None
        request = request_of(prompt, sampling_params, request_id, partial_images)
        validate(request, self.capabilities, self.config.limits)
        yield Progress(request_id, "denoise", 1, 2)
        seed = 2**64 - 9 if sampling_params.seed is None else sampling_params.seed
        for i in range(partial_images):
            yield OmniPreview(request_id=request_id, index=0, step=i, images=[painted(request, seed)])
        yield self.made(request, seed)

    def made(self, request: Request, seed: int) -> OmniRequestOutput:
        return OmniRequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            modality="image",
            images=[painted(request, seed)],
            seeds=[seed],
        )


class Singer(Painter):
    """Makes sound, too."""

    capabilities = Capabilities(
        family="singer",
        pipeline="SingerPipeline",
        modality="audio",
        arguments=("prompt", "negative_prompt", "num_inference_steps", "seconds", "src_audio"),
        required=("prompt",),
        media={"src_audio": 1},
        sample_rate=8000,
        max_seconds=10.0,
    )

    def made(self, request: Request, seed: int) -> OmniRequestOutput:
        return OmniRequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            modality="audio",
            audio=[sung(request, seed)],
            sample_rate=8000,
            seeds=[seed],
        )


def sung(request: Request, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    params = request.params
    asked = (seed, request.prompt, params.negative_prompt, params.num_inference_steps, repr(request.media))
    pitch = hashlib.sha256(repr(asked).encode()).digest()[0] + 200
    time = np.arange(int((params.seconds or 1) * 8000), dtype=np.float32) / 8000
    return np.sin(2 * np.pi * pitch * time)[None].astype(np.float32) / 2


def painted(request: Request, seed: int) -> Image.Image:
    params = request.params
    asked = (seed, request.prompt, params.negative_prompt, params.num_inference_steps, params.strength, request.media)
    colour = hashlib.sha256(repr(asked).encode()).digest()
    return Image.new("RGB", (params.width or 64, params.height or 64), (colour[0], colour[1], colour[2]))


@contextlib.contextmanager
def serving_painter(artist: Painter | None = None, **server_args: Any) -> Iterator[str]:
    """The URL."""
    server = uvicorn.Server(http_config(ServerState(artist or Painter(), build(ServerConfig, server_args))))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
