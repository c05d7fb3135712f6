"""From what a Python caller passes, a prompt and sampling parameters, to a Request.

Converts pictures, arrays and numpy's scalars to what can travel. Whether the model takes it is checked at admission.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypedDict, runtime_checkable

import numpy as np
from PIL import Image

from polymux.errors import InvalidRequestError
from polymux.media.wire import Array, to_wire
from polymux.request import Media, Message, Modality, OmniDiffusionSamplingParams, Part, Request, SamplingParams
from polymux.sampling import REFERENCE
from polymux.spelling import shown
from polymux.tools import ToolCall, ToolUse

# A picture; frames or sound; sound with its samples, or frames with their number, per second.
Medium = Image.Image | Array | tuple[Array, int] | tuple[Array, float]


class OmniPrompt(TypedDict, total=False):
    """A prompt with more than its text. Media go by the name of the pipeline's argument."""

    prompt: str
    negative_prompt: str
    multi_modal_data: dict[str, Medium | Sequence[Medium]]
    messages: Sequence[dict[str, Any]]  # a conversation, in place of a prompt: role and content; see docs/chat.md
    modalities: Sequence[Modality]  # of the answer: text, or text and audio
    tools: ToolUse  # functions that the answer may call


Prompt = str | OmniPrompt
Params = OmniDiffusionSamplingParams | SamplingParams


@runtime_checkable
class _Generator(Protocol):
    """What we need of a torch.Generator, without torch."""

    @property
    def device(self) -> Any: ...

    def get_state(self) -> Any: ...


def request_of(prompt: Prompt, params: Params | None, request_id: str, partial_images: int = 0) -> Request:
    """Raises InvalidRequestError for a prompt or parameters that are not even shaped like such."""
    fields = _fields_of(prompt)
    messages, shown = _conversation(fields)
    sampling = _plain(params) if isinstance(params, SamplingParams) else None
    if params is None or sampling is not None:
        params = OmniDiffusionSamplingParams()
    if not isinstance(params, OmniDiffusionSamplingParams):
        what = f"sampling_params is a {type(params).__name__}: must be OmniDiffusionSamplingParams or SamplingParams"
        raise InvalidRequestError(what, param="sampling_params")
    negative = fields.get("negative_prompt")
    media = fields.get("multi_modal_data") or {}
    if sampling is not None and sampling.ref_audio is not None:
        if REFERENCE in media:
            raise InvalidRequestError(f"{REFERENCE} is given twice, in the prompt too", param=REFERENCE)
        media, sampling = {**media, REFERENCE: sampling.ref_audio}, dataclasses.replace(sampling, ref_audio=None)
    return Request(
        request_id=request_id,
        prompt=fields.get("prompt"),
        negative_prompt=params.negative_prompt if negative is None else negative,
        media=_media_of({**shown, **media} if shown else media),
        params=_portable(params),
        sampling=sampling,
        partial_images=partial_images,
        generator_state=None if params.generator is None else _state_of(params.generator),
        messages=messages,
        modalities=_modalities(fields.get("modalities") or ()),
        tools=_tools(fields.get("tools")),
    )


def _fields_of(prompt: Prompt) -> OmniPrompt:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, dict):
        raise InvalidRequestError(f"prompt is a {type(prompt).__name__}: must be a str or a dict", param="prompt")
    known = OmniPrompt.__annotations__
    for key in prompt:
        if key not in known:
            what = f"unknown key {shown(key)} in a prompt; known are {', '.join(known)}"
            raise InvalidRequestError(what, param="prompt")
    return prompt


def _modalities(given: Any) -> tuple[Modality, ...]:
    if isinstance(given, (list, tuple)) and all(isinstance(one, str) for one in given):
        return tuple(given)
    raise InvalidRequestError(f"modalities={shown(given)}: must be a list of strings", param="modalities")


def _tools(given: Any) -> ToolUse | None:
    if given is None or isinstance(given, ToolUse):
        return given
    raise InvalidRequestError(f"tools is a {type(given).__name__}: must be a polymux.tools.ToolUse", param="tools")


def _conversation(fields: OmniPrompt) -> tuple[list[Message], dict[str, Medium | Sequence[Medium]]]:
    """The messages, and what they show, by kind, in their order."""
    given, shown = fields.get("messages"), dict[str, list[Any]]()
    if given is None:
        return [], {}
    if fields.get("multi_modal_data"):
        why = "cannot be combined with messages, whose content holds them"
        raise InvalidRequestError(f"multi_modal_data: {why}", param="multi_modal_data")
    if not isinstance(given, (list, tuple)) or not given:
        raise InvalidRequestError("messages: must be a list that is not empty", param="messages")
    messages = [_message(f"messages.{i}", one, shown) for i, one in enumerate(given)]
    return messages, dict(shown)


