"""The parts of OpenAI's chat bodies that are about tools, and about the form of an answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polymux.request import FinishReason
from polymux.server.chat_fields import Given, Text, TextFormat, by, by_form, tag
from polymux.server.protocol import Body

Reason = FinishReason | Literal["tool_calls"]


class FunctionTool(Body):
    name: str = Field(description="letters, digits, dots, dashes and underscores; 64 at most")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema; left out: it takes none")
    strict: bool | None = Field(None, description="hold the arguments to the schema as they are written")


class OfferedTool(Body):
    type: Literal["function"]
    function: FunctionTool


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


_CHOICES = 'must be "none", "auto", "required", or an object that names a function'
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], tag("text")] | Annotated[NamedTool, tag("named")],
    by_form("named", (dict, NamedTool), _CHOICES),
]


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    arguments: str = Field(description="JSON, of an object")


class Call(BaseModel):
    """A call that the model made: in an answer, and in a message that brings the answer back."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ResultMessage(Body):
    """What a call gave."""

    role: Literal["tool"]
    content: Text
    tool_call_id: str = Field(description="of the call, which stands in a message before it")


class CallDelta(Given):
    """A call of a stream: it comes whole."""

    index: int
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnyObject(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    name: str = Field(max_length=64, description="not shown to the model")
    schema_: dict[str, Any] = Field(alias="schema", description="see docs/chat.md for what it may hold")
    description: str | None = Field(None, description="not shown to the model")
    strict: bool | None = Field(None, description="the answer is held to the schema in any case")


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, tag("text")]
    | Annotated[AnyObject, tag("json_object")]
    | Annotated[SchemaFormat, tag("json_schema")],
    by("type", "text json_object json_schema", "must be of the type text, json_object or json_schema"),
]
