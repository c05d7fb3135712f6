"""A sentence that is written frame by frame, and how the frames of several become sound in one go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from polymux.ar.crossing import Landing, to_device, to_host
from polymux.ar.frames import Start
from polymux.engine.part_decoder import Decode
from polymux.engine.sound_job import SoundJob
from polymux.media.wire import Array


class SpokenStart(Start):
    """`kept`: what the sound goes on from; of all sentences of the same form, or nothing."""

    kept: tuple[torch.Tensor, ...]


@dataclass(eq=False)
class Sentence:
    """One that has a prompt."""

    job: SoundJob
    index: int
    start: SpokenStart
    kept: tuple[torch.Tensor, ...] = ()
    row: int | None = None
    launched: int = 0  # frames
    landed: int = 0
    heard: int = 0  # of these
    waiting: list[list[int]] = field(default_factory=list)  # frames that are no sound yet
    written: bool = False  # to its end
    left: bool = False  # nobody wants it any more
    sounding: int = 0  # parts that are being made
    sounds: list[Array] = field(default_factory=list)  # that are heard when all are there

    @property
    def over(self) -> bool:
        return self.written and not self.waiting and not self.sounding

    @property
    def counts_prompt(self) -> bool:
        """Whether the first code alone is a step, as it is in a loop of its own, or a frame's codes are."""
        return self.start.most == self.job.calls[self.index].steps

    @property
    def left_over(self) -> int:
        """Frames that there might have been, had it not ended."""
        return self.start.most - 1 - self.landed

    def take(self, codes: list[int], verdict: tuple[bool, bool]) -> None:
        """Codes that a step has written: those of a frame, if it was no prompt, and the first one of the next."""
        sounds, last = verdict
        if len(codes) > 1:
            self.landed += 1
            if sounds:
                self.heard += 1
                self.waiting.append(codes[:-1])
        self.written = last or not self.left_over


@dataclass
class Part:
    """Frames of some sentences, the same number of each, as samples (sentences, 1, samples), on the host once the
    device has got there."""

    sentences: list[Sentence]
    samples: torch.Tensor
    landed: Landing

    def wait(self) -> Iterator[tuple[Sentence, torch.Tensor]]:
        """The samples (samples) of each."""
        self.landed.wait()
        yield from zip(self.sentences, self.samples[:, 0], strict=True)


def due(sentences: Iterable[Sentence], count: int) -> list[list[Sentence]]:
    """Those of which so many frames wait, or the last ones, in groups that can become sound in one go."""
    groups: dict[tuple[int, bool], list[Sentence]] = defaultdict(list)
    for sentence in sentences:
        waiting = min(len(sentence.waiting), count)
        if waiting == count or (sentence.written and waiting):
            groups[waiting, bool(sentence.kept)].append(sentence)
    return list(groups.values())


def sounded(decode: Decode, sentences: list[Sentence], count: int, device: torch.device) -> Part:
    """Their next `count` frames, or fewer, which are as many in each."""
    frames = [sentence.waiting[:count] for sentence in sentences]
    codes = to_device(torch.tensor(frames).transpose(1, 2), device)
    kept = tuple(torch.cat(each) for each in zip(*(s.kept for s in sentences), strict=True))
    samples, now = decode(codes, kept)
    for i, sentence in enumerate(sentences):
        sentence.waiting = sentence.waiting[count:]
        sentence.kept = tuple(each[i : i + 1] for each in now)
        sentence.sounding += 1
    return Part(sentences, to_host(samples.float()), Landing(device))
