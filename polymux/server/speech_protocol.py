"""The body and events of /v1/audio/speech, in OpenAI's shape."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from polymux.media.audio import AudioFormat
from polymux.server.protocol import Body
from polymux.server.sse import StreamEvent


def _name_of(value: object) -> str:
    match value:
        case str():
            return value
        case {"id": str() as name, **others} if not others:
            return name
    raise PydanticCustomError("reference", 'must be the name of a voice, or {"id": NAME}')


_VOICE = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"id": {"type": "string"}},
            "required": ["id"],
            "additionalProperties": False,
        },
    ]
}
Voice = Annotated[str, BeforeValidator(_name_of), WithJsonSchema(_VOICE)]


class SpeechFields(Body):
    """How to speak, and as which kind of file: what every route for speech takes. null counts as not given."""

    model: str | None = None
    voice: Voice | None = Field(
        None, validation_alias=AliasChoices("voice", "speaker"), description="one of GET /v1/audio/voices"
    )
    ref_audio: str | None = Field(
        None, description="data: or http(s) URL of a recording of the voice to speak with, for models that take it"
    )
    ref_text: str | None = Field(None, description="what is said in ref_audio")
    speaker_embedding: tuple[float, ...] | None = Field(None, description="a vector in place of a voice, likewise")
    instructions: str | None = Field(None, description="how to speak, for models that take it")
    response_format: AudioFormat | None = Field(None, description="default mp3; pcm: 16 bits, little-endian")
    speed: float | None = Field(None, description="0.25 to 4, at the same pitch")
    language: str | None = Field(None, description="for models that take one")
    seed: int | None = Field(None, description="left out: drawn, and told in the header x-seed")
    max_new_tokens: int | None = Field(None, description="of each sentence, which is cut there")
    do_sample: bool | None = Field(None, description="whether tokens are drawn, or the likeliest taken")
    temperature: float | None = Field(None, description="of the tokens that are drawn; 0: none are")
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    guidance_scale: float | None = None
    extra_args: dict[str, Any] | None = Field(None, description="further arguments of the model's own")
    user: str | None = Field(None, max_length=256, description="appears in the server's log line")


class SpeechRequest(SpeechFields):
    """POST /v1/audio/speech. A field that is null counts as not given."""

    input: str = Field(description="the text, of any length: it is spoken sentence by sentence, and all of it")
    stream_format: Literal["audio", "sse"] | None = Field(
        None, description="answer while the model speaks: with the file's bytes, or with server-sent events"
    )
    stream: bool | None = Field(None, description="true: as stream_format says, audio if it is not given")
    profile: bool | None = Field(None, description="tell in the header x-profile where the time went; not with stream")


class SpeechUsage(BaseModel):
    input_tokens: int = Field(description="of the text")
    output_tokens: int = Field(description="steps of the model")
    total_tokens: int


class SpeechDelta(StreamEvent):
    """The next bytes of the file."""

    type: Literal["speech.audio.delta"] = "speech.audio.delta"
    audio: str = Field(description="base64")
    response_format: AudioFormat


class SpeechDone(StreamEvent):
    """The end of a stream that went well."""

    type: Literal["speech.audio.done"] = "speech.audio.done"
    usage: SpeechUsage
    seed: int | None
