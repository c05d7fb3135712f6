"""Random scenes of flat shapes, as plain data: what is where, in which colour, and what a caption may say of it.

Sampling is plain Python on `random.Random`, so that many processes can do it before any of them touches torch. Knows
neither pixels (`render.py`) nor words (`captions.py`).
"""

from __future__ import annotations

import dataclasses
import math
import random
import zlib
from dataclasses import dataclass

Colour = tuple[int, int, int]

PLAIN_SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "ring", "heart")
LETTERS = tuple("AEFHKLMNTVWXYZ")
SHAPES = PLAIN_SHAPES + LETTERS
COLOURS: dict[str, Colour] = {
    "red": (214, 40, 40),
    "green": (44, 160, 60),
    "blue": (40, 80, 210),
    "yellow": (245, 215, 40),
    "orange": (245, 130, 20),
    "purple": (130, 50, 170),
    "pink": (250, 140, 190),
    "cyan": (50, 200, 220),
    "brown": (120, 75, 40),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
    "gray": (130, 130, 130),
}
BACKGROUNDS: dict[str, Colour] = {
    "white": (250, 250, 250),
    "black": (15, 15, 15),
    "light blue": (190, 220, 250),
    "light green": (195, 235, 195),
    "cream": (250, 240, 205),
    "lavender": (215, 200, 240),
    "dark blue": (20, 30, 80),
    "dark green": (15, 60, 35),
}
TEXTURES = ("solid", "striped", "dotted", "checkered")
SIZES: dict[str, tuple[float, float]] = {"small": (10, 13), "medium": (17, 21), "large": (27, 33)}  # radius in pixels
PLACES: dict[str, tuple[int, int]] = {  # column and row of a 3 x 3 grid
    "center": (1, 1),
    "left": (0, 1),
    "right": (2, 1),
    "top": (1, 0),
    "bottom": (1, 2),
    "top left": (0, 0),
    "top right": (2, 0),
    "bottom left": (0, 2),
    "bottom right": (2, 2),
}
RELATIONS = ("left", "right", "above", "below")  # of the first object, seen from the second
CANVASES = ((128, 128), (160, 96), (96, 160))  # width, height
KINDS = ("one", "two", "many", "three")

NEVER_TOGETHER = frozenset({("heart", "green"), ("star", "blue"), ("ring", "brown"), ("triangle", "cyan")})
"""Kept out of training altogether, to see whether shape and colour are learnt apart."""

_REACH = 1.18  # no shape reaches further from its centre than this many radii
_MARGIN = 4.0
_GAP = 6.0
_CONTRAST = 90.0


@dataclass(frozen=True)
class Thing:
    """One object: `x`, `y` of its centre and radius `r` in pixels; `angle` and `period` are its texture's."""

    shape: str
    colour: str
    texture: str
    size: str
    says_size: bool
    r: float
    x: float
    y: float
    angle: float
    period: float


@dataclass(frozen=True)
class Scene:
    """A picture as data. `place` and `relation` are what the caption must say; None leaves it unsaid."""

    width: int
    height: int
    kind: str
    things: tuple[Thing, ...]
    background: tuple[str, str]  # at the top and at the bottom
    says_background: bool
    place: str | None = None
    relation: str | None = None

    @property
    def held_out(self) -> bool:
        """Whether this combination is kept for evaluation: one in sixteen, and NEVER_TOGETHER."""
        if self.novel:
            return True
        first, last = self.things[0], self.things[-1]
        key = (self.kind, len(self.things), first.shape, first.colour, last.shape, last.colour)
        said = (self.place, self.relation, first.size if first.says_size and self.kind == "one" else None)
        return zlib.crc32(repr(key + said).encode()) % 16 == 0

    @property
    def novel(self) -> bool:
        return any((t.shape, t.colour) in NEVER_TOGETHER for t in self.things)


