"""The reference: diffusers' own call, with the same checkpoint, seed and arguments."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import diffusers as D
import numpy as np
import torch
from PIL import Image

from polymux.prompts import request_of
from polymux.request import OmniDiffusionSamplingParams, Request

Arrays = list[np.ndarray[Any, np.dtype[Any]]]
OUTPUTS = ("images", "image", "frames", "videos", "audios", "audio", "sound")
NAMES = {"frame_rate": "fps"} | dict.fromkeys(("audio_end_in_s", "audio_duration", "audio_duration_s"), "seconds")
FIELDS = {f.name for f in dataclasses.fields(OmniDiffusionSamplingParams)}


def takes_steps(pipeline: Any) -> bool:
    if isinstance(pipeline, D.ModularPipeline):
        return "num_inference_steps" in {p.name for p in pipeline.blocks.inputs}
    return "num_inference_steps" in inspect.signature(type(pipeline).__call__).parameters


def reference(pipeline: Any, call: Mapping[str, Any], seed: int, output_type: str = "np") -> Arrays:
    """Every output as float arrays. The default generator is seeded too: some solvers draw from it."""
    own = copy.copy(pipeline)
    for name, part in list(vars(pipeline).items()):
        if isinstance(part, D.SchedulerMixin) or "guider" in name:
            setattr(own, name, copy.deepcopy(part))
    arguments = {k: list(v) if isinstance(v, list) else v for k, v in call.items()}
    arguments["generator"] = torch.Generator().manual_seed(seed)
    if isinstance(pipeline, D.ModularPipeline):
        names = [n for n in OUTPUTS if n in {p.name for p in pipeline.blocks.outputs}]
        arguments["output"] = names
    if (
        isinstance(pipeline, D.ModularPipeline)
        or "output_type" in inspect.signature(type(pipeline).__call__).parameters
    ):
        arguments["output_type"] = output_type
    torch.manual_seed(seed)
    with torch.no_grad():
        result = own(**arguments)
    found = [value for n in OUTPUTS if (value := result.get(n)) is not None]
    return [array for value in found for array in _leaves(value)]


def _leaves(value: Any) -> Arrays:
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in _leaves(item)]
    return [np.asarray(value.float() if isinstance(value, torch.Tensor) else value, dtype=np.float32)]


def request(call: Mapping[str, Any], request_id: str, seed: int, output_type: str = "np", n: int = 1) -> Request:
    """The same call as a request."""
    call = {NAMES.get(k, k): v for k, v in call.items()}
    media = {k: v for k, v in call.items() if _is_media(v)}
    fields = {k: v for k, v in call.items() if k in FIELDS}
    apart = {"prompt", "max_area", *FIELDS, *media}  # the area follows from height and width
    rest = {k: v for k, v in call.items() if k not in apart}
    params = OmniDiffusionSamplingParams(
        **fields, seed=seed, output_type=output_type, num_outputs_per_prompt=n, extra_args=rest
    )
    return request_of({"prompt": call["prompt"], "multi_modal_data": media}, params, request_id)


def _is_media(value: Any) -> bool:
    return isinstance(value, Image.Image) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], Image.Image)
    )


def distance(got: Arrays, wanted: Arrays) -> float:
    """The largest difference, relative to the largest magnitude where that exceeds one (sound of random weights)."""
    assert len(got) == len(wanted)
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        a, b = a.astype(np.float32).squeeze(), b.squeeze()
        assert a.shape == b.shape
        worst = max(worst, float(np.abs(a - b).max()) / max(1.0, float(np.abs(b).max())))
    return worst
