"""What the stages' processes report, added up over all processes that there have been.

A process counts from 0, so its totals fall when it is replaced; those here only grow. Knows the reports, not where they
come from.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from polymux.metrics import catalog
from polymux.metrics.catalog import Spec
from polymux.request import StageStats

Labels = tuple[str, ...]  # values, of the labels behind model_name, stage and replica
Totals = dict[tuple[Spec, Labels], list[float]]  # of a counter [total]; of a histogram runs per bucket, and the sum


@dataclass
class _Stage:
    totals: Totals = field(default_factory=lambda: defaultdict(list))
    seen: Totals = field(default_factory=dict)  # as the present process reported last
    now: StageStats | None = None  # None: there is no process


class StageCollector(Collector):
    """The series of all stages. `stages` are shown from the start, by stage and replica."""

    def __init__(self, model_name: str, stages: Iterable[tuple[str, str]]) -> None:
        self._model_name = model_name
        self._stages = {key: _Stage() for key in stages}
        for stage in self._stages.values():
            stage.totals[catalog.STEPS, ()] = [0.0]

    def begin(self, key: tuple[str, str], stats: StageStats) -> None:
        """A process takes over. What it has computed by then was for nobody's request and does not count."""
        stage = self._stages[key]
        stage.seen = {k: v for k, v in _totals_of(stats).items() if k[0] not in _OF_LOADING}
        self.report(key, stats)

    def report(self, key: tuple[str, str], stats: StageStats) -> None:
        """The present process has done this much."""
        stage, new = self._stages[key], _totals_of(stats)
        for series, numbers in new.items():
            before = stage.seen.get(series, [0.0] * len(numbers))
            total = stage.totals.get(series) or [0.0] * len(numbers)
            stage.totals[series] = [t + max(n - b, 0.0) for t, n, b in zip(total, numbers, before, strict=True)]
        stage.seen, stage.now = new, stats

    def end(self, key: tuple[str, str]) -> None:
        """The process is gone, and what it had with it."""
        self._stages[key].now = None

    def describe(self) -> Iterable[Metric]:
        return ()  # whoever registers it need not call collect

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._histograms()
        yield from self._gauges()

    def _counters(self) -> Iterator[Metric]:
        for spec in (s for s in _FROM_REPORTS if s.kind == "counter"):
            counter = CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
            for labels, numbers in self._series(spec):
                counter.add_metric(labels, numbers[0])
            yield counter

    def _histograms(self) -> Iterator[Metric]:
        for spec in (s for s in _FROM_REPORTS if s.kind == "histogram"):
            histogram = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
            for labels, (*counts, total) in self._series(spec):
                bounds = [*map(floatToGoString, spec.buckets), "+Inf"]
                up_to = [sum(counts[: i + 1]) for i in range(len(counts))]
                histogram.add_metric(labels, list(zip(bounds, up_to, strict=True)), total)
            yield histogram

    def _gauges(self) -> Iterator[Metric]:
        device = GaugeMetricFamily(
            catalog.DEVICE_MEMORY.name, catalog.DEVICE_MEMORY.help, labels=catalog.DEVICE_MEMORY.labels
        )
        host = GaugeMetricFamily(catalog.HOST_MEMORY.name, catalog.HOST_MEMORY.help, labels=catalog.HOST_MEMORY.labels)
        kv = GaugeMetricFamily(catalog.KV_USAGE.name, catalog.KV_USAGE.help, labels=catalog.KV_USAGE.labels)
        for key, stage in self._stages.items():
            if stage.now is not None:
                if stage.now.kv_blocks:
                    kv.add_metric([self._model_name, *key], stage.now.kv_blocks_used / stage.now.kv_blocks)
                for kind, nbytes in stage.now.device_memory.items():
                    device.add_metric([self._model_name, *key, kind], nbytes)
                host.add_metric([self._model_name, *key], stage.now.host_memory)
        yield from (device, host, kv)

    def _series(self, spec: Spec) -> Iterator[tuple[list[str], list[float]]]:
        for key, stage in self._stages.items():
            for (owner, labels), numbers in stage.totals.items():
                if owner is spec:
                    yield [self._model_name, *key, *labels], numbers


# What caches did before the first request, they did while the model was loaded: for all requests.
_OF_LOADING = (catalog.CACHE_QUERIES, catalog.CACHE_HITS)
_FROM_REPORTS = (
    *(catalog.STEPS, catalog.OFFLOAD_BYTES, catalog.OFFLOAD_LATE, *_OF_LOADING),
    catalog.PREEMPTIONS,
    *(catalog.RUN_SECONDS, catalog.BATCH_SIZE),
)


def _totals_of(stats: StageStats) -> Totals:
    """All that only grows while a process lives."""
    totals: Totals = {(catalog.STEPS, ()): [float(stats.steps)]}
    if stats.kv_blocks:
        totals[catalog.PREEMPTIONS, ()] = [float(stats.preemptions)]
    for spec, by_label in (
        (catalog.OFFLOAD_BYTES, stats.offload_bytes),
        (catalog.OFFLOAD_LATE, stats.offload_late),
        (catalog.CACHE_QUERIES, stats.cache_queries),
        (catalog.CACHE_HITS, stats.cache_hits),
    ):
        totals |= {(spec, (label,)): [float(number)] for label, number in by_label.items()}
    for runs in stats.runs:
        labels = (runs.component, runs.phase)
        totals[catalog.RUN_SECONDS, labels] = [*map(float, runs.seconds.counts), runs.seconds.sum]
        totals[catalog.BATCH_SIZE, labels] = _of_batches(runs.batches)
    return totals


def _of_batches(batches: Mapping[int, int]) -> list[float]:
    counts = [0.0] * (len(catalog.BATCH) + 1)
    for size, count in batches.items():
        counts[bisect_left(catalog.BATCH, size)] += count
    return [*counts, float(sum(size * count for size, count in batches.items()))]
