"""Calls of tools in what a model writes, found while it is written. What a call looks like stands in `tool_formats`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from polymux.tool_formats import element_call, json_call, leading_call
from polymux.tools import CallFormat, Tool, ToolCall

_BEGIN, _END = "<tool_call>", "</tool_call>"
_BETWEEN = " \t\r\n;"  # calls without marks


class CallReader:
    """Takes the text of one answer in pieces; gives texts and calls, in their order.

    What may be the beginning of a call waits until that is known, and so does the space before it, which is no part of
    the answer if a call follows. What looks like a call and is none (no JSON, no name) stays text.

    Calls stand between marks here.
    """

    def __init__(self, format: CallFormat = "hermes", tools: Sequence[Tool] = ()) -> None:
        self._parsed = partial(element_call, tools=tools) if format == "function_xml" else json_call
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
            call, goes_on = self._parsed(self._held[len(_BEGIN) : end])
            if goes_on:
                self._from = end + 1
                continue
            written = self._held[: end + len(_END)]
            self._held, self._from = self._held[len(written) :], 0
            self.calls += call is not None
            return written if call is None else call
        self._from = max(len(self._held) - len(_END) + 1, self._from)
        return None


class LeadingCallReader(CallReader):
    """The same where an answer that calls is calls from its begin on, without marks."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tools = tools
        self._calling = True

    def feed(self, text: str) -> list[str | ToolCall]:
        self._held += text
        found: list[str | ToolCall] = []
        while self._calling and (begun := self._held.lstrip(_BETWEEN if self.calls else None)):
            call, end = leading_call(begun, self._tools)
            if end == 0:
                return found
            if call is None:
                self._calling = False
                self._held = begun if self.calls else self._held
                break
            found.append(call)
            self.calls += 1
            self._held = begun[end:]
        if not self._calling and self._held:
            found.append(self._held)
            self._held = ""
        return found


def reader_of(format: CallFormat | None, tools: Sequence[Tool]) -> CallReader:
    """For the answer of a model that writes calls like this."""
    return LeadingCallReader(tools) if format == "llama3_json" else CallReader(format or "hermes", tools)


def calls_in(text: str, format: CallFormat = "hermes", tools: Sequence[Tool] = ()) -> tuple[str, list[ToolCall]]:
    """A whole answer: its text without the calls, and the calls. `format`: the model's; `tools`: those that it was
    offered, which all formats but hermes ask for."""
    reader = reader_of(format, tools)
    pieces = [*reader.feed(text), *reader.end()]
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    return said, [piece for piece in pieces if isinstance(piece, ToolCall)]


def _overlap(text: str) -> int:
    """The length of the longest end of `text` with which a call may begin."""
    return next((n for n in range(min(len(text), len(_BEGIN) - 1), 0, -1) if text.endswith(_BEGIN[:n])), 0)
