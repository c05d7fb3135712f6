"""Scenes into pixels: signed distances, antialiased, a whole batch at once on whatever device holds it.

Positive distances are outside. Everything is arithmetic on (batch, things, height, width) tensors without branches, so
that `torch.compile` makes one kernel of it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from training.scenes import BACKGROUNDS, COLOURS, LETTERS, PLAIN_SHAPES, SHAPES, TEXTURES, Scene, second_tone

THINGS = 4
FIELDS = 13  # shape, x, y, r, colour (3), second tone (3), texture, angle, period
WIDTH = THINGS * FIELDS + 6  # and the background's colour at the top and at the bottom

_STROKES: dict[str, list[tuple[float, float, float, float]]] = {  # x0 y0 x1 y1, y downwards
    "A": [(-0.65, 0.85, 0, -0.85), (0, -0.85, 0.65, 0.85), (-0.35, 0.3, 0.35, 0.3)],
    "E": [(-0.5, -0.85, -0.5, 0.85), (-0.5, -0.85, 0.5, -0.85), (-0.5, 0, 0.35, 0), (-0.5, 0.85, 0.5, 0.85)],
    "F": [(-0.5, -0.85, -0.5, 0.85), (-0.5, -0.85, 0.5, -0.85), (-0.5, 0, 0.35, 0)],
    "H": [(-0.55, -0.85, -0.55, 0.85), (0.55, -0.85, 0.55, 0.85), (-0.55, 0, 0.55, 0)],
    "K": [(-0.5, -0.85, -0.5, 0.85), (-0.5, 0.1, 0.55, -0.85), (-0.2, -0.1, 0.55, 0.85)],
    "L": [(-0.5, -0.85, -0.5, 0.85), (-0.5, 0.85, 0.55, 0.85)],
    "M": [(-0.7, 0.85, -0.7, -0.85), (-0.7, -0.85, 0, 0.3), (0, 0.3, 0.7, -0.85), (0.7, -0.85, 0.7, 0.85)],
    "N": [(-0.55, 0.85, -0.55, -0.85), (-0.55, -0.85, 0.55, 0.85), (0.55, 0.85, 0.55, -0.85)],
    "T": [(-0.65, -0.85, 0.65, -0.85), (0, -0.85, 0, 0.85)],
    "V": [(-0.65, -0.85, 0, 0.85), (0, 0.85, 0.65, -0.85)],
    "W": [(-0.8, -0.85, -0.4, 0.85), (-0.4, 0.85, 0, -0.3), (0, -0.3, 0.4, 0.85), (0.4, 0.85, 0.8, -0.85)],
    "X": [(-0.6, -0.85, 0.6, 0.85), (-0.6, 0.85, 0.6, -0.85)],
    "Y": [(-0.6, -0.85, 0, 0), (0.6, -0.85, 0, 0), (0, 0, 0, 0.85)],
    "Z": [(-0.6, -0.85, 0.6, -0.85), (0.6, -0.85, -0.6, 0.85), (-0.6, 0.85, 0.6, 0.85)],
}
_SEGMENTS = 4
_STROKE = 0.22


def record(scene: Scene) -> npt.NDArray[np.float32]:
    """The scene as WIDTH numbers; colours in 0..1, unused things have shape -1."""
    row = np.full(WIDTH, -1.0, dtype=np.float32)
    for i, t in enumerate(scene.things):
        colours = [c / 255 for c in (*COLOURS[t.colour], *second_tone(t.colour))]
        head = [float(SHAPES.index(t.shape)), t.x, t.y, t.r]
        row[i * FIELDS : (i + 1) * FIELDS] = [*head, *colours, float(TEXTURES.index(t.texture)), t.angle, t.period]
    row[THINGS * FIELDS :] = [c / 255 for name in scene.background for c in BACKGROUNDS[name]]
    return row


def letter_strokes(device: torch.device) -> torch.Tensor:
    """(letters + 1, segments, 4); the last row is for things that are no letters. Short letters repeat a segment."""
    rows = [(strokes + strokes[-1:] * _SEGMENTS)[:_SEGMENTS] for strokes in (_STROKES[c] for c in LETTERS)]
    return torch.tensor([*rows, [(9.0, 9.0, 9.0, 9.0)] * _SEGMENTS], device=device)


def _star(x: torch.Tensor, y: torch.Tensor, r: float = 1.15, inner: float = 0.45) -> torch.Tensor:
    """A five-pointed star: two reflections into one half of one spike, then the distance to a line segment."""
    kx, ky = math.cos(math.pi / 5), math.sin(math.pi / 5)
    x, y = x.abs(), -y
    for sign in (1.0, -1.0):
        dot = 2 * (sign * kx * x - ky * y).clamp(min=0)
        x, y = x - dot * sign * kx, y + dot * ky
    x, y = x.abs(), y - r
    bx, by = inner * ky, inner * kx - 1
    h = ((x * bx + y * by) / (bx * bx + by * by)).clamp(0, r)
    return torch.hypot(x - bx * h, y - by * h) * torch.sign(y * bx - x * by)


def _heart(x: torch.Tensor, y: torch.Tensor, scale: float = 1.75) -> torch.Tensor:
    """Two quarter discs upon a square that stands on its corner."""
    x, y = x.abs() / scale, 0.55 - y / scale
    lobe = torch.hypot(x - 0.25, y - 0.75) - math.sqrt(2) / 4
    along = 0.5 * (x + y).clamp(min=0)
    edge = torch.minimum(torch.hypot(x, y - 1), torch.hypot(x - along, y - along)) * torch.sign(x - y)
    return torch.where(x + y > 1, lobe, edge) * scale


def _letter(x: torch.Tensor, y: torch.Tensor, strokes: torch.Tensor) -> torch.Tensor:
    """`strokes` is (batch, things, segments, 4)."""
    best = torch.full_like(x, 9.0)
    for i in range(_SEGMENTS):
        x0, y0, x1, y1 = strokes[:, :, i, :, None, None].unbind(2)
        dx, dy = x1 - x0, y1 - y0
        h = (((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy + 1e-6)).clamp(0, 1)
        best = torch.minimum(best, torch.hypot(x - x0 - dx * h, y - y0 - dy * h))
    return best - _STROKE


def _distance(shape: torch.Tensor, x: torch.Tensor, y: torch.Tensor, strokes: torch.Tensor) -> torch.Tensor:
    """Distance in radii to the outline of each thing's shape."""
    ax, ay, length = x.abs(), y.abs(), torch.hypot(x, y)
    bar = torch.maximum(ax - 1.0, ay - 0.34)
    plain = (
        length - 1.0,
        torch.maximum(ax, ay) - 0.88,
        torch.maximum(y - 0.75, 0.866 * ax - 0.5 * (y + 1.1)),
        (ax + ay - 1.15) / math.sqrt(2),
        _star(x, y),
        torch.minimum(bar, torch.maximum(ax - 0.34, ay - 1.0)),
        (length - 0.75).abs() - 0.25,
        _heart(x, y),
    )
    result = _letter(x, y, strokes)
    for i in range(len(PLAIN_SHAPES)):
        result = torch.where(shape == i, plain[i], result)
    return result


