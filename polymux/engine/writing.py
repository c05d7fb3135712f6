"""Text on its way out: each token that a model chooses becomes text at once, up to where the answer is to end.

Handed to `generate` as a criterion of when to stop, which sees every token that is chosen. A character that is not
complete waits for its other tokens; what may be the beginning of a text to stop at waits until that is known. Knows
neither models nor requests.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import LogitsProcessor, StoppingCriteria


class Writer(StoppingCriteria):  # type: ignore[misc]
    """The text of one answer. For one sequence."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...] = ()) -> None:
        """`tokenizer`: one of transformers, with a backend of the library tokenizers. Nobody else may encode with it
        meanwhile, in another thread."""
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stops = stops
        self._unread: list[int] = []  # tokens that make no whole character yet
        self._held = ""  # not yet told: it may be the beginning of a text to stop at
        self._new: list[str] = []
        self._told: list[str] = []
        self.tokens: list[int] = []
        self.stopped = self._ended = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """The last of `input_ids` (1, tokens) has just been chosen. Whether that was the last one."""
        if not self.stopped:
            self.write(int(input_ids[0, -1]))
        return torch.full((input_ids.shape[0],), self.stopped, dtype=torch.bool, device=input_ids.device)

    def end(self) -> None:
        """No more will come: what waits is told. A second time, nothing does."""
        if self.stopped or self._ended:
            return
        self._ended = True
        self._add(self._backend.decode(self._unread, skip_special_tokens=True))
        if not self.stopped:
            self._tell(self._held)
            self._held = ""

    def take(self) -> str:
        """What has been written since the last time."""
        new, self._new = "".join(self._new), []
        return new

    @property
    def text(self) -> str:
        """All that has been told."""
        return "".join(self._told)

    def write(self, token: int) -> None:
        """This token has been chosen. Not after it has stopped."""
        self.tokens.append(token)
        self._unread.append(token)
        piece = self._step(token)
        if piece:
            self._unread.clear()
            self._add(piece)

    def _step(self, token: int) -> str | None:
        """The text that is certain with this token. Where bytes are tokens, a run of them is text as a whole or not at
        all: bytes that make no character, after one that did and has been told, are more than the stream can bear."""
        try:
            return self._stream.step(self._backend, token)
        except Exception as error:  # the library has no kind of its own
            if "prefix" not in str(error):
                raise
        self._stream = DecodeStream(ids=[token], skip_special_tokens=True)
        return str(self._backend.decode(self._unread, skip_special_tokens=True))

    def _add(self, piece: str) -> None:
        held = self._held + piece
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            self._tell(held[: min(found)])
            return
        waits = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._tell(held[: len(held) - waits])
        self._held = held[len(held) - waits :]

    def _tell(self, text: str) -> None:
        if text:
            self._new.append(text)
            self._told.append(text)


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's penalties: of tokens that the answer has already, by how often, and once. The prompt's are free."""

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency, self._presence = frequency, presence
        self._begin: int | None = None  # of the answer; the first call comes before its first token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` (1, tokens), `scores` (1, vocabulary)."""
        if self._begin is None:
            self._begin = input_ids.shape[1]
        counts = torch.zeros_like(scores)
        written = input_ids[:, self._begin :]
        counts.scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
