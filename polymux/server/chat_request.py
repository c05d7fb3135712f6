"""What a conversation asks a model for that makes pictures: one prompt, and the pictures it starts from.

The rule: what the user has said since the last answer is the prompt, and the pictures in it are the model's input. The
texts of answered turns say nothing any more; but a model that takes pictures goes on with the latest one of the
conversation where the user sends none. Knows the capabilities of the loaded pipeline, and no pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.request import Capabilities
from polymux.server.chat_fields import ImagePart, SystemMessage, TextPart
from polymux.server.chat_protocol import AssistantMessage, ChatRequest, UserMessage
from polymux.server.image_inputs import picture_argument
from polymux.spelling import shown

SYSTEM_ARGUMENT = "system_prompt"  # what pipelines call it that take one
FIELD = "messages"


@dataclass(frozen=True)
class Asked:
    """`names` are the fields in which the pictures were, for errors."""

    text: str
    pictures: Sequence[str]
    names: Sequence[str]
    system: str | None = None

    def located(self, error: InvalidRequestError) -> InvalidRequestError:
        """An error about picture i of those that were loaded, about the part that holds it."""
        found = re.fullmatch(rf"{FIELD}(?:\.(\d+))?", error.param or "")
        if found is None or not self.names or (found[1] is None and len(self.names) > 1):
            return error
        name = self.names[int(found[1] or 0)]
        return type(error)(error.message.replace(found[0], name, 1), param=name)


def asked(body: ChatRequest, capabilities: Capabilities) -> Asked:
    """Raises InvalidRequestError for what would have no effect, or is missing."""
    turns = [(i, m) for i, m in enumerate(body.messages) if not isinstance(m, SystemMessage)]
    latest: list[tuple[int, UserMessage]] = []
    for i, message in reversed(turns):
        if not isinstance(message, UserMessage):
            break
        latest.insert(0, (i, message))
    if not latest:
        raise InvalidRequestError("messages: the last one must be the user's: it says what to make", param=FIELD)
    text = "\n".join(text for _, message in latest for text in _texts(message))
    pictures = [found for i, message in latest for found in _pictures(i, message)]
    name = picture_argument(capabilities)
    if not pictures and name is not None:
        earlier = (list(_pictures(i, message)) for i, message in reversed(turns))
        pictures = next(filter(None, earlier), [])
        if not pictures and name in capabilities.required:
            why = "no picture is given, and the model edits pictures; add a part of type image_url"
            raise InvalidRequestError(f"messages: {why}", param=FIELD)
    if not text.strip() and not (pictures and capabilities.variations):
        raise InvalidRequestError("messages: the user's last one holds no text, which says what to make", param=FIELD)
    return Asked(text, [url for _, url in pictures], [name for name, _ in pictures], _system(body, capabilities))


def check_modalities(modalities: Sequence[str] | None, makes: str) -> None:
    """Raises InvalidRequestError unless the answer will be what was asked for. Beside pictures, text may be asked for:
    that is how clients ask models that answer with either."""
    if modalities is None:
        return
    for modality in modalities:
        if modality not in (makes, "text"):
            raise InvalidRequestError(f"modalities={modality[:80]!r}: the model makes {makes}", param="modalities")
    if makes not in modalities:
        why = f"must hold {makes!r}, which is what the model makes"
        raise InvalidRequestError(f"modalities={shown(modalities)}: {why}", param="modalities")


def _system(body: ChatRequest, capabilities: Capabilities) -> str | None:
    """The text of all system messages, for a pipeline that takes it."""
    given = [
        (i, text) for i, m in enumerate(body.messages) if isinstance(m, SystemMessage) for text in _texts(m) if text
    ]
    if not given:
        return None
    name = f"{FIELD}.{given[0][0]}"
    if SYSTEM_ARGUMENT not in capabilities.arguments or SYSTEM_ARGUMENT in capabilities.refused:
        why = "the model knows no system messages; put what it should know into the user's"
        raise InvalidRequestError(f"{name}: {why}", param=name)
    if SYSTEM_ARGUMENT in (body.extra_args or {}):
        raise InvalidRequestError(f"{name}: cannot be combined with extra_args.{SYSTEM_ARGUMENT}", param=name)
    return "\n".join(text for _, text in given)


def _texts(message: UserMessage | SystemMessage) -> list[str]:
    if isinstance(message.content, str):
        return [message.content]
    return [part.text for part in message.content if isinstance(part, TextPart)]


def _pictures(i: int, message: UserMessage | AssistantMessage) -> Iterable[tuple[str, str]]:
    """Each picture's place and URL."""
    if isinstance(message, AssistantMessage):
        for field, parts in (("images", message.images), ("content", message.content)):
            found = [(f"{FIELD}.{i}.{field}.{k}", url) for k, url in enumerate(map(_url, _items(parts))) if url]
            if found:  # an answer may hold its pictures twice, for different clients
                return found
        return []
    parts = enumerate(message.content) if not isinstance(message.content, str) else ()
    return [(f"{FIELD}.{i}.content.{k}", part.image_url.url) for k, part in parts if isinstance(part, ImagePart)]


def _items(parts: Any) -> list[Any]:
    return parts if isinstance(parts, list) else []


def _url(part: Any) -> str | None:
    match part:
        case {"image_url": {"url": str() as url}}:
            return url
    return None
