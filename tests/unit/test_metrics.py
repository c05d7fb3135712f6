"""Numbers only grow, belong to one orchestrator, are readable by Prometheus, and are those of the catalog."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from source_tree import ROOT

from polymux.metrics import OUTCOMES, Metrics, catalog
from polymux.metrics.page import page
from polymux.request import (
    ArrayData,
    ComponentRuns,
    Distribution,
    Finished,
    ImageData,
    Media,
    Modality,
    OutputChunk,
    RequestMetrics,
    StageStats,
)

SECONDS_PER_BUCKET = [1] + [0] * (len(catalog.RUN_S) - 1) + [1]  # one of no time at all, one of more than a minute


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """By name and values of labels, without those that are the same everywhere."""
    families = text_string_to_metric_families(metrics.render().decode())
    same = ("model_name", "stage", "replica")
    return {
        (s.name, *(value for label, value in sorted(s.labels.items()) if label not in same)): s.value
        for family in families
        for s in family.samples
    }


def report(steps: int = 0, batches: dict[int, int] | None = None, **more: dict[str, int]) -> StageStats:
    runs = ComponentRuns("vae", "decode", batches or {}, Distribution(SECONDS_PER_BUCKET, 90.5))
    return StageStats(steps=steps, runs=[runs] if batches else [], host_memory=steps, **more)  # type: ignore[arg-type]


def finished(modality: Modality, *media: Media, sample_rate: int | None = None, steps: int = 0) -> Finished:
    spent = RequestMetrics(queue=0.5, encode=1.0, denoise=6.0, decode=2.0, total=9.5, steps=steps)
    return Finished("r", modality, [list(media)], [1], spent, sample_rate=sample_rate)


def test_totals_go_on_after_a_new_process_starts_at_zero() -> None:
    metrics = Metrics("m")
    metrics.stage_began(StageStats())
    metrics.stage_reported(report(10, {2: 3, 65: 1}, offload_bytes={"vae": 7}))
    metrics.stage_ended()
    metrics.stage_began(StageStats())
    metrics.stage_reported(report(13, {2: 1}, offload_bytes={"vae": 1}))
    metrics.stage_reported(report(13, {2: 1}, offload_bytes={"vae": 1}))
    got = samples(metrics)
    assert got["polymux:denoise_steps_total",] == 23
    assert got["polymux:offload_bytes_total", "vae"] == 8
    assert got["polymux:component_batch_size_bucket", "vae", "2.0", "decode"] == 4
    assert got["polymux:component_batch_size_bucket", "vae", "64.0", "decode"] == 4
    assert got["polymux:component_batch_size_bucket", "vae", "+Inf", "decode"] == 5
    assert got["polymux:component_batch_size_count", "vae", "decode"] == 5
    assert got["polymux:component_batch_size_sum", "vae", "decode"] == 2 * 3 + 65 + 2
    assert got["polymux:component_run_seconds_bucket", "vae", "0.001", "decode"] == 2
    assert got["polymux:component_run_seconds_bucket", "vae", "60.0", "decode"] == 2
    assert got["polymux:component_run_seconds_count", "vae", "decode"] == 4
    assert got["polymux:component_run_seconds_sum", "vae", "decode"] == 181


def test_the_warm_up_does_not_count_but_what_caches_did_while_loading_does() -> None:
    metrics = Metrics("m")
    ready = report(2, {1: 2}, cache_queries={"runtime_cache": 2}, cache_hits={"runtime_cache": 1})
    metrics.stage_began(ready)
    got = samples(metrics)
    assert got["polymux:denoise_steps_total",] == got["polymux:component_run_seconds_count", "vae", "decode"] == 0
    assert got["polymux:cache_queries_total", "runtime_cache"] == 2
    assert got["polymux:cache_hits_total", "runtime_cache"] == 1


def test_totals_do_not_fall_with_a_component_that_is_loaded_again() -> None:
    """As after a deep sleep, in the same process."""
    metrics = Metrics("m")
    metrics.stage_began(StageStats())
    for moved in ({"vae": 7}, {}, {"vae": 2}):
        metrics.stage_reported(report(offload_bytes=moved))
    assert samples(metrics)["polymux:offload_bytes_total", "vae"] == 9


def test_a_process_that_is_gone_has_no_memory() -> None:
    metrics = Metrics("m")
    metrics.stage_began(report(4, device_memory={"peak": 3}))
    got = samples(metrics)
    assert (got["polymux:host_memory_bytes",], got["polymux:device_memory_bytes", "peak"]) == (4, 3)
    metrics.stage_ended()
    assert not [name for name, *_ in samples(metrics) if "memory_bytes" in name and name.startswith("polymux:")]


def test_the_cache_of_keys_and_values() -> None:
    metrics = Metrics("m")
    metrics.stage_began(report())
    assert not [name for name, *_ in samples(metrics) if "kv_cache" in name or "preemptions" in name]
    metrics.stage_reported(report(kv_blocks=8, kv_blocks_used=2, preemptions=3))
    got = samples(metrics)
    assert (got["polymux:kv_cache_usage",], got["polymux:preemptions_total",]) == (0.25, 3)


def test_a_picture() -> None:
    metrics = Metrics("m")
    metrics.finished(finished("image", ImageData("RGB", 8, 4, b""), ImageData("RGB", 8, 4, b""), steps=3), 11.0)
    got = samples(metrics)
    assert got["polymux:requests_total", "completed"] == got["polymux:outputs_total", "image"] == 1
    assert (got["polymux:images_total",], got["polymux:pixels_total",]) == (2, 64)
    assert got["polymux:e2e_request_latency_seconds_sum",] == 11.0
    assert got["polymux:request_queue_time_seconds_sum",] == 0.5
    assert got["polymux:request_step_time_seconds_sum",] == 2.0
    for phase, seconds in (("encode", 1.0), ("denoise", 6.0), ("decode", 2.0)):
        assert got["polymux:request_phase_time_seconds_sum", phase] == seconds


def test_a_video_with_sound() -> None:
    metrics = Metrics("m")
    video, sound = ArrayData("uint8", (5, 4, 8, 3), b""), ArrayData("float32", (2, 24000), b"")
    metrics.finished(finished("video", video, sound, sample_rate=16000), 1.0)
    got = samples(metrics)
    assert (got["polymux:frames_total",], got["polymux:pixels_total",]) == (5, 160)
    assert (got["polymux:images_total",], got["polymux:audio_seconds_total",]) == (0, 1.5)
    assert got["polymux:request_step_time_seconds_count",] == 0


def test_what_came_in_chunks_counts_too() -> None:
    metrics = Metrics("m")
    video, sound = ArrayData("uint8", (2, 4, 8, 3), b""), ArrayData("float32", (1, 24000), b"")
    begun = [OutputChunk("a", 0, 1, (2, 24000), 0, sound), OutputChunk("a", 0, 0, (5, 4, 8, 3), 0, video)]
    metrics.finished(finished("video", sample_rate=16000), 1.0, begun)
    got = samples(metrics)
    assert (got["polymux:frames_total",], got["polymux:pixels_total",]) == (5, 160)
    assert got["polymux:audio_seconds_total",] == 1.5


def test_two_do_not_collide() -> None:
    one, two = Metrics("m"), Metrics("m")
    one.count("aborted")
    assert samples(one)["polymux:requests_total", "aborted"] == 1
    assert samples(two)["polymux:requests_total", "aborted"] == 0


def test_everything_is_shown_before_anything_has_happened() -> None:
    got = samples(Metrics("m"))
    for outcome in OUTCOMES:
        assert got["polymux:requests_total", outcome] == 0
    assert got["polymux:denoise_steps_total",] == 0
    assert got["polymux:e2e_request_latency_seconds_count",] == 0


def test_the_catalog_lists_what_is_shown() -> None:
    shown = {f.name: f for f in Metrics("m").registry.collect() if f.name.startswith(catalog.PREFIX)}
    # Those of the orchestrator are watched, see its tests.
    watched = {catalog.RUNNING.name, catalog.WAITING.name, catalog.READY.name}
    listed = {spec.name: spec for spec in (*catalog.REQUEST_METRICS, *catalog.STAGE_METRICS)}
    assert set(shown) == set(listed) - watched
    for name, family in shown.items():
        assert (family.type, family.documentation) == (listed[name].kind, listed[name].help)


@pytest.mark.parametrize("spec", catalog.ALL, ids=lambda spec: spec.name)
def test_every_metric_is_explained(spec: catalog.Spec) -> None:
    assert spec.name.startswith(catalog.PREFIX) and spec.help.endswith(".")
    assert set(spec.labels) <= set(catalog.LABELS)
    assert bool(spec.buckets) == (spec.kind == "histogram")
    assert list(spec.buckets) == sorted(set(spec.buckets))


def test_the_page_is_the_one_in_the_documentation() -> None:
    """`python -m polymux.metrics.page > docs/metrics.md` makes it."""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == page()
