"""SpeechT5, whose voices are x-vectors and whose vocoder is a model of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from polymux.errors import InvalidRequestError
from polymux.families.generate import SPEECH, Adapter, Call, FrameShape, GenerateFamily, Parts, Wish, known_tokens
from polymux.families.graph import Arrays, Edge, Graph, StageDeclaration
from polymux.request import Bounds

_THRESHOLD, _SHORTEST, _LONGEST = 0.5, 0.0, 20.0  # of its generate_speech


class SpeechT5Adapter(Adapter):
    def voices(self, parts: Parts) -> tuple[str, ...]:
        return tuple(parts.voices) or ("default",)

    def sample_rate(self, parts: Parts) -> int:
        return int(parts.beside.config.sampling_rate)

    def embedding_size(self, parts: Parts) -> int | None:
        return int(parts.model.config.speaker_embedding_dim)

    def check(self, parts: Parts) -> str | None:
        size = parts.model.config.speaker_embedding_dim
        wrong = [f"{name} ({vector.size})" for name, vector in parts.voices.items() if vector.size != size]
        return f"voices must have {size} values each, unlike {', '.join(wrong)}" if wrong else None

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        model = parts.model
        inputs = parts.processor(wish.text, return_tensors="pt").to(model.device)
        known_tokens(parts.processor, wish.text, inputs.input_ids[0].tolist())
        count, most = inputs.input_ids.shape[1], model.config.max_text_positions
        if count > most:
            raise InvalidRequestError(f"prompt: a sentence has {count} tokens: allowed are {most}", param="prompt")
        speaker = next(model.parameters()).new_zeros(1, model.config.speaker_embedding_dim)
        given = wish.params.speaker_embedding
        vector = parts.voices.get(wish.voice or "") if given is None else given
        if vector is not None:
            speaker.copy_(speaker.new_tensor(vector).reshape(1, -1))
        own = {"threshold": _THRESHOLD, "minlenratio": _SHORTEST, "maxlenratio": _LONGEST} | wish.params.extra_args
        arguments = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask, **own}
        steps = max(int(count * own["maxlenratio"] / model.config.reduction_factor), 1)
        # The threshold is for the sum over a step's frames. Whoever gives one that cannot be met wants the longest.
        ends = own["threshold"] <= model.config.reduction_factor and "maxlenratio" not in wish.params.extra_args
        return Call(arguments={**arguments, "speaker_embeddings": speaker}, steps=steps, ends=ends)

    def run(self, parts: Parts, call: Call) -> Any:
        return parts.model.generate_speech(**call.arguments, vocoder=parts.beside)

    def write(self, parts: Parts, call: Call, emit: Callable[[Arrays], None]) -> None:
        """All at once: the last thing that it does looks at the whole of it."""
        emit({"rows": parts.model.generate_speech(**call.arguments).float().cpu().numpy()})

    def frame_shape(self, parts: Parts) -> FrameShape:
        """Convolutions of 7; between them transposed ones, each with several others side by side."""
        config, reach, rate = parts.beside.config, 3.0, 1
        kernels = zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
        widest = max(sum((kernel - 1) // 2 * (dilation + 1) for dilation in each) for kernel, each in kernels)
        for stride, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
            reach += math.ceil(kernel / stride) / rate
            rate *= stride
            reach += widest / rate
        frames = math.ceil(reach + 3 / rate)
        return FrameShape(hop=rate, before=frames, after=frames)

    def silence(self, parts: Parts) -> Arrays:
        return {"spectrum": np.zeros((parts.beside.config.model_in_dim, 4), np.float32)}

    def decode(self, parts: Parts, arrays: Arrays) -> Any:
        return parts.beside(arrays["spectrum"].T.to(parts.beside.dtype))


def spectrum_of(kept: Arrays, chunk: Arrays, last: bool) -> tuple[Arrays, Arrays]:
    """Rows are frames."""
    return {"spectrum": chunk["rows"].T}, {}


SPEECHT5 = GenerateFamily(
    name="speecht5",
    models=("SpeechT5ForTextToSpeech",),
    tasks=("text-to-speech",),
    adapter=SpeechT5Adapter(),
    processor="SpeechT5Tokenizer",
    beside=("SpeechT5HifiGan", "vocoder"),
    voice_files=True,
    precise=True,
    steps=("speecht5.decoder.wrapped_decoder.forward",),
    decoders=("vocoder",),
    arguments=(*SPEECH, "speaker_embedding"),
    unheard_because="their voices are vectors (x-vectors): give one as speaker_embedding",
    extra=("threshold", "minlenratio", "maxlenratio"),
    bounds={"threshold": Bounds(0, 100), "minlenratio": Bounds(0, 100), "maxlenratio": Bounds(0, 100)},
    graph=Graph(
        stages=(StageDeclaration(name="spectrum", does="write"), StageDeclaration(name="vocoder", does="decode")),
        edges=(Edge(source=0, target=1, hand_off=spectrum_of),),
    ),
)

FAMILIES = (SPEECHT5,)
