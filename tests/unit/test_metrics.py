"""Numbers only grow, belong to one orchestrator, and are readable by Prometheus."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from polymux.metrics import OUTCOMES, Metrics
from polymux.request import StageStats


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *dict(sorted(s.labels.items())).values()): s.value for family in families for s in family.samples}


def test_totals_go_on_after_a_new_process_starts_at_zero() -> None:
    metrics = Metrics()
    first = StageStats(steps=10, calls={"vae": 2}, merged={"vae": 5}, seconds={"decode": 0.5})
    metrics.stage("0", StageStats(), first)
    metrics.stage("0", StageStats(), StageStats(steps=3, calls={"vae": 1, "unet": 3}, seconds={"decode": 0.25}))
    got = samples(metrics)
    assert got["polymux_denoise_steps_total", "0"] == 13
    assert got["polymux_component_calls_total", "vae", "0"] == 3
    assert got["polymux_component_calls_total", "unet", "0"] == 3
    assert got["polymux_component_requests_total", "vae", "0"] == 5
    assert got["polymux_phase_seconds_total", "decode", "0"] == 0.75


def test_two_do_not_collide() -> None:
    one, two = Metrics(), Metrics()
    one.count("success", 0.2)
    assert samples(one)["polymux_requests_total", "success"] == 1
    assert samples(two)["polymux_requests_total", "success"] == 0


def test_everything_is_shown_before_anything_has_happened() -> None:
    got = samples(Metrics())
    for outcome in OUTCOMES:
        assert got["polymux_requests_total", outcome] == 0
    assert got["polymux_denoise_steps_total", "0"] == 0
    assert got["polymux_request_seconds_count",] == 0


def test_every_metric_is_explained() -> None:
    for family in text_string_to_metric_families(Metrics().render().decode()):
        assert family.name.startswith("polymux_")
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")
