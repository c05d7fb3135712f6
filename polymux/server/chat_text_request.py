"""What a conversation is to a model that answers it: messages, the media in them, and how to answer.

Knows the capabilities of the loaded model, and no model. Media are fetched and decoded here; how large they may be is
the operator's say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.media.decode import MediaLimits, decode_audio, decode_video
from polymux.media.film import at_rate
from polymux.prompts import Medium, OmniPrompt
from polymux.request import Capabilities, Modality, SamplingParams
from polymux.server.chat_fields import ImagePart, SystemMessage, TextPart
from polymux.server.chat_text_protocol import (
    AnsweredMessage,
    AnyPart,
    AskingMessage,
    AudioUrlPart,
    InputAudioPart,
    TextChatRequest,
    TextMessage,
    VideoUrlPart,
)
from polymux.server.media_inputs import MAX_MEDIA_SECONDS
from polymux.server.state import ServerState
from polymux.server.tool_protocol import AnyObject, NamedTool, ResultMessage, SchemaFormat
from polymux.tools import Tool, ToolUse

MAX_FRAMES = 36_000  # of one video; what they may take in memory is limited beside it
_WORDS = {"image": "pictures", "audio": "sound", "video": "video"}


@dataclass(frozen=True)
class Shown:
    """A medium of a conversation: what it is, the field that holds it, and where it comes from."""

    kind: str
    field: str
    source: str


def check_body(body: TextChatRequest, capabilities: Capabilities) -> None:
    """Raises InvalidRequestError for fields that do not fit each other, or the model."""
    speaks = body.modalities is not None and "audio" in body.modalities
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options: only with stream = true", param="stream_options")
    if body.profile and body.stream:
        raise InvalidRequestError("profile=true: a stream has none; leave stream out", param="profile")
    if body.audio is not None and not speaks:
        raise InvalidRequestError('audio: acts only with modalities = ["text", "audio"]', param="audio")
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequestError("tool_choice: there are no tools to choose from", param="tool_choice")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        what = f"max_tokens={body.max_tokens}: max_completion_tokens={body.max_completion_tokens} says otherwise"
        raise InvalidRequestError(what, param="max_tokens")
    for shown in media_in(body):
        if shown.kind not in capabilities.media:
            takes = " and ".join(["text", *(_WORDS[kind] for kind in capabilities.media)])
            raise InvalidRequestError(f"{shown.field}: the model takes {takes}", param=shown.field)
    for kind, most in capabilities.media.items():
        count = sum(shown.kind == kind for shown in media_in(body))
        if count > most:
            raise InvalidRequestError(f"messages: {count} of {_WORDS[kind]}, allowed are {most}", param="messages")


def params_of(body: TextChatRequest) -> SamplingParams:
    tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return SamplingParams(
        voice=None if body.audio is None else body.audio.voice,
        seed=body.seed,
        max_new_tokens=tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=None if body.temperature == 0 and body.top_p == 1 else body.top_p,  # clients like to say both
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        stop=body.stop,
        json_schema=_schema(body),
        profile=bool(body.profile),
        extra_args=body.extra_args or {},
    )


async def prompt_of(state: ServerState, body: TextChatRequest, capabilities: Capabilities) -> OmniPrompt:
    """The conversation, with its media loaded. Raises InvalidRequestError, with the client's field."""
    loaded = {shown.field: await _load(state, shown, capabilities) for shown in media_in(body)}
    messages = [_message(state, i, message, loaded) for i, message in enumerate(body.messages)]
    modalities: tuple[Modality, ...] = body.modalities or ()
    prompt: OmniPrompt = {"messages": messages, "modalities": modalities}
    if (use := tools_of(body)) is not None:
        prompt["tools"] = use
    return prompt


def tools_of(body: TextChatRequest) -> ToolUse | None:
    """None if none is to be called: then the model is shown none."""
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return None
    return ToolUse(
        tools=tuple(
            Tool(one.name, one.description, one.parameters, bool(one.strict))
            for one in (t.function for t in body.tools)
        ),
        choice="required" if choice == "required" else "auto",
        only=choice.function.name if isinstance(choice, NamedTool) else None,
        parallel=body.parallel_tool_calls is not False,
    )


def _schema(body: TextChatRequest) -> dict[str, Any] | None:
    match body.response_format:
        case SchemaFormat(json_schema=named):
            return named.schema_
        case AnyObject():
            return {"type": "object"}
    return None


