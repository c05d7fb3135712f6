"""The Python entry: `AsyncOmni`, and `Omni`, the same for callers without an event loop.

Knows prompts and outputs; what a model is and how requests reach it is the orchestrator's business. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
from tqdm import tqdm

from polymux.config import EngineConfig
from polymux.errors import InvalidRequestError, NotReadyError, PolymuxError
from polymux.loop_thread import LoopThread
from polymux.messages import StartProfile, StopProfile
from polymux.metrics import Metrics
from polymux.omni_output import ChunkCollector, OmniPreview, OmniRequestOutput, output_of, preview_of
from polymux.orchestrator.launch import MakeStage
from polymux.orchestrator.orchestrator import Orchestrator, Status
from polymux.orchestrator.stage_client import ProcessStage
from polymux.prompts import Params, Prompt, request_of
from polymux.request import (
    Capabilities,
    Finished,
    News,
    OmniDiffusionSamplingParams,
    OutputChunk,
    Preview,
    Progress,
    Request,
    SamplingParams,
    SoundPiece,
    TextPiece,
)

Streamed = Progress | OutputChunk | SoundPiece | TextPiece | OmniRequestOutput  # what `AsyncOmni.stream` gives


class AsyncOmni:
    """A model in a process of its own, driven from an event loop.

    async with AsyncOmni(model="demo") as omni:
        async for event in omni.generate("a cat", OmniDiffusionSamplingParams(seed=1)):
            ...  # Progress, ..., OmniRequestOutput

    Keyword arguments are the knobs of `polymux.config.EngineConfig`. Raises ConfigError on an impossible one.
    """

    def __init__(self, model: str | os.PathLike[str], **engine_args: Any) -> None:
        self._orchestrator = Orchestrator(EngineConfig.from_flat(model=os.fspath(model), **engine_args))

    @classmethod
    def from_config(
        cls, config: EngineConfig, make_stage: MakeStage = ProcessStage, *, model_name: str | None = None
    ) -> Self:
        """From a complete configuration; `make_stage` reaches the stage in another way, `model_name` is how the metrics
        call the model, if not as the configuration does."""
        omni = cls.__new__(cls)
        omni._orchestrator = Orchestrator(config, make_stage, model_name=model_name)
        return omni

    @property
    def config(self) -> EngineConfig:
        return self._orchestrator.config

    @property
    def capabilities(self) -> Capabilities | None:
        """What the model takes and makes; None until it was ready for the first time."""
        return self._orchestrator.capabilities

    @property
    def status(self) -> Status:
        return self._orchestrator.status

    @property
    def metrics(self) -> Metrics:
        return self._orchestrator.metrics

    @property
    def room(self) -> int:
        """How many requests there may be at once, running and waiting."""
        return self._orchestrator.room

    async def start(self) -> None:
        """Returns when a generation works. Raises ConfigError, CheckpointError, NotReadyError, StageDeadError."""
        await self._orchestrator.start()

    async def health(self) -> None:
        """Raises NotReadyError unless a generation would work now."""
        self._orchestrator.check_ready()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        request_id: str | None = None,
        partial_images: int = 0,
        session_id: str | None = None,
    ) -> AsyncGenerator[Progress | OmniPreview | OmniRequestOutput]:
        """Progress, up to `partial_images` previews of each picture, and then the output. Leaving early aborts the
        request. Requests with the same `session_id` may be kept at one replica (`data_parallel_policy`). Raises
        PolymuxError."""
        request = self._request(prompt, sampling_params, request_id, partial_images, session_id)
        async with contextlib.aclosing(self.run(request)) as events:
            async for event in events:
                yield event

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        request_id: str | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[Streamed]:
        """`generate`, for whoever uses frames up as they come: large arrays come as `OutputChunk`s, and are not in the
        output; the sound of models that speak comes as `SoundPiece`s, sentence by sentence. The stage goes on when a
        chunk or piece is used up, that is when the next event is asked for. Text comes as `TextPiece`s as it is
        written, and is in the output, too.

        The request is sent, or refused, before this returns. Iterate, or end it with `abort`.
        """
        request = self._request(prompt, sampling_params, request_id, session_id=session_id)
        return self._outputs(request, self._orchestrator.generate(request))

    async def run(self, request: Request) -> AsyncGenerator[Progress | OmniPreview | OmniRequestOutput]:
        """`generate`, for a request that is complete."""
        chunks = ChunkCollector()
        async with contextlib.aclosing(self._orchestrator.generate(request)) as events:
            async for event in events:
                match event:
                    case OutputChunk():
                        chunks.add(event)
                    case SoundPiece():
                        chunks.add_sound(event)
                    case Finished():
                        yield output_of(request, event, chunks)
                    case Preview():
                        yield preview_of(event)
                    case Progress():
                        yield event

    async def _outputs(self, request: Request, events: AsyncGenerator[News | Finished]) -> AsyncGenerator[Streamed]:
        async with contextlib.aclosing(events):
            async for event in events:
                match event:
                    case Finished():
                        yield output_of(request, event)
                    case Progress() | OutputChunk() | SoundPiece() | TextPiece():
                        yield event

    def _request(
        self,
        prompt: Prompt,
        sampling_params: Params | None,
        request_id: str | None,
        partial_images: int = 0,
        session_id: str | None = None,
    ) -> Request:
        try:
            request = request_of(prompt, sampling_params, request_id or uuid.uuid4().hex, partial_images)
            return msgspec.structs.replace(request, session_id=session_id)
        except PolymuxError:
            self.metrics.count("refused")
            raise

    def abort(self, request_id: str) -> None:
        """End a request; its consumer gets RequestAbortedError. Unknown ids are no error."""
        self._orchestrator.abort(request_id)

    async def sleep(self, level: int = 1) -> int:
        """Let requests under way finish, then give the device's memory back; the bytes that others have of it.

        Level 1 keeps the weights on the host, level 2 drops them; `wake_up` has them in place again. Until then
        requests are refused with NotReadyError. Raises ConfigError if this model cannot.
        """
        return await self._orchestrator.sleep(level)

    async def wake_up(self) -> None:
        """Returns when a generation works again."""
        await self._orchestrator.wake_up()

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Have every process of the model note what it does; needs `profiler_config`. Raises InvalidRequestError if it
        does already, ConfigError."""
        prefix = "trace" if profile_prefix is None else profile_prefix
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", prefix):
            what = f"profile_prefix={prefix[:70]!r}: must be 1 to 64 letters, digits and ._-"
            raise InvalidRequestError(what, param="profile_prefix")
        await self._orchestrator.profile(StartProfile(f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}"))

    async def stop_profile(self) -> list[str]:
        """Write the traces; their files, one for each process. Raises InvalidRequestError if none is under way."""
        return await self._orchestrator.profile(StopProfile())

    async def until_dead(self) -> PolymuxError | None:
        """Returns when no generation will ever work again, with the reason; None after an orderly end."""
        return await self._orchestrator.until_dead()

    async def drain(self, grace: float) -> None:
        """Take no new requests, give those under way `grace` seconds, then stop the model's process."""
        await self._orchestrator.drain(grace)

    async def close(self) -> None:
        """Stop now. Requests under way end with NotReadyError."""
        await self._orchestrator.close()

    def kill(self) -> None:
        """End the model's process at once. For when the event loop cannot do it: callable from any thread."""
        self._orchestrator.kill()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Omni:
    """A model in a process of its own, driven by plain calls, from any thread and inside a running event loop too.

    with Omni(model="demo") as omni:
        (output,) = omni.generate("a cat", OmniDiffusionSamplingParams(seed=1))
        output.images[0].save("cat.png")

    Returns from the constructor when the model is ready. Arguments and errors are those of AsyncOmni.
    """

    def __init__(self, model: str | os.PathLike[str], **engine_args: Any) -> None:
        self._open(EngineConfig.from_flat(model=os.fspath(model), **engine_args), ProcessStage)

    @classmethod
    def from_config(cls, config: EngineConfig, make_stage: MakeStage = ProcessStage) -> Self:
        """From a complete configuration; `make_stage` reaches the stage in another way."""
        omni = cls.__new__(cls)
        omni._open(config, make_stage)
        return omni

    def _open(self, config: EngineConfig, make_stage: MakeStage) -> None:
        self._omni = AsyncOmni.from_config(config, make_stage)
        self._places = asyncio.Semaphore(self._omni.room)  # more prompts than that wait here, and are not refused
        self._loop = LoopThread("polymux")
        # When this object is collected or the interpreter ends, unless close() came first.
        self._finalizer = weakref.finalize(self, _abandon, self._omni, self._loop, os.getpid())
        try:
            self._loop.call(self._omni.start())
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> EngineConfig:
        return self._omni.config

    @property
    def capabilities(self) -> Capabilities | None:
        return self._omni.capabilities

    @property
    def status(self) -> Status:
        return self._omni.status

    @property
    def metrics(self) -> Metrics:
        return self._omni.metrics

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[OmniRequestOutput]:
        """One output per prompt, in order; that of a prompt that failed has its `error` set.

        `sampling_params`: one for all prompts, or one per prompt. Raises InvalidRequestError, before any work, if a
        prompt is not made as prompts are.
        """
        requests = _requests_of(prompts, sampling_params)
        if not self._finalizer.alive:
            raise NotReadyError("this Omni is closed")
        return self._loop.call(self._generate_all(requests, use_tqdm))

    def sleep(self, level: int = 1) -> int:
        """Give the device's memory back until `wake_up`; the bytes that others have of it. See `AsyncOmni.sleep`."""
        return self._loop.call(self._omni.sleep(level))

    def wake_up(self) -> None:
        """Returns when a generation works again."""
        self._loop.call(self._omni.wake_up())

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """See `AsyncOmni.start_profile`."""
        self._loop.call(self._omni.start_profile(profile_prefix))

    def stop_profile(self) -> list[str]:
        """See `AsyncOmni.stop_profile`."""
        return self._loop.call(self._omni.stop_profile())

    def close(self) -> None:
        """Stop now, leave nothing behind. May be called more than once."""
        if self._finalizer.detach() is not None:
            self._loop.finish(self._omni.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _generate_all(self, requests: list[Request], use_tqdm: bool) -> list[OmniRequestOutput]:
        with tqdm(total=len(requests), unit="prompt", disable=not use_tqdm) as bar:

            async def counted(request: Request) -> OmniRequestOutput:
                output = await self._generate_one(request)
                bar.update()
                return output

            return await asyncio.gather(*map(counted, requests))

    async def _generate_one(self, request: Request) -> OmniRequestOutput:
        output = OmniRequestOutput(request_id=request.request_id, prompt=request.prompt)
        try:
            async with self._places, contextlib.aclosing(self._omni.run(request)) as events:
                async for event in events:
                    if isinstance(event, OmniRequestOutput):
                        output = event
        except PolymuxError as error:
            output.error = error
        return output


def _abandon(omni: AsyncOmni, loop: LoopThread, owner: int) -> None:
    if os.getpid() != owner:
        return  # in a fork of the process that has the stage
    omni.kill()  # nobody waits for what is under way
    loop.finish(omni.close())


def _requests_of(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: Params | Sequence[Params] | None,
) -> list[Request]:
    if isinstance(prompts, (str, dict)):
        each: list[Prompt] = [prompts]
    elif isinstance(prompts, (list, tuple)):
        each = list(prompts)
    else:
        what = f"prompts is a {type(prompts).__name__}: must be a str, a dict, or a list of these"
        raise InvalidRequestError(what, param="prompt")
    if isinstance(sampling_params, (list, tuple)):
        params: list[Params | None] = list(sampling_params)
    elif sampling_params is None or isinstance(sampling_params, (OmniDiffusionSamplingParams, SamplingParams)):
        params = [sampling_params] * len(each)
    else:
        allowed = "must be OmniDiffusionSamplingParams or SamplingParams, or a list"
        what = f"sampling_params is a {type(sampling_params).__name__}: {allowed}"
        raise InvalidRequestError(what, param="sampling_params")
    if len(params) != len(each):
        what = f"{len(params)} sampling_params for {len(each)} prompts: must be one, or as many"
        raise InvalidRequestError(what, param="sampling_params")
    return [request_of(one, how, uuid.uuid4().hex) for one, how in zip(each, params, strict=True)]
