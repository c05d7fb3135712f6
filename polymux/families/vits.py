"""VITS, and MMS-TTS, which has a checkpoint for each language."""

from __future__ import annotations

import importlib.util
import unicodedata
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.families.generate import SPEECH, Adapter, Call, GenerateFamily, Parts, Wish, known_signs
from polymux.request import Bounds

_OWN = ("noise_scale", "noise_scale_duration", "speaking_rate")  # attributes that its forward reads

_RATES = Bounds(0.1, 10)  # of speech: far beyond, it divides by zero, or makes hours of a word


class VitsAdapter(Adapter):
    def voices(self, parts: Parts) -> tuple[str, ...]:
        count = parts.model.config.num_speakers
        return tuple(map(str, range(count))) if count > 1 else ("default",)

    def languages(self, parts: Parts) -> tuple[str, ...]:
        return (parts.processor.language,) if parts.processor.language else ()

    def sample_rate(self, parts: Parts) -> int:
        return int(parts.model.config.sampling_rate)

    def check(self, parts: Parts) -> str | None:
        for needs, package in ((parts.processor.phonemize, "phonemizer"), (parts.processor.is_uroman, "uroman")):
            if needs and importlib.util.find_spec(package) is None:
                return f"its tokenizer needs the package {package}, which is not installed"
        return None

    def sample_text(self, parts: Parts) -> str:
        letters = [sign for sign in parts.processor.encoder if len(sign) == 1 and sign.isalpha()]
        return "".join(letters[:5]) or super().sample_text(parts)

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        tokenizer, text = parts.processor, unicodedata.normalize("NFC", wish.text)
        if not (tokenizer.phonemize or tokenizer.is_uroman):  # it leaves out what it does not know
            said = tokenizer.normalize_text(text) if tokenizer.normalize else text
            known_signs(said, lambda sign: sign in tokenizer.encoder)
        inputs = tokenizer(text, return_tensors="pt").to(parts.model.device)
        if inputs.input_ids.shape[1] < 2:
            raise InvalidRequestError("prompt: the model has no sign for anything in it", param="prompt")
        speaker = {} if parts.model.config.num_speakers < 2 else {"speaker_id": int(wish.voice or 0)}
        return Call(arguments={**inputs, **speaker, "own": wish.params.extra_args})

    def run(self, parts: Parts, call: Call) -> Any:
        arguments = dict(call.arguments)
        for name, value in arguments.pop("own").items():
            setattr(parts.model, name, value)  # of the session's own copy
        return parts.model(**arguments).waveform[0]


VITS = GenerateFamily(
    name="vits",
    models=("VitsModel",),
    tasks=("text-to-speech",),
    adapter=VitsAdapter(),
    processor="VitsTokenizer",
    precise=True,
    decoders=("decoder",),
    arguments=(*SPEECH, "language"),
    unheard_because="their speakers are those that they were trained with",
    extra=_OWN,
    bounds={"noise_scale": Bounds(0, 10), "noise_scale_duration": Bounds(0, 2), "speaking_rate": _RATES},
    unmerged_because="its lengths follow from drawn durations, and it is done in one pass",
)

FAMILIES = (VITS,)
