"""Dia: dialogues, whose speakers are marked in the text.

With a recording, what is said there stands before the text, and its codes are those that the model goes on from.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from polymux.errors import InvalidRequestError
from polymux.families.generate import (
    DRAWING,
    REFERENCE,
    SPEECH,
    Adapter,
    Call,
    Codec,
    FrameShape,
    GenerateFamily,
    Parts,
    Wish,
    told,
)
from polymux.families.graph import Arrays, Edge, Graph, StageDeclaration
from polymux.request import SamplingParams

SPEAKERS = ("S1", "S2")
_TOP_K = 50  # of transformers, where nobody says anything
_MARK = re.compile(r"\[(S[12])\]")
_FRAME_PROMPT = 1  # frames that stand before the first one that is made


class DiaAdapter(Adapter):
    def voices(self, parts: Parts) -> tuple[str, ...]:
        return SPEAKERS

    def speaker_marks(self) -> tuple[str, ...]:
        return tuple(f"[{speaker}]" for speaker in SPEAKERS)

    def sample_rate(self, parts: Parts) -> int:
        return int(parts.beside.config.sampling_rate)

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        config = parts.model.config
        room, delay = config.decoder_config.max_position_embeddings, max(config.delay_pattern)
        return int(room - delay - _FRAME_PROMPT)

    def deaf(self, parts: Parts) -> str | None:
        if parts.beside.device.type != "meta":
            return None
        return "the codec that would hear it is in another stage's process; serve without --split-stages"

    def pieces(self, text: str, voice: str | None, longest: int) -> list[str]:
        """Each piece begins with the mark of whoever speaks."""
        if voice is not None and _MARK.match(text.lstrip()):
            raise InvalidRequestError(f"voice={voice!r}: the text says itself who speaks", param="voice")
        made, speaker = [], voice or SPEAKERS[0]
        for turn in re.split(r"(?=\[S[12]\])", text):
            if found := _MARK.match(turn):
                speaker = found[1]
            made += [f"[{speaker}] {piece}" for piece in super().pieces(_MARK.sub("", turn).strip(), None, longest)]
        return made

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        encoder, model = parts.model.config.encoder_config, parts.model
        text = wish.text if wish.reference is None else _with_words(wish.text, wish.reference.text)
        count = len(parts.processor.tokenizer(text).input_ids)
        most = encoder.max_position_embeddings
        if count > most:
            param, what = ("prompt", "a sentence has") if wish.reference is None else ("ref_text", "with it there are")
            raise InvalidRequestError(f"{param}: {what} {count} tokens: allowed are {most}", param=param)
        inputs = parts.processor(text=[text], padding=True, return_tensors="pt", **self._signs(parts))
        given, longest = told(wish), self.longest(parts, 0) or 0
        ends = wish.params.max_new_tokens is None
        heard = {}
        if wish.reference is not None:
            heard = {"text": text, "heard": wish.reference.samples}
            longest -= math.ceil(len(wish.reference.samples) / parts.processor.feature_extractor.hop_length)
        # With guidance, transformers takes the likeliest of what there is without asking how much that is.
        top_k, most = given.get("top_k", model.generation_config.top_k), model.config.decoder_config.vocab_size
        if given.get("guidance_scale") is not None and (_TOP_K if top_k is None else top_k) > most:
            given["top_k"] = most
        # Its own default, a whole length of positions, leaves no room for the delay of its channels.
        steps = given.setdefault("max_new_tokens", longest)
        if steps > longest or longest < 1:
            what = f"it leaves room for {max(longest, 0)} new tokens, and {max(steps, 1)} are wanted"
            raise InvalidRequestError(f"ref_audio: {what}", param="ref_audio")
        return Call(arguments={**inputs.to(model.device), **given, **heard}, steps=steps, ends=ends)

    def run(self, parts: Parts, call: Call) -> Any:
        arguments, begins = dict(call.arguments), None
        signs = self._signs(parts)
        if "heard" in arguments:  # here, because it calls the codec
            text, samples = arguments.pop("text"), arguments.pop("heard")
            processor = copy.copy(parts.processor)
            processor.audio_tokenizer = Codec(parts.beside)
            made = processor(text=[text], audio=[samples], padding=True, return_tensors="pt", **signs)
            arguments |= made.to(parts.model.device)
            begins = parts.processor.get_audio_prompt_len(arguments["decoder_attention_mask"], **signs)
        codes = parts.model.generate(**arguments)
        del signs["eos_token_id"]
        return parts.processor.batch_decode(codes, begins, **signs)[0]

    def _signs(self, parts: Parts) -> dict[str, Any]:
        config = parts.model.config
        names = ("eos_token_id", "pad_token_id", "bos_token_id")
        signs = {name: getattr(config.decoder_config, name) for name in names}
        return signs | {"delay_pattern": list(config.delay_pattern)}

    def write(self, parts: Parts, call: Call, emit: Callable[[Arrays], None]) -> None:
        config = parts.model.config
        signs = {"delay": np.array(config.delay_pattern), "end": np.array(config.decoder_config.eos_token_id)}
        parts.model.generate(**call.arguments, streamer=_Rows(len(config.delay_pattern), signs, emit))

    def frame_shape(self, parts: Parts) -> FrameShape:
        """Convolutions of 7, and in each block a transposed one, which reaches one step to each side, and three of 7
        with dilations 1, 3 and 9."""
        reach, rate = 3.0, 1
        for stride in parts.beside.config.upsampling_ratios:
            reach += 1 / rate
            rate *= stride
            reach += 3 * (1 + 3 + 9) / rate
        frames = math.ceil(reach + 3 / rate)
        return FrameShape(hop=rate, before=frames, after=frames)

    def silence(self, parts: Parts) -> Arrays:
        return {"codes": np.zeros((parts.beside.config.n_codebooks, 4), np.int64)}

    def decode(self, parts: Parts, arrays: Arrays) -> Any:
        return parts.beside.decode(audio_codes=arrays["codes"][None]).audio_values[0]


class _Rows:
    """A streamer: what is written at each step, one token for each channel."""

    def __init__(self, channels: int, signs: Arrays, emit: Callable[[Arrays], None]) -> None:
        self._channels, self._signs, self._emit = channels, signs, emit
        self._begun = False

    def put(self, tokens: Any) -> None:
        """At first what the model begins with, which is none of the sound."""
        if self._begun:
            self._emit({"rows": tokens.numpy().reshape(1, self._channels), **self._signs})
        self._begun = True

    def end(self) -> None:
        pass


def frames_of(kept: Arrays, chunk: Arrays, last: bool) -> tuple[Arrays, Arrays]:
    """Rows, in which channel c is late by its delay, become frames; they end where the first channel says so."""
    rows, delay = chunk["rows"], chunk["delay"]
    if "rows" in kept:
        rows = np.concatenate([kept["rows"], rows])
    ends = np.flatnonzero(rows[:, 0] == chunk["end"])
    known = int(ends[0]) if len(ends) else len(rows)
    count = max(min(known, len(rows) - int(delay.max())), 0)
    codes = np.stack([rows[late : late + count, channel] for channel, late in enumerate(delay)])
    return {"codes": codes}, {"rows": rows[count:]}


def _with_words(text: str, said: str) -> str:
    """A piece, after what is said in the recording. Unless that says itself who speaks, it is who speaks the piece."""
    mark = _MARK.match(text)
    assert mark is not None  # `pieces` made it
    return f"{said} {text}" if _MARK.match(said) else f"{mark[0]} {said} {text}"


DIA = GenerateFamily(
    name="dia",
    models=("DiaForConditionalGeneration",),
    tasks=("text-to-speech",),
    adapter=DiaAdapter(),
    longest=250,
    processor="DiaProcessor",
    assembled=(("feature_extractor", "DiaFeatureExtractor"), ("tokenizer", "DiaTokenizer")),
    beside=("DacModel", "audio_tokenizer"),
    steps=("model.forward",),
    decoders=("audio_tokenizer",),
    arguments=(*SPEECH, *REFERENCE, *DRAWING, "max_new_tokens", "guidance_scale"),
    warmup=SamplingParams(seed=0, max_new_tokens=24),
    graph=Graph(
        stages=(StageDeclaration(name="tokens", does="write"), StageDeclaration(name="codec", does="decode")),
        edges=(Edge(source=0, target=1, hand_off=frames_of),),
    ),
)

FAMILIES = (DIA,)
