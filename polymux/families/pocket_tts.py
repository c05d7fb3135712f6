"""Pocket TTS: a small model that writes sound as continuous frames, which its codec decodes."""

from __future__ import annotations

import math
from typing import Any

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

_TOKENS_A_SECOND, _SECONDS_MORE = 3, 2  # no text takes longer to be said


class PocketTtsAdapter(Adapter):
    def sample_rate(self, parts: Parts) -> int:
        return int(parts.beside.config.sampling_rate)

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        return int(parts.model.config.max_position_embeddings) // 2

    def deaf(self, parts: Parts) -> str | None:
        return None if parts.beside.config.encoder_config is not None else "the codec is there without its encoder"

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        processor, config, most = parts.processor, parts.model.config, self.longest(parts, 0) or 0
        no_control_tokens(processor.tokenizer, wish.text)
        content: list[dict[str, Any]] = [{"type": "text", "text": wish.text}]
        heard: dict[str, Any] = {}
        frames = 0
        if wish.reference is not None:
            content.insert(0, {"type": "audio"})
            heard = {"audio": [wish.reference.samples], "sampling_rate": self.sample_rate(parts)}
            frames = math.ceil(len(wish.reference.samples) / parts.beside.config.frame_size)
        text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        mask = processor.tokenizer(text, return_tensors="pt").attention_mask
        count = int(mask.sum())
        seconds = count / _TOKENS_A_SECOND + _SECONDS_MORE
        given = told(wish)
        steps = given.setdefault("max_new_tokens", min(math.ceil(seconds * config.frame_rate), most))
        check_room(wish, count + frames, steps, config.max_position_embeddings)
        arguments = {"attention_mask": mask.new_ones(1, count + frames), "said": {"text": [text], **heard}, **given}
        return Call(arguments=arguments, steps=steps, ends=wish.params.max_new_tokens is None)

    def run(self, parts: Parts, call: Call) -> Any:
        """The processor is called here because it calls the codec."""
        arguments = {name: value for name, value in call.arguments.items() if name not in ("attention_mask", "said")}
        inputs = parts.processor(**call.arguments["said"], return_tensors="pt").to(parts.model.device)
        made = parts.model.generate(**inputs, **arguments, return_dict_in_generate=True)
        return parts.processor.decode(made.audio_latents, made.audio_latents_mask)[0]


POCKET_TTS = GenerateFamily(
    name="pocket-tts",
    models=("PocketTTSForConditionalGeneration",),
    tasks=("text-to-speech",),
    adapter=PocketTtsAdapter(),
    processor="PocketTTSProcessor",
    assembled=(("feature_extractor", "PocketTTSFeatureExtractor"), ("tokenizer", "AutoTokenizer")),
    beside=("PocketTTSAudioTokenizerModel", "audio_tokenizer"),
    steps=("model.forward",),
    decoders=("audio_tokenizer",),
    arguments=(*SPEECH, "ref_audio", "do_sample", "temperature", "max_new_tokens"),
    extra=("num_flow_steps", "eos_threshold", "min_frames_before_eos"),
    bounds={
        "num_flow_steps": Bounds(1, 100, "integer"),
        "eos_threshold": Bounds(-100, 100),
        "min_frames_before_eos": Bounds(0, 10**6, "integer"),
    },
    warmup=SamplingParams(seed=0, max_new_tokens=2),
)

FAMILIES = (POCKET_TTS,)
