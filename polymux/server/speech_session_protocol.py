"""The messages of WS /v1/audio/speech/stream, both ways. Sound itself goes as binary messages."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from polymux.media.audio import AudioFormat
from polymux.server.protocol import Body, ErrorDetail
from polymux.server.speech_protocol import SpeechFields


class SessionConfig(SpeechFields):
    """How to speak what follows."""

    type: Literal["session.config"]
    response_format: AudioFormat | None = Field(None, description="default wav")


class InputText(Body):
    """The next part of the text: a letter, a word, or all of it."""

    type: Literal["input.text"]
    text: str


class InputDone(Body):
    """The text is complete. Another one may begin when session.done has come."""

    type: Literal["input.done"]


class SessionClose(Body):
    """What is not spoken yet will not be."""

    type: Literal["session.close"]


MESSAGES: dict[str, type[Body]] = {
    "session.config": SessionConfig,
    "input.text": InputText,
    "input.done": InputDone,
    "session.close": SessionClose,
}


class AudioStart(BaseModel):
    """The sound of a sentence follows, a file of its own in binary messages."""

    type: Literal["audio.start"] = "audio.start"
    utterance_index: int
    sentence_index: int
    sentence_text: str
    format: AudioFormat
    sample_rate: int | None
    seed: int


class AudioDone(BaseModel):
    """That was all of it."""

    type: Literal["audio.done"] = "audio.done"
    utterance_index: int
    sentence_index: int
    total_bytes: int
    error: ErrorDetail | None = None


class SessionDone(BaseModel):
    """A text is spoken."""

    type: Literal["session.done"] = "session.done"
    utterance_index: int
    total_sentences: int
