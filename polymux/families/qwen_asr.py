"""Qwen3-ASR: a language model that is given the sound among its tokens, and says first which language it hears."""

from __future__ import annotations

from typing import Any

from polymux.errors import InvalidRequestError
from polymux.families.generate import Call, Parts, no_control_tokens
from polymux.families.hearing import Heard, HearingAdapter, HearingFamily, Transcript, check_length, most_tokens
from polymux.request import SamplingParams

_LONGEST_S = 1200  # of its training
_LANGUAGES = {
    "ar": "Arabic", "yue": "Cantonese", "zh": "Chinese", "cs": "Czech", "da": "Danish", "nl": "Dutch", "en": "English",
    "fil": "Filipino", "fi": "Finnish", "fr": "French", "de": "German", "el": "Greek", "hi": "Hindi",
    "hu": "Hungarian", "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian",
    "ms": "Malay", "fa": "Persian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian",
    "es": "Spanish", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese",
}  # fmt: skip
_CODES = {name: code for code, name in _LANGUAGES.items()}


class QwenAsrAdapter(HearingAdapter):
    def hears_at(self, parts: Parts) -> int:
        return int(parts.processor.feature_extractor.sampling_rate)

    def languages(self, parts: Parts) -> tuple[str, ...]:
        return tuple(_LANGUAGES)

    def prepare_heard(self, parts: Parts, heard: Heard) -> Call:
        processor, language, rate = parts.processor, heard.params.language, self.hears_at(parts)
        check_length(heard, rate, _LONGEST_S)
        if heard.before is not None:
            no_control_tokens(processor.tokenizer, heard.before)
        asked: dict[str, Any] = {"language": language, "prompt": heard.before}
        inputs = processor.apply_transcription_request(audio=[heard.samples], **asked)
        count, room = inputs["input_ids"].shape[1], parts.model.config.text_config.max_position_embeddings
        steps = most_tokens(heard, rate)
        if count + steps > room:
            param = "audio" if heard.before is None else "prompt"
            what = f"with it there are {count} tokens, and {steps} may be written: the model has room for {room}"
            raise InvalidRequestError(f"{param}: {what}", param=param)
        given: dict[str, Any] = {"max_new_tokens": steps, "language": language}
        if heard.params.temperature is not None:
            given["do_sample"] = heard.params.temperature > 0
        if heard.params.temperature:
            given["temperature"] = float(heard.params.temperature)
        return Call(arguments={**inputs.to(parts.model.device, parts.model.dtype), **given}, steps=steps)

    def transcribe(self, parts: Parts, call: Call) -> Transcript:
        arguments = dict(call.arguments)
        asked, count = arguments.pop("language"), arguments["input_ids"].shape[1]
        ids = parts.model.generate(**arguments)[0, count:]
        found = parts.processor.decode(ids, return_format="parsed")
        language = asked or _CODES.get(found["language"])
        return Transcript(text=found["transcription"], segments=[], language=language, tokens=len(ids))


QWEN_ASR = HearingFamily(
    name="qwen3-asr",
    models=("Qwen3ASRForConditionalGeneration",),
    tasks=("automatic-speech-recognition",),
    adapter=QwenAsrAdapter(),
    processor="Qwen3ASRProcessor",
    steps=("model.forward",),
    arguments=("language", "temperature"),
    warmup=SamplingParams(seed=0),
)

FAMILIES = (QWEN_ASR,)
