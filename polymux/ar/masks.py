"""Which tokens may come next, of those sequences of a batch that have a constraint.

Made on the host from the tokens that are known, while the device computes the logits that they are for; rows without a
constraint cost nothing. A constraint that fails is its own sequence's failure. Knows no grammars.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from polymux.ar.sequence import Constraint, Sequence


@dataclass(frozen=True)
class Masks:
    at: torch.Tensor  # (held): their places in the batch
    allowed: torch.Tensor  # (held, vocabulary) of bool

    def applied(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (batch, vocabulary) in which what may not come is impossible."""
        return scores.index_copy(0, self.at, scores[self.at].masked_fill(~self.allowed, -torch.inf))


def masks_of(sequences: Many[Sequence], failed: dict[Sequence, Exception]) -> Masks | None:
    """None if nobody has a constraint. `failed` gets those whose constraint has raised something, and what."""
    at: list[int] = []
    masks: list[torch.Tensor] = []
    for i, sequence in enumerate(sequences):
        if sequence.constraint is None:
            continue
        try:
            masks.append(_allowed(sequence, sequence.constraint))
            at.append(i)
        except Exception as error:  # a library's, or ours: in either case of this sequence alone
            failed[sequence] = error
    return Masks(torch.tensor(at), torch.stack(masks)) if masks else None


def _allowed(sequence: Sequence, constraint: Constraint) -> torch.Tensor:
    return constraint.allowed(sequence.tokens[sequence.prompt :])
