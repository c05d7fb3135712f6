"""Calls of tools in what a model writes, found while it is written. Knows one way to write them down: see `tools`."""

from __future__ import annotations

import json
import uuid

from polymux.tools import ToolCall

_BEGIN, _END = "<tool_call>", "</tool_call>"


class CallReader:
    """Takes the text of one answer in pieces; gives texts and calls, in their order.

    What may be the beginning of a call waits until that is known, and so does the space before it, which is no part of
    the answer if a call follows. What looks like a call and is none (no JSON, no name) stays text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._from = 0  # in what is held: before it, no call ends
        self.calls = 0

    def feed(self, text: str) -> list[str | ToolCall]:
        self._held += text
        found: list[str | ToolCall] = []
        while (piece := self._call() if self._held.startswith(_BEGIN) else self._text()) is not None:
            found += [piece] if piece else []
        return found

    def end(self) -> list[str | ToolCall]:
        """No more comes: a call that is not complete is text."""
        rest, self._held = self._held, ""
        return [rest] if rest.strip() or (rest and not self.calls) else []

    def _text(self) -> str | None:
        """What stands before the next call; None if nothing can be told yet."""
        at = self._held.find(_BEGIN)
        certain = at if at > 0 else len(self._held) - _overlap(self._held)
        told = self._held[:certain].rstrip()
        if at < 0 and not told:
            return None
        self._held = self._held[certain if at > 0 else len(told) :]
        return told

    def _call(self) -> str | ToolCall | None:
        """The call that is held, as text if it is none; None until its end has come."""
        while (end := self._held.find(_END, self._from)) >= 0:
            call, goes_on = _parsed(self._held[len(_BEGIN) : end])
            if goes_on:
                self._from = end + 1
                continue
            written = self._held[: end + len(_END)]
            self._held, self._from = self._held[len(written) :], 0
            self.calls += call is not None
            return written if call is None else call
        self._from = max(len(self._held) - len(_END) + 1, self._from)
        return None


def calls_in(text: str) -> tuple[str, list[ToolCall]]:
    """A whole answer: its text without the calls, and the calls."""
    reader = CallReader()
    pieces = [*reader.feed(text), *reader.end()]
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    return said, [piece for piece in pieces if isinstance(piece, ToolCall)]


def _parsed(body: str) -> tuple[ToolCall | None, bool]:
    """What stands between the marks; whether it goes on behind the second one, which is part of a string in it."""
    try:
        made = json.loads(body)
    except json.JSONDecodeError as error:
        return None, error.msg.startswith("Unterminated string")
    except RecursionError:
        return None, False
    name, arguments = (made.get("name"), made.get("arguments", {})) if isinstance(made, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None, False
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, json.dumps(arguments, ensure_ascii=False)), False


def _overlap(text: str) -> int:
    """The length of the longest end of `text` with which a call may begin."""
    return next((n for n in range(min(len(text), len(_BEGIN) - 1), 0, -1) if text.endswith(_BEGIN[:n])), 0)
