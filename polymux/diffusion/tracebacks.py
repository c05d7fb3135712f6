"""Errors that are kept, without what they keep alive.

A caught exception holds the frames that it passed, and with them every tensor of a failed forward. Whoever keeps an
exception beyond its handler lets go of these first; files and lines stay.
"""

from __future__ import annotations

import traceback


def drop_locals(error: BaseException) -> None:
    """Clear the frames of an error and of the errors that led to it. Frames that still run keep what they hold."""
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            chain += [link.__cause__, link.__context__]
