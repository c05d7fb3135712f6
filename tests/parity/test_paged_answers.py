"""Greedy tokens of every class whose answers go on together are those of transformers' `generate`: alone, beside eight
others, with prompts in parts and whole, after shared beginnings and after a preemption, and launched one step ahead.

fp32 on a CPU, networks with random weights made on the spot.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as T

from polymux.ar.blocks import BlockPool
from polymux.ar.network import Network, refusal
from polymux.ar.paged_cache import PagedCache, Room
from polymux.ar.runner import Flight, Runner
from polymux.ar.scheduler import Scheduler
from polymux.ar.sequence import Drawing, Sequence
from polymux.ar.step_graphs import Graphs
from polymux.families.language import LANGUAGE

VOCABULARY, TOKENS, BLOCK, CONTEXT = 300, 14, 8, 128
CLASSES = sorted(LANGUAGE.paged)
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=12, max_position_embeddings=CONTEXT, sliding_window=None, eos_token_id=2,
)  # fmt: skip


@dataclass(frozen=True)
class How:
    blocks: int = 100
    budget: int = 256
    chunked: bool = True
    caching: bool = True
    graphs: Graphs = "off"
    ahead: bool = False


HOWS = {
    "plain": How(caching=False),
    "in-parts": How(budget=7, caching=False),
    "whole": How(budget=20, chunked=False),
    "preempted": How(blocks=16, caching=False),
    "found-and-preempted": How(blocks=16, budget=10),
    "padded-and-ahead": How(graphs="padded", ahead=True),
    "all": How(blocks=16, budget=10, graphs="padded", ahead=True),
}


@pytest.fixture(scope="module", params=CLASSES)
def case(request: pytest.FixtureRequest) -> tuple[Network, list[list[int]], list[list[int]]]:
    """A network, prompts, and how transformers goes on with each."""
    torch.manual_seed(0)
    cls = getattr(T, request.param)
    model = cls(cls.config_class(**SMALL)).eval()
    assert refusal(model) is None
    source = random.Random(1)
    prompts = [[source.randrange(3, VOCABULARY) for _ in range(n)] for n in (5, 33, 1, 16, 8, 50, 23, 40)]
    prompts.append(prompts[1][:24] + [9, 9])  # begins like another
    with torch.no_grad():
        wanted = [
            model.generate(torch.tensor([p]), max_new_tokens=TOKENS, do_sample=False)[0, len(p) :].tolist()
            for p in prompts
        ]
        return Network(model), prompts, wanted


def test_what_would_not_be_the_same_is_refused() -> None:
    for odd in (
        {"sliding_window": 8},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ):
        model = T.MistralForCausalLM(T.MistralConfig(**SMALL | odd))
        assert refusal(model) is not None
    model = T.MistralForCausalLM(T.MistralConfig(**SMALL))
    assert refusal(model) is None
    model.generation_config.suppress_tokens = [4]
    assert "suppress_tokens" in str(refusal(model))


class Engine:
    """Scheduler and runner, and nothing around them."""

    def __init__(self, network: Network, how: How) -> None:
        self.how = how
        self.scheduler = Scheduler(BlockPool(how.blocks, BLOCK, how.caching), 9, how.budget, how.chunked)
        cache = PagedCache(network.shape, Room(how.blocks, BLOCK, 9, CONTEXT), torch.device("cpu"))
        self.runner = Runner(network, cache, how.graphs)

    @torch.no_grad()
    def run(self, prompts: list[list[int]], drawings: list[Drawing] | None = None) -> list[list[int]]:
        drawings = drawings or [Drawing()] * len(prompts)
        made = [
            Sequence(name=i, tokens=list(p), limit=TOKENS, ends=frozenset({2}), drawing=d)
            for i, (p, d) in enumerate(zip(prompts, drawings, strict=True))
        ]
        for one in made:
            self.scheduler.add(one)
        before: Flight | None = None
        while not all(one.ended for one in made):
            plan = self.scheduler.plan()
            flight = self.runner.launch(plan) if plan else None
            landing, before = (before, flight) if self.how.ahead else (flight, None)
            assert landing or flight, "nobody can go on"
            if landing:
                self.land(landing)
        assert self.scheduler.pool.used == 0
        return [one.tokens[one.prompt :] for one in made]

    def land(self, flight: Flight) -> None:
        for one, token in zip(flight.sequences, flight.tokens(), strict=True):
            if not one.ended:
                one.take(token)
                self.scheduler.know(one)
                if one.ended:
                    self.scheduler.remove(one)


@pytest.mark.parametrize("how", HOWS)
def test_greedy_tokens_are_those_of_transformers(
    how: str, case: tuple[Network, list[list[int]], list[list[int]]]
) -> None:
    network, prompts, wanted = case
    engine = Engine(network, HOWS[how])
    assert engine.run(prompts[:1]) == wanted[:1]  # alone
    assert engine.run(prompts) == wanted
    assert engine.run(prompts[::-1]) == wanted[::-1]  # again, where beginnings may be found
    assert bool(engine.scheduler.found) == HOWS[how].caching
    assert bool(engine.scheduler.preemptions) == (HOWS[how].blocks == 16)


def test_tokens_that_are_drawn_depend_on_nobody_else(
    case: tuple[Network, list[list[int]], list[list[int]]],
) -> None:
    network, prompts, _ = case
    rules: list[dict[str, Any]] = [{"temperature": 0.9}, {"temperature": 1.2, "top_k": 9}, {"repetition_penalty": 1.4},
                                   {"temperature": 2.0, "top_p": 0.9, "presence_penalty": 0.5}]  # fmt: skip
    drawings = [Drawing(**rules[i % 4], seed=i) for i in range(len(prompts))]
    alone = [Engine(network, How()).run([p], [d])[0] for p, d in zip(prompts[:4], drawings, strict=False)]
    for how in ("plain", "all"):
        assert Engine(network, HOWS[how]).run(prompts, drawings)[:4] == alone
