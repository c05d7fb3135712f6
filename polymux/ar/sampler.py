"""The next tokens of many sequences, chosen on the device in one batch, each by the rules of its own sequence.

In the order in which transformers applies them: penalties, constraints, temperature, top-k, top-p, min-p. A token is
drawn with one number from 0 to 1 that the sequence brings, so it does not depend on who else is in the batch. Nothing
here waits for the device. Knows logits and rows; nothing of the network.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from polymux.ar.masks import Masks
from polymux.ar.sequence import Sequence

_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _REPETITION, _FREQUENCY, _PRESENCE = range(7)


class Sampler:
    """`rows`: places for sequences; one more is for nobody."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._rows, self._vocabulary, self._device = rows, vocabulary, device
        self.last = torch.zeros(rows + 1, dtype=torch.long, device=device)  # the token that each row goes on with
        self._settings = torch.zeros(rows + 1, 7, device=device)
        self._written: torch.Tensor | None = None  # how often each row has written each token
        self._seen: torch.Tensor | None = None  # which tokens were in its prompt

    def place(self, sequence: Sequence) -> None:
        """It has got a row."""
        drawing, row = sequence.drawing, sequence.row
        assert row is not None
        values = (drawing.temperature, float(drawing.top_k), drawing.top_p, drawing.min_p,
                  drawing.repetition_penalty, drawing.frequency_penalty, drawing.presence_penalty)  # fmt: skip
        self._settings[row].copy_(torch.tensor(values), non_blocking=True)
        if drawing.penalises:
            written, seen = self._counts()
            written[row].copy_(self._count(sequence.tokens[sequence.prompt :]))
            seen[row].copy_(self._count(sequence.tokens[: sequence.prompt]) > 0)

    def choose(
        self, logits: torch.Tensor, sequences: Many[Sequence], rows: torch.Tensor, masks: Masks | None = None
    ) -> torch.Tensor:
        """(sequences) tokens for logits (sequences, vocabulary); `rows` (sequences) are theirs. `masks`: of those that
        have a constraint."""
        draws = [s.drawing.draws for s in sequences]
        penalises = any(s.drawing.penalises for s in sequences)
        if not penalises and not any(draws) and masks is None:
            tokens = logits.argmax(-1)
        else:
            settings = self._settings[rows]
            scores = logits.float()
            if penalises:
                scores = self._penalised(scores, rows, settings)
            if masks is not None:
                scores = masks.applied(scores)
            tokens = scores.argmax(-1)
            if any(draws):
                drawn = _draw(scores, settings, self._uniforms(sequences), _candidates(sequences, self._vocabulary))
                tokens = torch.where(settings[:, _TEMPERATURE] > 0, drawn, tokens)
            if penalises:
                written, _ = self._counts()
                written.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
        self.last[rows] = tokens
        return tokens

    def _uniforms(self, sequences: Many[Sequence]) -> torch.Tensor:
        numbers = [s.uniforms.next() if s.drawing.draws else 0.0 for s in sequences]
        return torch.tensor(numbers, dtype=torch.float32).to(self._device, non_blocking=True)

    def _counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Made when the first sequence asks for them: they are as large as some hundred rows of logits."""
        if self._written is None or self._seen is None:
            size = (self._rows + 1, self._vocabulary)
            self._written = torch.zeros(size, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(size, dtype=torch.bool, device=self._device)
        return self._written, self._seen

    def _count(self, tokens: list[int]) -> torch.Tensor:
        counts = np.bincount(np.asarray(tokens, dtype=np.int64), minlength=self._vocabulary)[: self._vocabulary]
        return torch.from_numpy(counts.astype(np.int32)).to(self._device)

    def _penalised(self, scores: torch.Tensor, rows: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        written, seen = (table[rows] for table in self._counts())
        factor = settings[:, _REPETITION, None]
        repeated = torch.where(scores < 0, scores * factor, scores / factor)
        scores = torch.where(seen | (written > 0), repeated, scores)
        scores = scores - settings[:, _FREQUENCY, None] * written
        return scores - settings[:, _PRESENCE, None] * (written > 0)


def _candidates(sequences: Many[Sequence], vocabulary: int) -> int:
    """How many of the likeliest tokens can be drawn at all, of any of those that draw."""
    drawing = [s.drawing for s in sequences if s.drawing.draws]
    most = max(d.top_k if d.top_k else vocabulary for d in drawing)
    return min(1 << (most - 1).bit_length(), vocabulary)


def _draw(scores: torch.Tensor, settings: torch.Tensor, uniforms: torch.Tensor, candidates: int) -> torch.Tensor:
    """One token per row of scores (rows, vocabulary)."""
    temperature = settings[:, _TEMPERATURE, None]
    scores = scores / torch.where(temperature > 0, temperature, 1.0)
    if candidates < scores.shape[1]:
        scores, ids = scores.topk(candidates)
    else:
        scores, ids = scores.sort(dim=-1, descending=True)
    rank = torch.arange(candidates, device=scores.device)
    top_k = settings[:, _TOP_K, None]
    scores = scores.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probabilities = scores.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # of what is likelier
    keeps = (before < settings[:, _TOP_P, None]) & (probabilities >= settings[:, _MIN_P, None] * probabilities[:, :1])
    keeps &= probabilities > 0
    keeps[:, 0] = True
    sums = (probabilities * keeps).cumsum(-1)
    index = (sums <= uniforms[:, None] * sums[:, -1:]).sum(-1)
    index = torch.minimum(index, keeps.sum(-1) - 1)
    return ids.gather(1, index[:, None])[:, 0]
