"""Speech faster or slower at the same pitch: a stretch in time, by FFmpeg's atempo filter."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
from av.filter import Graph

from polymux.media.audio import check_rate, check_samples
from polymux.media.wire import Array

SLOWEST, FASTEST = 0.25, 4.0
_LAYOUTS = {1: "mono", 2: "stereo"}
_SILENCE_S = 1.0
_STEP = (0.5, 2.0)  # beyond these the filter drops samples, or knows no such tempo


def stretch(samples: Array, sample_rate: int, speed: float) -> Array:
    """The samples (channels, samples) at `speed` times the pace, as float32. Raises ValueError."""
    samples = check_samples(samples)
    check_rate(sample_rate)
    if not SLOWEST <= speed <= FASTEST:
        raise ValueError(f"speed={speed!r}: must be from {SLOWEST:g} to {FASTEST:g}")
    if speed == 1.0 or samples.shape[1] == 0:
        return samples.astype(np.float32)
    graph, layout = Graph(), _LAYOUTS[len(samples)]
    source = graph.add_abuffer(
        format="fltp", sample_rate=sample_rate, layout=layout, time_base=Fraction(1, sample_rate)
    )
    last = source
    nodes = [graph.add("atempo", f"{tempo:.9g}") for tempo in _tempos(speed)]
    for node in [*nodes, graph.add("aformat", "sample_fmts=fltp")]:
        last.link_to(node)
        last = node
    last.link_to(graph.add("abuffersink"))
    graph.configure()
    # The filter keeps back what does not fill its last window: silence goes in behind, and none of it comes out.
    padded = np.pad(samples.astype(np.float32), ((0, 0), (0, round(sample_rate * _SILENCE_S))))
    frame = av.AudioFrame.from_ndarray(padded, format="fltp", layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = sample_rate, 0, Fraction(1, sample_rate)
    graph.push(frame)
    graph.push(None)
    return np.concatenate(_pulled(graph), axis=1)[:, : max(1, round(samples.shape[1] / speed))]


def _tempos(speed: float) -> list[float]:
    """Factors, each within what the filter does well, whose product is the speed."""
    tempos, (low, high) = [], _STEP
    while not low <= speed <= high:
        factor = high if speed > high else low
        tempos.append(factor)
        speed /= factor
    return [*tempos, speed]


def _pulled(graph: Graph) -> list[Array]:
    parts: list[Array] = []
    while True:
        try:
            frame = graph.pull()
        except (av.error.BlockingIOError, av.error.EOFError):
            return parts
        assert isinstance(frame, av.AudioFrame)
        parts.append(frame.to_ndarray())
