"""How a family's models are cut into stages, which run in processes of their own: stages, edges, and what is handed on.

A graph is a declaration. Arrays go over an edge, never objects of a model; what they mean is agreed between the stage
that makes them and the hand-off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Arrays = Mapping[str, Any]  # of numpy
Does = Literal["write", "think", "talk", "decode"]

HandOff = Callable[[Arrays, Arrays, bool], tuple[Arrays, Arrays]]
"""What was kept of the chunks before (at first nothing), a chunk, whether it is the last one; gives what the next stage
gets, and what is kept. The whole is a chunk too: in how many chunks it comes makes no difference to what comes out."""


@dataclass(frozen=True, kw_only=True)
class StageDeclaration:
    """One stage.

    name: for people.
    does: write: runs the model's own loop, and hands on what it writes as it is written; think: answers with text, and
    hands on what has to be known to speak it; talk: does the latter, and hands on what it writes; decode: makes sound
    of what it gets.
    part: the child of the model that runs there, of models that are cut inside; None: all of the model, or of a stage
    that decodes what is beside it.
    """

    name: str
    does: Does
    part: str | None = None


@dataclass(frozen=True, kw_only=True)
class Edge:
    """From one stage to the next, by their numbers.

    random: the next stage draws on where this one has stopped drawing.
    """

    source: int
    target: int
    hand_off: HandOff
    random: bool = False


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Stages in the order of the way; the first one gets the request, the last one makes the output.

    chunk: frames that are handed on at once.
    first: the same of the first chunk of a request, for which somebody waits.
    """

    stages: tuple[StageDeclaration, ...]
    edges: tuple[Edge, ...]
    chunk: int = 25
    first: int = 25

    def into(self, stage: int) -> Edge:
        """The edge that ends there."""
        return next(edge for edge in self.edges if edge.target == stage)

    def out_of(self, stage: int) -> Edge:
        """The edge that begins there."""
        return next(edge for edge in self.edges if edge.source == stage)

    @property
    def children(self) -> tuple[str, ...]:
        """Of a model that is cut inside: what each stage has of it."""
        return tuple(stage.part for stage in self.stages if stage.part is not None)


def as_it_is(kept: Arrays, chunk: Arrays, last: bool) -> tuple[Arrays, Arrays]:
    """A hand-off that changes nothing, for what comes in one chunk."""
    return chunk, {}
