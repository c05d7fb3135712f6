"""How codes are drawn, for many requests at once: each row has settings and noise of its own.

The noise is an argument, so that a row's code depends on nothing but the row; without noise it is the likeliest code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The settings of one request. `drawn`: whether there is noise."""

    drawn: bool = True
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    penalty: float = 1.0  # of codes that were drawn before

    def row(self, barred: bool = False) -> list[float]:
        """`barred`: the end may not come yet."""
        chosen = [self.temperature, float(self.top_k or 2**20), self.top_p] if self.drawn else [1.0, 1.0, 1.0]
        return [*chosen, self.penalty, float(barred)]


BARRED = 4  # a column


def noise(shape: tuple[int, ...], drawn: bool, device: torch.device) -> Tensor:
    """Gumbel noise from the default generator: the largest of logits and noise is a draw of their softmax."""
    if not drawn:
        return torch.zeros(shape, device=device)
    return -torch.empty(shape, device=device).exponential_().log()


def draw(logits: Tensor, added: Tensor, how: Tensor) -> Tensor:
    """One code for each row of `logits` (rows, codes), `added` (rows, codes or more) and `how` (rows, columns)."""
    count = logits.shape[-1]
    scaled = logits.float() / how[:, :1]
    ordered, _ = scaled.sort(dim=-1, descending=True)
    top = ordered.gather(-1, how[:, 1:2].long().clamp(1, count) - 1)
    shares = ordered.masked_fill(ordered < top, -torch.inf).softmax(-1)
    before = shares.cumsum(-1) - shares  # what all likelier codes have
    kept = (before < how[:, 2:3]).sum(-1, keepdim=True).clamp(min=1)
    least = torch.maximum(top, ordered.gather(-1, kept - 1))
    return (scaled.masked_fill(scaled < least, -torch.inf) + added[:, :count]).argmax(-1)


def penalised(logits: Tensor, seen: Tensor, how: Tensor) -> Tensor:
    """Codes that were `seen` (rows, codes) become less likely."""
    factor = how[:, 3:4].to(logits.dtype)
    return torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)
