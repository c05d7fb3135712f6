"""The state of torch's default generators.

Every session draws from default generators of its own, whoever else runs in between, and leaves the process's as they
were.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class RandomState:
    """A state of the CPU's default generator and, on a CUDA device, of that device's."""

    device: torch.device
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def seeded(cls, device: torch.device, seed: int) -> RandomState:
        """What torch.manual_seed(seed) would set."""
        cpu = torch.Generator().manual_seed(seed).get_state()
        return cls(device, cpu, torch.Generator(device).manual_seed(seed).get_state() if on_cuda(device) else None)

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        return cls(device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_cuda(device) else None)

    def apply(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    def equals(self, other: RandomState) -> bool:
        if self.cuda is not None and other.cuda is not None and not torch.equal(self.cuda, other.cuda):
            return False
        return torch.equal(self.cpu, other.cpu)


def on_cuda(device: torch.device) -> bool:
    return device.type == "cuda"
