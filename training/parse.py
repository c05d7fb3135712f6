"""Pictures back into scenes, without a model: the independent judge of what was painted.

Each row's background is the colour of its edges (nothing ever touches the sides, and gradients are vertical). What
differs from it is cut into connected pieces; a piece's shape is the template that overlaps it most once both fill a
square, its colour the one whose two tones explain most of its pixels. Textures are not judged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.render import render_scenes
from training.scenes import COLOURS, SHAPES, Scene, Thing, second_tone

_DIFFERENT = 0.17  # RGB distance from the background, colours in 0..1
_TONE = 0.22
_SMALLEST = 40  # pixels
_GRID = 32


@dataclass(frozen=True)
class Piece:
    """One connected piece; `x`, `y` is the middle of its bounding box in pixels."""

    shape: str
    colour: str
    x: float
    y: float
    width: int
    height: int


def _fill_square(mask: Tensor) -> Tensor:
    """A (height, width) mask, cropped to its content already, as (_GRID, _GRID) coverage."""
    return F.interpolate(mask[None, None].float(), size=(_GRID, _GRID), mode="area")[0, 0]


def _crop(mask: Tensor) -> tuple[Tensor, int, int]:
    """The content of a mask, and the column and row where it begins."""
    rows, columns = torch.where(mask.any(1))[0], torch.where(mask.any(0))[0]
    x0, x1, y0, y1 = int(columns[0]), int(columns[-1]) + 1, int(rows[0]), int(rows[-1]) + 1
    return mask[y0:y1, x0:x1], x0, y0


def _template(shape: str, r: float) -> Tensor:
    thing = Thing(shape, "black", "solid", "large", False, r, 64.0, 64.0, 0.0, 10.0)
    picture = render_scenes([Scene(128, 128, "one", (thing,), ("white", "white"), False)])[0]
    return _fill_square(_crop(picture[0] < 0.5)[0])


class Parser:
    """Templates are rendered once, small and large: antialiasing rounds small corners off."""

    def __init__(self) -> None:
        self.names = [shape for shape in SHAPES for _ in (11, 19, 30)]
        self.templates = torch.stack([_template(shape, r) for shape in SHAPES for r in (11, 19, 30)])
        self.tones = torch.tensor([[COLOURS[c], second_tone(c)] for c in COLOURS]) / 255  # (colours, 2, 3)

    def __call__(self, pictures: Tensor) -> list[list[Piece]]:
        """(batch, 3, height, width) in 0..1; the pieces of each picture, from left to right."""
        pictures = pictures.float()
        sides = torch.cat([pictures[..., :3], pictures[..., -3:]], dim=-1)
        ground = sides.median(dim=-1, keepdim=True).values
        away = (pictures - ground).norm(dim=1)
        labels = _components(away > _DIFFERENT).cpu()
        return [self._pieces(picture, label) for picture, label in zip(pictures.cpu(), labels, strict=True)]

    def _pieces(self, picture: Tensor, labels: Tensor) -> list[Piece]:
        found = []
        names, counts = labels[labels > 0].unique(return_counts=True)
        for name in names[counts >= _SMALLEST]:
            mask = labels == name
            content, x0, y0 = _crop(mask)
            height, width = content.shape
            found.append(
                Piece(self._shape(content), self._colour(picture, mask), x0 + width / 2, y0 + height / 2, width, height)
            )
        return sorted(found, key=lambda piece: piece.x)

    def _shape(self, content: Tensor) -> str:
        filled = _fill_square(content)
        both = torch.minimum(filled, self.templates).sum((1, 2))
        either = torch.maximum(filled, self.templates).sum((1, 2))
        return self.names[int((both / either).argmax())]

    def _colour(self, picture: Tensor, mask: Tensor) -> str:
        inner = -F.max_pool2d(-mask[None].float(), 3, 1, 1)[0] > 0
        pixels = picture[:, inner if int(inner.sum()) >= 12 else mask].T
        distance = torch.cdist(pixels, self.tones.flatten(0, 1)).unflatten(-1, (-1, 2))  # (pixels, colours, 2)
        first = (distance[..., 0] < _TONE).float().mean(0)
        nearest = torch.zeros(len(self.tones)).index_add_(
            0, distance[..., 0].argmin(1), torch.ones(len(pixels)) / len(pixels)
        )
        either = (distance.amin(2) < _TONE).float().mean(0)
        closeness = (-distance[..., 0].mean(0)).exp()
        score = either * (first > 0.2) + nearest + 0.1 * closeness
        return list(COLOURS)[int(score.argmax())]


def _components(mask: Tensor) -> Tensor:
    """(batch, height, width) booleans to labels, 0 outside: the largest index spreads until nothing changes."""
    h, w = mask.shape[1:]
    inside = mask[:, None].float()
    labels = torch.arange(1, h * w + 1, dtype=torch.float32, device=mask.device).view(1, 1, h, w) * inside
    while True:
        spread = labels
        for _ in range(8):
            spread = F.max_pool2d(spread, 3, 1, 1) * inside
        if torch.equal(spread, labels):
            return labels[:, 0].long()
        labels = spread
