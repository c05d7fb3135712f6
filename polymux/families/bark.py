"""Bark: three models of tokens, one after the other."""

from __future__ import annotations

from typing import Any

from polymux.errors import InvalidRequestError
from polymux.families.generate import Adapter, Call, GenerateFamily, Parts, Wish, known_tokens, told
from polymux.request import Bounds, SamplingParams

_STAGES = ("semantic", "coarse", "fine")


class BarkAdapter(Adapter):
    def voices(self, parts: Parts) -> tuple[str, ...]:
        return tuple(parts.processor.available_voice_presets) or ("default",)

    def sample_rate(self, parts: Parts) -> int:
        return int(parts.model.generation_config.sample_rate)

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        return int(parts.model.generation_config.semantic_config["max_new_tokens"])

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        generation, tokenizer = parts.model.generation_config.semantic_config, parts.processor.tokenizer
        most = generation["max_input_semantic_length"]
        ids = tokenizer(wish.text, add_special_tokens=False).input_ids
        known_tokens(tokenizer, wish.text, ids)
        if len(ids) > most:
            raise InvalidRequestError(f"prompt: a sentence has {len(ids)} tokens: allowed are {most}", param="prompt")
        preset = wish.voice if wish.voice in parts.processor.available_voice_presets else None
        inputs = parts.processor(wish.text, voice_preset=preset, max_length=most)
        device = parts.model.device
        arguments = {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}
        if preset is not None:
            arguments["history_prompt"] = inputs["history_prompt"].to(device)
        given = told(wish)
        # The number of tokens is that of the first model; those of the others follow from it. The last one does not
        # draw from a choice of tokens, but knows a temperature.
        steps = given.pop("max_new_tokens", None)
        for name in ("do_sample", "top_k", "top_p", "repetition_penalty"):
            if name in given:
                value = given.pop(name)
                arguments |= {f"semantic_{name}": value, f"coarse_{name}": value}
        if steps is not None:
            arguments["semantic_max_new_tokens"] = steps
        return Call(arguments=arguments | given, steps=steps or generation["max_new_tokens"], ends=steps is None)

    def run(self, parts: Parts, call: Call) -> Any:
        return parts.model.generate(**call.arguments)[0]


BARK = GenerateFamily(
    name="bark",
    models=("BarkModel",),
    tasks=("text-to-speech",),
    adapter=BarkAdapter(),
    longest=150,  # it makes less than a quarter of a minute in one go
    processor="BarkProcessor",
    steps=("semantic.forward",),
    decoders=("codec_model",),
    arguments=("voice", "speed", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty"),
    unheard_because="their voices are presets, which take another model to be made of a sound",
    extra=("min_eos_p", *(f"{stage}_temperature" for stage in _STAGES)),
    bounds={"min_eos_p": Bounds(0, 1)},
    warmup=SamplingParams(seed=0, max_new_tokens=4),
)

FAMILIES = (BARK,)
