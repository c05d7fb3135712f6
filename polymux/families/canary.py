"""Canary: an encoder like Parakeet's, and a decoder that is told the language and writes it down."""

from __future__ import annotations

from typing import Any

from polymux.families.generate import Call, Parts
from polymux.families.hearing import (
    TOKENS_A_SECOND,
    Heard,
    HearingAdapter,
    HearingFamily,
    Transcript,
    check_length,
    most_tokens,
)
from polymux.request import SamplingParams

_PROMPT = 32  # tokens; more than the longest of its own
_LANGUAGES = (
    "en", "bg", "hr", "cs", "da", "nl", "et", "fi", "fr", "de", "el", "hu", "it", "lv", "lt", "mt", "pl", "pt", "ro",
    "sk", "sl", "es", "sv", "ru", "uk",
)  # fmt: skip


class CanaryAdapter(HearingAdapter):
    def hears_at(self, parts: Parts) -> int:
        return int(parts.processor.feature_extractor.sampling_rate)

    def languages(self, parts: Parts) -> tuple[str, ...]:
        return _LANGUAGES

    def prepare_heard(self, parts: Parts, heard: Heard) -> Call:
        rate, config, language = self.hears_at(parts), parts.model.config, heard.params.language or _LANGUAGES[0]
        room, encoder = config.decoder_config.max_position_embeddings, config.encoder_config
        frame = parts.processor.feature_extractor.hop_length * encoder.subsampling_factor
        check_length(
            heard, rate, min((room - _PROMPT) / TOKENS_A_SECOND, encoder.max_position_embeddings * frame / rate)
        )
        inputs = parts.processor.apply_transcription_request(audio=[heard.samples], source_language=language)
        count = inputs["decoder_input_ids"].shape[1]
        steps = min(most_tokens(heard, rate), room - count)
        given: dict[str, Any] = {"max_new_tokens": steps, "language": language}
        return Call(arguments={**inputs.to(parts.model.device, parts.model.dtype), **given}, steps=steps)

    def transcribe(self, parts: Parts, call: Call) -> Transcript:
        arguments = dict(call.arguments)
        language, count = arguments.pop("language"), arguments["decoder_input_ids"].shape[1]
        ids = parts.model.generate(**arguments)[0, count:]
        text = parts.processor.tokenizer.decode(ids, skip_special_tokens=True).strip()
        return Transcript(text=text, segments=[], language=language, tokens=len(ids))


CANARY = HearingFamily(
    name="canary",
    models=("CanaryForConditionalGeneration",),
    tasks=("automatic-speech-recognition",),
    adapter=CanaryAdapter(),
    processor="CanaryProcessor",
    components=("model.encoder", "model.decoder", "proj_out"),
    steps=("model.decoder.forward",),
    arguments=("language",),
    prompted=False,
    warmup=SamplingParams(seed=0),
)

FAMILIES = (CANARY,)
