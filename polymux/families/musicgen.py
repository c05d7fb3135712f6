"""MusicGen: a description becomes music, as long as is asked for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from polymux.families.generate import DRAWING, Adapter, Call, GenerateFamily, Parts, Wish, told
from polymux.request import SamplingParams


class MusicgenAdapter(Adapter):
    def voices(self, parts: Parts) -> tuple[str, ...]:
        return ()

    def sample_rate(self, parts: Parts) -> int:
        return int(parts.model.config.audio_encoder.sampling_rate)

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        return max(1, int(limit_s * self._frames_per_second(parts)))

    def pieces(self, text: str, voice: str | None, longest: int) -> list[str]:
        return [text]

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        inputs = parts.processor(text=[wish.text], padding=True, return_tensors="pt").to(parts.model.device)
        given = told(wish)
        if wish.params.seconds is not None:
            # So many more steps than frames as its channels are delayed.
            frames = math.ceil(wish.params.seconds * self._frames_per_second(parts))
            given["max_new_tokens"] = frames + parts.model.config.decoder.num_codebooks - 1
        steps = given.get("max_new_tokens")
        return Call(arguments={**inputs, **given}, steps=steps, ends=False)

    def run(self, parts: Parts, call: Call) -> Any:
        return parts.model.generate(**call.arguments)[0]

    def _frames_per_second(self, parts: Parts) -> float:
        return float(parts.model.config.audio_encoder.frame_rate)


MUSICGEN = GenerateFamily(
    name="musicgen",
    models=("MusicgenForConditionalGeneration",),
    tasks=("text-to-audio",),
    adapter=MusicgenAdapter(),
    speaks=False,
    processor="MusicgenProcessor",
    steps=("decoder.forward",),
    decoders=("audio_encoder",),
    arguments=(*DRAWING, "max_new_tokens", "seconds", "guidance_scale"),
    warmup=SamplingParams(seed=0, max_new_tokens=8),
)

# Its processor reads melodies, too, which nobody can give here yet: what reads texts is its tokenizer.
MUSICGEN_MELODY = dataclasses.replace(
    MUSICGEN,
    name="musicgen-melody",
    models=("MusicgenMelodyForConditionalGeneration",),
    processor="AutoTokenizer",
)

FAMILIES = (MUSICGEN, MUSICGEN_MELODY)
