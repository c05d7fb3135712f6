"""The first-block cache on the embedded model: speed, and how far the pictures are from those without it.

    python bench/step_cache.py [--thresholds 0 0.3 0.5 1.0] [--steps 20] [--prompts 4] [--size 256]

The same requests, one after the other, in an engine without the cache and in one for each threshold, which take
turns; "ratio" is the time without the cache over that with it, of the better of two rounds each; on a CPU, of the
time that the process has had it. "left out" is the share of denoiser calls of which only the first block ran, PSNR is
that of the worst picture, in dB.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import numpy as np
from report import Table, save

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.media.wire import from_wire
from polymux.request import Event, Finished, OmniDiffusionSamplingParams, Request

PROMPTS = ("a red circle", "a blue square", "a green triangle", "a yellow star")
Array = np.ndarray[Any, Any]


def generate(engine: DiffusionEngine, prompt: str, steps: int, size: int) -> Array:
    params = OmniDiffusionSamplingParams(height=size, width=size, num_inference_steps=steps, seed=1, output_type="np")
    engine.add(Request(request_id="a", prompt=prompt, params=params))
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    last = events[-1]
    if not isinstance(last, Finished):
        raise RuntimeError(f"no picture: {last}")
    return from_wire(last.outputs[0][0])


def psnr(one: Array, other: Array) -> float:
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return math.inf if error == 0 else -10 * math.log10(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--thresholds", nargs="+", type=float, default=[0.0, 0.3, 0.5, 1.0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--size", type=int, default=256)
    args = parser.parse_args()
    engines: dict[float | None, DiffusionEngine] = {}
    for threshold in (None, *args.thresholds):
        cache = {} if threshold is None else {"cache_backend": "first_block", "cache_config": {"threshold": threshold}}
        engines[threshold] = DiffusionEngine.load(EngineConfig.from_flat(model=args.model, **cache))
        engines[threshold].warm_up()
    before = {t: engine.stats for t, engine in engines.items()}
    pictures: dict[float | None, list[Array]] = {}
    best = dict.fromkeys(engines, math.inf)
    clock = time.process_time if engines[None].device.type == "cpu" else time.perf_counter
    for _ in range(2):
        for threshold, engine in engines.items():
            start = clock()
            made = [generate(engine, prompt, args.steps, args.size) for prompt in PROMPTS[: args.prompts]]
            best[threshold], pictures[threshold] = min(best[threshold], clock() - start), made
    table = Table("First-block cache", ("threshold", "ratio", "left out", "PSNR"))
    for threshold in args.thresholds:
        now, then = engines[threshold].stats, before[threshold]
        asked, hits = (
            new["first_block"] - old["first_block"]
            for new, old in ((now.cache_queries, then.cache_queries), (now.cache_hits, then.cache_hits))
        )
        worst = min(psnr(got, want) for got, want in zip(pictures[threshold], pictures[None], strict=True))
        table.add(threshold=threshold, ratio=best[None] / best[threshold], left_out=hits / asked, PSNR=worst)
    save("step_cache.json", [table], steps=args.steps, size=args.size)


if __name__ == "__main__":
    main()
