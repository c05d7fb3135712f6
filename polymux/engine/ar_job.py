"""A request for an answer, where answers go on together: prepared in a thread, then a sequence of tokens."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from transformers import GenerationConfig

from polymux.ar.features import Features, names_of
from polymux.ar.sequence import Drawing, Heard, Sequence
from polymux.engine.job import wants_profile
from polymux.engine.writing import Writer
from polymux.errors import InvalidRequestError
from polymux.families.chat import ChatCall
from polymux.profile import ComponentTime, Profile, StepTime
from polymux.request import Finished, FinishReason, Progress, Request, RequestMetrics, SamplingParams, TextPiece

USUAL_TOP_K = 50  # of transformers, where neither a request nor the checkpoint says


@dataclass(eq=False, kw_only=True)
class ArJob:
    request: Request
    seed: int
    writer: Writer
    preparing: Future[ChatCall]
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    call: ChatCall | None = None
    sequence: Sequence | None = None
    seconds: float = 0.0  # of the steps it was in
    reading: float = 0.0  # seconds of its media
    steps: list[tuple[float, int, int]] = field(default_factory=list)  # likewise, for a profile: see `took`

    def took(self, seconds: float, tokens: int, own: int) -> None:
        """It was in a step that computed so many tokens, of which so many were its own."""
        self.seconds += seconds
        if wants_profile(self.request):
            self.steps.append((seconds, tokens, own))

    def profile(self) -> Profile | None:
        """If the request asks for one: all computing is that of the model."""
        if not wants_profile(self.request):
            return None
        now = self.metrics()
        steps = [
            StepTime(i, 1, tokens, seconds, seconds * own / tokens)
            for i, (seconds, tokens, own) in enumerate(self.steps)
        ]
        share = sum(step.share for step in steps)
        model = ComponentTime("model", "denoise", len(steps), self.seconds, share)
        other = max(now.total - now.queue - self.seconds, 0.0)
        return Profile(now.total, now.queue, self.seconds, 0.0, other, [model] if steps else [], steps)

    def pieces(self) -> list[TextPiece | Progress]:
        """What there is to be said, after a token of it."""
        if text := self.writer.take():
            return [TextPiece(self.request.request_id, text)]
        return [Progress(self.request.request_id, "denoise", len(self.writer.tokens), 0)]

    def metrics(self) -> RequestMetrics:
        now, tokens = time.perf_counter(), len(self.writer.tokens)
        return RequestMetrics(
            queue=(self.started or now) - self.arrived,
            encode=self.reading,
            denoise=self.seconds,
            total=now - self.arrived,
            steps=tokens,
            prompt_tokens=0 if self.call is None else self.call.prompt_tokens,
            completion_tokens=tokens,
        )

    def finished(self) -> Finished:
        return Finished(
            request_id=self.request.request_id,
            modality="text",
            outputs=[[]],
            seeds=[self.seed],
            metrics=self.metrics(),
            text=self.writer.text,
            finish_reason=self._reason(),
            profile=self.profile(),
        )

    def _reason(self) -> FinishReason:
        assert self.call is not None
        tokens = self.writer.tokens
        ended = self.writer.stopped or len(tokens) < self.call.steps or tokens[-1] in self.call.ends
        return "stop" if ended else "length"


def fitted(call: ChatCall, params: SamplingParams, context: int) -> ChatCall:
    """With no more steps than there is room for. Raises InvalidRequestError if more are asked for."""
    room = context - call.prompt_tokens
    if room < min(call.steps, params.max_new_tokens or 1):
        param = "prompt" if room < 1 else "max_new_tokens"
        left = f"for {room} more" if room > 0 else f"for {context}, with an answer"
        what = f"the conversation has {call.prompt_tokens} tokens, and the cache has room {left}"
        raise InvalidRequestError(f"{param}: {what} (--kv-cache-memory-bytes)", param=param)
    ids = call.arguments["input_ids"].cpu()  # here, where requests are prepared: it waits for the device
    return replace(call, arguments=call.arguments | {"input_ids": ids}, steps=min(call.steps, room))


def drawing_of(
    call: ChatCall, params: SamplingParams, settings: GenerationConfig, seed: int, prefix: str = ""
) -> Drawing:
    """How its tokens are drawn: as the request says, else as the checkpoint does. `prefix`: of the names by which the
    call's arguments say it."""
    given = call.arguments

    def setting(name: str, usual: float) -> float:
        value = given.get(prefix + name)
        value = getattr(settings, name) if value is None else value
        return usual if value is None else float(value)

    draws = bool(setting("do_sample", False))
    return Drawing(
        temperature=setting("temperature", 1.0) if draws else 0.0,
        top_k=int(setting("top_k", USUAL_TOP_K)) if draws else 0,
        top_p=setting("top_p", 1.0),
        min_p=setting("min_p", 0.0),
        repetition_penalty=setting("repetition_penalty", 1.0),
        frequency_penalty=params.frequency_penalty or 0.0,
        presence_penalty=params.presence_penalty or 0.0,
        seed=seed,
    )


def sequence_of(
    job: ArJob, params: SamplingParams, settings: GenerationConfig, prefix: str, features: Features | None
) -> Sequence:
    """Its prompt, and how its tokens are drawn: see `drawing_of`."""
    assert job.call is not None
    tokens: list[int] = job.call.arguments["input_ids"][0].tolist()
    names = None if features is None else names_of(tokens, features, job.call.contents)
    return Sequence(
        name=job.request.request_id,
        tokens=tokens,
        limit=job.call.steps,
        ends=job.call.ends,
        drawing=drawing_of(job.call, params, settings, job.seed, prefix),
        constraint=job.call.constraint,
        features=features,
        names=names,
        shared=features is None or names is not None,
        heard=None if job.call.speech_steps is None else Heard(),
    )