def _texture(kind: torch.Tensor, u: torch.Tensor, v: torch.Tensor, period: torch.Tensor) -> torch.Tensor:
    """How much of the second tone each pixel has, 0..1; `u` and `v` in pixels."""
    fu, fv = torch.frac(u / period + 64), torch.frac(v / period + 64)
    su = (0.5 - ((fu - 0.5).abs() - 0.25) * period).clamp(0, 1)
    sv = (0.5 - ((fv - 0.5).abs() - 0.25) * period).clamp(0, 1)
    dots = (0.5 - (torch.hypot(fu - 0.5, fv - 0.5) - 0.3) * period).clamp(0, 1)
    zero = torch.zeros_like(su)
    checks = su * (1 - sv) + sv * (1 - su)
    return torch.where(kind == 1, su, torch.where(kind == 2, dots, torch.where(kind == 3, checks, zero)))


def render(
    records: torch.Tensor, strokes: torch.Tensor, width: int, height: int, outline: bool = False
) -> torch.Tensor:
    """(batch, WIDTH) records to (batch, 3, height, width) pictures in 0..1; `strokes` from `letter_strokes`."""
    batch = records.shape[0]
    things = records[:, : THINGS * FIELDS].view(batch, THINGS, FIELDS)
    shape, cx, cy, r = things[..., :4, None, None].unbind(2)
    kind, angle, period = things[..., 10:13, None, None].unbind(2)
    px = torch.arange(width, device=records.device, dtype=torch.float32).view(1, 1, 1, -1) + 0.5 - cx
    py = torch.arange(height, device=records.device, dtype=torch.float32).view(1, 1, -1, 1) + 0.5 - cy
    letter = (things[..., 0].long() - len(PLAIN_SHAPES)).clamp(min=-1)
    letter = torch.where(letter < 0, len(LETTERS), letter)
    radius = r.clamp(min=1.0)
    distance = _distance(shape, px / radius, py / radius, strokes[letter]) * radius
    if outline:
        distance = (distance + 1.75).abs() - 1.75
        kind = torch.zeros_like(kind)
    alpha = (0.5 - distance).clamp(0, 1) * (shape >= 0)
    u, v = px * angle.cos() + py * angle.sin(), py * angle.cos() - px * angle.sin()
    mix = _texture(kind, u, v, period.clamp(min=1.0))
    ramp = (torch.arange(height, device=records.device, dtype=torch.float32) / (height - 1)).view(1, 1, -1, 1)
    top, bottom = records[:, -6:-3, None, None], records[:, -3:, None, None]
    picture = (top + (bottom - top) * ramp).expand(batch, 3, height, width)
    for i in range(THINGS):
        first, second = things[:, i, 4:7, None, None], things[:, i, 7:10, None, None]
        paint = first + (second - first) * mix[:, i : i + 1]
        picture = picture + (paint - picture) * alpha[:, i : i + 1]
    return picture


