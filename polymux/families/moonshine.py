"""Moonshine: small models that read a sound as it is, as long as they have room to write it down."""

from __future__ import annotations

import math
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.families.generate import Call, Parts
from polymux.families.hearing import Heard, HearingAdapter, HearingFamily, Transcript, check_length
from polymux.request import SamplingParams

_TOKENS_A_SECOND = 6.5  # no speech has more, say its authors: a model that writes more repeats itself


class MoonshineAdapter(HearingAdapter):
    def hears_at(self, parts: Parts) -> int:
        return int(parts.processor.feature_extractor.sampling_rate)

    def prepare_heard(self, parts: Parts, heard: Heard) -> Call:
        rate, room = self.hears_at(parts), parts.model.config.max_position_embeddings
        check_length(heard, rate, room / _TOKENS_A_SECOND)
        if len(heard.samples) < (least := _least_samples(parts)):
            what = f"{len(heard.samples) / rate:.3f} s: the model hears nothing in less than {least / rate:.3f} s"
            raise InvalidRequestError(f"audio: {what}", param="audio")
        inputs = parts.processor(heard.samples, sampling_rate=rate, return_tensors="pt")
        steps = min(math.ceil(len(heard.samples) / rate * _TOKENS_A_SECOND), room - 1)
        given: dict[str, Any] = {"max_new_tokens": steps}
        if heard.params.temperature is not None:
            given["do_sample"] = heard.params.temperature > 0
        if heard.params.temperature:
            given["temperature"] = float(heard.params.temperature)
        return Call(arguments={**inputs.to(parts.model.device, parts.model.dtype), **given}, steps=steps)

    def transcribe(self, parts: Parts, call: Call) -> Transcript:
        ids = parts.model.generate(**call.arguments)[0].tolist()
        text = parts.processor.tokenizer.decode(ids, skip_special_tokens=True).strip()
        return Transcript(text=text, segments=[], language=None, tokens=len(ids) - 1)


def _least_samples(parts: Parts) -> int:
    """Of which the encoder's convolutions make one frame."""
    encoder, least = parts.model.model.encoder, 1
    for layer in (encoder.conv3, encoder.conv2, encoder.conv1):
        least = (least - 1) * layer.stride[0] + layer.kernel_size[0]
    return least


MOONSHINE = HearingFamily(
    name="moonshine",
    models=("MoonshineForConditionalGeneration",),
    tasks=("automatic-speech-recognition",),
    adapter=MoonshineAdapter(),
    processor="Wav2Vec2Processor",
    steps=("model.decoder.forward",),
    components=("model.encoder", "model.decoder", "proj_out"),
    arguments=("temperature",),
    prompted=False,
    warmup=SamplingParams(seed=0),
)

FAMILIES = (MOONSHINE,)
