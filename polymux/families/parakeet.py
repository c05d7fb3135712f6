"""Parakeet: an encoder, and a small network that chooses a token for each of its frames, or none (CTC); or a token and
how many frames it lasts (transducers), which tell when each was said.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from polymux.families.generate import Call, Parts
from polymux.families.hearing import Heard, HearingAdapter, HearingFamily, Transcript, check_length
from polymux.request import Segment

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
        ids = made.sequences
        if not self.timestamps(parts):
            (text,) = processor.batch_decode(ids, skip_special_tokens=True)
            chosen = [token for token, _ in groupby(ids[0].tolist()) if token != processor.tokenizer.pad_token_id]
            return Transcript(text=text.strip(), segments=[], language=None, tokens=len(chosen))
        (text,), (tokens,) = processor.decode(ids, durations=made.durations, skip_special_tokens=True)
        return Transcript(text=text.strip(), segments=_sentences(tokens), language=None, tokens=len(tokens))


def _sentences(tokens: list[dict[str, Any]]) -> list[Segment]:
    """Tokens with their times, put together up to where a sentence ends."""
    made: list[Segment] = []
    begun: list[dict[str, Any]] = []
    for token in tokens:
        begun.append(token)
        if _ENDS.search(token["token"]) or token is tokens[-1]:
            text = "".join(one["token"] for one in begun)
            start, end = (round(float(time), 3) for time in (begun[0]["start"], begun[-1]["end"]))
            made.append(Segment(start=start, end=max(start, end), text=text, tokens=[]))
            begun = []
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
