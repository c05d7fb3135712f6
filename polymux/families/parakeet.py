"""Parakeet: an encoder, and a small network that chooses a token for each of its frames, or none (CTC); or a token and
how many frames it lasts (transducers), which tell when each was said.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

from polymux.families.generate import Call, Parts
from polymux.families.hearing import Heard, HearingAdapter, HearingFamily, Transcript, check_length
from polymux.request import Segment

Read = Callable[[list[int]], str]
_MARKS = ("?", "'", "¡", "¿", "-", ":", ",", "%", "/", ".", "!")
_LONGEST_CHARACTER = 4  # bytes, each of which may be a token
_ENDS = re.compile(r"[.?!。？！]\s*$")  # of a sentence


class ParakeetAdapter(HearingAdapter):
    def hears_at(self, parts: Parts) -> int:
        return int(parts.processor.feature_extractor.sampling_rate)

    def timestamps(self, parts: Parts) -> bool:
        return bool(parts.model.config.model_type != "parakeet_ctc")

    def prepare_heard(self, parts: Parts, heard: Heard) -> Call:
        rate, encoder = self.hears_at(parts), parts.model.config.encoder_config
        frame = parts.processor.feature_extractor.hop_length * encoder.subsampling_factor
        check_length(heard, rate, encoder.max_position_embeddings * frame / rate)
        inputs = parts.processor(heard.samples, sampling_rate=rate).to(parts.model.device, parts.model.dtype)
        return Call(arguments={**inputs})

    def transcribe(self, parts: Parts, call: Call) -> Transcript:
        made, processor = parts.model.generate(**call.arguments, return_dict_in_generate=True), parts.processor
        (text,) = processor.batch_decode(made.sequences, skip_special_tokens=True)
        (ids,), tokenizer = made.sequences.tolist(), processor.tokenizer
        if not self.timestamps(parts):
            chosen = [token for token, _ in groupby(ids) if token != tokenizer.pad_token_id]
            return Transcript(text=text.strip(), segments=[], language=None, tokens=len(chosen))
        config, features = parts.model.config, processor.feature_extractor
        frame = features.hop_length / features.sampling_rate * config.encoder_config.subsampling_factor

        def read(tokens: list[int]) -> str:
            return str(processor.decode(tokens, skip_special_tokens=True))

        lasts = config.model_type == "parakeet_tdt"  # elsewhere a duration says only whether the next frame is next
        unsaid = {config.blank_token_id, *tokenizer.all_special_ids}
        said: list[Said] = []
        at = 0
        for token, duration in zip(ids, made.durations[0].tolist(), strict=True):
            if token not in unsaid:
                end = at + (duration if lasts else 1)
                said.append(Said(token, at * frame, end * frame))
            at += duration
        segments = sentences(_punctuated(said, read) if lasts else said, read)
        return Transcript(text=text.strip(), segments=segments, language=None, tokens=len(said))


@dataclass(frozen=True)
class Said:
    """A token, and when it was said, in seconds."""

    token: int
    start: float
    end: float


def _punctuated(said: list[Said], read: Read) -> list[Said]:
    """Nobody says a punctuation mark: it has the end of what stands before it."""
    made: list[Said] = []
    for one in said:
        marks = made and read([one.token]) in _MARKS
        made.append(replace(one, start=made[-1].end, end=made[-1].end) if marks else one)
    return made


def sentences(said: list[Said], read: Read) -> list[Segment]:
    """Tokens put together up to where a sentence ends.

    A sentence is read with the one before it, so that a space between them is seen; never token by token, since some
    tokens are bytes that make no character."""
    made: list[Segment] = []
    tokens, before, begin = [one.token for one in said], 0, 0
    for i, one in enumerate(said):
        if i == len(said) - 1 or _ENDS.search(read(tokens[max(begin, i + 1 - _LONGEST_CHARACTER) : i + 1])):
            known = read(tokens[before:begin]) if begin else ""
            text = read(tokens[before : i + 1])[len(known) :]
            start, end = round(said[begin].start, 3), round(one.end, 3)
            made.append(Segment(start=start, end=max(start, end), text=text, tokens=[]))
            before, begin = begin, i + 1
    return made


PARAKEET = HearingFamily(
    name="parakeet",
    models=("ParakeetForCTC", "ParakeetForTDT", "ParakeetForRNNT"),
    tasks=("automatic-speech-recognition",),
    adapter=ParakeetAdapter(),
    processor="ParakeetProcessor",
    steps=("decoder.forward",),
    arguments=(),
    prompted=False,
)

FAMILIES = (PARAKEET,)
