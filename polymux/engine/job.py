"""A request in the engine: its outputs, each made by a session of its own, and what they have cost so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from polymux.diffusion.call import Phase, Span
from polymux.diffusion.outputs import RawOutput
from polymux.diffusion.preview import Replay
from polymux.diffusion.session import Session
from polymux.diffusion.tuned import AdapterSet
from polymux.engine.outbound import WINDOW, FrameStream, Outbound, Outputs
from polymux.engine.profiled import profile_of
from polymux.engine.seeds import seed_of
from polymux.errors import InvalidRequestError
from polymux.interpolation.frames import Smoothing
from polymux.interpolation.network import FlowNetwork
from polymux.profile import Profile
from polymux.request import Finished, Media, Modality, OutputChunk, Progress, Request, RequestMetrics
from polymux.validation import SEEDS


@dataclass(frozen=True)
class Randomness:
    """Where the noise of one output comes from. `seed` is None if the caller passed a generator."""

    seed: int | None
    generator: torch.Generator

    def again(self) -> torch.Generator:
        """A generator as this one was, if it began with a seed."""
        return torch.Generator().manual_seed(self.generator.initial_seed())


def randomness_of(request: Request) -> list[Randomness]:
    """Output i has seed + i; or, of a generator: output 0 has its state, the others have seeds drawn from a copy."""
    count = request.params.num_outputs_per_prompt
    if request.generator_state is not None:
        first, source = (_with_state(request.generator_state) for _ in range(2))
        drawn = torch.randint(2**63 - 1, (count - 1,), generator=source).tolist()
        return [Randomness(None, first), *(Randomness(s, torch.Generator().manual_seed(s)) for s in drawn)]
    seed = seed_of(request.params.seed)
    seeds = [(seed + i) % SEEDS for i in range(count)]
    return [Randomness(s, torch.Generator().manual_seed(s)) for s in seeds]


def _with_state(state: bytes) -> torch.Generator:
    generator = torch.Generator()
    try:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (RuntimeError, TypeError, ValueError) as error:
        what = f"generator: its state is not one of a CPU generator: {error}"
        raise InvalidRequestError(what, param="generator") from None
    return generator


def wants_profile(request: Request) -> bool:
    """Whether a request asks where its time goes."""
    return request.params.profile or (request.sampling is not None and request.sampling.profile)


@dataclass(eq=False)
class Job:
    """One request. Sessions are opened in the order of the outputs and removed when they end."""

    request: Request
    randomness: list[Randomness]
    adapters: AdapterSet = ()
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    opened: int = 0
    sessions: dict[int, Session] = field(default_factory=dict)
    outbound: dict[int, Outbound] = field(default_factory=dict)  # outputs that are made, and not yet out
    streams_open: dict[int, FrameStream] = field(default_factory=dict)  # likewise, and still being decoded
    under_way: int = 0  # chunks that are out, and not yet used up
    previews: dict[int, Session] = field(default_factory=dict)  # in the works, by output; at most one each
    outputs: dict[int, list[Media]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, of sessions that have ended
    spans: list[Span] = field(default_factory=list)  # likewise, if the request asks for a profile
    own_seconds: float = 0.0  # likewise
    steps_done: int = 0  # of sessions that have ended
    steps_total: int = 0
    phase: Literal["queued"] | Phase = "queued"
    reported: tuple[str, int, int] | None = None

    @property
    def count(self) -> int:
        return len(self.randomness)

    @property
    def complete(self) -> bool:
        return len(self.outputs) == self.count

    @property
    def hungry(self) -> bool:
        """Whether another session of it may begin."""
        return self.opened < self.count

    @property
    def profiled(self) -> bool:
        """Whether the request asks where its time goes."""
        return wants_profile(self.request)

    def close(self, session: Session) -> None:
        """Take over what an ended session has cost. The steps of a preview are none of the output's."""
        for span in session.spans:
            self.seconds[span.phase] = self.seconds.get(span.phase, 0.0) + span.seconds()
        if self.profiled:
            self.spans += session.spans
            self.own_seconds += session.own_seconds
        if session.company == Replay.company:
            self.previews.pop(session.index, None)
            return
        self.steps_done += session.steps.done
        self.steps_total += session.steps.total
        self.sessions.pop(session.index, None)

    def drop(self) -> None:
        """Let go of what has not left yet."""
        for outbound in self.outbound.values():
            outbound.drop()

    def metrics(self) -> RequestMetrics:
        now = time.perf_counter()
        return RequestMetrics(
            queue=(self.started or now) - self.arrived,
            encode=self.seconds.get("encode", 0.0),
            denoise=self.seconds.get("denoise", 0.0),
            decode=self.seconds.get("decode", 0.0),
            total=now - self.arrived,
            steps=self.steps_done,
        )

    def profile(self) -> Profile | None:
        """If the request asks for one."""
        if not self.profiled:
            return None
        now = self.metrics()
        return profile_of(self.spans, now.total, now.queue, self.own_seconds)

    def chunks_of(self, outbound: Outbound) -> list[OutputChunk]:
        """What may be sent now of an output; it counts as under way."""
        chunks = outbound.take(WINDOW - self.under_way)
        self.under_way += len(chunks)
        return chunks

    @property
    def streams(self) -> bool:
        """Whether its frames may leave one by one: those that something is put between are needed in pairs."""
        params = self.request.params
        return params.output_type == "pil" and not params.enable_frame_interpolation

    def open_stream(self, outputs: Outputs, index: int) -> FrameStream:
        """An output's frames begin to leave."""
        stream = self.streams_open[index] = outputs.stream(self.request.request_id, index)
        self.outbound[index] = stream.outbound
        return stream

    def end_stream(self, index: int) -> bool:
        """Whether this output's frames have left like that; all of them are decoded."""
        stream = self.streams_open.pop(index, None)
        if stream is not None:
            stream.end()
        return stream is not None

    def smoothed(self, raw: RawOutput, network: FlowNetwork | None) -> RawOutput:
        """With frames put between its frames, if the request asks for that."""
        params = self.request.params
        if network is None or not params.enable_frame_interpolation:
            return raw
        return replace(raw, smoothing=Smoothing(network, params.frame_factor, params.frame_interpolation_scale))

    def finished(self, modality: Modality, fps: float | None, sample_rate: int | None) -> Finished:
        """The end of a complete job. `fps`: of what the pipeline made."""
        return Finished(
            request_id=self.request.request_id,
            modality=modality,
            outputs=[self.outputs[i] for i in range(self.count)],
            seeds=[r.seed for r in self.randomness],
            metrics=self.metrics(),
            fps=None if fps is None else fps * self.request.params.frame_factor,
            sample_rate=sample_rate,
            profile=self.profile(),
        )

    def progress(self) -> Progress | None:
        """How far it is, if that has changed since the last time."""
        if not self.opened and self.reported is not None:  # there may be thousands that wait
            return None
        sessions = list(self.sessions.values())
        done = self.steps_done + sum(s.steps.done for s in sessions)
        known = self.opened == self.count and all(s.steps.total for s in sessions)
        total = self.steps_total + sum(s.steps.total for s in sessions) if known else 0
        phase = next((s.blocked_on.phase for s in sessions if s.blocked_on is not None), self.phase)
        now = (phase, done, total)
        if now == self.reported:
            return None
        self.phase, self.reported = phase, now
        return Progress(self.request.request_id, phase, done, total)
