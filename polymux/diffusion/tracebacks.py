"""Errors that are kept, without what they keep alive.

A caught exception holds the frames that it passed, and with them every tensor of a failed forward. Whoever keeps one
beyond its handler takes the lines as text and lets go of the frames.
"""

from __future__ import annotations

import traceback


def drop_frames(error: BaseException) -> str:
    """Where an error came from, as text; it and the errors that led to it hold nothing afterwards."""
    where = "".join(traceback.format_tb(error.__traceback__))
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            chain += [link.__cause__, link.__context__]
    return where
