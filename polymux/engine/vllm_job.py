"""A request for an answer that vLLM writes: what has come of it so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from polymux.engine.writing import Writer
from polymux.families.chat import ChatCall
from polymux.request import Finished, FinishReason, Progress, Request, RequestMetrics, SamplingParams, TextPiece


@dataclass(eq=False, kw_only=True)
class VllmJob:
    request: Request
    params: SamplingParams
    seed: int
    name: str  # by which vLLM knows it
    writer: Writer
    arrived: float = field(default_factory=time.perf_counter)
    begun: float | None = None  # handed to vLLM, which may have it wait
    call: ChatCall | None = None
    task: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> int:
        """Of the answer, so far."""
        return len(self.writer.tokens)

    def write(self, tokens: Sequence[int], last: bool) -> None:
        """More of the answer; what comes after a text to stop at is none of it. Raises what a tokenizer raises."""
        for token in tokens:
            if self.writer.stopped:
                break
            self.writer.write(token)
        if last:
            self.writer.end()

    def piece(self) -> TextPiece | Progress:
        """What there is to be said of it."""
        if text := self.writer.take():
            return TextPiece(self.request.request_id, text)
        return Progress(self.request.request_id, "denoise", self.tokens, 0)

    @property
    def seconds(self) -> float:
        return 0.0 if self.begun is None else time.perf_counter() - self.begun

    def finished(self, reason: FinishReason) -> Finished:
        now = time.perf_counter()
        metrics = RequestMetrics(
            queue=(self.begun or now) - self.arrived,
            denoise=self.seconds,
            total=now - self.arrived,
            steps=self.tokens,
            prompt_tokens=0 if self.call is None else self.call.prompt_tokens,
            completion_tokens=self.tokens,
        )
        return Finished(
            request_id=self.request.request_id,
            modality="text",
            outputs=[[]],
            seeds=[self.seed],
            metrics=metrics,
            text=self.writer.text,
            finish_reason=reason,
        )
