"""VibeVoice: a language model says when sound goes on, and a small diffusion model makes each piece of it."""

from __future__ import annotations

from typing import Any

from polymux.errors import UnusableOutputError
from polymux.families.generate import (
    SPEECH,
    Adapter,
    Call,
    GenerateFamily,
    Parts,
    Wish,
    check_room,
    no_control_tokens,
    told,
)
from polymux.request import Bounds, SamplingParams

SPEAKERS = 4  # as many as it was trained to tell apart


class VibeVoiceAdapter(Adapter):
    def voices(self, parts: Parts) -> tuple[str, ...]:
        return tuple(map(str, range(SPEAKERS)))

    def sample_rate(self, parts: Parts) -> int:
        return int(parts.processor.feature_extractor.sampling_rate)

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        return int(parts.model.config.text_config.max_position_embeddings) // 2

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        processor, config = parts.processor, parts.model.config
        no_control_tokens(processor.tokenizer, wish.text)
        content: list[dict[str, Any]] = [{"type": "text", "text": wish.text}]
        heard: dict[str, Any] = {}
        if wish.reference is not None:
            content.append({"type": "audio"})
            heard = {"audio": [wish.reference.samples], "sampling_rate": self.sample_rate(parts)}
        text = processor.apply_chat_template([{"role": wish.voice, "content": content}], tokenize=False)
        inputs = processor(text=[text], return_tensors="pt", **heard).to(parts.model.device, parts.model.dtype)
        given = told(wish)
        count, room = inputs["input_ids"].shape[1], config.text_config.max_position_embeddings
        steps = given.setdefault("max_new_tokens", self.longest(parts, 0) or 0)
        check_room(wish, count, steps, room)
        return Call(arguments={**inputs, **given}, steps=steps, ends=wish.params.max_new_tokens is None)

    def run(self, parts: Parts, call: Call) -> Any:
        made = parts.model.generate(**call.arguments, return_dict_in_generate=True)
        if call.ends and int(made.sequences[0, -1]) != parts.model.config.eos_token_id:
            raise UnusableOutputError(f"a sentence had not come to its end after {call.steps} steps: another seed may")
        if made.audio[0] is None:
            raise UnusableOutputError("the model ended before it had made a sound: another seed may not")
        return made.audio[0].reshape(-1)


VIBEVOICE = GenerateFamily(
    name="vibevoice",
    models=("VibeVoiceForConditionalGeneration",),
    tasks=("text-to-speech",),
    adapter=VibeVoiceAdapter(),
    longest=600,
    processor="VibeVoiceProcessor",
    components=(
        "lm_head",
        "model.language_model",
        "model.diffusion_head",
        "model.audio_tower",
        "model.multi_modal_projector",
        "model.semantic_tokenizer_encoder",
        "model.semantic_connector",
    ),
    steps=("model.audio_tower.decode",),  # of the language model, guidance makes several calls for each
    decoders=("model.audio_tower",),
    arguments=(*SPEECH, "ref_audio", "max_new_tokens", "guidance_scale"),
    extra=("num_diffusion_steps",),
    bounds={"num_diffusion_steps": Bounds(1, 1000, "integer")},
    warmup=SamplingParams(seed=0, max_new_tokens=2),
)

FAMILIES = (VIBEVOICE,)
