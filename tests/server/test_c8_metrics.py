"""Case C8, the metrics half: what was asked is what is counted, and nothing that was asked is shown."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families
from server_process import BASE, ENDLESS, Server, send_raw, until

from polymux.metrics import catalog

SECRET = "zebra-crossing"
STAGE = {"model_name": "tiny-img", "stage": "0", "replica": "0"}


def test_three_good_two_bad_one_aborted(server: Server) -> None:
    until(lambda: server.running() == server.waiting() == 0)
    before = server.metrics()
    for seed in range(3):
        assert server.post(BASE | {"prompt": SECRET, "seed": seed, "n": 2}).status_code == 200
    assert server.post(BASE | {"prompt": SECRET, "size": "63x64"}).status_code == 400
    assert server.post(BASE | {"prompt": SECRET, "num_inference_steps": 0}).status_code == 400
    leaving = send_raw(server, server.http.build_request("POST", "/", json=ENDLESS | {"prompt": SECRET}).content)
    until(lambda: server.running() == 1)
    leaving.close()
    until(lambda: server.running() == server.waiting() == 0)
    after = server.metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    outcomes = {"completed": 3, "refused": 2, "aborted": 1, "failed": 0}
    assert {kind: grown(f'polymux:requests_total{{outcome="{kind}"}}') for kind in outcomes} == outcomes
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_step_time_seconds"):
        assert grown(f"polymux:{name}_count") == 3
    for phase in ("encode", "denoise", "decode"):
        assert grown(f'polymux:request_phase_time_seconds_count{{phase="{phase}"}}') == 3
    assert (grown("polymux:images_total"), grown("polymux:pixels_total")) == (6, 6 * 64 * 64)
    assert grown('polymux:outputs_total{modality="image"}') == 6
    decoded = '{component="vae",phase="decode"}'
    assert grown(f"polymux:component_batch_size_sum{decoded}") == 6
    assert 0 < grown(f"polymux:component_run_seconds_count{decoded}") <= 6
    assert after["polymux:stage_ready"] == 1 and after["polymux:host_memory_bytes"] > 2**20


def test_the_text_is_what_prometheus_reads(server: Server) -> None:
    response = server.http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    for spec in catalog.ALL:
        assert f"# TYPE {spec.series[0] if spec.kind != 'histogram' else spec.name} {spec.kind}\n" in response.text
        assert families[spec.name].documentation == spec.help
    for sample in (sample for family in families.values() for sample in family.samples):
        assert set(sample.labels) <= set(catalog.LABELS) | {"le"}
    (ready,) = families["polymux:stage_ready"].samples
    assert ready.labels == STAGE
    assert SECRET not in response.text
    assert not re.search(r"[0-9a-f]{32}", response.text), "no ids of requests"
