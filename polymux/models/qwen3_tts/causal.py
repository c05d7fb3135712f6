"""Causal layers that can be fed a sound in parts: what they need of the parts before is kept, and handed in again.

In parts of any size they make the same samples as at once: a layer's padding of zeros is what is kept at first.
"""

from __future__ import annotations

import torch

from polymux.models.memory import Memory

Tensor = torch.Tensor


class CausalConv(torch.nn.Module):
    """A convolution that sees what came before."""

    def __init__(self, inside: int, out: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(inside, out, kernel, dilation=dilation, groups=groups)
        self._reach = (kernel - 1) * dilation

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        made: Tensor = self.conv(memory.before(x, self._reach))
        return made


class CausalUpsampling(torch.nn.Module):
    """A transposed convolution, whose kernel is one stride or two: each step reaches into the one after it."""

    def __init__(self, inside: int, out: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = torch.nn.ConvTranspose1d(inside, out, kernel, stride=stride)
        self._stride, self._reach = stride, -(-kernel // stride) - 1

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        skipped = self._reach * self._stride
        made: Tensor = self.conv(memory.before(x, self._reach))
        return made[..., skipped : skipped + x.shape[-1] * self._stride]


class Snake(torch.nn.Module):
    """x + sin²(αx) / β, with α and β as logarithms for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = torch.nn.Parameter(torch.zeros(channels))
        self.beta = torch.nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        alpha, beta = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        return x + (x * alpha).sin().square() / (beta + 1e-9)


class ResidualUnit(torch.nn.Module):
    """Two convolutions, and what they were given."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.conv1 = Snake(channels), CausalConv(channels, channels, 7, dilation)
        self.act2, self.conv2 = Snake(channels), CausalConv(channels, channels, 1)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        made = x
        for layer in (self.act1, self.conv1, self.act2, self.conv2):
            made = layer(made, memory)
        return x + made


class UpsamplingBlock(torch.nn.Module):
    """More samples in fewer channels."""

    def __init__(self, inside: int, out: int, rate: int) -> None:
        super().__init__()
        layers = [Snake(inside), CausalUpsampling(inside, out, 2 * rate, rate)]
        self.block = torch.nn.ModuleList([*layers, *(ResidualUnit(out, dilation) for dilation in (1, 3, 9))])

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        for layer in self.block:
            x = layer(x, memory)
        return x


class ConvNeXt(torch.nn.Module):
    """A convolution of each channel by itself, and a network over the channels of each sample."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(channels, channels, 7, groups=channels)
        self.norm = torch.nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = torch.nn.Linear(channels, 4 * channels)
        self.pwconv2 = torch.nn.Linear(4 * channels, channels)
        self.gamma = torch.nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        wide = torch.nn.functional.gelu(self.pwconv1(self.norm(self.dwconv(x, memory).transpose(1, 2))))
        made: Tensor = x + (self.gamma * self.pwconv2(wide)).transpose(1, 2)
        return made
