"""The network that makes the frame between two frames: coarse-to-fine estimation of intermediate flow.

The architecture of RIFE (Huang et al., "Real-Time Intermediate Flow Estimation for Video Frame Interpolation", ECCV
2022) in the form that its releases from 4.22 lite on have: a small encoder gives features of both frames; blocks, each
at twice the resolution of the one before, refine the flow from the wanted moment to both frames; and a mask says of
which frame each pixel is. Names and shapes of the parameters are those of the released weights. How many blocks there
are and how wide they are follows from the weights (`Layout`). Knows nothing of files and videos.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

SLOPE = 0.2  # of the leaky rectifiers
STRIDE = 4  # a block works at a quarter of the resolution that it gets
DEPTH = 8  # residual convolutions of a block
FLOW, MASK, HIDDEN = 4, 1, 8  # channels: x and y of two flows, whose pixel, what a block tells the next one
UPSCALE = 2  # of the shuffle at a block's end


@dataclass(frozen=True)
class Layout:
    """The sizes that releases differ in."""

    encoder: int  # channels inside the encoder
    features: int  # channels that it gives
    widths: tuple[int, ...]  # of the blocks, the coarsest first

    @property
    def coarsest(self) -> int:
        """How many times smaller than the frames the first block's view is."""
        return 1 << (len(self.widths) - 1)


class Encoder(nn.Module):
    """(batch, 3, height, width) to (batch, features, height, width)."""

    def __init__(self, inside: int, features: int) -> None:
        super().__init__()
        self.cnn0 = nn.Conv2d(3, inside, 3, stride=2, padding=1)
        self.cnn1 = nn.Conv2d(inside, inside, 3, padding=1)
        self.cnn2 = nn.Conv2d(inside, inside, 3, padding=1)
        self.cnn3 = nn.ConvTranspose2d(inside, features, 4, stride=2, padding=1)

    def forward(self, frames: Tensor) -> Tensor:
        for layer in (self.cnn0, self.cnn1, self.cnn2):
            frames = functional.leaky_relu(layer(frames), SLOPE)
        features: Tensor = self.cnn3(frames)
        return features


class Residual(nn.Module):
    """A convolution whose result is scaled per channel and added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.beta = nn.Parameter(torch.ones(1, width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.leaky_relu(torch.addcmul(x, self.conv(x), self.beta), SLOPE)


class Block(nn.Module):
    """One refinement: what it sees, at a scale, to (change of flow, mask, hidden) at full resolution."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv0 = nn.Sequential(_halving(channels, width // 2), _halving(width // 2, width))
        self.convblock = nn.Sequential(*(Residual(width) for _ in range(DEPTH)))
        made = (FLOW + MASK + HIDDEN) * UPSCALE**2
        self.lastconv = nn.Sequential(nn.ConvTranspose2d(width, made, 4, stride=2, padding=1), nn.PixelShuffle(UPSCALE))

    def forward(self, seen: Tensor, flow: Tensor | None, shrink: float) -> tuple[Tensor, Tensor, Tensor]:
        """`shrink`: how many times smaller its view is. A flow is in pixels, and shrinks with the picture."""
        view = _resized(seen, 1 / shrink)
        if flow is not None:
            view = torch.cat((view, _resized(flow, 1 / shrink) / shrink), dim=1)
        made = _resized(self.lastconv(self.convblock(self.conv0(view))), shrink)
        change, mask, hidden = torch.split(made, [FLOW, MASK, HIDDEN], dim=1)
        return change * shrink, mask, hidden


class FlowNetwork(nn.Module):
    """(first, second, moment) to the frame at that moment. Sides must be multiples of `multiple(scale)`."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        both = 2 * 3 + 2 * layout.features + 1  # two frames, their features, the moment
        for number, width in enumerate(layout.widths):
            channels = both if number == 0 else both + MASK + HIDDEN + FLOW
            self.add_module(f"block{number}", Block(channels, width))
        self.encode = Encoder(layout.encoder, layout.features)

    def multiple(self, scale: float) -> int:
        return max(STRIDE, round(STRIDE * self.layout.coarsest / scale))

    def forward(self, first: Tensor, second: Tensor, moment: float, scale: float = 1.0) -> Tensor:
        """Frames are (batch, 3, height, width) with values of 0 to 1; `moment` is from 0, the first, to 1; with a
        `scale` below 1 motion is estimated at a lower resolution."""
        when = torch.full_like(first[:, :1], moment)
        features = self.encode(first), self.encode(second)
        seen = torch.cat((first, second, *features, when), dim=1)
        flow: Tensor | None = None
        mask, warped = when, (first, second)
        for number in range(len(self.layout.widths)):
            block, shrink = self.get_submodule(f"block{number}"), (self.layout.coarsest >> number) / scale
            change, mask, hidden = block(seen, flow, shrink)
            flow = change if flow is None else flow + change
            to_first, to_second = flow.chunk(2, dim=1)
            warped = warp(first, to_first), warp(second, to_second)
            pulled = warp(features[0], to_first), warp(features[1], to_second)
            seen = torch.cat((*warped, *pulled, when, mask, hidden), dim=1)
        return torch.lerp(warped[1], warped[0], mask.sigmoid())


def warp(picture: Tensor, flow: Tensor) -> Tensor:
    """Each pixel comes from where `flow` (batch, 2, height, width; x and y in pixels) points; outside is the edge."""
    height, width = picture.shape[-2:]
    rows = torch.arange(height, device=picture.device, dtype=picture.dtype)
    columns = torch.arange(width, device=picture.device, dtype=picture.dtype)
    x = (columns + flow[:, 0]) * (2 / max(width - 1, 1)) - 1
    y = (rows[:, None] + flow[:, 1]) * (2 / max(height - 1, 1)) - 1
    grid = torch.stack((x, y), dim=-1)
    return functional.grid_sample(picture, grid, mode="bilinear", padding_mode="border", align_corners=True)


def _halving(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.LeakyReLU(SLOPE))


def _resized(x: Tensor, factor: float) -> Tensor:
    if factor == 1:
        return x
    return functional.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)
