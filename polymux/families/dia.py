"""Dia: dialogues, whose speakers are marked in the text."""

from __future__ import annotations

import re
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.families.generate import DRAWING, SPEECH, Adapter, Call, GenerateFamily, Parts, Wish, told
from polymux.request import SamplingParams

SPEAKERS = ("S1", "S2")
_MARK = re.compile(r"\[(S[12])\]")
_FRAME_PROMPT = 1  # frames that stand before the first one that is made


class DiaAdapter(Adapter):
    def voices(self, parts: Parts) -> tuple[str, ...]:
        return SPEAKERS

    def sample_rate(self, parts: Parts) -> int:
        return int(parts.beside.config.sampling_rate)

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        config = parts.model.config
        room, delay = config.decoder_config.max_position_embeddings, max(config.delay_pattern)
        return int(room - delay - _FRAME_PROMPT)

    def pieces(self, text: str, voice: str | None, longest: int) -> list[str]:
        """Each piece begins with the mark of whoever speaks."""
        if voice is not None and _MARK.match(text.lstrip()):
            raise InvalidRequestError(f"voice={voice!r}: the text says itself who speaks", param="voice")
        made, speaker = [], voice or SPEAKERS[0]
        for turn in re.split(r"(?=\[S[12]\])", text):
            if found := _MARK.match(turn):
                speaker = found[1]
            made += [f"[{speaker}] {piece}" for piece in super().pieces(_MARK.sub("", turn).strip(), None, longest)]
        return made

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        encoder, model = parts.model.config.encoder_config, parts.model
        count = len(parts.processor.tokenizer(wish.text).input_ids)
        most = encoder.max_position_embeddings
        if count > most:
            raise InvalidRequestError(f"prompt: a sentence has {count} tokens: allowed are {most}", param="prompt")
        inputs = parts.processor(text=[wish.text], padding=True, return_tensors="pt", **self._signs(parts))
        given, longest = told(wish), self.longest(parts, 0) or 0
        ends = wish.params.max_new_tokens is None
        # Its own default, a whole length of positions, leaves no room for the delay of its channels.
        steps = given.setdefault("max_new_tokens", longest)
        return Call(arguments={**inputs.to(model.device), **given}, steps=steps, ends=ends)

    def run(self, parts: Parts, call: Call) -> Any:
        codes = parts.model.generate(**call.arguments)
        signs = {name: value for name, value in self._signs(parts).items() if name != "eos_token_id"}
        return parts.processor.batch_decode(codes, **signs)[0]

    def _signs(self, parts: Parts) -> dict[str, Any]:
        config = parts.model.config
        names = ("eos_token_id", "pad_token_id", "bos_token_id")
        signs = {name: getattr(config.decoder_config, name) for name in names}
        return signs | {"delay_pattern": list(config.delay_pattern)}


DIA = GenerateFamily(
    name="dia",
    models=("DiaForConditionalGeneration",),
    tasks=("text-to-speech",),
    adapter=DiaAdapter(),
    longest=250,
    processor="DiaProcessor",
    assembled=(("feature_extractor", "DiaFeatureExtractor"), ("tokenizer", "DiaTokenizer")),
    beside=("DacModel", "audio_tokenizer"),
    steps=("model.forward",),
    decoders=("audio_tokenizer",),
    arguments=(*SPEECH, *DRAWING, "max_new_tokens", "guidance_scale"),
    warmup=SamplingParams(seed=0, max_new_tokens=24),
)

FAMILIES = (DIA,)
