"""Whether a picture shows what its caption says: found pieces against the scene the caption was made from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from training.parse import Piece
from training.scenes import PLACES, Scene, Thing

Score = dict[str, bool]
_LOW, _HIGH = 0.42, 0.58


def _cell(value: float) -> set[int]:
    """Columns (or rows) of the 3 x 3 grid that a relative coordinate may be said to lie in."""
    return {i for i, ok in enumerate((value < _LOW, 0.34 < value < 0.66, value > _HIGH)) if ok}


def _in_place(piece: Piece, place: str, scene: Scene) -> bool:
    column, row = PLACES[place]
    return column in _cell(piece.x / scene.width) and row in _cell(piece.y / scene.height)


def _related(first: Piece, second: Piece, relation: str) -> bool:
    dx, dy = second.x - first.x, second.y - first.y
    main, other = (dx, dy) if relation in ("left", "right") else (dy, dx)
    return (main if relation in ("left", "above") else -main) > max(6.0, abs(other) * 0.8)


def _agreement(things: Sequence[Thing], pieces: Sequence[Piece]) -> tuple[int, int]:
    shapes = sum(t.shape == p.shape for t, p in zip(things, pieces, strict=False))
    return shapes, sum(t.colour == p.colour for t, p in zip(things, pieces, strict=False))


def score(scene: Scene, pieces: list[Piece]) -> Score:
    """count, shape, colour, position (place or relation, where the caption has one), and `all` of them together.

    Pieces are matched to things in the way that agrees most; position is judged on that match.
    """
    result = {"count": len(pieces) == len(scene.things), "shape": False, "colour": False}
    if scene.place or scene.relation:
        result["position"] = False
    matches = list(permutations(pieces, len(scene.things))) if len(pieces) <= 6 else []
    if matches:
        best = max(matches, key=lambda m: sum(_agreement(scene.things, m)))
        shapes, colours = _agreement(scene.things, best)
        result["shape"] = shapes == len(scene.things)
        result["colour"] = colours == len(scene.things)
        if scene.place:
            result["position"] = _in_place(best[0], scene.place, scene)
        if scene.relation:
            result["position"] = _related(best[0], best[1], scene.relation)
    return {**result, "all": all(result.values())}


def rates(scores: Sequence[Score]) -> dict[str, float]:
    """The share of pictures that pass, per criterion, over the pictures it applies to."""
    names = dict.fromkeys(name for s in scores for name in s)
    return {name: round(sum(s.get(name, False) for s in scores) / sum(name in s for s in scores), 4) for name in names}
