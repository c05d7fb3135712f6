"""A measurement for people, as a table, and for programs, as JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polymux.bench.records import Record
from polymux.bench.settings import BenchSettings
from polymux.bench.summary import Spread, Summary
from polymux.version import VERSION


def table(summary: Summary) -> str:
    lines = [f"{name:<28}{value}" for name, value in _rows(summary)]
    return "\n".join(lines)


def document(
    settings: BenchSettings, source: dict[str, Any], model: str | None, summary: Summary, records: Sequence[Record]
) -> str:
    """All that is needed to repeat the measurement, and all that came of it. Without the API key."""
    content = {
        "polymux": VERSION,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": model,
        "dataset": source,
        "settings": _settings(settings),
        "summary": dataclasses.asdict(summary),
        "requests": [dataclasses.asdict(record) for record in records],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _settings(settings: BenchSettings) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for group in (settings.load, settings.request, settings.report):
        fields = [f for f in dataclasses.fields(group) if not f.metadata["secret"]]
        shown |= {f.name: getattr(group, f.name) for f in fields}
    return shown


def _rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "requests completed", f"{summary.completed} of {summary.requests}"
    if summary.unfinished:
        yield "requests given up", str(summary.unfinished)
    yield "requests failed", str(summary.failed)
    for kind, count in summary.errors.items():
        yield f"  {kind}", str(count)
    yield "duration", _seconds(summary.duration)
    yield from _throughput(summary)
    yield from _spread("latency", summary.latency)
    yield from _spread("time to first picture", summary.first)
    yield from _spread("time to first token", summary.first_text)
    yield from _spread("inter-token latency", summary.gap)
    yield from _spread("time per output token", summary.per_token)
    yield from _spread("time to first audio", summary.first_sound)
    yield from _spread("real-time factor", summary.real_time_factor, _plain)
    yield from _spread("underrun", summary.silence)
    if summary.continuity is not None:
        yield "underruns", f"{summary.underruns}; {summary.continuity:.1%} of the sounds were heard without one"
    if summary.client_wait is not None and summary.client_wait.max > 0.01:
        yield from _spread("wait before sending", summary.client_wait)
    if summary.goodput is not None:
        attained = "" if summary.attainment is None else f" ({summary.attainment:.1%} of the requests that ended)"
        yield "goodput", f"{summary.goodput:.3f} requests/s{attained}"


def _throughput(summary: Summary) -> Iterator[tuple[str, str]]:
    requests = f"{summary.request_throughput:.3f} requests/s"
    if not (summary.tokens or summary.sound):
        requests += f", {summary.output_throughput:.3f} pictures/s"
    yield "throughput", requests
    if summary.pixel_throughput:
        yield "", f"{summary.pixel_throughput / 1e6:.3f} megapixels/s"
    if summary.tokens:
        yield "", f"{summary.token_throughput:.3f} tokens/s of text"
    if summary.sound:
        yield "", f"{summary.sound_throughput:.3f} s of sound per second, {summary.sound:.2f} s in all"


def _spread(name: str, spread: Spread | None, shown: Callable[[float], str] | None = None) -> Iterator[tuple[str, str]]:
    if spread is not None:
        show = shown or _seconds
        yield name, "  ".join(f"{key} {show(value)}" for key, value in dataclasses.asdict(spread).items())


def _plain(value: float) -> str:
    return f"{value:.3f}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
