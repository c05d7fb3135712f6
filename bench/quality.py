"""What a setting costs in quality, and what it gains in memory and time: the same seeds with and without it.

    python bench/quality.py [--model demo] [--settings SETTING ...] [--steps 20] [--prompts 4] [--size 256] [--dummy]
    python bench/quality.py --real-size qwen-image --size 1024 --steps 10 --prompts 1

A setting is a method of quantization (fp8, int8, int4, nf4, fp4) or a JSON object with any of `Omni`'s arguments, such
as '{"diffusion_quantization_config": {"transformer": {"method": "int8", "activation_scheme": "dynamic"}}}'. The plain
engine runs first, then one engine for each setting, with the same requests one after the other, in two rounds. Its key
"sampling" holds fields of a request instead, such as '{"sampling": {"num_inference_steps": 8}}'. --scored N: also how
many of N held-out prompts of the demo model come out wholly right, of one thing and of two, by training's checker.

PSNR in dB and SSIM are of the worst output. "weights" are the bytes of all components, "peak" is the device memory that
was in use at most while they ran; "ratio" is the plain engine's seconds over the setting's, of the better round; on a
CPU, of the time that the process has had it. LPIPS is left out: no package ships all the weights that it needs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_size import MODELS, make_model
from report import Clock, Table, save
from scored import KINDS, share_right
from torch.nn import functional as F

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.media.wire import from_wire
from polymux.request import Event, Finished, OmniDiffusionSamplingParams, Request

PROMPTS = ("a red circle", "a blue square", "a green triangle", "a yellow star")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Result:
    outputs: list[Array]
    seconds: float
    weights: float  # MiB
    peak: float  # MiB
    quantized: dict[str, str]
    right: dict[str, float]  # the share of held-out prompts, by kind


def generate(engine: DiffusionEngine, prompt: str, args: argparse.Namespace, sampling: dict[str, Any]) -> Array:
    sizes = {"height": args.size, "width": args.size} if args.size else {}
    frames = {"num_frames": args.frames} if args.frames else {}
    asked = {"num_inference_steps": args.steps, **sizes, **frames, **sampling}
    params = OmniDiffusionSamplingParams(seed=1, output_type="np", **asked)
    engine.add(Request(request_id="a", prompt=prompt, params=params))
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
        engine.taken("a")
    last = events[-1]
    if not isinstance(last, Finished):
        raise RuntimeError(f"no output: {last}")
    return from_wire(last.outputs[0][0])


def measure(settings: dict[str, Any], args: argparse.Namespace) -> Result:
    """All requests in an engine of its own, which is gone afterwards."""
    load = {"load_format": "dummy"} if args.dummy else {}
    sampling = settings.pop("sampling", {})
    engine = DiffusionEngine.load(EngineConfig.from_flat(model=args.model, warmup=False, **load, **settings))
    clock = Clock(engine.device)
    now = time.process_time if engine.device.type == "cpu" else time.perf_counter
    generate(engine, PROMPTS[0], args, sampling)  # warms up
    clock.reset_peak()
    best, outputs = math.inf, []
    for _ in range(2):
        clock.sync()
        start = now()
        outputs = [generate(engine, prompt, args, sampling) for prompt in PROMPTS[: args.prompts]]
        clock.sync()
        best = min(best, now() - start)
    tensors = {id(t): t.nbytes for c in engine.components for t in (*c.module.parameters(), *c.module.buffers())}
    peak, quantized = clock.peak * 2**10, dict(engine.described.quantized)
    right = share_right(engine, args.scored, sampling) if args.scored else {}
    result = Result(outputs, best, sum(tensors.values()) / 2**20, peak, quantized, right)
    engine.close()
    del engine
    gc.collect()
    return result


def psnr(one: Array, other: Array) -> float:
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return math.inf if error == 0 else -10 * math.log10(error)


def ssim(one: Array, other: Array) -> float:
    """Mean structural similarity of pictures (..., height, width, channels) from 0 to 1: Gaussian windows of 11 pixels
    and deviation 1.5, as Wang, Bovik, Sheikh and Simoncelli define it (2004)."""
    x, y = (torch.from_numpy(np.moveaxis(a.astype(np.float64), -1, -3).copy()).flatten(0, -3) for a in (one, other))
    steps = torch.arange(11, dtype=torch.float64) - 5
    line = torch.exp(-(steps**2) / (2 * 1.5**2))
    window = torch.outer(line, line)[None, None] / line.sum() ** 2

    def mean(planes: torch.Tensor) -> torch.Tensor:
        return F.conv2d(planes[:, None], window)

    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    values = ((2 * mx * my + c1) * (2 * cov + c2)) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return float(values.mean())


def settings_of(text: str) -> dict[str, Any]:
    value = json.loads(text) if text.startswith("{") else {"quantization": text}
    assert isinstance(value, dict)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--settings", nargs="+", default=["fp8", "int8", "int4", "nf4"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4, choices=range(1, 5))
    parser.add_argument("--size", type=int, default=256, help="0: the pipeline's own")
    parser.add_argument("--frames", type=int, default=0, help="of a video; 0: the pipeline's own")
    parser.add_argument("--scored", type=int, default=0, help="held-out prompts of each kind, for the demo model")
    parser.add_argument("--dummy", action="store_true", help="random weights: memory and time are those of the model")
    parser.add_argument(
        "--real-size", choices=sorted(MODELS), help="in place of a model: its size, with random weights"
    )
    args = parser.parse_args()
    if args.scored < 0 or (args.scored and (args.model != "demo" or args.dummy or args.real_size)):
        parser.error("--scored: how many prompts of the demo model, with its own weights; no other knows them")
    with tempfile.TemporaryDirectory() as folder:
        if args.real_size is not None:
            args.model, args.dummy = str(make_model(args.real_size, Path(folder))), True
        compare(args)


def compare(args: argparse.Namespace) -> None:
    plain = measure({}, args)
    columns = ("setting", "what runs", "PSNR", "SSIM", "weights MiB", "peak MiB", "ratio")
    table = Table("Quality", (*columns, *(KINDS if args.scored else ())))
    table.add(setting="plain", weights_MiB=plain.weights, peak_MiB=plain.peak, ratio=1.0, **plain.right)
    for text in args.settings:
        made = measure(settings_of(text), args)
        pairs = list(zip(made.outputs, plain.outputs, strict=True))
        pictures = plain.outputs[0].ndim >= 3 and min(plain.outputs[0].shape[-3:-1]) >= 11
        table.add(
            setting=text,
            what_runs="; ".join(f"{name}: {how}" for name, how in made.quantized.items()),
            PSNR=min(psnr(*pair) for pair in pairs),
            SSIM=min(ssim(*pair) for pair in pairs) if pictures else None,
            weights_MiB=made.weights,
            peak_MiB=made.peak,
            ratio=plain.seconds / made.seconds,
            **made.right,
        )
    save("quality.json", [table], model=args.real_size or args.model, steps=args.steps, size=args.size)


if __name__ == "__main__":
    main()
