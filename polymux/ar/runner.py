"""A plan, carried out: the network runs, the next tokens are chosen, and their numbers set out for the host.

Nothing here waits for the device: what was launched is a `Flight`, and its tokens are asked for when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch

from polymux.ar.crossing import Landing, to_device, to_host
from polymux.ar.features import Ints, together
from polymux.ar.masks import Masks, masks_of
from polymux.ar.network import Made, Network
from polymux.ar.paged_cache import PagedCache
from polymux.ar.prompt_batch import lay_out
from polymux.ar.ranks import Lead
from polymux.ar.sampler import Sampler
from polymux.ar.scheduler import Piece, Plan
from polymux.ar.sequence import Sequence
from polymux.ar.step_graphs import Graphs, StepGraphs


@dataclass(frozen=True)
class Stretch:
    """The states of tokens of a sequence, from `start` on: rows `begin` to `end` of what was copied."""

    sequence: Sequence
    start: int
    begin: int
    end: int


@dataclass
class Flight:
    """A step that is under way: whose tokens are being chosen, and where they will be; and the states of those who are
    listened to."""

    plan: Plan
    sequences: list[Sequence]
    chosen: list[torch.Tensor]  # on the host
    landed: Landing | None = None
    unheld: dict[Sequence, Exception] = field(default_factory=dict)  # whose constraint has failed: their token is void
    heard: list[tuple[list[Stretch], torch.Tensor]] = field(default_factory=list)  # on the host

    def tokens(self) -> list[int]:
        """Waits for the device. Who is listened to has the states, too, from then on."""
        if self.landed is not None:
            self.landed.wait()
        for stretches, states in self.heard:
            for one in stretches:
                assert one.sequence.heard is not None
                one.sequence.heard.take(one.start, states[one.begin : one.end].clone())
        self.heard.clear()
        return [token for tensor in self.chosen for token in tensor.tolist()]


class Runner:
    def __init__(self, network: Network, cache: PagedCache, graphs: Graphs, lead: Lead | None = None) -> None:
        """`lead`: through it other ranks do the same."""
        self._network, self._cache, self._lead = network, cache, lead
        self._sampler = Sampler(cache.rows, network.vocabulary, cache.device)
        read = network.read if network.listens else None
        self._steps = StepGraphs(network, cache, self._sampler.last, graphs, read, needed=lead is not None)

    def prepare(self) -> None:
        """Do what takes long, before anybody waits for it."""
        if self._lead is not None:
            self._lead.prepare()
        self._steps.prepare()

    def launch(self, plan: Plan) -> Flight:
        """What goes on and what begins are runs of their own: one of them is always the same graph."""
        flight = Flight(plan, [], [])
        if self._lead is not None:
            self._lead.begin(plan, self._cache)
        if plan.decodes:
            self._choose(flight, self._decode(plan.decodes), plan.decodes)
            self._hear(flight, [(s, s.computed - 1, 1) for s in plan.decodes], self._steps.states)
        if plan.pieces:
            (logits, states), ending = self._begin(plan.pieces)
            self._hear(flight, [(p.sequence, p.start, p.end - p.start) for p in plan.pieces], states)
            if ending:
                self._choose(flight, logits, ending)
        flight.landed = Landing(self._cache.device)
        return flight

    def embedded(self, sequence: Sequence, count: int) -> torch.Tensor:
        """(count, size): what the network is given for the first tokens of a sequence."""
        tokens = self._upload(np.array(sequence.tokens[:count], dtype=np.int64))
        features = sequence.features
        told = None if features is None else together([(0, features, 0, count)], count, self._upload)
        return self._network.embedded(tokens, told)

    def _choose(self, flight: Flight, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        rows = self._upload(np.array([s.row for s in sequences], dtype=np.int64))
        masks = masks_of(sequences, flight.unheld)  # while the device computes the logits
        tokens = self._sampler.choose(logits, sequences, rows, self._on_device(masks))
        if self._lead is not None:
            self._lead.share(tokens)
        flight.sequences += sequences
        flight.chosen.append(to_host(tokens))

    def _hear(self, flight: Flight, batch: Many[tuple[Sequence, int, int]], states: torch.Tensor | None) -> None:
        """`batch`: the tokens that were computed, in their order: from which one on, and how many, of each sequence."""
        if states is None or all(sequence.heard is None for sequence, _, _ in batch):
            return
        wanted: list[Stretch] = []
        at: list[Ints] = []
        begin = kept = 0
        for sequence, start, count in batch:
            if sequence.heard is not None:
                wanted.append(Stretch(sequence, start, kept, kept + count))
                at.append(np.arange(begin, begin + count))
                kept += count
            begin += count
        flight.heard.append((wanted, to_host(states[self._upload(np.concatenate(at))])))

    def _decode(self, sequences: Many[Sequence]) -> torch.Tensor:
        positions = [s.computed - 1 for s in sequences]
        rows = [s.row for s in sequences if s.row is not None]
        slots = [self._cache.slot(s.blocks, s.computed - 1) for s in sequences]
        shifted = any(s.shift for s in sequences)
        return self._steps.run(
            positions, rows, slots, [s.computed - 1 + s.shift for s in sequences] if shifted else None
        )

    def _begin(self, pieces: Many[Piece]) -> tuple[Made, list[Sequence]]:
        """Logits of those whose next token comes of this, and who they are; states of all."""
        batch = lay_out(pieces, self._cache.block_size, self._upload)
        for sequence in batch.ending:
            blocks = self._upload(np.array(sequence.blocks, dtype=np.int64))
            self._cache.table[sequence.row, : len(blocks)] = blocks.int()
            self._sampler.place(sequence)
        self._cache.batch = batch.stretches
        made = self._network.read(batch.tokens, batch.positions, batch.keep, self._cache.handle, batch.told)
        return made, batch.ending

    def _on_device(self, masks: Masks | None) -> Masks | None:
        return None if masks is None else Masks(self._upload(masks.at), self._upload(masks.allowed))

    def _upload(self, values: Ints | torch.Tensor) -> torch.Tensor:
        return to_device(values, self._cache.device)
