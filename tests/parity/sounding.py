"""What parity tests of models that make sound share: an engine that is driven until nothing is left."""

from __future__ import annotations

from typing import Any

import numpy as np

from polymux.engine.generate_engine import GenerateEngine
from polymux.omni_output import samples_of
from polymux.request import Event, Failed, Finished, SoundPiece

Sound = np.ndarray[Any, Any]


def pieces_of(engine: GenerateEngine) -> tuple[dict[str, list[Sound]], dict[str, Event]]:
    """The pieces of sound of each request, and how it ended."""
    pieces: dict[str, list[Sound]] = {}
    ends: dict[str, Event] = {}
    while engine.busy:
        for event in engine.step():
            if isinstance(event, SoundPiece):
                pieces.setdefault(event.request_id, []).append(samples_of(event))
                engine.taken(event.request_id)
            elif isinstance(event, (Finished, Failed)):
                ends[event.request_id] = event
    return pieces, ends


def drive(engine: GenerateEngine) -> tuple[dict[str, Sound], dict[str, Event]]:
    """The sound of each request, and how it ended."""
    pieces, ends = pieces_of(engine)
    return {name: np.concatenate(parts, axis=1) for name, parts in pieces.items()}, ends
