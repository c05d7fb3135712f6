"""CSM: a backbone writes the first code of each frame, a small model the others."""

from __future__ import annotations

from typing import Any

from polymux.errors import InvalidRequestError
from polymux.families.generate import DRAWING, SPEECH, Adapter, Call, GenerateFamily, Parts, Wish, told
from polymux.request import SamplingParams

SPEAKERS = 10  # any number works; those of a conversation count from 0


class CsmAdapter(Adapter):
    def voices(self, parts: Parts) -> tuple[str, ...]:
        return tuple(map(str, range(SPEAKERS)))

    def sample_rate(self, parts: Parts) -> int:
        return int(parts.model.config.codec_config.sampling_rate)

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        return int(parts.model.config.max_position_embeddings) // 2

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        said = {"role": wish.voice, "content": [{"type": "text", "text": wish.text}]}
        inputs = parts.processor.apply_chat_template([said], tokenize=True, return_dict=True).to(parts.model.device)
        given = told(wish)
        count, room = inputs["input_ids"].shape[1], parts.model.config.max_position_embeddings
        default = self.longest(parts, 0) or 0
        steps = given.setdefault("max_new_tokens", default)
        if count + steps > room:
            what = f"a sentence has {count} tokens, and with {steps} new ones there are more than {room}"
            raise InvalidRequestError(f"prompt: {what}", param="prompt")
        for name in ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty"):
            if name in given:
                given.setdefault(f"depth_decoder_{name}", given[name])
        ends = wish.params.max_new_tokens is None
        return Call(arguments={**inputs, **given}, steps=steps, ends=ends)

    def run(self, parts: Parts, call: Call) -> Any:
        return parts.model.generate(**call.arguments, output_audio=True)[0]


CSM = GenerateFamily(
    name="csm",
    models=("CsmForConditionalGeneration",),
    tasks=("text-to-speech",),
    adapter=CsmAdapter(),
    longest=400,
    processor="CsmProcessor",
    steps=("backbone_model.forward",),
    decoders=("codec_model",),
    arguments=(*SPEECH, *DRAWING, "max_new_tokens"),
    extra=("depth_decoder_do_sample", "depth_decoder_temperature", "depth_decoder_top_k", "depth_decoder_top_p"),
    warmup=SamplingParams(seed=0, max_new_tokens=2),
)

FAMILIES = (CSM,)
