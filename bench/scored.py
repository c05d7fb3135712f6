"""How often the demo model's pictures show what was asked for: the yardstick of settings that change what is computed.

Held-out prompts of training/, whose checker reads the pictures. For `bench/quality.py --scored`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.media.wire import from_wire
from polymux.request import Finished, OmniDiffusionSamplingParams, Request

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `training` is a part of the checkout, and not installed
from training.evaluate import GUIDANCE, STEPS, judge, prompts
from training.parse import Parser

KINDS = ("one", "two")
SIZE = (128, 128)
SEED = 40  # other prompts than those that training/ scores


def share_right(engine: DiffusionEngine, number: int, sampling: dict[str, Any]) -> dict[str, float]:
    """The share of `number` prompts of each kind that come out wholly right, all in flight together."""
    parser, found = Parser(), {}
    for kind in KINDS:
        asked = prompts(kind, SIZE, number, SEED)
        pictures = painted(engine, [text for _, text in asked], sampling)
        found[kind] = judge(parser, asked, pictures)["all"]
    return found


def painted(engine: DiffusionEngine, texts: list[str], sampling: dict[str, Any]) -> torch.Tensor:
    """(number, 3, height, width) in 0..1; the seed of each is its number."""
    width, height = SIZE
    usual = {"num_inference_steps": STEPS, "true_cfg_scale": GUIDANCE, "negative_prompt": " "}
    for number, text in enumerate(texts):
        params = OmniDiffusionSamplingParams(
            **{**usual, **sampling}, width=width, height=height, seed=number, output_type="np"
        )
        engine.add(Request(request_id=str(number), prompt=text, params=params))
    pictures: dict[int, np.ndarray[Any, Any]] = {}
    while engine.busy:
        for event in engine.step():
            if not isinstance(event, Finished):
                continue
            engine.taken(event.request_id)
            pictures[int(event.request_id)] = from_wire(event.outputs[0][0])
    arrays = [pictures[number].reshape(height, width, 3) for number in range(len(texts))]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float()
