"""From the records of requests to the numbers that people compare. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from polymux.bench.records import Record


@dataclass(frozen=True)
class Spread:
    """Seconds, or whatever the values are."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None if there are no values."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p95, p99 = (quantile(ordered, percent) for percent in (50, 95, 99))
        return cls(mean=math.fsum(ordered) / len(ordered), p50=p50, p95=p95, p99=p99, max=ordered[-1])


def quantile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest values, in proportion."""
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


@dataclass(frozen=True)
class Summary:
    requests: int  # that were to be sent
    completed: int
    failed: int
    unfinished: int  # never sent, or given up, when the measurement was interrupted
    errors: dict[str, int]  # by kind
    duration: float  # seconds
    request_throughput: float  # completed requests per second
    output_throughput: float  # pictures, spoken texts or answers per second
    pixel_throughput: float  # per second, of the pictures that came as bytes
    token_throughput: float  # of text, per second
    sound_throughput: float  # seconds of sound per second
    outputs: int
    tokens: int
    sound: float  # seconds
    latency: Spread | None  # of completed requests, and so on
    first: Spread | None
    first_text: Spread | None
    gap: Spread | None  # from a piece of text to the next one, all requests' together
    per_token: Spread | None  # the mean of each request
    first_sound: Spread | None
    real_time_factor: Spread | None
    silence: Spread | None  # in the sound that somebody plays as it comes
    underruns: int | None  # times that there was nothing to play
    continuity: float | None  # the share of those with sound that were heard without a break
    client_wait: Spread | None  # between the moment a request was due and the one it was sent
    goodput: float | None  # completed requests per second that met all objectives
    attainment: float | None  # their share of all that ended


def summarize(records: Sequence[Record], duration: float, objectives: Mapping[str, float]) -> Summary:
    done = [record for record in records if record.succeeded]
    failed = [record for record in records if record.failed]
    outputs, pixels = sum(record.outputs for record in done), sum(record.pixels for record in done)
    tokens, sound = sum(record.tokens for record in done), math.fsum(record.sound for record in done)
    breaks = [record.underruns for record in done if record.underruns is not None]
    good = sum(meets(record, objectives) for record in done)
    ended = len(done) + len(failed)

    def rate(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    return Summary(
        requests=len(records),
        completed=len(done),
        failed=len(failed),
        unfinished=len(records) - ended,
        errors=dict(Counter(record.error for record in failed if record.error is not None).most_common()),
        duration=duration,
        request_throughput=rate(len(done)),
        output_throughput=rate(outputs),
        pixel_throughput=rate(pixels),
        token_throughput=rate(tokens),
        sound_throughput=rate(sound),
        outputs=outputs,
        tokens=tokens,
        sound=sound,
        latency=_spread(record.latency for record in done),
        first=_spread(record.first for record in done),
        first_text=_spread(record.first_text for record in done),
        gap=Spread.of([gap for record in done for gap in record.gaps]),
        per_token=_spread(record.per_token for record in done),
        first_sound=_spread(record.first_sound for record in done),
        real_time_factor=_spread(record.real_time_factor for record in done),
        silence=_spread(record.silence for record in done),
        underruns=sum(breaks) if breaks else None,
        continuity=breaks.count(0) / len(breaks) if breaks else None,
        client_wait=Spread.of([record.sent - record.due for record in done if record.sent is not None]),
        goodput=rate(good) if objectives else None,
        attainment=good / ended if objectives and ended else None,
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    return Spread.of([value for value in values if value is not None])


def meets(record: Record, objectives: Mapping[str, float]) -> bool:
    """Whether a completed request met all of them."""
    measured = {
        "e2el": record.latency,
        "ttfp": record.first,
        "ttft": record.first_text,
        "ttfa": record.first_sound,
    }
    return all((value := measured[name]) is not None and value <= limit for name, limit in objectives.items())
