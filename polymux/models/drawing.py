"""How codes are drawn, for many requests at once: each row has settings and noise of its own.

Noise is a function of the row's key and of which code it is for, so that a row's code depends on nothing but the row,
and is made where it is used. Without noise it is the likeliest code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
_DRAWN, _TEMPERATURE, _TOP_K, _TOP_P, _PENALTY = range(5)
COLUMNS = 5
# Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): constants of the 64-bit mixer, as
# signed numbers.
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_BITS = 23  # of a number between 0 and 1, neither of which it is


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The settings of one request. `drawn`: whether there is noise."""

    drawn: bool = True
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    penalty: float = 1.0  # of codes that were drawn before

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Drawing:
        """Of settings as `generate` of transformers names them."""
        return cls(
            drawn=given["do_sample"],
            temperature=given["temperature"],
            top_k=given["top_k"],
            top_p=given["top_p"],
            penalty=given.get("repetition_penalty", 1.0),
        )

    def row(self) -> list[float]:
        chosen = [self.temperature, float(self.top_k or 2**20), self.top_p] if self.drawn else [1.0, 1.0, 1.0]
        return [float(self.drawn), *chosen, self.penalty]


def noise(key: Tensor, number: Tensor, codes: int) -> Tensor:
    """Gumbel noise (rows, codes): the largest of logits and noise is a draw of their softmax. `key` (rows); `number`
    (rows): of the draw, of which no key has two."""
    code = torch.arange(codes, device=key.device)
    bits = _mixed(_mixed(key + number * _STEP)[:, None] + code)
    share = (_shifted(bits, 64 - _BITS).float() + 0.5) * 2.0**-_BITS
    return -(-share.log()).log()


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """To the right, as of an unsigned number."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def draw(logits: Tensor, key: Tensor, number: Tensor, how: Tensor) -> Tensor:
    """One code for each row of `logits` (rows, codes) and `how` (rows, COLUMNS); see `noise`."""
    count = logits.shape[-1]
    scaled = logits.float() / how[:, _TEMPERATURE, None]
    ordered, _ = scaled.sort(dim=-1, descending=True)
    top = ordered.gather(-1, how[:, _TOP_K, None].long().clamp(1, count) - 1)
    shares = ordered.masked_fill(ordered < top, -torch.inf).softmax(-1)
    before = shares.cumsum(-1) - shares  # what all likelier codes have
    kept = (before < how[:, _TOP_P, None]).sum(-1, keepdim=True).clamp(min=1)
    least = torch.maximum(top, ordered.gather(-1, kept - 1))
    added = noise(key, number, count) * how[:, _DRAWN, None]
    return (scaled.masked_fill(scaled < least, -torch.inf) + added).argmax(-1)


def penalised(logits: Tensor, seen: Tensor, how: Tensor) -> Tensor:
    """Codes that were `seen` (rows, codes) become less likely."""
    factor = how[:, _PENALTY, None].to(logits.dtype)
    return torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)
