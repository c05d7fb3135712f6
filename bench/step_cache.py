"""Caches of denoising steps: speed, and how far the pictures are from those without one.

    python bench/step_cache.py [--model demo] [--backends first_block mag_cache ...] [--steps 20] [--prompts 4]
        [--size 256] [--rounds 2]
    python bench/step_cache.py --model qwen-image --size 1024 --prompts 1 --rounds 1   # of real size, on a GPU

The same requests, one after the other, in engines of one loaded pipeline: without a cache, and with each backend at
each of its settings, which take turns. "ratio" is the time without over that with it, of the best of the rounds; on a
CPU, of the time that the process has had. "left out" is the share of the denoiser's calls that were shortened; PSNR is
that of the worst picture, in dB. What has to be measured of a checkpoint beforehand is measured first, in this run.

Models of `real_size` have random weights: there the ratio tells what a setting gains at the share that is left out, and
PSNR tells nothing of a trained model.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_size import MODELS, make_model
from report import Table, save

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.loading import auto_dtype, load_pipeline
from polymux.media.wire import from_wire
from polymux.request import Event, Finished, OmniDiffusionSamplingParams, Request

PROMPTS = ("a red circle", "a blue square", "a green triangle", "a yellow star")
Array = np.ndarray[Any, Any]
Settings = dict[str, Any]

EVERYWHERE = {"spatial_attention_timestep_skip_range": [0, 1001]}
CURVES: dict[str, list[Settings]] = {
    "first_block": [{"threshold": t} for t in (0.0, 0.1, 0.3, 1.0)],
    "mag_cache": [{"mag_threshold": t} for t in (0.06, 0.24, 1.0)],
    "tea_cache": [{"rel_l1_thresh": t} for t in (0.1, 0.3, 1.0)],
    "taylorseer": [{"cache_interval": n} for n in (2, 3, 5)],
    "pab": [{"spatial_attention_block_skip_range": n} | EVERYWHERE for n in (2, 4)],
    "cache_dit": [{"residual_diff_threshold": t} for t in (0.1, 0.24, 0.8)],
}
MEASURE: dict[str, Settings] = {"mag_cache": {"mag_calibrate": True}, "tea_cache": {"calibrate": True}}


@dataclass
class Bench:
    """A loaded pipeline and the requests. Engines come and go."""

    pipeline: Any
    device: torch.device
    prompts: tuple[str, ...]
    steps: int
    size: int

    def run(self, backend: str, settings: Settings) -> tuple[float, list[Array], float]:
        """Seconds, pictures, and the share of calls that were shortened."""
        cache = {} if backend == "none" else {"cache_backend": backend, "cache_config": settings}
        flat = EngineConfig.from_flat(model="bench", prompt_cache_gib=0, max_num_seqs=1, enforce_eager=True, **cache)
        engine = DiffusionEngine(flat, self.pipeline, self.device)
        self._generate(engine, "warm up", 2)
        before = engine.stats
        clock = time.process_time if self.device.type == "cpu" else time.perf_counter
        start = clock()
        pictures = [self._generate(engine, prompt, self.steps) for prompt in self.prompts]
        seconds, now = clock() - start, engine.stats
        engine.close()
        asked = now.cache_queries.get(backend, 0) - before.cache_queries.get(backend, 0)
        hits = now.cache_hits.get(backend, 0) - before.cache_hits.get(backend, 0)
        return seconds, pictures, hits / asked if asked else 0.0

    def _generate(self, engine: DiffusionEngine, prompt: str, steps: int) -> Array:
        params = OmniDiffusionSamplingParams(
            height=self.size, width=self.size, num_inference_steps=steps, seed=1, output_type="np"
        )
        engine.add(Request(request_id="a", prompt=prompt, params=params))
        events: list[Event] = []
        while engine.busy:
            events += engine.step()
        last = events[-1]
        if not isinstance(last, Finished):
            raise RuntimeError(f"no picture: {last}")
        return from_wire(last.outputs[0][0])

    def measured(self, backend: str) -> Settings:
        """What the backend has to know of the checkpoint: its log says it."""
        if backend not in MEASURE:
            return {}
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("polymux.diffusion")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        self.run(backend, MEASURE[backend])
        log.removeHandler(handler)
        (*_, last) = [line for line in said if "measured" in line]
        found: Settings = json.loads(last.partition("--cache-config '")[2].rstrip("'"))
        return found


def psnr(one: Array, other: Array) -> float:
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return math.inf if error == 0 else -10 * math.log10(error)


def load(model: str, device: torch.device) -> Any:
    dtype = auto_dtype("auto", device)
    if model not in MODELS:
        return load_pipeline(EngineConfig.from_flat(model=model).model, device, dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(model, Path(folder))
        return load_pipeline(EngineConfig.from_flat(model=str(path), load_format="dummy").model, device, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="a checkpoint, or one of " + ", ".join(MODELS))
    parser.add_argument("--backends", nargs="+", choices=tuple(CURVES), default=list(CURVES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(load(args.model, device), device, PROMPTS[: args.prompts], args.steps, args.size)
    variants: list[tuple[str, Settings, Settings]] = [("none", {}, {})]
    for backend in args.backends:
        known = bench.measured(backend)
        variants += [(backend, settings, known) for settings in CURVES[backend]]
    best = [math.inf] * len(variants)
    results: list[tuple[list[Array], float]] = []
    for _ in range(args.rounds):
        results = []
        for index, (backend, settings, known) in enumerate(variants):
            seconds, pictures, share = bench.run(backend, settings | known)
            best[index] = min(best[index], seconds)
            results.append((pictures, share))
    table = Table(f"Caches of steps, {args.model}", ("backend", "setting", "ratio", "left out", "PSNR"))
    for index, (backend, settings, _) in enumerate(variants[1:], 1):
        worst = min(psnr(got, want) for got, want in zip(results[index][0], results[0][0], strict=True))
        setting = ", ".join(f"{key} {value}" for key, value in settings.items() if key not in EVERYWHERE)
        ratio = best[0] / best[index]
        table.add(backend=backend, setting=setting, ratio=ratio, left_out=results[index][1], PSNR=worst)
    save("step_cache.json", [table], model=args.model, steps=args.steps, size=args.size)


if __name__ == "__main__":
    main()
