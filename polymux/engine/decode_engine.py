"""The engine of a stage that decodes: chunks of another stage's work become sound, as they come.

A step takes one chunk, of the request that has waited longest. Knows requests and the window between them and whoever
hears the sound; what a chunk means is the edge's and the family's business.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from polymux.config import EngineConfig
from polymux.connector import make_connector
from polymux.diffusion.random_state import RandomState
from polymux.diffusion.tracebacks import drop_frames
from polymux.engine.failure import as_polymux_error
from polymux.engine.generate_engine import parts_of, sound_of
from polymux.engine.outbound import WINDOW
from polymux.engine.session_engine import prepare_device
from polymux.engine.travel import split_random, unpacked
from polymux.engine.windowed import Array, Window, window_of
from polymux.errors import (
    InvalidRequestError,
    NotReadyError,
    OutOfMemoryError,
    PolymuxError,
    RequestAbortedError,
)
from polymux.families.generate import GenerateFamily, Parts
from polymux.families.graph import Arrays
from polymux.loading import load_decoder
from polymux.media.tempo import stretch
from polymux.memory.measure import device_bytes, release, resident_bytes, used_bytes
from polymux.memory.place import place
from polymux.memory.residency import Residency, Tenant
from polymux.memory_config import MemoryConfig
from polymux.metrics.catalog import RUN_S
from polymux.parcel import Chunk, Consumed
from polymux.request import (
    ArrayData,
    Capabilities,
    ComponentRuns,
    Distribution,
    Event,
    Failed,
    Finished,
    Request,
    RequestMetrics,
    SoundPiece,
    StageStats,
)


@dataclass(eq=False)
class DecodeJob:
    """A request: what has come of it, and what has not left yet."""

    request: Request
    inbox: deque[Chunk] = field(default_factory=deque)
    kept: Arrays = field(default_factory=dict)  # by the hand-off, of the present sentence
    window: Window | None = None  # of the present sentence
    whole: list[Array] = field(default_factory=list)  # of the present sentence, if it is to be stretched
    outbox: deque[tuple[int, ArrayData]] = field(default_factory=deque)
    under_way: int = 0  # pieces that are out, and not yet used up
    ended: bool = False  # nothing more comes
    seconds_made: float = 0.0
    seconds: float = 0.0  # of decoding

    @property
    def workable(self) -> bool:
        """Whether there is a chunk to take: what is made of it must soon be able to leave."""
        return bool(self.inbox) and len(self.outbox) < WINDOW


class DecodeEngine:
    """Implements `engine.base.StageEngine` for the last stage of a declared graph."""

    @classmethod
    def load(cls, config: EngineConfig) -> DecodeEngine:
        """Load the decoder. Raises CheckpointError, ConfigError."""
        device = prepare_device(config)
        family, parts = load_decoder(config, device)
        return cls(config, family, parts, device)

    def __init__(self, config: EngineConfig, family: GenerateFamily, parts: Parts, device: torch.device) -> None:
        assert family.graph is not None
        self._config, self._family, self._device = config, family, device
        self._edge = family.graph.into(config.stage)
        part, beside = family.graph.stages[config.stage].part, family.beside
        self._name = part or ("" if beside is None else beside[1])
        self._connector = make_connector(config.stages)
        self._asleep = 0  # the level
        self._jobs: dict[str, DecodeJob] = {}
        self._events: list[Event] = []
        self._counts, self._sum = [0] * (len(RUN_S) + 1), 0.0
        self._random: RandomState | None = None  # what the chunk that is decoded now is to be decoded with
        self._use(parts)

    @property
    def capabilities(self) -> Capabilities:
        return self._described

    @property
    def stats(self) -> StageStats:
        return StageStats(
            running=len(self._jobs),
            seconds={"decode": self._sum},
            runs=[
                ComponentRuns(self._name, "decode", {1: sum(self._counts)}, Distribution(list(self._counts), self._sum))
            ],
            device_memory=device_bytes(self._device),
            host_memory=resident_bytes(),
        )

    @property
    def busy(self) -> bool:
        """Requests that wait for another stage, or for whoever hears them, are no work."""
        return bool(self._events) or any(self._stirs(job) for job in self._jobs.values())

    def warm_up(self) -> None:
        """Decode a little silence. Raises what that raised."""
        self._decode(self._family.adapter.silence(self._parts))
        self._counts, self._sum = [0] * (len(RUN_S) + 1), 0.0

    def add(self, request: Request) -> None:
        if self._asleep:
            raise NotReadyError("the model is asleep")
        if request.request_id in self._jobs:
            raise InvalidRequestError("request_id: a request of this id is in flight", param="request_id")
        self._jobs[request.request_id] = DecodeJob(request)

    def abort(self, request_id: str) -> None:
        if request_id in self._jobs:
            self._fail(request_id, RequestAbortedError("the request was aborted"))

    def taken(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None and job.under_way:
            job.under_way -= 1

    def feed(self, chunk: Chunk) -> None:
        job = self._jobs.get(chunk.request_id)
        if job is not None:
            job.inbox.append(chunk)

    def step(self) -> list[Event]:
        name = next((name for name, job in self._jobs.items() if job.workable), None)
        if name is not None:
            job = self._jobs.pop(name)
            self._jobs[name] = job  # it has had its turn
            try:
                self._take(job, job.inbox.popleft())
            except Exception as error:  # whatever the family's code raises is the end of this request alone
                self._fail(name, as_polymux_error(error, drop_frames(error), computing=True))
        for job in list(self._jobs.values()):
            self._send(job)
        events, self._events = self._events, []
        return events

    def sleep(self, level: int) -> int:
        """As the other engines do. Raises ConfigError, with everything in place, if it cannot."""
        if self._jobs or self._asleep:
            raise NotReadyError("the engine is busy" if self._jobs else f"the engine sleeps, at level {self._asleep}")
        before = used_bytes(self._device)
        if level == 1:
            self._weights.sleep()
        else:
            self._weights.close()
            self._parts = Parts(model=None, processor=None)
        self._asleep = level
        release(self._device)
        return max(before - used_bytes(self._device), 0)

    def wake_up(self) -> None:
        try:
            if self._asleep == 1:
                self._weights.wake()
            elif self._asleep == 2:
                self._use(load_decoder(self._config, self._device)[1])
        except torch.OutOfMemoryError as error:
            release(self._device)
            raise OutOfMemoryError(f"there is no room to wake up: {error}") from None
        self._asleep = 0

    def close(self) -> None:
        self._connector.close()
        self._weights.close()

    def _use(self, parts: Parts) -> None:
        """The decoder has come, or come back."""
        self._parts = parts
        self._weights: Residency = place([Tenant(self._name, "decoder", parts.beside)], MemoryConfig(), self._device)
        self._described = Capabilities(
            family=self._family.name,
            pipeline=type(parts.beside).__name__,
            modality=self._family.modality,
            arguments=(),
            required=(),
            media={},
            sample_rate=self._family.adapter.sample_rate(parts),
            samples=True,
            device=str(self._device),
            dtype=str(parts.beside.dtype).removeprefix("torch."),
            parameters=sum(p.numel() for p in parts.beside.parameters()),
            storage=self._weights.describe(),
        )

    @staticmethod
    def _stirs(job: DecodeJob) -> bool:
        return job.workable or (bool(job.outbox) and job.under_way < WINDOW)

    def _take(self, job: DecodeJob, chunk: Chunk) -> None:
        """Make sound of a chunk."""
        started = time.perf_counter()
        got = self._connector.get(chunk.parcel)
        seconds = chunk.parcel.seconds + time.perf_counter() - started
        self._events.append(Consumed(chunk.request_id, seconds))
        if job.window is None:
            job.window = window_of(self._family.adapter.frame_shape(self._parts), self._decode)
        got, self._random = split_random(got, self._device)
        if got:
            got, job.kept = self._edge.hand_off(job.kept, got, chunk.ends_part)
        before = self._sum
        sound = job.window.push(got, chunk.ends_part)
        job.seconds += self._sum - before
        self._keep(job, chunk, sound)
        job.ended = chunk.last
        if chunk.ends_part:
            job.kept, job.window = {}, None

    def _keep(self, job: DecodeJob, chunk: Chunk, sound: Array | None) -> None:
        """For whoever hears it. A sentence that is to be quicker or slower is stretched as a whole."""
        sampling, rate = job.request.sampling, self._described.sample_rate or 0
        speed = sampling.speed if sampling is not None else None
        if speed not in (None, 1.0):
            job.whole += [sound] if sound is not None else []
            if not chunk.ends_part or not job.whole:
                return
            sound = stretch(np.concatenate(job.whole, axis=1), rate, float(speed or 1.0))
            job.whole = []
        if sound is not None:
            job.seconds_made += sound.shape[1] / rate
            parts = parts_of(sound, rate, self._config.process.output_chunk_bytes)
            job.outbox.extend((chunk.part, part) for part in parts)

    @torch.inference_mode()
    def _decode(self, arrays: Arrays) -> Array:
        """(channels, samples)"""
        started = time.perf_counter()
        outside = RandomState.now(self._device)
        if self._random is not None:
            self._random.apply()
        try:
            sound = sound_of(self._family.adapter.decode(self._parts, unpacked(arrays, self._device)))
        finally:
            outside.apply()
        took = time.perf_counter() - started
        self._counts[int(np.searchsorted(RUN_S, took))] += 1
        self._sum += took
        return sound

    def _send(self, job: DecodeJob) -> None:
        request_id = job.request.request_id
        while job.outbox and job.under_way < WINDOW:
            part, samples = job.outbox.popleft()
            self._events.append(SoundPiece(request_id, part, samples))
            job.under_way += 1
        if job.ended and not job.inbox and not job.outbox:
            del self._jobs[request_id]
            self._events.append(
                Finished(
                    request_id=request_id,
                    modality=self._family.modality,
                    outputs=[[]],
                    seeds=[],
                    metrics=RequestMetrics(decode=job.seconds),
                    sample_rate=self._described.sample_rate,
                    sound_seconds=job.seconds_made,
                )
            )

    def _fail(self, request_id: str, error: PolymuxError) -> None:
        del self._jobs[request_id]
        self._events.append(Failed(request_id, error.info()))
