"""One optimizer for all stages: Muon for hidden matrices and convolution kernels, AdamW for everything else.

Muon (momentum, then the nearest orthogonal matrix by a Newton-Schulz iteration) needs about half the steps of AdamW on
networks as small as these. Matrices of one shape are orthogonalized together. Rates live in tensors and nothing waits
for the device, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_MATCH = 0.2  # the usual root mean square of an AdamW update, so that both kinds share one learning rate


def orthogonalized(matrices: Tensor) -> Tensor:
    """(number, rows, columns) to matrices with the same singular vectors and singular values near one."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    """`hidden` parameters go to Muon, `others` to AdamW, whose rate is `share` of the rate given to `set_rate`."""

    def __init__(
        self,
        hidden: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        decay: float = 0.0,
        share: float = 1.0,
    ) -> None:
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for p in hidden:
            self.groups.setdefault((p.shape[0], p[0].numel()), []).append(p)
        self.hidden = [p for group in self.groups.values() for p in group]
        self.others = list(others)
        device = (self.hidden or self.others)[0].device
        self.decay, self.share = decay, share
        self.rate = torch.zeros((), device=device)
        self.momenta = [torch.zeros_like(p) for p in self.hidden]
        cuda = device.type == "cuda"
        self.adam = torch.optim.AdamW(
            self.others, lr=torch.zeros((), device=device), betas=(0.9, 0.98), eps=1e-8, weight_decay=decay,
            fused=cuda, capturable=cuda,
        ) if self.others else None  # fmt: skip

    def set_rate(self, rate: float) -> None:
        self.rate.fill_(rate)
        if self.adam is not None:
            for group in self.adam.param_groups:
                group["lr"].fill_(rate * self.share)

    def zero_grad(self) -> None:
        for p in [*self.hidden, *self.others]:
            p.grad = None

    @torch.no_grad()
    def clip(self, most: float) -> Tensor:
        """Scales all gradients so that their norm is at most `most`; returns the norm before."""
        grads = [p.grad for p in [*self.hidden, *self.others] if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, (most / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self, momentum: float = 0.95) -> None:
        if self.adam is not None:
            self.adam.step()
        if not self.hidden:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.hidden]
        torch._foreach_lerp_(self.momenta, grads, 1 - momentum)
        ahead = torch._foreach_lerp(grads, self.momenta, momentum)
        first = 0
        for (rows, columns), group in self.groups.items():
            part = ahead[first : first + len(group)]
            first += len(group)
            update = orthogonalized(torch.stack([u.reshape(rows, columns) for u in part]))
            update = update.float() * (-_MATCH * math.sqrt(max(rows, columns)) * self.rate)
            if self.decay:
                torch._foreach_mul_(group, 1 - self.decay * self.rate)
            torch._foreach_add_(group, [u.reshape(p.shape) for u, p in zip(update.unbind(0), group, strict=True)])


def split(
    named: Iterable[tuple[str, nn.Parameter]], is_hidden: Callable[[str, nn.Parameter], bool]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(hidden, others)."""
    hidden: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named:
        (hidden if is_hidden(name, parameter) else others).append(parameter)
    return hidden, others
