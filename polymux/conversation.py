"""A conversation with a model that answers: its messages, and whether they may be sent.

What only the model's processor can know (tokens, a template that takes no system message) is not checked here.
"""

from __future__ import annotations

import math
from typing import Any

from polymux.config import LimitsConfig
from polymux.errors import InvalidRequestError
from polymux.request import ArrayData, Capabilities, ImageData, Media, Message, Part, Request
from polymux.spelling import shown
from polymux.tools import arguments_of, check_tools

KINDS = ("image", "video", "audio")  # of media, in the order in which those of a bare prompt are shown
FIELD = "messages"
_WORDS = {"image": "pictures", "video": "videos", "audio": "sounds"}
_ROLES = ("system", "user", "assistant", "tool")
_SOUNDS = ("float16", "float32", "float64", "int16")
_MAX_FPS = 1000


def conversation_of(request: Request) -> list[Message]:
    """Its messages; those of a bare prompt are one of the user, with the media before the text."""
    if request.messages:
        return request.messages
    media = [Part(kind) for kind in KINDS for _ in request.media.get(kind, [])]  # type: ignore[arg-type]
    return [Message("user", [*media, Part("text", request.prompt or "")])]


def speaks(request: Request) -> bool:
    """Whether the answer is to be spoken, too."""
    return "audio" in request.modalities


def check_conversation(request: Request, capabilities: Capabilities, limits: LimitsConfig) -> None:
    """Raises InvalidRequestError with the field and what is allowed."""
    if request.messages and request.prompt is not None:
        raise InvalidRequestError("prompt: cannot be combined with messages", param="prompt")
    _check_messages(request, limits)
    _check_tools(request, capabilities)
    _check_media(request, capabilities)
    _check_answer(request, capabilities)


def _check_messages(request: Request, limits: LimitsConfig) -> None:
    messages = conversation_of(request)
    if not all(isinstance(m, Message) and m.role in _ROLES and (m.parts or m.tool_calls) for m in messages):
        raise InvalidRequestError("messages: each must have a role and parts", param=FIELD)
    name = FIELD if request.messages else "prompt"
    if messages[-1].role not in ("user", "tool"):
        raise InvalidRequestError("messages: the last one must be the user's, or a tool's", param=FIELD)
    texts = [part.text for one in messages for part in one.parts if part.kind == "text"]
    length = sum(map(len, texts))
    if length > limits.max_prompt_length:
        allowed = f"allowed are {limits.max_prompt_length} (--max-prompt-length)"
        raise InvalidRequestError(f"{name} has {length} characters: {allowed}", param=name)
    if any("\ud800" <= sign <= "\udfff" for text in texts for sign in text):
        raise InvalidRequestError(f"{name} is not valid Unicode: it holds a lone surrogate", param=name)
    last = messages[-1]
    if last.role == "user" and all(part.kind == "text" and not part.text.strip() for part in last.parts):
        raise InvalidRequestError(f"{name} is empty: the user's last message says nothing", param=name)


def _check_tools(request: Request, capabilities: Capabilities) -> None:
    """Whether the tools may be offered; and whether the results in the messages are those of calls before them."""
    used = request.tools is not None or any(m.tool_calls or m.role == "tool" for m in request.messages)
    if used and capabilities.tool_calls is None:
        what = f"the chat template of this {capabilities.pipeline} takes none, or shows calls in an unknown way"
        raise InvalidRequestError(f"tools: {what}", param="tools")
    open_calls = set[str]()
    for i, message in enumerate(request.messages):
        name = f"{FIELD}.{i}"
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                what = "must be the id of a call in a message before it, which has no result yet"
                raise InvalidRequestError(f"{name}.tool_call_id={message.tool_call_id!r:.80}: {what}", param=name)
            open_calls.discard(message.tool_call_id)
        elif open_calls:
            raise _without_result(name, open_calls)
        for call in message.tool_calls:
            arguments_of(call, f"{name}.tool_calls")
            open_calls.add(call.id)
    if open_calls:
        raise _without_result(FIELD, open_calls)
    if request.tools is None:
        return
    formed = request.sampling is not None and request.sampling.json_schema is not None
    check_tools(request.tools, held=request.tools.constrains or formed)
    if request.tools.constrains and "json_schema" not in capabilities.arguments:
        why = capabilities.refused.get("json_schema", f"{capabilities.pipeline} cannot be held to calls")
        raise InvalidRequestError(f"tools: strict ones, and tool_choice: {why}", param="tools")
    if speaks(request):
        raise InvalidRequestError("tools: cannot be combined with audio, which would speak the calls", param="tools")


def _without_result(name: str, open_calls: set[str]) -> InvalidRequestError:
    what = f"the call {min(open_calls)!r:.80} has no result: one message of a tool for each call comes first"
    return InvalidRequestError(f"{name}: {what}", param=name)


def _check_media(request: Request, capabilities: Capabilities) -> None:
    parts = [part.kind for one in conversation_of(request) for part in one.parts if part.kind != "text"]
    for kind in dict.fromkeys([*parts, *request.media]):
        items, count = request.media.get(kind, []), parts.count(kind)  # type: ignore[arg-type]
        if kind not in capabilities.media:
            takes = ", ".join(_WORDS[name] for name in capabilities.media)
            does = f"it takes text and {takes}" if takes else "it takes text alone"
            raise InvalidRequestError(f"{kind}: {capabilities.pipeline} takes none; {does}", param=kind)
        if len(items) != count:
            what = f"{len(items)} are given, and the messages have a place for {count}"
            raise InvalidRequestError(f"{kind}: {what}", param=kind)
        if count > capabilities.media[kind]:
            raise InvalidRequestError(f"{kind}: {count} given, allowed are {capabilities.media[kind]}", param=kind)
        for item in items:
            if (why := _wrong(kind, item)) is not None:
                raise InvalidRequestError(f"{kind}: {why}", param=kind)


def _wrong(kind: str, item: Media) -> str | None:
    """What a medium is, in place of what it should be."""
    if kind == "image":
        return None if isinstance(item, ImageData) else "must be a picture"
    if not isinstance(item, ArrayData):
        return "must be an array"
    if kind == "video":
        frames = item.dtype == "uint8" and len(item.shape) == 4 and item.shape[3] == 3
        if item.fps is not None and not (math.isfinite(item.fps) and 0 < item.fps <= _MAX_FPS):
            return f"its frames per second must be a number above 0, at most {_MAX_FPS}"
        return None if frames else "must be uint8 of shape (frames, height, width, 3)"
    sound = item.dtype in _SOUNDS and len(item.shape) == 2 and 1 <= item.shape[0] <= 2
    return None if sound else "must be floats or int16 of shape (channels, samples), with one channel or two"


def _check_answer(request: Request, capabilities: Capabilities) -> None:
    makes: tuple[Any, ...] = capabilities.makes
    asked = request.modalities
    if any(one not in makes for one in asked) or (asked and "text" not in asked):
        allowed = f"the model makes {' and '.join(makes)}, and text must be among them"
        raise InvalidRequestError(f"modalities={shown(asked)}: {allowed}", param="modalities")
    if speaks(request):
        return
    if request.sampling is not None and request.sampling.voice is not None:
        why = "nothing is spoken: ask for audio too (modalities)"
        raise InvalidRequestError(f"voice={request.sampling.voice[:80]!r}: {why}", param="voice")
