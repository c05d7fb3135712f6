"""A stand-in for AsyncOmni with a model that makes video: its frames come in chunks, when a test lets them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fake_omni import FakeOmni

from polymux.errors import NotReadyError, RequestAbortedError
from polymux.knobs import build
from polymux.media.wire import to_wire
from polymux.omni_output import OmniRequestOutput
from polymux.profile import ComponentTime, Profile, StepTime
from polymux.prompts import Prompt, request_of
from polymux.request import ArrayData, Capabilities, OmniDiffusionSamplingParams, OutputChunk, Progress, Request
from polymux.server.app import build_app
from polymux.server.state import ServerState
from polymux.server_config import ServerConfig
from polymux.validation import validate

CAPABILITIES = Capabilities(
    family="fake",
    pipeline="FakeVideoPipeline",
    modality="video",
    lora=True,
    arguments=("prompt", "height", "width", "num_frames", "num_inference_steps", "guidance_scale", "strength"),
    required=("prompt",),
    media={"image": 1, "last_image": 1, "reference_images": 3, "video": 1, "audio": 1, "mask": 1},
    size_multiple=16,
    frames_multiple=4,
    defaults={"height": 32, "width": 48, "num_frames": 9},
    fps=8.0,
    sample_rate=16000,
)
STEPS = 4
PROFILE = Profile(
    3.0, 0.5, 2.0, 0.25, 0.25, [ComponentTime("t", "denoise", 1, 2.0, 1.0)], [StepTime(0, 1, 2, 2.0, 1.0)]
)


class FakeVideoOmni(FakeOmni):
    """`gates`: a request waits at "queued", "denoise" (half of it), and "frames" (all but the last chunk) until the
    gate is open; all are, unless a test closes one."""

    def __init__(self, sound: bool = False, **engine_args: Any) -> None:
        super().__init__(**engine_args)
        self.capabilities = CAPABILITIES
        self.sound = sound
        self.chunked = True
        self.gates = {name: asyncio.Event() for name in ("queued", "denoise", "frames")}
        for gate in self.gates.values():
            gate.set()
        self.at: dict[str, str] = {}  # by request: how far it is
        self.live: set[str] = set()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: OmniDiffusionSamplingParams,
        *,
        request_id: str | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[Progress | OutputChunk | OmniRequestOutput]:
        assert request_id is not None and self.capabilities is not None
        if self.status != "ready":
            raise NotReadyError(f"the model is {self.status}")
        request = request_of(prompt, sampling_params, request_id)
        validate(request, self.capabilities, self.config.limits)
        self.requests.append(request)
        self.live.add(request_id)
        return self._stream(request)

    def abort(self, request_id: str) -> None:
        if request_id in self.live:
            self.live.discard(request_id)
            self.aborted.append(request_id)

    async def _stream(self, request: Request) -> AsyncGenerator[Progress | OutputChunk | OmniRequestOutput]:
        name = request.request_id
        try:
            yield Progress(name, "queued", 0, 0)
            await self._gate(name, "queued")
            for step in range(STEPS):
                if step == STEPS // 2:
                    await self._gate(name, "denoise")
                yield Progress(name, "denoise", step + 1, STEPS)
            yield Progress(name, "decode", STEPS, STEPS)
            if self.fails_with is not None:
                raise self.fails_with
            async for chunk in self._chunks(request):
                yield chunk
            self.live.discard(name)
            yield self._video(request)
        finally:
            self.abort(name)

    async def _gate(self, name: str, gate: str) -> None:
        self.at[name] = gate
        await self.gates[gate].wait()
        if name not in self.live:
            raise RequestAbortedError("aborted")

    async def _chunks(self, request: Request) -> AsyncGenerator[OutputChunk]:
        if not self.chunked:
            return
        name, frames = request.request_id, frames_of(request)
        if self.sound:
            sound = _sound(len(frames))
            yield OutputChunk(name, 0, 1, sound.shape, 0, _array(sound))
        for start in range(0, len(frames), 2):
            if start + 2 >= len(frames):
                await self._gate(name, "frames")
            yield OutputChunk(name, 0, 0, frames.shape, start, _array(frames[start : start + 2]))

    def _video(self, request: Request) -> OmniRequestOutput:
        output = OmniRequestOutput(request_id=request.request_id, prompt=request.prompt, modality="video", fps=8.0)
        output.seeds = [request.params.seed]
        output.profile = PROFILE if request.params.profile else None
        if not self.chunked:
            output.videos = [frames_of(request)]
            output.audio = [_sound(len(output.videos[0]))] if self.sound else []
        return output


def frames_of(request: Request) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Smooth, so that a lossy encoder changes little; frame i is brighter than frame i - 1."""
    params, defaults = request.params, CAPABILITIES.defaults
    count = ((params.num_frames or defaults["num_frames"]) - 1) * params.frame_factor + 1
    shape = (count, params.height or defaults["height"], params.width or defaults["width"], 3)
    return np.broadcast_to((np.arange(count) * 10 % 250).astype(np.uint8)[:, None, None, None], shape).copy()


def _sound(frames: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.sin(np.arange(frames * 2000, dtype=np.float32) / 10)[None] / 2


def _array(values: np.ndarray[Any, Any]) -> ArrayData:
    wire = to_wire(values)
    assert isinstance(wire, ArrayData)
    return wire


@contextlib.asynccontextmanager
async def serving(omni: FakeVideoOmni, folder: Path, **server_args: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose requests go straight into the application, which is closed at the end as a server is."""
    state = ServerState(omni, build(ServerConfig, {"video_dir": str(folder)} | server_args))
    transport = httpx.ASGITransport(build_app(state))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        try:
            yield http
        finally:
            await state.aclose()
