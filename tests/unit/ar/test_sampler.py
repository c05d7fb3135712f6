"""Tokens are chosen by the rules of each row, in any company, and by the rules of transformers."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as T

from polymux.ar.masks import Masks, masks_of
from polymux.ar.sampler import Sampler, _candidates, _draw
from polymux.ar.sequence import Drawing, Sequence, Uniforms
from polymux.engine.writing import Penalties

VOCABULARY = 50
PROMPT, WRITTEN = [3, 4, 5, 5], [7, 7, 8]


def sequence(row: int, **rules: Any) -> Sequence:
    made = Sequence(name=row, tokens=list(PROMPT), limit=100, drawing=Drawing(**rules))
    made.tokens += WRITTEN
    made.row = row
    return made


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def choose(sequences: list[Sequence], scores: torch.Tensor, masks: Masks | None = None) -> list[int]:
    sampler = Sampler(len(sequences), VOCABULARY, torch.device("cpu"))
    for one in sequences:
        sampler.place(one)
    rows = torch.tensor([one.row for one in sequences])
    tokens: list[int] = sampler.choose(scores, sequences, rows, masks).tolist()
    assert sampler.last[rows].tolist() == tokens
    return tokens


def wanted(scores: torch.Tensor, rules: dict[str, Any]) -> torch.Tensor:
    """Probabilities (vocabulary) as transformers has them."""
    steps: list[Any] = []
    if "repetition_penalty" in rules:
        steps.append(T.RepetitionPenaltyLogitsProcessor(rules["repetition_penalty"]))
    if "frequency_penalty" in rules or "presence_penalty" in rules:
        penalties = Penalties(rules.get("frequency_penalty", 0.0), rules.get("presence_penalty", 0.0))
        penalties(torch.tensor([PROMPT]), scores[None])  # the answer begins after these
        steps.append(penalties)
    steps.append(T.TemperatureLogitsWarper(rules["temperature"]))
    for name, cls in (("top_k", T.TopKLogitsWarper), ("top_p", T.TopPLogitsWarper), ("min_p", T.MinPLogitsWarper)):
        if name in rules:
            steps.append(cls(rules[name]))
    made = scores[None]
    for step in steps:
        made = step(torch.tensor([PROMPT + WRITTEN]), made)
    return made.softmax(-1)[0]


RULES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.9, "repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": -0.8},
]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(rules))
def test_probabilities_are_those_of_transformers(rules: dict[str, Any]) -> None:
    """All numbers from 0 to 1, evenly: each token comes as often as it is likely."""
    count = 20_000
    scores = logits(1)[0]
    one = sequence(0, **rules)
    sampler = Sampler(1, VOCABULARY, torch.device("cpu"))
    sampler.place(one)
    row = torch.tensor([0])
    settings = sampler._settings[row].expand(count, -1)
    made = sampler._penalised(scores[None], row, settings[:1]) if one.drawing.penalises else scores[None]
    evenly = (torch.arange(count) + 0.5) / count
    tokens = _draw(made.expand(count, -1), settings, evenly, _candidates([one], VOCABULARY))
    often = torch.bincount(tokens, minlength=VOCABULARY) / count
    assert torch.allclose(often, wanted(scores, rules), atol=2 / count)


def test_a_row_depends_on_its_own_rules_and_seed_alone() -> None:
    rules: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.5}, *RULES]
    scores = logits(len(rules))
    alone = [choose([sequence(0, **one, seed=9)], scores[i : i + 1])[0] for i, one in enumerate(rules)]
    assert choose([sequence(i, **one, seed=9) for i, one in enumerate(rules)], scores) == alone
    assert alone[0] == scores[0].argmax().item()


class Only:
    """A constraint that lets these tokens follow those."""

    def __init__(self, *allowed: int) -> None:
        self.at = torch.tensor(allowed)

    def allowed(self, written: Many[int]) -> torch.Tensor:
        assert list(written) == WRITTEN
        return torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, self.at, True)


class Broken:
    def allowed(self, written: Many[int]) -> torch.Tensor:
        raise RuntimeError("broken")


def test_a_constraint_is_of_its_row_alone() -> None:
    rules: list[dict[str, Any]] = [{}, {}, *RULES, *RULES]
    scores = logits(len(rules))
    made = [sequence(0, **one, seed=9) for one in rules]
    free = [choose([one], scores[i : i + 1])[0] for i, one in enumerate(made)]
    failed: dict[Sequence, Exception] = {}
    assert masks_of(made, failed) is None
    batch = [sequence(i, **one, seed=9) for i, one in enumerate(rules)]
    held = range(0, len(batch), 2)
    for i in held:
        batch[i].constraint = Only(2, 30, 41)
    batch[1].constraint = Broken()
    masks = masks_of(batch, failed)
    assert masks is not None and masks.at.tolist() == [*held] and [*failed] == [batch[1]]
    kept = scores.clone()
    got = choose(batch, scores, masks)
    assert torch.equal(scores, kept)
    assert all((token in (2, 30, 41)) if i in held else token == free[i] for i, token in enumerate(got))
    assert got[0] == max((2, 30, 41), key=lambda token: scores[0, token].item())


def test_a_row_forgets_whose_it_was() -> None:
    sampler, scores = Sampler(2, VOCABULARY, torch.device("cpu")), logits(1)
    hot = sequence(1, temperature=50.0, presence_penalty=2.0)
    sampler.place(hot)
    sampler.choose(scores, [hot], torch.tensor([1]))
    for rules in ({}, {"frequency_penalty": 0.5}):
        calm = sequence(1, **rules)
        sampler.place(calm)
        assert sampler.choose(scores, [calm], torch.tensor([1])).tolist() == choose([calm], scores)


def test_what_is_written_is_counted() -> None:
    sampler = Sampler(1, VOCABULARY, torch.device("cpu"))
    one = sequence(0, frequency_penalty=1.0)
    sampler.place(one)
    scores = torch.zeros(1, VOCABULARY)
    scores[0, 20], scores[0, 21] = 5.0, 4.5
    assert [sampler.choose(scores, [one], torch.tensor([0])).item() for _ in range(4)] == [20, 21, 20, 21]


def test_numbers_are_the_seeds() -> None:
    one, two = Uniforms(2**64 - 1), Uniforms(2**64 - 1)
    assert [one.next() for _ in range(130)] == [two.next() for _ in range(130)]
    assert Uniforms(1).next() != Uniforms(2).next()
    assert replace(Drawing(), temperature=1.0).draws and not Drawing().draws