def media_in(body: TextChatRequest) -> Iterator[Shown]:
    """In their order."""
    for i, message in enumerate(body.messages):
        if isinstance(message, AskingMessage) and not isinstance(message.content, str):
            for k, part in enumerate(message.content):
                shown = _shown(f"messages.{i}.content.{k}", part)
                if shown is not None:
                    yield shown


class TextWords:
    """How the client said what the engine calls otherwise. Keeps nothing of the body but where its media were."""

    def __init__(self, body: TextChatRequest) -> None:
        places: dict[str, list[str]] = {}
        for shown in media_in(body):
            places.setdefault(shown.kind, []).append(shown.field)
        tokens = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        self._names = {"prompt": "messages", "max_new_tokens": tokens, "voice": "audio.voice"}
        named = isinstance(body.response_format, SchemaFormat) and not body.tools
        self._names |= {"json_schema": "response_format.json_schema.schema" if named else "response_format"}
        self._names |= {kind: fields[0] if len(fields) == 1 else "messages" for kind, fields in places.items()}

    def of(self, error: InvalidRequestError) -> InvalidRequestError:
        """The same error, about the field that the client sent."""
        name = self._names.get(error.param or "")
        if name is None:
            return error
        begin = f"{error.param}"
        rest = error.message.removeprefix(begin) if error.message.startswith(begin) else f": {error.message}"
        return type(error)(name + rest, param=name)


def _shown(field: str, part: AnyPart) -> Shown | None:
    match part:
        case ImagePart():
            return Shown("image", field, part.image_url.url)
        case InputAudioPart():
            return Shown("audio", field, f"data:;base64,{part.input_audio.data}")
        case AudioUrlPart():
            return Shown("audio", field, part.audio_url.url)
        case VideoUrlPart():
            return Shown("video", field, part.video_url.url)
        case TextPart():
            return None


async def _load(state: ServerState, shown: Shown, capabilities: Capabilities) -> Medium:
    if shown.kind == "image":
        return await state.media.image(shown.source, param=shown.field)
    most = state.config.media.max_media_bytes
    data = await state.media.fetch(shown.source, param=shown.field, max_bytes=most)
    limits = MediaLimits(
        file_bytes=most,
        pixels=state.config.media.max_input_image_size,
        frames=MAX_FRAMES,
        seconds=MAX_MEDIA_SECONDS,
    )
    if shown.kind == "audio":
        sound = await asyncio.to_thread(decode_audio, data, limits, param=shown.field)
        state.media.held.add_array(sound.samples)
        return sound.samples, sound.sample_rate
    frames, fps = await asyncio.to_thread(_film, data, limits, shown.field, capabilities.sees_at)
    state.media.held.add_array(frames)
    return frames, fps


def _film(data: bytes, limits: MediaLimits, field: str, rate: float | None) -> tuple[Any, float]:
    """The frames that the model looks at, and how many of them there are per second. In a thread."""
    film = decode_video(data, limits, param=field)
    frames, fps = film.frames, float(film.fps)
    if rate is None or fps <= rate:
        return frames, fps
    picked = at_rate(frames, fps, rate)
    return picked, len(picked) * fps / len(frames)


def _message(state: ServerState, i: int, message: TextMessage, loaded: dict[str, Medium]) -> dict[str, Any]:
    match message:
        case SystemMessage():
            return {"role": "system", "content": _texts(message.content)}
        case AnsweredMessage(tool_calls=calls) if calls:
            made = [call.model_dump() for call in calls]
            return {"role": "assistant", "content": _answered(state, i, message) or [], "tool_calls": made}
        case AnsweredMessage():
            return {"role": "assistant", "content": _answered(state, i, message)}
        case ResultMessage():
            return {"role": "tool", "content": _texts(message.content), "tool_call_id": message.tool_call_id}
    if isinstance(message.content, str):
        return {"role": "user", "content": message.content}
    content: list[dict[str, Any]] = []
    for k, part in enumerate(message.content):
        shown = _shown(f"messages.{i}.content.{k}", part)
        if shown is not None:
            content.append({"type": shown.kind, shown.kind: loaded[shown.field]})
        elif isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
    return {"role": "user", "content": content}


def _answered(state: ServerState, i: int, message: AnsweredMessage) -> Any:
    if message.content is not None:
        return _texts(message.content)
    if message.audio is None:
        return ""
    text = state.transcripts.get(message.audio.id)
    if text is None:
        name = f"messages.{i}.audio.id"
        why = "there is no such answer, or no more; send its transcript as content"
        raise InvalidRequestError(f"{name}={message.audio.id[:80]!r}: {why}", param=name)
    return text


def _texts(content: str | tuple[TextPart, ...]) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]