def _message(name: str, given: Any, shown: dict[str, list[Any]]) -> Message:
    match given:
        case {"role": "system" | "user" | "assistant" as role, "content": str() | list() as content, **rest} if (
            not rest
        ):
            return Message(role, _parts(name, content, shown))
        case {"role": "tool", "content": str() | list() as content, "tool_call_id": str() as call, **rest} if not rest:
            return Message("tool", _parts(name, content, shown), tool_call_id=call)
        case {"role": "assistant", "tool_calls": list() as calls, **rest} if calls and set(rest) <= {"content"}:
            made = [_tool_call(f"{name}.tool_calls.{i}", one) for i, one in enumerate(calls)]
            return Message("assistant", _parts(name, rest.get("content") or [], shown), made)
    what = 'must be {"role": "system", "user", "assistant" or "tool", "content": a string or a list of parts}'
    raise InvalidRequestError(f"{name}: {what}; a tool's has a tool_call_id", param=name)


def _parts(name: str, content: Any, shown: dict[str, list[Any]]) -> list[Part]:
    if isinstance(content, str):
        return [Part("text", content)]
    return [_part(f"{name}.content.{i}", one, shown) for i, one in enumerate(content)]


def _tool_call(name: str, given: Any) -> ToolCall:
    match given:
        case {"id": str() as id_, "function": {"name": str() as function, "arguments": str() as arguments}}:
            return ToolCall(id_, function, arguments)
    what = 'must be {"id": ..., "type": "function", "function": {"name": ..., "arguments": JSON}}'
    raise InvalidRequestError(f"{name}: {what}", param=name)


def _part(name: str, given: Any, shown: dict[str, list[Any]]) -> Part:
    match given:
        case {"type": "text", "text": str() as text, **rest} if not rest:
            return Part("text", text)
        case {"type": "image" | "audio" | "video" as kind, **rest} if list(rest) == [kind]:
            shown.setdefault(kind, []).append(rest[kind])
            return Part(kind)
    what = 'must be {"type": "text", "text": ...}, or a medium such as {"type": "image", "image": ...}'
    raise InvalidRequestError(f"{name}: {what}", param=name)


def _media_of(given: dict[str, Medium | Sequence[Medium]]) -> dict[str, list[Media]]:
    if not isinstance(given, dict):
        what = f"multi_modal_data is a {type(given).__name__}: must be a dict"
        raise InvalidRequestError(what, param="multi_modal_data")
    media: dict[str, list[Media]] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise InvalidRequestError(f"key {name!r} of multi_modal_data: must be a str", param="multi_modal_data")
        items = list(value) if isinstance(value, list) else [value]
        if name in ("video", "mask") and len(items) > 1 and all(isinstance(item, Image.Image) for item in items):
            items = [_frames(name, items)]
        media[name] = [_medium(name, item) for item in items]
    return media


def _medium(name: str, value: Any) -> Media:
    try:
        match value:
            case np.ndarray() if value.dtype == np.uint8 and value.ndim in (2, 3):
                return _picture(value)
            case Image.Image() | np.ndarray():
                return to_wire(value)
            case (np.ndarray() as frames, int() | float() as fps) if name == "video" and fps > 0:
                return to_wire(frames, fps=float(fps))
            case (np.ndarray() as samples, int() as rate) if rate > 0:
                return to_wire(samples[np.newaxis] if samples.ndim == 1 else samples, sample_rate=rate)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name} is {error.message}", param=name) from None
    allowed = "a PIL image, a numpy array, (samples, rate), or a list of these"
    raise InvalidRequestError(f"{name} is a {type(value).__name__}: must be {allowed}", param=name)


def _picture(pixels: Array) -> Media:
    try:
        return to_wire(Image.fromarray(pixels))
    except (TypeError, ValueError):
        what = f"an array of shape {pixels.shape}: a picture is (height, width) or (height, width, 3 or 4)"
        raise InvalidRequestError(what) from None


def _frames(name: str, pictures: list[Any]) -> Array:
    """Pictures of one size as frames (frames, height, width, 3)."""
    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        raise InvalidRequestError(f"{name} has frames of different sizes: {sorted(sizes)}", param=name)
    return np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])


def _portable(params: OmniDiffusionSamplingParams) -> OmniDiffusionSamplingParams:
    """The parameters without what is carried elsewhere, and with plain numbers in place of numpy's."""
    changes: dict[str, Any] = {"generator": None, "negative_prompt": None}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if isinstance(value, np.generic):
            changes[field.name] = value.item()
        elif field.name in ("sigmas", "timesteps") and isinstance(value, (list, np.ndarray)):
            changes[field.name] = tuple(v.item() if isinstance(v, np.generic) else v for v in value)
    return dataclasses.replace(params, **changes)


def _plain(params: SamplingParams) -> SamplingParams:
    """With plain numbers in place of numpy's."""
    values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    if isinstance(vector := values["speaker_embedding"], np.ndarray):
        values["speaker_embedding"] = tuple(vector.reshape(-1).tolist())
    return SamplingParams(**{name: v.item() if isinstance(v, np.generic) else v for name, v in values.items()})


def _state_of(generator: Any) -> bytes:
    if not isinstance(generator, _Generator):
        what = f"generator is a {type(generator).__name__}: must be a torch.Generator"
        raise InvalidRequestError(what, param="generator")
    if str(generator.device) != "cpu":
        what = f"generator is on {generator.device}: its state means nothing in another process"
        raise InvalidRequestError(f"{what}; use torch.Generator('cpu'), or a seed", param="generator")
    return bytes(generator.get_state().numpy().tobytes())
