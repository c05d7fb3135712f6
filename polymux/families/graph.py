"""How a family's models are cut into stages, which run in processes of their own: stages, edges, and what is handed on.

A graph is a declaration. Arrays go over an edge, never objects of a model; what they mean is agreed between the stage
that makes them and the hand-off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Arrays = Mapping[str, Any]  # of numpy

HandOff = Callable[[Arrays, Arrays, bool], tuple[Arrays, Arrays]]
"""What was kept of the chunks before (at first nothing), a chunk, whether it is the last one; gives what the next stage
gets, and what is kept. The whole is a chunk too: in how many chunks it comes makes no difference to what comes out."""


@dataclass(frozen=True, kw_only=True)
class StageDeclaration:
    """One stage.

    name: for people.
    does: write: runs the model's own loop, and hands on what it writes as it is written; decode: makes sound of
    frames, each of which is a fixed number of samples.
    """

    name: str
    does: Literal["write", "decode"]


@dataclass(frozen=True, kw_only=True)
class Edge:
    """From one stage to the next, by their numbers."""

    source: int
    target: int
    hand_off: HandOff


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Stages in the order of the way; the first one gets the request, the last one makes the output.

    chunk: frames that are handed on at once.
    """

    stages: tuple[StageDeclaration, ...]
    edges: tuple[Edge, ...]
    chunk: int = 25

    def into(self, stage: int) -> Edge:
        """The edge that ends there."""
        return next(edge for edge in self.edges if edge.target == stage)
