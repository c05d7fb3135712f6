"""The bodies of POST /v1/chat/completions: OpenAI's, as far as they mean something for a model that makes pictures.

OpenAI's fields about text that is generated are declared too, each with the value that changes nothing; any other value
is refused. What the messages mean together stands in `chat_request`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polymux.media.image import ImageFormat
from polymux.server.chat_fields import (
    CONTENT,
    ChatFields,
    Given,
    ImagePart,
    Nothing,
    SystemMessage,
    TextFormat,
    TextPart,
    by,
    by_role,
    tag,
)
from polymux.server.protocol import Body, EncodingFields, SamplingFields

Part = Annotated[
    Annotated[TextPart, tag("text")] | Annotated[ImagePart, tag("image_url")],
    by("type", "text image_url", 'must be a part of type "text" or "image_url"'),
]
Content = Annotated[
    Annotated[str, tag("text")] | Annotated[Annotated[tuple[Part, ...], Field(min_length=1)], tag("parts")], CONTENT
]


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: str | None = Field(None, description="not shown to the model, which knows no names")


class AssistantMessage(BaseModel):
    """An answer that was given before, by this model or by another: what is not looked at may be anything."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["assistant"]
    content: Any = None
    images: Any = None


Message = Annotated[
    Annotated[UserMessage, tag("user")]
    | Annotated[SystemMessage, tag("system")]
    | Annotated[SystemMessage, tag("developer")]
    | Annotated[AssistantMessage, tag("assistant")],
    by_role(),
]


class ChatRequest(ChatFields, SamplingFields, EncodingFields):
    """POST /v1/chat/completions. A field that is null counts as not given."""

    messages: Annotated[tuple[Message, ...], Field(min_length=1)]
    modalities: tuple[str, ...] | None = Field(None, description="what to make; must hold what the model makes")
    strength: float | None = Field(None, description="0 to 1: how far the picture is changed")

    # OpenAI's fields for text. An answer holds none, so an upper limit of its length holds anyway.
    temperature: float | None = Field(None, ge=1, le=1)
    top_p: float | None = Field(None, ge=1, le=1)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    stop: Nothing | None = None
    response_format: TextFormat | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    audio: None = None
    reasoning_effort: Literal["none"] | None = None


class PictureUrl(BaseModel):
    url: str = Field(description="data: URL")


class PicturePart(BaseModel):
    """A picture of an answer, as a message may hold it, and what it is."""

    index: int = Field(description="among the pictures of this choice")
    type: Literal["image_url"] = "image_url"
    image_url: PictureUrl
    size: str = Field(description="WIDTHxHEIGHT, as decoded")
    output_format: ImageFormat
    seed: int | None = Field(description="gives this picture again, with n = 1; null: no single seed made it")


class Answer(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: list[PicturePart]
    refusal: None = None


class Choice(BaseModel):
    index: int
    message: Answer
    finish_reason: Literal["stop"] = "stop"
    logprobs: None = None


class Usage(BaseModel):
    """Tokens of text. The model generates none, and those of the prompt are not counted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="seconds since 1970")
    model: str
    choices: list[Choice]
    usage: Usage = Usage()


class Delta(Given):
    """What a chunk adds to a choice. Pictures have a field of their own: clients join contents as text."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    images: list[PicturePart] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    finish_reason: Literal["stop"] | None = None
    logprobs: None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
