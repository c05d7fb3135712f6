"""Higgs Audio v2: a language model that writes the codes of a sound, several for each frame, each later than the last.

With a recording, what is said there and its codes come before the text, as an earlier turn.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.families.generate import (
    REFERENCE,
    SPEECH,
    Adapter,
    Call,
    Codec,
    GenerateFamily,
    Parts,
    Wish,
    check_room,
    no_control_tokens,
    told,
)
from polymux.request import SamplingParams

_TASK = "Generate audio following instruction."  # what it was trained to be told
_SCENE = "Audio is recorded from a quiet room."


class HiggsAdapter(Adapter):
    def sample_rate(self, parts: Parts) -> int:
        return int(parts.beside.config.sample_rate)

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        return int(parts.model.config.max_position_embeddings) // 2

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        processor, config, scene = parts.processor, parts.model.config, wish.params.instructions or _SCENE
        no_control_tokens(processor.tokenizer, wish.text)
        no_control_tokens(processor.tokenizer, scene, "instructions")
        turns = [_turn("system", _TASK), _turn("scene", scene)]
        heard: dict[str, Any] = {}
        frames = 0
        if wish.reference is not None:
            no_control_tokens(processor.tokenizer, wish.reference.text, "ref_text")
            samples = wish.reference.samples
            turns += [_turn("user", wish.reference.text), {"role": "assistant", "content": [{"type": "audio"}]}]
            heard = {"audio": [samples], "sampling_rate": self.sample_rate(parts)}
            frames = (
                math.ceil(len(samples) / parts.beside.config.hop_length) + config.num_codebooks
            )  # a mark stands there
        turns.append(_turn("user", wish.text))
        text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        mask = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt").attention_mask
        given = told(wish)
        count = int(mask.sum()) + frames
        steps = given.setdefault("max_new_tokens", self.longest(parts, 0) or 0)
        check_room(wish, count, steps, config.max_position_embeddings)
        if steps <= config.num_codebooks:
            why = f"a frame takes {config.num_codebooks} steps and one to begin"
            raise InvalidRequestError(f"max_new_tokens={steps}: {why}", param="max_new_tokens")
        arguments = {"attention_mask": mask.new_ones(1, count), "said": {"text": [text], **heard}, **given}
        return Call(arguments=arguments, steps=steps, ends=wish.params.max_new_tokens is None)

    def run(self, parts: Parts, call: Call) -> Any:
        """The processor is called here because it calls the codec."""
        arguments = {name: value for name, value in call.arguments.items() if name not in ("attention_mask", "said")}
        processor = copy.copy(parts.processor)
        processor.audio_tokenizer = Codec(parts.beside)
        inputs = processor(**call.arguments["said"], add_special_tokens=False, return_tensors="pt")
        codes = parts.model.generate(**inputs.to(parts.model.device), **arguments, return_dict_in_generate=True)
        return processor.decode(codes.audio_sequences)


def _turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


HIGGS = GenerateFamily(
    name="higgs-audio-v2",
    models=("HiggsAudioV2ForConditionalGeneration",),
    tasks=("text-to-speech",),
    adapter=HiggsAdapter(),
    processor="HiggsAudioV2Processor",
    assembled=(("feature_extractor", "DacFeatureExtractor"), ("tokenizer", "AutoTokenizer")),
    beside=("HiggsAudioV2TokenizerModel", "audio_tokenizer"),
    steps=("model.forward",),
    decoders=("audio_tokenizer",),
    arguments=(*SPEECH, *REFERENCE, "instructions", "do_sample", "temperature", "top_k", "top_p", "max_new_tokens"),
    warmup=SamplingParams(seed=0, max_new_tokens=12),
)

FAMILIES = (HIGGS,)
