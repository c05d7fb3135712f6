"""Recordings of voices that requests bring or name, as samples of one channel; and which voice a request means.

A request names one of the model's voices, one that was uploaded, or brings a recording or a vector of its own. Whether
the model can speak like that is the model's word; here it is said in the words of the field that the client sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import numpy as np

from polymux.config import LimitsConfig
from polymux.errors import InvalidRequestError, VoiceNotFoundError
from polymux.media.decode import MediaLimits, decode_audio
from polymux.media.wire import Array
from polymux.request import Capabilities, SamplingParams
from polymux.sampling import REFERENCE
from polymux.server.speech_protocol import SpeechFields
from polymux.server.state import ServerState

Recording = tuple[Array, int]  # (1, samples), and how many there are per second


async def recording_of(state: ServerState, source: str | bytes, param: str, max_bytes: int) -> Recording:
    """Of an uploaded file's bytes, a data URL or an http(s) URL. Raises InvalidRequestError, OverloadedError."""
    data = await state.media.fetch(source, param=param, max_bytes=max_bytes) if isinstance(source, str) else source
    heard = await asyncio.to_thread(_decoded, data, param, max_bytes, state.omni.config.limits)
    state.media.held.add_array(heard[0])
    return heard


def _decoded(data: bytes, param: str, max_bytes: int, limits: LimitsConfig) -> Recording:
    """In a thread."""
    seconds = limits.max_ref_audio_seconds
    allowed = MediaLimits(file_bytes=max_bytes, pixels=1, frames=1, seconds=seconds)
    sound = decode_audio(data, allowed, param=param)
    return sound.samples.mean(axis=0, keepdims=True, dtype=np.float32), sound.sample_rate


def check_hears(can: Capabilities, field: str) -> None:
    """Raises InvalidRequestError if the model cannot speak with the voice of a recording."""
    if REFERENCE not in can.media:
        why = can.refused.get(REFERENCE, f"{can.pipeline} does not take it")
        raise InvalidRequestError(f"{field}: {why}", param=field)


def check_takes_vectors(can: Capabilities, field: str, size: int) -> None:
    """Raises InvalidRequestError if the model cannot speak with the voice of a vector of this size."""
    if can.embedding_size is None:
        raise InvalidRequestError(f"{field}: {can.pipeline} has no vectors for its voices", param=field)
    if size != can.embedding_size:
        what = f"{size} values are given, the model's voices have {can.embedding_size}"
        raise InvalidRequestError(f"{field}: {what}", param=field)


async def speech_params(state: ServerState, body: SpeechFields, can: Capabilities) -> SamplingParams:
    """How to speak. Raises InvalidRequestError, and what fetching and reading raise."""
    voice, recording, text, vector = body.voice, None, body.ref_text, body.speaker_embedding
    if body.ref_audio is not None:
        check_hears(can, REFERENCE)
        limit = state.config.media.max_media_bytes
        recording = await recording_of(state, body.ref_audio, REFERENCE, limit)
    if voice is not None and voice not in can.voices and state.voices.has(voice):
        if recording is not None or vector is not None:
            other = REFERENCE if recording is not None else "speaker_embedding"
            raise InvalidRequestError(f"{other}: cannot be combined with an uploaded voice", param=other)
        try:
            record, values = await asyncio.to_thread(state.voices.get, voice)
        except VoiceNotFoundError:  # deleted since
            raise VoiceNotFoundError(f"voice={voice!r}: it has just been deleted", param="voice") from None
        voice = None
        if record.sample_rate is None:
            check_takes_vectors(can, "voice", values.size)
            vector = tuple(values.tolist())
        else:
            check_hears(can, "voice")
            if text is not None and record.ref_text is not None:
                raise InvalidRequestError("ref_text: the voice has one of its own", param="ref_text")
            if "ref_text" in can.arguments:  # others need not know what is said
                text = text or record.ref_text
            recording = (values, record.sample_rate)
    return SamplingParams(
        voice=voice,
        ref_audio=recording,
        ref_text=text,
        speaker_embedding=vector,
        language=body.language,
        instructions=body.instructions,
        speed=body.speed,
        seed=body.seed,
        max_new_tokens=body.max_new_tokens,
        do_sample=body.do_sample,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        repetition_penalty=body.repetition_penalty,
        guidance_scale=body.guidance_scale,
        extra_args=body.extra_args or {},
    )


def uploaded(body: SpeechFields, params: SamplingParams) -> str | None:
    """The uploaded voice that a body names; None: it names none. `params`: what `speech_params` has made of it."""
    return body.voice if params.voice is None else None


@contextlib.contextmanager
def in_our_words(voice: str | None) -> Iterator[None]:
    """What is wrong with a prompt is wrong with `input` here; and what is wrong with a recording or a vector that an
    uploaded voice stands for, with `voice`."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param == "prompt":
            raise type(error)(error.message.replace("prompt", "input", 1), param="input") from None
        if voice is None or error.param not in (REFERENCE, "speaker_embedding"):
            raise
        message = f"voice={voice!r}: {error.message.removeprefix(f'{error.param}: ')}"
        raise type(error)(message, param="voice") from None
