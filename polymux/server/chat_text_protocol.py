"""The bodies of POST /v1/chat/completions for models that answer with text, and maybe with speech: OpenAI's.

Beyond OpenAI's fields there are those that other servers of such models know under the same names. Choices that mean
nothing here are declared too, each with the value that changes nothing; any other value is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from polymux.server.chat_fields import (
    CONTENT,
    ChatFields,
    Given,
    ImagePart,
    SystemMessage,
    Text,
    TextPart,
    by,
    by_role,
    tag,
)
from polymux.server.profile_answer import RequestProfile
from polymux.server.protocol import Body
from polymux.server.speech_protocol import Voice
from polymux.server.tool_protocol import Call, CallDelta, OfferedTool, Reason, ResponseFormat, ResultMessage, ToolChoice

SpokenFormat = Literal["wav", "mp3", "flac", "opus", "pcm16"]


class InputAudio(Body):
    data: str = Field(description="a file in base64")
    format: Literal["wav", "mp3", "flac", "opus", "ogg", "m4a", "webm"] = Field(
        description="what it is told to be; what it is, its first bytes tell"
    )


class InputAudioPart(Body):
    type: Literal["input_audio"]
    input_audio: InputAudio


class Url(Body):
    url: str = Field(description="data: or http(s) URL")


class AudioUrlPart(Body):
    type: Literal["audio_url"]
    audio_url: Url


class VideoUrlPart(Body):
    type: Literal["video_url"]
    video_url: Url


_KINDS = "text image_url input_audio audio_url video_url"
AnyPart = Annotated[
    Annotated[TextPart, tag("text")]
    | Annotated[ImagePart, tag("image_url")]
    | Annotated[InputAudioPart, tag("input_audio")]
    | Annotated[AudioUrlPart, tag("audio_url")]
    | Annotated[VideoUrlPart, tag("video_url")],
    by("type", _KINDS, f"must be a part of one of the types {', '.join(_KINDS.split())}"),
]
AnyContent = Annotated[
    Annotated[str, tag("text")] | Annotated[Annotated[tuple[AnyPart, ...], Field(min_length=1)], tag("parts")],
    CONTENT,
]


class AskingMessage(Body):
    role: Literal["user"]
    content: AnyContent
    name: str | None = Field(None, description="not shown to the model, which knows no names")


class SpokenBefore(Body):
    id: str = Field(description="of an answer's audio, while it is kept; its transcript is what the model reads")


class AnsweredMessage(BaseModel):
    """An answer that was given before. What clients note of it beside what was said may stay."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    role: Literal["assistant"]
    content: Text | None = None
    audio: SpokenBefore | None = None
    tool_calls: tuple[Call, ...] | None = None
    function_call: None = None


TextMessage = Annotated[
    Annotated[AskingMessage, tag("user")]
    | Annotated[SystemMessage, tag("system")]
    | Annotated[SystemMessage, tag("developer")]
    | Annotated[AnsweredMessage, tag("assistant")]
    | Annotated[ResultMessage, tag("tool")],
    by_role("tool"),
]


class SpokenHow(Body):
    voice: Voice | None = Field(None, description="one of GET /v1/models")
    format: SpokenFormat = Field("wav", description="pcm16: 16 bits, little-endian, without a header")


def _listed(value: object) -> object:
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


_STOP = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


class TextChatRequest(ChatFields):
    """POST /v1/chat/completions, of a model that answers with text. A field that is null counts as not given."""

    messages: Annotated[tuple[TextMessage, ...], Field(min_length=1)]
    modalities: tuple[Literal["text", "audio"], ...] | None = Field(None, description="text, or text and audio")
    audio: SpokenHow | None = Field(None, description="how to speak, with audio among the modalities")
    n: int | None = Field(None, ge=1, le=1)
    temperature: float | None = Field(None, description="0: the likeliest tokens; left out: the checkpoint's own way")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = Field(None, description="-2 to 2")
    presence_penalty: float | None = Field(None, description="-2 to 2")
    repetition_penalty: float | None = None
    seed: int | None = Field(None, description="left out: drawn, and told in the answer")
    stop: Annotated[tuple[str, ...] | None, BeforeValidator(_listed), WithJsonSchema(_STOP)] = Field(
        None, description="a text, or several, before which the answer ends; not with audio"
    )
    response_format: ResponseFormat | None = Field(None, description="text, or JSON: any object, or of a schema")
    tools: tuple[OfferedTool, ...] | None = Field(None, description="functions that the answer may call")
    tool_choice: ToolChoice | None = Field(None, description="left out: auto, the model decides")
    extra_args: dict[str, Any] | None = Field(None, description="further arguments of the model's own")
    profile: bool | None = Field(None, description="tell in the answer where the time went; not with stream")
    reasoning_effort: None = None


class CompletionDetails(BaseModel):
    audio_tokens: int = Field(description="steps of the speech")
    text_tokens: int


class TextUsage(BaseModel):
    prompt_tokens: int = Field(description="of the conversation, its template and media")
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails


class Spoken(BaseModel):
    id: str = Field(description="stands for this answer in a later message, until it expires")
    data: str = Field(description="the file in base64")
    expires_at: int = Field(description="seconds since 1970")
    transcript: str


class TextAnswer(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="null: there are calls alone")
    refusal: None = None
    audio: Spoken | None = None
    tool_calls: list[Call] | None = None


class TextChoice(BaseModel):
    index: Literal[0] = 0
    message: TextAnswer
    finish_reason: Reason
    logprobs: None = None


class TextCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="seconds since 1970")
    model: str
    choices: list[TextChoice]
    usage: TextUsage
    seed: int | None = Field(description="gives this answer again")
    profile: RequestProfile | None = Field(default=None, description="if it was asked for")


class SpokenDelta(Given):
    """The next bytes of the file, or of its transcript."""

    id: str
    data: str | None = None
    transcript: str | None = None
    expires_at: int | None = None


class TextDelta(Given):
    role: Literal["assistant"] | None = None
    content: str | None = None
    audio: SpokenDelta | None = None
    tool_calls: list[CallDelta] | None = None


class TextChunkChoice(BaseModel):
    index: Literal[0] = 0
    delta: TextDelta
    finish_reason: Reason | None = None
    logprobs: None = None


class TextChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: TextUsage | None = None
    seed: int | None = Field(default=None, description="in the last chunk of the answer: gives it again")
