"""The numbers that GET /metrics shows. One registry per orchestrator, so that several live in one process.

Totals that a stage reports start again at 0 when its process is replaced; here they only grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from polymux.request import StageStats

Outcome = Literal["success", "failure", "aborted", "refused"]
OUTCOMES: tuple[Outcome, ...] = ("success", "failure", "aborted", "refused")
CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class Metrics:
    """What one orchestrator counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests that ended, by outcome.", "outcome")
        self._latency = Histogram(
            "polymux_request_seconds",
            "Seconds from a request's admission to its output, of successful requests.",
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._restarts = self._counter("stage_restarts", "Times that the stage's process was replaced.", "stage")
        self._steps = self._counter("denoise_steps", "Denoising steps, each request's counted.", "stage")
        self._calls = self._counter("component_calls", "Calls of components that ran.", "stage", "component")
        self._answered = self._counter(
            "component_requests", "Requests' calls that the component calls answered.", "stage", "component"
        )
        self._phases = self._counter("phase_seconds", "Seconds spent in component calls, by phase.", "stage", "phase")
        for outcome in OUTCOMES:
            self._requests.labels(outcome)  # shown as 0 from the start
        for counter in (self._restarts, self._steps):
            counter.labels("0")
        for phase in ("encode", "denoise", "decode"):
            self._phases.labels("0", phase)

    def watch(self, name: str, help: str, value: Callable[[], float]) -> None:
        """A gauge that is read when somebody looks."""
        Gauge(f"polymux_{name}", help, registry=self.registry).set_function(value)

    def count(self, outcome: Outcome, seconds: float | None = None) -> None:
        """A request has ended; `seconds` is its latency, for successes."""
        self._requests.labels(outcome).inc()
        if seconds is not None:
            self._latency.observe(seconds)

    def restarted(self, stage: str) -> None:
        self._restarts.labels(stage).inc()

    def stage(self, stage: str, before: StageStats, now: StageStats) -> None:
        """Add what a stage has done between two of its reports."""
        self._steps.labels(stage).inc(max(0, now.steps - before.steps))
        for counter, old, new in (
            (self._calls, before.calls, now.calls),
            (self._answered, before.merged, now.merged),
            (self._phases, before.seconds, now.seconds),
        ):
            for label, total in new.items():
                counter.labels(stage, label).inc(max(0, total - old.get(label, 0)))

    def render(self) -> bytes:
        """All of it in Prometheus' text format, `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"polymux_{name}", help, labels, registry=self.registry)