def cropped(records: torch.Tensor, corner: torch.Tensor, height: int, size: int) -> torch.Tensor:
    """Records of the squares of `size` pixels whose upper left corners, (batch, 2), lie in canvases of `height`."""
    result = records.clone()
    things = result[:, : THINGS * FIELDS].view(-1, THINGS, FIELDS)
    things[..., 1:3] -= corner[:, None]
    top, bottom = records[:, -6:-3], records[:, -3:]
    for part, row in ((result[:, -6:-3], corner[:, 1:]), (result[:, -3:], corner[:, 1:] + size - 1)):
        part.copy_(top + (bottom - top) * row / (height - 1))
    return result


def token_labels(records: torch.Tensor, strokes: torch.Tensor, width: int, height: int, cell: int) -> torch.Tensor:
    """(batch, tokens, 3): shape, colour and texture of what is at each cell of `cell` pixels, from 1; 0 for nothing."""
    things = records[:, : THINGS * FIELDS].view(-1, THINGS, FIELDS)
    shape, cx, cy, r = things[..., :4, None, None].unbind(2)
    px = (torch.arange(width // cell, device=records.device) + 0.5).mul(cell).view(1, 1, 1, -1) - cx
    py = (torch.arange(height // cell, device=records.device) + 0.5).mul(cell).view(1, 1, -1, 1) - cy
    letter = (things[..., 0].long() - len(PLAIN_SHAPES)).clamp(min=-1)
    radius = r.clamp(min=1.0)
    strokes_of = strokes[torch.where(letter < 0, len(LETTERS), letter)]
    distance = _distance(shape, px / radius, py / radius, strokes_of) * radius
    nearest, owner = distance.masked_fill(shape < 0, math.inf).flatten(2).min(dim=1)  # (batch, tokens)
    palette = torch.tensor(list(COLOURS.values()), device=records.device) / 255
    colour = torch.cdist(things[..., 4:7].contiguous(), palette).argmin(-1)
    known = torch.stack([things[..., 0].long(), colour, things[..., 10].long()], -1) + 1  # (batch, THINGS, 3)
    chosen = known.gather(1, owner[..., None].expand(-1, -1, 3))
    return torch.where(nearest[..., None] < 0.35 * cell, chosen, 0)


def render_scenes(scenes: list[Scene], device: torch.device | str = "cpu", outline: bool = False) -> torch.Tensor:
    """Scenes of one canvas size, as (batch, 3, height, width)."""
    records = torch.from_numpy(np.stack([record(s) for s in scenes])).to(device)
    return render(records, letter_strokes(records.device), scenes[0].width, scenes[0].height, outline)
