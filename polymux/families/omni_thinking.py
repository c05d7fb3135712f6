"""Qwen-Omni where answers go on together: the thinker as an engine of its own asks for it, and the rest after it.

Knows neither how prompts are made nor what the generations have of their own.
"""

from __future__ import annotations

from typing import Any

from polymux.families import omni_parts, omni_reading
from polymux.families.chat import ChatAdapter, ChatCall, Read, Tensors
from polymux.families.generate import Parts


class ThinkingAdapter(ChatAdapter):
    sees_at: float

    prefix = "thinker_"

    def writer(self, parts: Parts) -> Any:
        return parts.model.thinker

    def unpaged(self, parts: Parts) -> str | None:
        return omni_reading.between_numbers(parts, self.sees_at)

    def read(self, parts: Parts, call: ChatCall) -> tuple[ChatCall, Read | None]:
        return omni_reading.read(parts, call)

    def thoughts(self, parts: Parts, call: ChatCall, sequences: Any, embeds: Any, hidden: Any) -> Tensors:
        words = self.words(parts, call.arguments.get("speaker"))
        return omni_parts.thoughts(parts.model.thinker, call, words, (sequences, embeds, hidden))

    def layer(self, parts: Parts) -> int | None:
        """Whose output of the thinker's the talker gets."""
        return self.heard(parts) if parts.model.has_talker else None

    def heard(self, parts: Parts) -> int:
        """The layer of `layer`, of a checkpoint that speaks."""
        raise NotImplementedError

    def speak_thoughts(self, parts: Parts, call: ChatCall, thoughts: Tensors) -> Any:
        self.refuse_silence(parts.model)
        speech = {
            name: value
            for name, value in call.arguments.items()
            if not name.startswith(self.prefix) and not hasattr(value, "shape")
        }
        return omni_parts.talk(parts, thoughts, max(1, self.heard(parts)), None, speech)[1].reshape(-1)

    def words(self, parts: Parts, voice: str | None) -> tuple[int, ...]:
        """Tokens of text whose embeddings the talker puts in by itself. No voice: it will not speak."""
        raise NotImplementedError

    def refuse_silence(self, model: Any) -> None:
        """Have a session's own model raise GenerationError where there are no codes to decode."""
        raise NotImplementedError
