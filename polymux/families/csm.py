"""CSM: a backbone writes the first code of each frame, a small model the others.

With a recording, what is said there and its codes come before the text, as an earlier turn of the same speaker. The
sentences of all requests are written together; with `--decoding generate` each by the model's own `generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polymux.families.generate import (
    DRAWING,
    REFERENCE,
    SPEECH,
    Adapter,
    Call,
    GenerateFamily,
    Parts,
    Reference,
    Wish,
    check_room,
    no_control_tokens,
    told,
)
from polymux.request import SamplingParams

CHUNK = 4  # frames that are heard at once: a third of a second
_PENALTY = "repetition_penalty"
_DRAWING = tuple(name for name in DRAWING if name != _PENALTY)
SPEAKERS = 10  # any number works; those of a conversation count from 0


class CsmAdapter(Adapter):
    def voices(self, parts: Parts) -> tuple[str, ...]:
        return tuple(map(str, range(SPEAKERS)))

    def sample_rate(self, parts: Parts) -> int:
        return int(parts.model.config.codec_config.sampling_rate)

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        return int(parts.model.config.max_position_embeddings) // 2

    def without(self, parts: Parts) -> Mapping[str, str]:
        return {_PENALTY: "models that write several codes at once know none"}

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        no_control_tokens(parts.processor.tokenizer, wish.text)
        said = [_turn(wish.voice, wish.text)]
        if wish.reference is None:
            inputs = parts.processor.apply_chat_template(said, tokenize=True, return_dict=True)
        else:
            inputs = _heard(parts, wish.reference, [_turn(wish.voice, wish.reference.text, heard=True), *said])
        inputs = inputs.to(parts.model.device)
        given = told(wish)
        count, room = inputs["input_ids"].shape[1], parts.model.config.max_position_embeddings
        default = self.longest(parts, 0) or 0
        steps = given.setdefault("max_new_tokens", default)
        check_room(wish, count, steps, room)
        for name in _DRAWING:
            if name in given:
                given.setdefault(f"depth_decoder_{name}", given[name])
        ends = wish.params.max_new_tokens is None
        return Call(arguments={**inputs, **given}, steps=steps, ends=ends)

    def run(self, parts: Parts, call: Call) -> Any:
        return parts.model.generate(**call.arguments, output_audio=True)[0]

    def start(self, parts: Parts, call: Call) -> Any:
        return parts.model.start(call.arguments)

    def writer(self, parts: Parts) -> Any:
        return parts.model.writer()

    def codec(self, parts: Parts) -> Any:
        return parts.model.codec()

    def alone(self, parts: Parts) -> str | None:
        why: str | None = parts.model.alone()
        return why


def _turn(speaker: str | None, text: str, *, heard: bool = False) -> dict[str, Any]:
    content = [{"type": "text", "text": text}, *([{"type": "audio"}] if heard else [])]
    return {"role": speaker, "content": content}


def _heard(parts: Parts, reference: Reference, turns: list[dict[str, Any]]) -> Any:
    """What the processor would make of them. It counts the frames of one codec, we those of the checkpoint's own."""
    processor, model = parts.processor, parts.model
    no_control_tokens(processor.tokenizer, reference.text, "ref_text")
    samples = next(model.parameters()).new_tensor(reference.samples)
    length = samples.new_tensor([samples.shape[0]]).long()
    mark, frames = processor.audio_token, int(model.codec_model.get_encoded_length(length))
    text = processor.apply_chat_template(turns, tokenize=False).replace(mark, mark * frames)
    inputs = processor.tokenizer([text], add_special_tokens=False, return_tensors="pt")
    inputs["input_values"], inputs["input_values_cutoffs"] = samples.reshape(1, 1, -1), length.reshape(1, 1)
    return inputs


CSM = GenerateFamily(
    name="csm",
    models=("CsmForConditionalGeneration",),
    tasks=("text-to-speech",),
    adapter=CsmAdapter(),
    longest=400,
    processor="CsmProcessor",
    components=("backbone_model", "depth_decoder", "embed_text_tokens", "lm_head", "codec_model"),
    steps=("backbone_model.forward",),
    decoders=("codec_model",),
    arguments=(*SPEECH, *REFERENCE, *_DRAWING, "max_new_tokens"),
    extra=("depth_decoder_do_sample", "depth_decoder_temperature", "depth_decoder_top_k", "depth_decoder_top_p"),
    framed=CHUNK,
    unmerged_because="with `--decoding generate` they are not",
    warmup=SamplingParams(seed=0, max_new_tokens=2 * CHUNK),
)

FAMILIES = (CSM,)
