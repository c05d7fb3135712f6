"""Who is in the next step, and with how many tokens.

Sequences that only go on come first, one token each; what is left of the step's budget computes prompts, in parts if
need be, in the order of arrival. When blocks run out, whoever came last gives its own back and is computed again later:
its tokens are kept, so they are the same. Knows numbers; nothing of tensors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from polymux.ar.blocks import BlockPool
from polymux.ar.sequence import Sequence


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `end` of a prompt; or of a sequence that is computed again."""

    sequence: Sequence
    start: int
    end: int

    @property
    def chooses(self) -> bool:
        """Whether the next token comes of it."""
        return self.end == self.sequence.length


@dataclass(frozen=True)
class Plan:
    """A step: sequences that go on by one token, and pieces of prompts."""

    decodes: list[Sequence]
    pieces: list[Piece]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.pieces)

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(piece.end - piece.start for piece in self.pieces)


class Scheduler:
    def __init__(self, pool: BlockPool, rows: int, budget: int, chunked: bool) -> None:
        """`rows`: sequences that may run at once. `budget`: tokens of a step; not `chunked`: a prompt is one piece, the
        only one in its step if it is longer than that."""
        self.pool, self._budget, self._chunked = pool, budget, chunked
        self._rows = list(range(rows))[::-1]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of arrival
        self.preemptions = self.looked_for = self.found = 0  # looked for, and found: full blocks

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It has ended, or is not wanted any more. A step that is under way may still write where it was: whoever gets
        its place writes later."""
        sequence.ended = True
        if sequence.row is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._leave(sequence)

    def plan(self) -> Plan:
        """The next step. What is in it counts as computed from now on."""
        decodes = self._decodes()
        pieces: list[Piece] = []
        budget = self._budget - len(decodes)
        for sequence in self.running:
            if not sequence.begun:
                budget -= self._piece(sequence, budget, pieces)
        while self.waiting and self._rows and self._has_room(self.waiting[0], budget, pieces):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            budget -= self._piece(sequence, budget, pieces)
        for sequence in decodes:
            sequence.computed += 1
            sequence.pending += 1
        for piece in pieces:
            sequence, sequence_chooses = piece.sequence, piece.chooses
            sequence.computed = piece.end
            sequence.begun = sequence_chooses
            sequence.pending = int(sequence_chooses)
        return Plan(decodes, pieces)

    def forget(self) -> None:
        """Nothing of what has been computed is found again, and nothing has been looked for."""
        self.pool.forget()
        self.looked_for = self.found = 0

    def know(self, sequence: Sequence) -> None:
        """Its tokens are known up to here: full blocks can be found by whoever begins alike."""
        full = min(sequence.computed, len(sequence.tokens)) // self.pool.block_size
        if not self.pool.caching or not sequence.shared or full <= sequence.remembered:
            return
        self._keys(sequence, full)
        for i in range(sequence.remembered, full):
            self.pool.remember(sequence.blocks[i], sequence.keys[i])
        sequence.remembered = full

    def _keys(self, sequence: Sequence, count: int) -> None:
        """Those of its first blocks."""
        size, keys = self.pool.block_size, sequence.keys
        names = sequence.tokens if sequence.names is None else sequence.names
        while len(keys) < count:
            begin = len(keys) * size
            keys.append(self.pool.next_key(keys[-1] if keys else None, names[begin : begin + size]))

    def _decodes(self) -> list[Sequence]:
        """Those that go on, each with a block for its token."""
        going = [s for s in self.running if s.decodes and s.written < s.limit]
        return [s for s in going if s.row is not None and self._block(s)]

    def _block(self, sequence: Sequence) -> bool:
        """Give it a block for its next token, at the cost of who came last; that may be itself."""
        while sequence.computed >= len(sequence.blocks) * self.pool.block_size:
            if self.pool.free:
                sequence.blocks.append(self.pool.take())
                return True
            last = self.running.pop()
            self._leave(last)
            self.waiting.appendleft(last)
            self.preemptions += 1
            if last is sequence:
                return False
        return True

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._rows.append(sequence.row)
        self.pool.give_back(sequence.leave())

    def _has_room(self, sequence: Sequence, budget: int, pieces: list[Piece]) -> bool:
        """Give one that waits a place, what is there of its beginning, and blocks for all the rest that it has."""
        if sequence.pending or budget <= 0 or (pieces and not self._chunked and sequence.length > budget):
            return False
        # Its last token is computed. Of what is found there are no states to listen to.
        finds = self.pool.caching and sequence.shared and sequence.heard is None
        whole = (sequence.length - 1) // self.pool.block_size if finds else 0
        self._keys(sequence, whole)
        sequence.blocks = self.pool.find(sequence.keys[:whole])
        missing = self.pool.blocks_for(sequence.length) - len(sequence.blocks)
        if missing > self.pool.free:
            self.pool.give_back(sequence.leave())
            return False
        self.looked_for += whole
        self.found += len(sequence.blocks)
        sequence.remembered = len(sequence.blocks)
        sequence.computed = sequence.remembered * self.pool.block_size
        sequence.blocks += [self.pool.take() for _ in range(missing)]
        sequence.row = self._rows.pop()
        return True

    def _piece(self, sequence: Sequence, budget: int, pieces: list[Piece]) -> int:
        """Its next piece goes into the step, if there is room; its tokens."""
        count = sequence.length - sequence.computed
        if self._chunked:
            count = max(0, min(count, budget))
        elif pieces and count > budget:
            count = 0
        if count:
            pieces.append(Piece(sequence, sequence.computed, sequence.computed + count))
        return count
