"""A language model inside a pipeline that writes what no picture can be made of: an error of the request, in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.request import Failed, Finished, OmniDiffusionSamplingParams, Request

CODES = 32  # tokens of pictures


def test_a_picture_without_its_tokens(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("glm-image"), folder)
    file = folder / "vision_language_encoder" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": list(range(CODES))}))
    engine = DiffusionEngine.load(EngineConfig.from_flat(model=str(folder)))
    try:
        params = OmniDiffusionSamplingParams(height=64, width=64, num_inference_steps=1, seed=1)
        engine.add(Request(request_id="a", prompt="a cat", params=params))
        ends = []
        while engine.busy:
            ends += [event for event in engine.step() if isinstance(event, (Failed, Finished))]
    finally:
        engine.close()
    (end,) = ends
    assert isinstance(end, Failed) and end.error.kind == "UnusableOutputError", end
    assert "came to an end before it had written all tokens" in end.error.message
    assert end.error.message.endswith(": another seed may help")
