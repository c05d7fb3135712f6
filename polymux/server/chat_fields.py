"""What the bodies of POST /v1/chat/completions have in common, whatever the model makes: parts, roles, OpenAI's fields.

Some of OpenAI's fields mean nothing to any model here. They are declared with the value that changes nothing; any other
value is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_serializer
from pydantic_core import core_schema

from polymux.server.protocol import UNION_TAG, Body

Nothing = Annotated[tuple[Any, ...], Field(max_length=0)]
NothingNamed = Annotated[dict[str, Any], Field(max_length=0)]


def tag(name: str) -> Tag:
    return Tag(UNION_TAG + name)


def by(key: str, names: str, error: str) -> Discriminator:
    """Chooses a union's member by the value of `key`."""
    known = names.split()

    def choose(value: Any) -> str | None:
        name = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
        return UNION_TAG + name if isinstance(name, str) and name in known else None

    return Discriminator(choose, custom_error_type="value", custom_error_message=error)


def by_form(other: str, type_: type | tuple[type, ...], error: str) -> Discriminator:
    """Chooses between a text and another form, which JSON has as `type_` and is tagged `other`."""

    def choose(value: Any) -> str | None:
        if isinstance(value, str):
            return UNION_TAG + "text"
        return UNION_TAG + other if isinstance(value, type_) else None

    return Discriminator(choose, custom_error_type="value", custom_error_message=error)


CONTENT = by_form("parts", (list, tuple), "must be a string or a list of parts")


class TextPart(Body):
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    url: str = Field(description="data: or http(s) URL")
    detail: Literal["auto"] | None = None


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


Text = Annotated[
    Annotated[str, tag("text")] | Annotated[Annotated[tuple[TextPart, ...], Field(min_length=1)], tag("parts")],
    CONTENT,
]


class SystemMessage(Body):
    role: Literal["system", "developer"]
    content: Text
    name: str | None = None


def by_role(more: str = "") -> Discriminator:
    """Chooses a message by its role: one of the usual three, or one of `more`."""
    roles = ", ".join(f'"{role}"' for role in ("user", "assistant", *more.split()))
    return by("role", f"user system developer assistant {more}", f'must be an object with the role {roles} or "system"')


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(Body):
    type: Literal["text"]


class ChatFields(Body):
    """A field that is null counts as not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256, description="appears in the server's log line")
    max_tokens: int | None = Field(None, ge=1, description="of text; left out: the model's own")
    max_completion_tokens: int | None = Field(None, ge=1, description="the same")
    parallel_tool_calls: bool | None = None

    logit_bias: NothingNamed | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=0)
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    prediction: None = None
    metadata: NothingNamed | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class Given(BaseModel):
    """Only what is there is sent."""

    @model_serializer(mode="wrap")
    def _given(self, serialize: core_schema.SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}
