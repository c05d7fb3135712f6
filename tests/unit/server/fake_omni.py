"""A stand-in for AsyncOmni, without a model: it answers, waits or fails as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
from PIL import Image

from polymux.config import EngineConfig, build
from polymux.errors import NotReadyError, PolymuxError
from polymux.metrics import Metrics
from polymux.omni_output import OmniPreview, OmniRequestOutput
from polymux.orchestrator.orchestrator import Status
from polymux.prompts import Prompt, request_of
from polymux.request import Capabilities, OmniDiffusionSamplingParams, Progress, Request
from polymux.server.app import build_app
from polymux.server.state import ServerState
from polymux.server_config import ServerConfig
from polymux.validation import validate

CAPABILITIES = Capabilities(
    family="fake",
    pipeline="FakePipeline",
    modality="image",
    arguments=("prompt", "negative_prompt", "height", "width", "num_inference_steps", "guidance_scale", "eta"),
    required=("prompt",),
    media={},
    size_multiple=16,
)


class FakeOmni:
    def __init__(self, **engine_args: Any) -> None:
        self.config = EngineConfig.from_flat(**{"model": "fake/model"} | engine_args)
        self.status: Status = "ready"
        self.capabilities: Capabilities | None = CAPABILITIES
        self.metrics = Metrics("fake/model")
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.hold = asyncio.Event()  # a generation ends when it is set
        self.hold.set()
        self.started = asyncio.Event()
        self.fails_with: Exception | None = None
        self.images = 1  # per output

    async def health(self) -> None:
        if self.status != "ready":
            raise NotReadyError(f"the model is {self.status}")

    async def sleep(self, level: int) -> int:
        await self.health()
        self.status = "asleep"
        return 1000 * level

    async def wake_up(self) -> None:
        self.status = "ready"

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        await self.health()

    async def stop_profile(self) -> list[str]:
        await self.health()
        return ["trace.json"]

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
        await self._admit(request)
        self.requests.append(request)
        self.started.set()
        try:
            yield Progress(request_id, "denoise", 1, 2)
            for i in range(sampling_params.num_outputs_per_prompt * partial_images):
                index, step = (
                    i % sampling_params.num_outputs_per_prompt,
                    1 + i // sampling_params.num_outputs_per_prompt,
                )
                size = (sampling_params.width or 32, sampling_params.height or 16)
                images = [Image.effect_noise(size, 90)]
                yield OmniPreview(request_id=request_id, index=index, step=step, images=images)
            await self.hold.wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            self.metrics.count("aborted")
            raise
        if self.fails_with is not None:
            raise self.fails_with
        self.metrics.count("completed")
        yield self._output(request)

    async def _admit(self, request: Request) -> None:
        try:
            await self.health()
            assert self.capabilities is not None
            validate(request, self.capabilities, self.config.limits)
        except PolymuxError:
            self.metrics.count("refused")
            raise

    def _output(self, request: Request) -> OmniRequestOutput:
        params = request.params
        size = (params.width or 32, params.height or 16)
        seed = 7 if params.seed is None else params.seed
        count = params.num_outputs_per_prompt
        images: list[Any] = [Image.effect_noise(size, 90) for _ in range(count * self.images)]
        return OmniRequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            modality="image",
            images=images,
            seeds=[seed + i for i in range(count)],
        )


def client(omni: FakeOmni, **server_args: Any) -> httpx.AsyncClient:
    """A client whose requests go straight into the application."""
    app: Any = build_app(ServerState(omni, build(ServerConfig, server_args)))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")
