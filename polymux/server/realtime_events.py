"""What the server says on WS /v1/realtime: OpenAI's events, by the names that its clients of today know."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal, TypedDict

from pydantic import BaseModel, Field

from polymux.server.realtime_protocol import RATE, ServerVad


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex[:24]}"


class ServerEvent(BaseModel):
    event_id: str = Field(default_factory=lambda: new_id("event"))


class RealtimeError(BaseModel):
    type: str
    code: str
    message: str
    param: str | None
    event_id: str | None = Field(description="of the client's event that was wrong")


class ErrorEvent(ServerEvent):
    type: Literal["error"] = "error"
    error: RealtimeError


class PcmFormat(BaseModel):
    type: Literal["audio/pcm"] = "audio/pcm"
    rate: int = RATE


class InputView(BaseModel):
    format: PcmFormat = PcmFormat()
    turn_detection: ServerVad | None
    transcription: None = None
    noise_reduction: None = None


class OutputView(BaseModel):
    format: PcmFormat = PcmFormat()
    voice: str | None
    speed: float = 1.0


class AudioView(BaseModel):
    input: InputView
    output: OutputView


class SessionView(BaseModel):
    """The session as it is."""

    id: str
    object: Literal["realtime.session"] = "realtime.session"
    type: Literal["realtime"] = "realtime"
    model: str
    output_modalities: list[str]
    instructions: str
    audio: AudioView
    max_output_tokens: int | Literal["inf"]
    temperature: float | None
    seed: int | None
    extra_args: dict[str, Any]
    tools: list[None] = []
    tool_choice: Literal["auto"] = "auto"
    truncation: Literal["disabled"] = "disabled"


class SessionEvent(ServerEvent):
    type: Literal["session.created", "session.updated"]
    session: SessionView


class BufferCommitted(ServerEvent):
    type: Literal["input_audio_buffer.committed"] = "input_audio_buffer.committed"
    item_id: str
    previous_item_id: str | None


class BufferCleared(ServerEvent):
    type: Literal["input_audio_buffer.cleared"] = "input_audio_buffer.cleared"


class SpeechStarted(ServerEvent):
    type: Literal["input_audio_buffer.speech_started"] = "input_audio_buffer.speech_started"
    audio_start_ms: int = Field(description="of all sound that was appended; where the turn's sound begins")
    item_id: str


class SpeechStopped(ServerEvent):
    type: Literal["input_audio_buffer.speech_stopped"] = "input_audio_buffer.speech_stopped"
    audio_end_ms: int
    item_id: str


class TextContent(BaseModel):
    type: Literal["input_text", "output_text"]
    text: str


class SoundContent(BaseModel):
    type: Literal["input_audio", "output_audio"]
    transcript: str | None = None


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ItemView(BaseModel):
    id: str
    object: Literal["realtime.item"] = "realtime.item"
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["user", "system", "assistant"]
    content: list[TextContent | SoundContent]


class ItemEvent(ServerEvent):
    type: Literal["conversation.item.added", "conversation.item.done"]
    previous_item_id: str | None
    item: ItemView


class ItemDeleted(ServerEvent):
    type: Literal["conversation.item.deleted"] = "conversation.item.deleted"
    item_id: str


class OutputTokens(BaseModel):
    text_tokens: int
    audio_tokens: int = Field(description="steps of the speech")


class Usage(BaseModel):
    total_tokens: int
    input_tokens: int
    output_tokens: int
    output_token_details: OutputTokens


class FailureView(BaseModel):
    type: str
    code: str
    message: str


Status = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
Reason = Literal["turn_detected", "client_cancelled", "max_output_tokens"]


class StatusDetails(BaseModel):
    type: Status
    reason: Reason | None = None
    error: FailureView | None = None


class AnswerAudio(BaseModel):
    output: OutputView


class ResponseView(BaseModel):
    id: str
    object: Literal["realtime.response"] = "realtime.response"
    status: Status
    status_details: StatusDetails | None = None
    output: list[ItemView]
    conversation_id: str
    output_modalities: list[str]
    max_output_tokens: int | Literal["inf"]
    audio: AnswerAudio
    usage: Usage | None = Field(default=None, description="null: it did not come to its end")
    seed: int | None = None
    metadata: None = None


class ResponseEvent(ServerEvent):
    type: Literal["response.created", "response.done"]
    response: ResponseView


class _OfResponse(ServerEvent):
    response_id: str
    output_index: Literal[0] = 0


class OutputItemEvent(_OfResponse):
    type: Literal["response.output_item.added", "response.output_item.done"]
    item: ItemView


class TextPart(BaseModel):
    type: Literal["text"] = "text"
    text: str = ""


class AudioPart(BaseModel):
    type: Literal["audio"] = "audio"
    transcript: str = ""


class Place(TypedDict):
    """Where in which response."""

    response_id: str
    item_id: str


class _OfPart(_OfResponse):
    item_id: str
    content_index: Literal[0] = 0


class PartEvent(_OfPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Annotated[TextPart | AudioPart, Field(discriminator="type")]


class Delta(_OfPart):
    type: Literal["response.output_text.delta", "response.output_audio.delta", "response.output_audio_transcript.delta"]
    delta: str


class TextDone(_OfPart):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    text: str


class TranscriptDone(_OfPart):
    type: Literal["response.output_audio_transcript.done"] = "response.output_audio_transcript.done"
    transcript: str


class AudioDone(_OfPart):
    type: Literal["response.output_audio.done"] = "response.output_audio.done"
