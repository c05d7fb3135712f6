"""What `polymux deploy-config` prints can be loaded: of each kind of engine one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polymux.cli.main import main
from polymux.config import EngineConfig
from polymux.engine.engines import engine_for
from polymux.orchestrator.plan import plan_of

FLAGS = ("--output-chunk-bytes", "9000", "--no-warmup")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (None, ("--max-loras", "2", "--enable-cpu-offload")),
        ("sd3", ()),
        ("vits", ()),
        ("whisper", ()),
        ("qwen3-lm", ("--decoding", "paged", "--block-size", "8", "--kv-cache-memory-bytes", "1000000")),
        ("dia", ("--split-stages", "--max-num-seqs", "3")),
        ("janus", ()),
    ],
)
def test_what_is_printed_is_loaded(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str | None,
    flags: tuple[str, ...],
) -> None:
    model = "demo" if name is None else str(tiny_checkpoint(name))
    assert main(["deploy-config", model, "--device", "cpu", *FLAGS, *flags]) == 0
    file = tmp_path / "deploy.yaml"
    file.write_text(capsys.readouterr().out)
    plan = plan_of(EngineConfig.from_flat(model=model, deploy_config=str(file)))
    assert len(plan) == (2 if "--split-stages" in flags else 1)
    for stage in plan:
        engine = engine_for(stage.config)
        engine.close()
