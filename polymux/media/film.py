"""The frames of a video that a model is shown: so many per second, spread evenly. Knows neither files nor models."""

from __future__ import annotations

from polymux.media.wire import Array

FEWEST = 2


def at_rate(frames: Array, fps: float | None, rate: float) -> Array:
    """Frames (frames, height, width, 3) at `rate` per second; `fps` None: they are at that rate already. Two at least:
    models see change between two."""
    count = len(frames)
    wanted = count if fps is None else round(count / fps * rate)
    wanted = max(wanted, FEWEST)
    if wanted == count:
        return frames
    picked: Array = frames[[min(int((i + 0.5) * count / wanted), count - 1) for i in range(wanted)]]
    return picked
