"""What clients of WS /v1/realtime send: OpenAI's events, as far as they mean something for a model that answers.

Choices that mean nothing here are declared, each with the value that asks for nothing; any other value is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field

from polymux.server.chat_fields import Nothing, NothingNamed, by, tag
from polymux.server.protocol import UNION_TAG, Body

RATE = 24_000  # samples per second, both ways
MAX_ID = 64  # characters
MAX_SILENCE_MS, MAX_PADDING_MS = 10_000, 5_000

Modalities = Annotated[tuple[Literal["text", "audio"], ...], Field(min_length=1, max_length=1)]


def _word_or_number(value: object) -> str:
    return UNION_TAG + ("word" if isinstance(value, str) else "number")


MostTokens = Annotated[
    Annotated[int, Field(ge=1), tag("number")] | Annotated[Literal["inf"], tag("word")], Discriminator(_word_or_number)
]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID)]


class ClientEvent(Body):
    event_id: str | None = Field(None, max_length=512, description="named by the error that this event causes")


class Pcm(Body):
    type: Literal["audio/pcm"]
    rate: Literal[24000] | None = None


class ServerVad(Body):
    """Turns by the energy of the sound."""

    type: Literal["server_vad"] = "server_vad"
    threshold: float = Field(default=0.5, ge=0, le=1, description="0: -70 dB of full scale; 1: -10 dB")
    prefix_padding_ms: int = Field(default=300, ge=0, le=MAX_PADDING_MS)
    silence_duration_ms: int = Field(default=500, ge=0, le=MAX_SILENCE_MS)
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: None = None


class InputFields(Body):
    format: Pcm | None = None
    turn_detection: ServerVad | None = Field(None, description="null: turns are those of commit")
    transcription: None = None
    noise_reduction: None = None


class OutputFields(Body):
    format: Pcm | None = None
    voice: str | None = None
    speed: float | None = Field(None, ge=1, le=1)


class SessionAudio(Body):
    input: InputFields | None = None
    output: OutputFields | None = None


class ResponseAudio(Body):
    output: OutputFields | None = None


class HowToAnswer(Body):
    """null counts as not given."""

    output_modalities: Modalities | None = None
    instructions: str | None = None
    max_output_tokens: MostTokens | None = None
    temperature: float | None = None
    seed: int | None = None
    extra_args: dict[str, Any] | None = Field(None, description="further arguments of the model's own")

    tools: Nothing | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    prompt: None = None
    reasoning: None = None


class SessionFields(HowToAnswer):
    type: Literal["realtime"] | None = None
    model: str | None = None
    audio: SessionAudio | None = None
    include: Nothing | None = None
    tracing: None = None
    truncation: Literal["disabled"] | None = None


class ResponseFields(HowToAnswer):
    audio: ResponseAudio | None = None
    conversation: Literal["auto"] | None = None
    metadata: NothingNamed | None = None


class SessionUpdate(ClientEvent):
    type: Literal["session.update"]
    session: SessionFields


class AudioAppend(ClientEvent):
    type: Literal["input_audio_buffer.append"]
    audio: str = Field(description="base64 of 16-bit little-endian samples, 24000 per second")


class AudioCommit(ClientEvent):
    type: Literal["input_audio_buffer.commit"]


class AudioClear(ClientEvent):
    type: Literal["input_audio_buffer.clear"]


class TextInput(Body):
    type: Literal["input_text"]
    text: str


class SoundInput(Body):
    type: Literal["input_audio"]
    audio: str


class OutputText(Body):
    type: Literal["output_text"]
    text: str


Asked = Annotated[
    Annotated[TextInput, tag("input_text")] | Annotated[SoundInput, tag("input_audio")],
    by("type", "input_text input_audio", "must be a part of the type input_text or input_audio"),
]
_MAX_PARTS = 32


class _Message(Body):
    type: Literal["message"]
    id: Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete"] | None = Field(None, description="without effect")


class UserItem(_Message):
    role: Literal["user"]
    content: Annotated[tuple[Asked, ...], Field(min_length=1, max_length=_MAX_PARTS)]


class SystemItem(_Message):
    role: Literal["system"]
    content: Annotated[tuple[TextInput, ...], Field(min_length=1, max_length=_MAX_PARTS)]


class AssistantItem(_Message):
    role: Literal["assistant"]
    content: Annotated[tuple[OutputText, ...], Field(min_length=1, max_length=_MAX_PARTS)]


AnyItem = Annotated[
    Annotated[UserItem, tag("user")]
    | Annotated[SystemItem, tag("system")]
    | Annotated[AssistantItem, tag("assistant")],
    by("role", "user system assistant", 'must be a message with the role "user", "system" or "assistant"'),
]


class ItemCreate(ClientEvent):
    type: Literal["conversation.item.create"]
    item: AnyItem
    previous_item_id: str | None = Field(None, description='left out: at the end; "root": at the beginning')


class ItemDelete(ClientEvent):
    type: Literal["conversation.item.delete"]
    item_id: str


class ResponseCreate(ClientEvent):
    type: Literal["response.create"]
    response: ResponseFields | None = None


class ResponseCancel(ClientEvent):
    type: Literal["response.cancel"]
    response_id: str | None = None


MESSAGES: dict[str, type[Body]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": AudioCommit,
    "input_audio_buffer.clear": AudioClear,
    "conversation.item.create": ItemCreate,
    "conversation.item.delete": ItemDelete,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}
