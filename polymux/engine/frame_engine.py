"""The engine of models that speak frame by frame: the sentences of all requests are written together.

A sentence is prepared in a session (which voice it has, what its prompt is), and then has a row in a batch: each step
writes one frame of every row. What has been written becomes sound in parts, those of several sentences at once. On a
GPU a step is launched before the codes of the one before are known. Knows requests and their sentences; not what codes
mean, and nothing of processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from msgspec.structs import replace

from polymux.ar.frames import FrameBatch, FrameFlight
from polymux.config import EngineConfig
from polymux.diffusion.call import Phase, Span
from polymux.diffusion.recording import CudaRecorder
from polymux.diffusion.session import Session
from polymux.diffusion.timing import Elapsed, Stopwatch
from polymux.diffusion.tracebacks import drop_frames
from polymux.engine.ar_state import new_frame_batch
from polymux.engine.failure import as_polymux_error
from polymux.engine.generate_engine import GenerateEngine, sound_of
from polymux.engine.generate_model import GenerateModel
from polymux.engine.job import wants_profile
from polymux.engine.part_decoder import PartDecoder
from polymux.engine.sentence import Part, Sentence, due, sounded
from polymux.engine.sound_job import SoundJob
from polymux.errors import InvalidRequestError, PolymuxError, UnusableOutputError
from polymux.media.tempo import stretch
from polymux.media.wire import Array
from polymux.memory.measure import used_bytes
from polymux.request import Capabilities, StageStats

PROMPT_TOKENS = 4096  # that one step reads, unless one prompt alone has more
Launched = TypeVar("Launched", FrameFlight, Part)


@dataclass
class _Written:
    flight: FrameFlight
    sentences: list[Sentence]
    elapsed: Elapsed


@dataclass
class _Sounded:
    part: Part
    elapsed: Elapsed

    @property
    def sentences(self) -> list[Sentence]:
        return self.part.sentences


class FrameEngine(GenerateEngine):
    """Implements `engine.base.StageEngine`."""

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, model, device)
        self._ahead = device.type == "cuda"
        self._waiting: list[Sentence] = []  # for a row
        self._begun: list[Sentence] = []
        self._launched: deque[_Written | _Sounded] = deque()
        self._warm = False
        self._batch: FrameBatch | None = None
        self._decoder: PartDecoder | None = None
        self._make_batch()

    def _make_batch(self) -> None:
        """The model has come. It runs as a whole: nobody captures calls of its parts."""
        for component in self.loaded.components:
            component.detach()
        adapter, parts = self.family.adapter, self.loaded.parts
        self._writer = adapter.writer(parts)
        with torch.no_grad():
            self._batch = new_frame_batch(self.config, self._writer, self.device)
        most = (self.config.scheduler.max_num_seqs, self._writer.groups, self.family.framed)
        recorder = None if self._batch.graphs == "off" else CudaRecorder(self.device)
        self._decoder = PartDecoder(adapter.codec(parts).decode, most, recorder)

    def _describe(self, model: GenerateModel, config: EngineConfig) -> Capabilities:
        return replace(super()._describe(model, config), merges=True)

    @property
    def batch(self) -> FrameBatch:
        assert self._batch is not None  # while it is awake
        return self._batch

    @property
    def stats(self) -> StageStats:
        used, count = self._batch.blocks if self._batch is not None else (0, 0)
        return replace(super().stats, kv_blocks=count, kv_blocks_used=used)

    def warm_up(self) -> None:
        """Speak a little, and record what can be recorded. Raises what that raised."""
        super().warm_up()
        self._warm = True
        assert self._decoder is not None
        with torch.no_grad():
            self.batch.prepare()
            self._decoder.prepare(self.device)

    def sleep(self, level: int) -> int:
        if self.busy or self.asleep:
            return super().sleep(level)  # which says so
        before = used_bytes(self.device)
        self._batch = self._decoder = None
        try:
            super().sleep(level)
        except PolymuxError:
            self._make_batch()
            raise
        return max(before - used_bytes(self.device), 0)

    def wake_up(self) -> None:
        super().wake_up()
        self._make_batch()
        if self._warm:
            self.warm_up()

    # A sentence: prepared, begun, written frame by frame, sounded part by part.

    def _open(self, job: SoundJob) -> None:
        index, session = job.opened, self._new_session(job)
        self._start(job, session, lambda own: self.family.adapter.start(own, job.calls[index]))

    def _done(self, job: SoundJob, session: Session, result: Any) -> None:
        if self.batch.fits(result):
            self._waiting.append(Sentence(job, session.index, result, result.kept))
            return
        what = f"after {result.embeds.shape[1]} positions of its prompt, {result.most} do not fit in the cache"
        self._fail(
            job, InvalidRequestError(f"max_new_tokens: {what} (--kv-cache-memory-bytes)", param="max_new_tokens")
        )

    def _deliver(self, idle: bool) -> None:
        worked = self._write()
        super()._deliver(idle and not worked)

    def _write(self) -> bool:
        """Launch a step, and take what those before have made. Whether there was anything to do."""
        before = len(self._launched)
        self._begin()
        self._step()
        if not self._ahead:
            before = len(self._launched)
        for _ in range(before):
            self._land(self._launched.popleft())
        for group in due(self._begun, self.family.framed):
            count = min(len(group[0].waiting), self.family.framed)
            part = self._try(group, "decode", lambda g=group, n=count: self._part(g, n))  # type: ignore[misc]
            if part is not None:
                self._launched.append(_Sounded(*part))
        return bool(before or self._launched)

    def _part(self, sentences: list[Sentence], count: int) -> Part:
        assert self._decoder is not None
        return sounded(self._decoder, sentences, count, self.device)

    def _begin(self) -> None:
        """Of those that wait: of the request with the fewest sentences under way first."""
        chosen: list[Sentence] = []
        while self._waiting:
            under_way = [sentence.job for sentence in (*self._begun, *chosen)]
            best = min(self._waiting, key=lambda s: (under_way.count(s.job), s.job.arrived, s.index))
            starts = [sentence.start for sentence in (*chosen, best)]
            if not self.batch.has_room(starts) or (chosen and sum(s.embeds.shape[1] for s in starts) > PROMPT_TOKENS):
                break
            self._waiting.remove(best)
            chosen.append(best)
        if not chosen:
            return
        made = self._try(chosen, "denoise", lambda: self.batch.begin([s.start for s in chosen]))
        if made is None:
            return
        for sentence, row in zip(chosen, made[0].rows, strict=True):
            sentence.row = row
        self._begun += chosen
        self._launched.append(_Written(made[0], chosen, made[1]))

    def _step(self) -> None:
        going = [s for s in self._begun if s.row is not None and s.launched < s.start.most - 1]
        rows = [s.row for s in going if s.row is not None]
        made = self._try(going, "denoise", lambda: self.batch.step(rows)) if going else None
        if made is not None:
            for sentence in going:
                sentence.launched += 1
            self._launched.append(_Written(made[0], going, made[1]))

    def _try(
        self, sentences: list[Sentence], phase: Phase, launch: Callable[[], Launched]
    ) -> tuple[Launched, Elapsed] | None:
        watch = Stopwatch(self.device)
        try:
            made = launch()
        except Exception as error:  # whatever a model raises is the end of those for whom it ran
            self._fall(sentences, error)
            return None
        elapsed = watch.stop()
        self.runner.log.count(self._name(phase), phase, len(sentences), elapsed)
        return made, elapsed

    def _name(self, phase: Phase) -> str:
        """Of what runs then."""
        return self.family.components[0] if phase == "denoise" else self.family.decoders[0]

    def _land(self, launched: _Written | _Sounded) -> None:
        try:
            if isinstance(launched, _Sounded):
                self._heard(launched)
            else:
                self._take(launched)
        except Exception as error:  # a device says what has gone wrong when it is asked for a result
            self._fall(launched.sentences, error)

    def _take(self, written: _Written) -> None:
        """The codes of a step are there."""
        codes = written.flight.wait()
        for sentence, row in zip(written.sentences, codes, strict=True):
            if sentence.left or sentence.written:
                continue
            job = sentence.job
            steps = int(len(row) > 1 or sentence.counts_prompt)
            job.steps_done += steps
            self.totals["steps"] += steps
            job.phase = "denoise"  # no session says so: without it, the request seems to wait
            self._spent(sentence, "denoise", written.elapsed, len(codes))
            sentence.take(row, self._writer.verdict(row))
            if sentence.written:
                self._leave(sentence)
            if sentence.over:
                self._end(sentence)

    def _spent(self, sentence: Sentence, phase: Phase, elapsed: Elapsed, company: int) -> None:
        """In a run for so many sentences, by one whose session has ended: what a session takes is counted then."""
        job, seconds = sentence.job, elapsed()
        job.seconds[phase] = job.seconds.get(phase, 0.0) + seconds
        self.totals[phase] += seconds
        if wants_profile(job.request):
            step = max(job.steps_done - 1, 0) if phase == "denoise" else None
            job.spans.append(Span(self._name(phase), phase, step, elapsed, company, 1))

    def _heard(self, made: _Sounded) -> None:
        """The next part of some sentences' sound."""
        for sentence, samples in made.part.wait():
            sentence.sounding -= 1
            if sentence.left:
                continue
            self._spent(sentence, "decode", made.elapsed, len(made.sentences))
            try:
                self._take_sound(sentence, sound_of(samples))
            except Exception as error:  # of what this one's sound is, or of what is made of it
                self._fall([sentence], error)

    def _take_sound(self, sentence: Sentence, sound: Array) -> None:
        """What is to be stretched is heard when it is whole."""
        if sentence.job.params.speed in (None, 1.0):
            self._hear(sentence.job, sentence.index, sound)
        else:
            sentence.sounds.append(sound)
        if sentence.over:
            self._end(sentence)

    def _end(self, sentence: Sentence) -> None:
        """It is written, and its sound is there."""
        job, speed = sentence.job, sentence.job.params.speed
        self._begun.remove(sentence)
        if sentence.sounds:
            rate = self.described.sample_rate or 0
            self._hear(job, sentence.index, stretch(np.concatenate(sentence.sounds, axis=1), rate, float(speed or 1.0)))
        if not sentence.heard:
            what = f"sentence {sentence.index + 1} came to its end before there was a sound: another seed may"
            self._fail(job, UnusableOutputError(what))
        elif not self._cut_off(job, sentence.index, (job.calls[sentence.index].steps or 0) - sentence.left_over):
            self._made(job, sentence.index, None)

    def _leave(self, sentence: Sentence) -> None:
        if sentence.row is not None:
            self.batch.leave(sentence.row)
            sentence.row = None

    def _fall(self, sentences: Many[Sentence], error: Exception) -> None:
        problem = as_polymux_error(error, drop_frames(error), computing=True)
        for sentence in sentences:
            if not sentence.left:
                self._fail(sentence.job, problem)

    def _fail(self, job: SoundJob, error: PolymuxError) -> None:
        for sentence in [s for s in (*self._begun, *self._waiting) if s.job is job]:
            sentence.left = True
            self._leave(sentence)
        self._begun = [s for s in self._begun if not s.left]
        self._waiting = [s for s in self._waiting if not s.left]
        if job.request.request_id in self.jobs:
            super()._fail(job, error)
