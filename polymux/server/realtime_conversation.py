"""The conversation of one realtime session: its items in their order, and the prompt that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from polymux.errors import InvalidRequestError
from polymux.media.wire import Array
from polymux.prompts import OmniPrompt
from polymux.server.realtime_events import ItemStatus, ItemView, SoundContent, TextContent, new_id
from polymux.server.realtime_protocol import RATE

MAX_ITEMS = 512
_FIRST = "root"  # what comes before the first item


@dataclass
class Item:
    """A message. Its parts are texts, and sounds as int16 (1, samples); an answer has one text, which grows."""

    role: Literal["user", "system", "assistant"]
    parts: list[str | Array]
    id: str = field(default_factory=lambda: new_id("item"))
    status: ItemStatus = "completed"
    spoken: bool = False

    @property
    def empty(self) -> bool:
        """It is an answer that was ended before it began."""
        return self.role == "assistant" and not any(isinstance(part, str) and part for part in self.parts)

    @property
    def characters(self) -> int:
        return sum(len(part) for part in self.parts if isinstance(part, str))

    def view(self) -> ItemView:
        content = [self._content(part) for part in self.parts]
        return ItemView(id=self.id, status=self.status, role=self.role, content=content)

    def _content(self, part: str | Array) -> TextContent | SoundContent:
        if not isinstance(part, str):
            return SoundContent(type="input_audio")
        if self.spoken:
            return SoundContent(type="output_audio", transcript=part)
        return TextContent(type="output_text" if self.role == "assistant" else "input_text", text=part)

    def content(self) -> list[dict[str, Any]]:
        """For the model."""
        return [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "audio", "audio": (part, RATE)}
            for part in self.parts
        ]


class Conversation:
    """Raises InvalidRequestError for what cannot be added or is not there."""

    def __init__(self, max_characters: int) -> None:
        self.id = new_id("conv")
        self._items: list[Item] = []
        self._max_characters = max_characters

    def check_room(self, item: Item) -> None:
        """For one that the client brings; answers are added in any case."""
        if len(self._items) >= MAX_ITEMS:
            raise InvalidRequestError(f"the conversation has {MAX_ITEMS} items: delete some", param="item")
        if any(other.id == item.id for other in self._items):
            raise InvalidRequestError(f"item.id={item.id!r}: there is one of this id", param="item.id")
        characters = item.characters and item.characters + sum(other.characters for other in self._items)
        if characters > self._max_characters:
            allowed = f"allowed are {self._max_characters} (--max-prompt-length); delete some"
            raise InvalidRequestError(f"the conversation's texts would have {characters} characters: {allowed}",
                                      param="item")  # fmt: skip

    def add(self, item: Item, after: str | None = None) -> str | None:
        """At the end, or after the item `after`. The id of the item before it."""
        if after is None:
            at = len(self._items)
        else:
            at = 0 if after == _FIRST else self._index(after, "previous_item_id") + 1
        self._items.insert(at, item)
        return self.before(item)

    def before(self, item: Item) -> str | None:
        """The id of the item before it; None: it is the first, or was deleted."""
        at = next((i for i, other in enumerate(self._items) if other is item), 0)
        return self._items[at - 1].id if at else None

    @property
    def last_id(self) -> str | None:
        return self._items[-1].id if self._items else None

    def delete(self, item_id: str) -> None:
        del self._items[self._index(item_id, "item_id")]

    def prompt(self, instructions: str, spoken: bool) -> OmniPrompt:
        """What the model reads: items of the user in a row are one message."""
        messages: list[dict[str, Any]] = []
        if instructions:
            messages.append({"role": "system", "content": instructions})
        for item in self._items:
            if item.empty:
                continue
            if item.role == "user" and messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += item.content()
            else:
                messages.append({"role": item.role, "content": item.content()})
        if not messages or messages[-1]["role"] != "user":
            raise InvalidRequestError("the conversation must end with an item of the user", param=None)
        return {"messages": messages, "modalities": ("text", "audio") if spoken else ("text",)}

    def _index(self, item_id: str, param: str) -> int:
        for i, item in enumerate(self._items):
            if item.id == item_id:
                return i
        raise InvalidRequestError(f"{param}={item_id[:80]!r}: there is no such item", param=param)
