"""The numbers of one orchestrator: what has become of its requests, and what its stages report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from polymux.metrics import catalog
from polymux.metrics.catalog import Spec
from polymux.metrics.outcome import OUTCOMES, Outcome
from polymux.metrics.stage import StageCollector
from polymux.metrics.streams import StreamMetrics
from polymux.request import ArrayData, Finished, ImageData, OutputChunk, StageStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
PHASES = ("encode", "denoise", "decode")
Stage = tuple[str, str]  # the numbers of a stage and of one of its replicas
FIRST: Stage = ("0", "0")


def counter(spec: Spec, registry: CollectorRegistry) -> Counter:
    return Counter(spec.name, spec.help, spec.labels, registry=registry)


def histogram(spec: Spec, registry: CollectorRegistry) -> Histogram:
    return Histogram(spec.name, spec.help, spec.labels, registry=registry, buckets=spec.buckets)


class Metrics:
    """`model_name` is how clients call the model, `stages` are the processes that there will be."""

    def __init__(self, model_name: str, stages: Sequence[Stage] = (FIRST,)) -> None:
        self.registry = registry = CollectorRegistry()
        self._name = model_name
        self._requests = counter(catalog.REQUESTS, registry)
        self._outputs = counter(catalog.OUTPUTS, registry)
        self._phases = histogram(catalog.PHASES, registry)
        self._latency, self._queue, self._step = (
            histogram(spec, registry).labels(model_name) for spec in (catalog.LATENCY, catalog.QUEUE, catalog.STEP)
        )
        self._images, self._frames, self._pixels, self._audio = (
            counter(spec, registry).labels(model_name)
            for spec in (catalog.IMAGES, catalog.FRAMES, catalog.PIXELS, catalog.AUDIO)
        )
        self.streams = StreamMetrics(model_name, registry)
        self._restarts = counter(catalog.RESTARTS, registry)
        self._transfer_bytes = counter(catalog.TRANSFER_BYTES, registry)
        self._transfer_size = histogram(catalog.TRANSFER_SIZE, registry)
        self._transfer_seconds = histogram(catalog.TRANSFER_SECONDS, registry)
        self._stages = StageCollector(model_name, stages)
        registry.register(self._stages)
        for outcome in OUTCOMES:
            self._requests.labels(model_name, outcome)  # shown as 0 from the start
        for phase in PHASES:
            self._phases.labels(model_name, phase)
        for stage in stages:
            self._restarts.labels(model_name, *stage)
        self._gauges: dict[Spec, Gauge] = {}

    def watch(self, spec: Spec, value: Callable[[], float], stage: Stage = FIRST) -> None:
        """A gauge that is read when somebody looks."""
        if spec not in self._gauges:
            self._gauges[spec] = Gauge(spec.name, spec.help, spec.labels, registry=self.registry)
        labels = (self._name, *stage)[: len(spec.labels)]
        self._gauges[spec].labels(*labels).set_function(value)

    def count(self, outcome: Outcome) -> None:
        """A request has ended without an output."""
        self._requests.labels(self._name, outcome).inc()

    def finished(self, finished: Finished, seconds: float, begun: Sequence[OutputChunk] = ()) -> None:
        """A request has its output, `seconds` after it was admitted. `begun`: the first chunk of each array."""
        self.count("completed")
        self._latency.observe(seconds)
        spent = finished.metrics
        self._queue.observe(spent.queue)
        for phase, value in zip(PHASES, (spent.encode, spent.denoise, spent.decode), strict=True):
            self._phases.labels(self._name, phase).observe(value)
        if spent.steps:
            self._step.observe(spent.denoise / spent.steps)
        self._outputs.labels(self._name, finished.modality).inc(len(finished.outputs))
        self._audio.inc(finished.sound_seconds)
        for medium in (medium for output in finished.outputs for medium in output):
            self._count_medium(medium, finished)
        for chunk in begun:
            self._count_array(chunk.rows.dtype, chunk.shape, finished)

    def restarted(self, stage: Stage = FIRST) -> None:
        """The process is about to be replaced."""
        self._restarts.labels(self._name, *stage).inc()

    def stage_began(self, stats: StageStats, stage: Stage = FIRST) -> None:
        """A process is ready; `stats` is what it had done by then."""
        self._stages.begin(stage, stats)

    def stage_reported(self, stats: StageStats, stage: Stage = FIRST) -> None:
        self._stages.report(stage, stats)

    def stage_ended(self, stage: Stage = FIRST) -> None:
        self._stages.end(stage)

    def handed_on(self, source: int, target: int, nbytes: int) -> None:
        """From one stage to another."""
        edge = (self._name, str(source), str(target))
        self._transfer_bytes.labels(*edge).inc(nbytes)
        self._transfer_size.labels(*edge).observe(nbytes)

    def arrived(self, source: int, target: int, seconds: float) -> None:
        self._transfer_seconds.labels(self._name, str(source), str(target)).observe(seconds)

    def render(self) -> bytes:
        """All of it in Prometheus' text format, `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _count_medium(self, medium: ImageData | ArrayData, finished: Finished) -> None:
        if isinstance(medium, ImageData):
            self._images.inc()
            self._pixels.inc(medium.width * medium.height)
        else:
            self._count_array(medium.dtype, medium.shape, finished)

    def _count_array(self, dtype: str, shape: Sequence[int], finished: Finished) -> None:
        if dtype == "uint8" and len(shape) == 4:
            frames, height, width, _ = shape
            self._frames.inc(frames)
            self._pixels.inc(frames * height * width)
        elif finished.sample_rate and len(shape) == 2:
            self._audio.inc(shape[-1] / finished.sample_rate)
