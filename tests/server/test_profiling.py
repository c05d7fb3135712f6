"""Traces over HTTP: of every replica's process, of what it did between start and stop, and nobody is disturbed."""

from __future__ import annotations

import json
from pathlib import Path

from server_process import BASE, error_of, serving


def test_traces_of_all_replicas(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    flags = ("--data-parallel-size", "2", "--profiler-config.profiler", "torch")
    with serving("demo", tmp_path, *flags, "--profiler-config.torch_profiler_dir", str(traces)) as server:
        assert error_of(server.http.post("/stop_profile", json={}))["message"] == "profiling is not under way"
        bad = error_of(server.http.post("/start_profile", json={"profile_prefix": "../up"}))
        assert bad["param"] == "profile_prefix"
        plain = server.post(BASE | {"seed": 1}).json()["data"]
        assert server.http.post("/start_profile", json={"profile_prefix": "mine"}).json() == {"status": "started"}
        assert "under way" in error_of(server.http.post("/start_profile", json={}))["message"]
        for _ in range(2):  # the least busy replica, and then the other one
            assert server.post(BASE | {"seed": 1}).json()["data"] == plain
        files = server.http.post("/stop_profile", json={}).json()["files"]
        assert len(files) == 2 and {Path(file).parent for file in files} == {traces}
        assert all(Path(file).name.startswith("mine-") for file in files)
        names = {event.get("name") for file in files for event in json.loads(Path(file).read_text())["traceEvents"]}
        assert "aten::linear" in names
        assert server.http.post("/start_profile", json={}).json() == {"status": "started"}  # again
        assert len(server.http.post("/stop_profile", json={}).json()["files"]) == 2
