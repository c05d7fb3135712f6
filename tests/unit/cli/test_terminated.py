"""A command that is terminated while it writes a file takes what it has written with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polymux.cli import main as command
from polymux.cli import models
from polymux.media.video import VideoSpec, VideoWriter


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_half_a_video_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.mp4"

    def written(_: object) -> int:
        with VideoWriter(target, VideoSpec(width=16, height=16, fps=8)) as writer:
            while not target.exists():  # the encoder looks ahead
                writer.add_frames(np.zeros((1, 16, 16, 3), np.uint8))
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):
                writer.add_frames(np.zeros((1, 16, 16, 3), np.uint8))
        return 0

    monkeypatch.setattr(models, "run", written)
    with pytest.raises(SystemExit) as ended:
        command.main(["models"])
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == []
