"""How an answer is written, and the choice of its next token."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from transformers import LogitsProcessor

from .exceptions import VLLMClientError

_ONE = threading.Lock()  # the generator that is seeded is the process's own
Chooser = Callable[[Any, list[int], int], int]


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1


@dataclass
class StructuredOutputsParams:
    structural_tag: str | None = None


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    detokenize: bool = True
    stop_token_ids: list[int] = field(default_factory=list)
    max_tokens: int | None = 16
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if self.temperature > 2:
            raise VLLMClientError(f"temperature must be in [0, 2], got {self.temperature}.")
        self.temperature = max(self.temperature, 0.01) if self.temperature else 0.0

    def chooser(self, tokenizer: Any, vocabulary: int) -> Chooser:
        """From a model and the tokens so far, of which the answer's begin there, to the next one."""
        form = self.structured_outputs
        held = None if form is None else _Held(tokenizer, vocabulary, str(form.structural_tag), self.stop_token_ids)

        def choose(model: Any, ids: list[int], begin: int) -> int:
            extra: list[Any] = [_Penalties(self.frequency_penalty, self.presence_penalty, begin)]
            extra += [held] if held is not None else []
            drawn = {} if not self.temperature else dict(
                temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
            )  # fmt: skip
            with _ONE, torch.random.fork_rng():
                torch.manual_seed((self.seed or 0) % 2**32 * 7919 + len(ids) * 104729)
                made = model.generate(
                    torch.tensor([ids]),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                    max_new_tokens=1,
                    do_sample=bool(self.temperature),
                    repetition_penalty=self.repetition_penalty,
                    logits_processor=extra,
                    **drawn,
                )
            if held is not None:
                held.take(int(made[0, -1]))
            return int(made[0, -1])

        return choose


class _Penalties(LogitsProcessor):
    def __init__(self, frequency: float, presence: float, begin: int) -> None:
        self._frequency, self._presence, self._begin = frequency, presence, begin

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._begin :], minlength=scores.shape[1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


class _Held(LogitsProcessor):
    def __init__(self, tokenizer: Any, vocabulary: int, tag: str, ends: list[int]) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
        grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)
        self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=ends)
        self._bits = xgrammar.allocate_token_bitmask(1, vocabulary)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._matcher.fill_next_token_bitmask(self._bits)
        allowed = (self._bits[0, :, None] >> torch.arange(32)) & 1
        return scores.masked_fill(~allowed.flatten()[: scores.shape[1]].bool(), -torch.inf)

    def take(self, token: int) -> None:
        assert self._matcher.accept_token(token)
