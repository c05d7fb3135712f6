"""What an answer must fit while it is written: JSON of a schema, or calls of tools.

`Constraint.allowed` is all that an engine needs: which token may come next, given those of the answer so far.
`Constrained` is that for transformers' `generate`. Grammars are compiled by the package xgrammar, which is optional,
once for each schema. Knows neither models nor requests in flight.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from polymux.errors import GenerationError, InvalidRequestError
from polymux.families.tool_templates import WRITTEN, WrittenCall
from polymux.tools import CallFormat, Tool, ToolUse

PACKAGE = "xgrammar"
_CACHE_BYTES = 256 << 20  # of compiled grammars
_MOST_SPACES = 16  # one after the other, between the parts of a JSON text; a model that is lost would go on with them


def can_constrain() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec(PACKAGE) is not None


class Grammars:
    """Compiled grammars for one tokenizer. For one thread at a time; compiling may take a second."""

    def __init__(self, tokenizer: Any, vocabulary: int, format: CallFormat = "hermes") -> None:
        """`vocabulary`: tokens that the model gives scores for; `format`: how it writes calls of tools."""
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
        self._vocabulary, self._written = vocabulary, WRITTEN[format]
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)

    def json(self, schema: dict[str, Any], ends: Iterable[int]) -> Constraint:
        """The answer is JSON that fits a schema which `json_schema.check_schema` has passed. `ends`: tokens that end
        an answer. Raises InvalidRequestError."""
        return self._constraint(json_form(schema), ends, "json_schema")

    def calls(self, use: ToolUse, ends: Iterable[int], schema: dict[str, Any] | None = None) -> Constraint:
        """The answer is calls of tools, or text that may end with such; with `schema`, calls or JSON that fits it, as
        `json` has it. Raises InvalidRequestError."""
        return self._constraint(calls_form(use, self._written, schema), ends, "tools")

    def _constraint(self, form: dict[str, Any], ends: Iterable[int], name: str) -> Constraint:
        import xgrammar

        stops = sorted(ends)
        if not stops:
            raise InvalidRequestError(f"{name}: the checkpoint names no token that ends an answer", param=name)
        try:
            grammar = self._compiler.compile_structural_tag(structural_tag(form))
        except (RuntimeError, xgrammar.InvalidStructuralTagError) as error:
            why = str(error).strip().splitlines()[0].rpartition(".cc:")[2].partition(": ")[2] or "it is not known why"
            raise InvalidRequestError(f"{name}: no grammar can be made of it: {why[:200]}", param=name) from None
        return Constraint(xgrammar.GrammarMatcher(grammar, override_stop_tokens=stops), self._vocabulary)


class Constraint:
    """Which tokens may come next in one answer. For one sequence."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._bits = torch.zeros(1, (vocabulary + 31) // 32, dtype=torch.int32)
        self._taken: list[int] = []

    def allowed(self, written: Sequence[int]) -> torch.Tensor:
        """(vocabulary,) of bool, on the CPU: true where a token may follow. `written`: the answer's tokens so far, of
        which what was there the last time may have been taken back. Raises GenerationError for one that may not be
        there."""
        kept = self._kept(written)
        if kept < len(self._taken):
            self._matcher.rollback(len(self._taken) - kept)
            del self._taken[kept:]
        for token in written[kept:]:
            if not self._matcher.accept_token(token):
                raise GenerationError(f"the model wrote token {token}, which may not be there")
            self._taken.append(token)
        if self._matcher.is_terminated():
            return torch.ones(self._vocabulary, dtype=torch.bool)  # it has ended
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little")
        return torch.from_numpy(bits[: self._vocabulary].view(np.bool_))

    def _kept(self, written: Sequence[int]) -> int:
        """Tokens at the beginning that are those of the last time."""
        if list(written[: len(self._taken)]) == self._taken:  # nearly always, and in no time
            return len(self._taken)
        pairs = zip(self._taken, written, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._taken), len(written)))


class Constrained(LogitsProcessor):  # type: ignore[misc]
    """A constraint, as `generate` takes it."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._begin: int | None = None  # of the answer; the first call comes before its first token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` (1, tokens), `scores` (1, vocabulary)."""
        if self._begin is None:
            self._begin = input_ids.shape[1]
        allowed = self._constraint.allowed(input_ids[0, self._begin :].tolist())
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)


def json_form(schema: dict[str, Any]) -> dict[str, Any]:
    """JSON that fits a schema, in xgrammar's words."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_SPACES}


def calls_form(use: ToolUse, written: WrittenCall, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """Calls of tools, or text that may end with such, or with a schema JSON in its place, in xgrammar's words."""
    tools = [tool for tool in use.tools if use.only in (None, tool.name)]
    once = use.only is not None or not use.parallel
    form: dict[str, Any] = {"tags": [_tag(written, tool) for tool in tools], "stop_after_first": once}
    free = use.choice == "auto" and use.only is None
    if free and schema is None:
        return form | {"type": "triggered_tags", "triggers": [written.trigger], "at_least_one": False}
    form |= {"type": "tags_with_separator", "separator": written.between, "at_least_one": True}
    return {"type": "or", "elements": [form, json_form(schema)]} if free and schema is not None else form


def structural_tag(form: dict[str, Any]) -> str:
    """A form as JSON, as it is compiled."""
    return json.dumps({"type": "structural_tag", "format": form})


def _tag(written: WrittenCall, tool: Tool) -> dict[str, Any]:
    """A call of a tool, where all is written like this."""
    schema = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    content = json_form(schema) | {"style": written.style}
    if written.style != "json":  # a value has no quotes there, so what stands around it could be taken for a part of it
        content["max_whitespace_cnt"] = 1
    return {
        "type": "tag",
        "begin": f"{written.before}{tool.name}{written.named}",
        "content": content,
        "end": written.after,
    }