def second_tone(colour: str) -> Colour:
    """The other colour of a texture: lighter for dark colours, darker for bright ones."""
    r, g, b = COLOURS[colour]
    if 0.3 * r + 0.59 * g + 0.11 * b < 140:
        return (int(r * 0.45 + 140), int(g * 0.45 + 140), int(b * 0.45 + 140))
    return (r // 2, g // 2, b // 2)


def _visible(colour: str, texture: str, background: tuple[str, str]) -> bool:
    tones = [COLOURS[colour]] + ([second_tone(colour)] if texture != "solid" else [])
    top, bottom = (BACKGROUNDS[b] for b in background)
    shades = [tuple(t + (b - t) * k / 4 for t, b in zip(top, bottom, strict=True)) for k in range(5)]
    return all(math.dist(tone, shade) >= _CONTRAST for tone in tones for shade in shades)


def _look(rng: random.Random, background: tuple[str, str], sizes: tuple[str, ...] = tuple(SIZES)) -> Thing:
    while True:
        shape = rng.choice(PLAIN_SHAPES) if rng.random() < 0.8 else rng.choice(LETTERS)
        size = rng.choice(sizes)
        plain = size == "small" or shape in LETTERS or rng.random() < 0.6
        texture = "solid" if plain else rng.choice(TEXTURES[1:])
        colour = rng.choice(tuple(COLOURS))
        if _visible(colour, texture, background):
            break
    low, high = SIZES[size]
    return Thing(
        shape=shape,
        colour=colour,
        texture=texture,
        size=size,
        says_size=rng.random() < 0.5,
        r=rng.uniform(low, high),
        x=0.0,
        y=0.0,
        angle=rng.choice((0.0, math.pi / 4, math.pi / 2, -math.pi / 4)),
        period=rng.uniform(9.0, 11.0),
    )


def _at(thing: Thing, x: float, y: float) -> Thing:
    return dataclasses.replace(thing, x=x, y=y)


def _span(rng: random.Random, low: float, high: float, reach: float, length: int) -> float:
    """A coordinate in [low, high], moved inwards where the object would leave the canvas."""
    edge = reach + _MARGIN
    return min(max(rng.uniform(low, high), edge), length - edge)


def _placed(rng: random.Random, thing: Thing, place: str | None, width: int, height: int) -> Thing:
    column, row = PLACES[place] if place else (-1, -1)
    reach = thing.r * _REACH

    def along(cell: int, length: int) -> float:
        low, high = {-1: (0.0, 1.0), 0: (0.12, 0.3), 1: (0.46, 0.54), 2: (0.7, 0.88)}[cell]
        return _span(rng, low * length, high * length, reach, length)

    return _at(thing, along(column, width), along(row, height))


def _apart(a: Thing, b: Thing) -> bool:
    return math.dist((a.x, a.y), (b.x, b.y)) >= (a.r + b.r) * _REACH + _GAP


def _related(relation: str, a: Thing, b: Thing, width: int, height: int) -> bool:
    dx, dy = b.x - a.x, b.y - a.y
    need = (a.r + b.r) * 0.9 + 4
    if relation in ("left", "right"):
        return (dx if relation == "left" else -dx) >= need and abs(dy) <= 0.22 * height
    return (dy if relation == "above" else -dy) >= need and abs(dx) <= 0.22 * width


def _arranged(
    rng: random.Random, looks: list[Thing], relation: str | None, size: tuple[int, int]
) -> list[Thing] | None:
    """Positions without overlap, or None when a few tries found none."""
    for _ in range(30):
        things: list[Thing] = []
        for look in looks:
            thing = _placed(rng, look, None, *size)
            if not all(_apart(thing, other) for other in things):
                break
            things.append(thing)
        if len(things) == len(looks) and (relation is None or _related(relation, things[0], things[1], *size)):
            return things
    return None


def _background(rng: random.Random) -> tuple[str, str]:
    names = tuple(BACKGROUNDS)
    top = rng.choice(names)
    return (top, rng.choice(names)) if rng.random() < 0.15 else (top, top)


def _sample(rng: random.Random, kind: str, size: tuple[int, int]) -> Scene | None:
    background = _background(rng)
    place = relation = None
    things: list[Thing] | None
    if kind == "one":
        place = rng.choice(tuple(PLACES)) if rng.random() < 0.6 else None
        thing = _look(rng, background)
        if place and (thing.r * _REACH + _MARGIN) > 0.4 * min(size):  # no room to be anywhere but in the middle
            return None
        things = [_placed(rng, thing, place, *size)]
    elif kind == "many":
        number = rng.choice((2, 3, 4))
        look = _look(rng, background, ("small", "medium", "large") if number == 2 else ("small", "medium"))
        things = _arranged(rng, [look] * number, None, size)
    else:
        small = ("small", "medium", "large") if kind == "two" else ("small", "medium")
        looks = [_look(rng, background, small) for _ in range(2 if kind == "two" else 3)]
        if len({(t.shape, t.colour) for t in looks}) < len(looks):
            return None
        relation = rng.choice(RELATIONS) if kind == "two" and rng.random() < 0.7 else None
        things = _arranged(rng, looks, relation, size)
    if things is None:
        return None
    return Scene(*size, kind, tuple(things), background, rng.random() < 0.5, place, relation)


def sample(
    rng: random.Random, size: tuple[int, int] = CANVASES[0], kind: str | None = None, held_out: bool = False
) -> Scene:
    """One scene of the wanted canvas and kind, from the training part or from the held-out part."""
    wanted = kind or rng.choices(KINDS, (40, 35, 15, 10))[0]
    while True:
        scene = _sample(rng, wanted, size)
        if scene is not None and scene.held_out == held_out:
            return scene
