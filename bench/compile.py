"""Compiled blocks against eager ones: seconds of a step, of the warm-up, and how much is compiled for several sizes.

    python bench/compile.py            one GPU: denoisers of Qwen-Image's and Wan-14B's size, random weights
    python bench/compile.py --only qwen-image      one of the two; the other is wan-14b
    python bench/compile.py --tiny     small, to see that it works; also on a CPU

steps: of one engine after the other, on the same weights: eager, compiled once for all sizes (the default), and, with
--automatic, with the sizes as torch decides. What is no step is taken out: it is the difference of runs with STEPS and
with 2 steps, over that of their numbers. "difference": of the latents from the eager ones, relative. "graphs": what was
compiled in the warm-up; then for two more sizes; then for two requests at once. warm-up: each in a process of its own,
with a denoiser of two blocks, which are compiled as sixty are: eager, with an empty cache and with a full one. Encoders
and autoencoders stay tiny. Prints Markdown tables row by row, and on stderr what is compiled; JSON goes to the folder
that OUT names.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from real_size import MODELS, make_changed
from report import Clock, Table, save
from torch._dynamo.utils import counters

from polymux import logs
from polymux.config import EngineConfig, LogConfig
from polymux.engine.device import resolve_device
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.loading import auto_dtype, load_pipeline
from polymux.media.wire import from_wire
from polymux.request import Failed, Finished, OmniDiffusionSamplingParams, Request

FEW = 2  # steps of the run that is taken off
PROMPT = "a lighthouse in a storm"
AUTOMATIC = "compiled, sizes as torch decides"
KINDS: dict[str, dict[str, Any]] = {  # of engines
    "eager": {"enforce_eager": True},
    "compiled": {"compilation_config": {"dynamic": True}},
    AUTOMATIC: {"compilation_config": {"dynamic": None}},
}


@dataclass(frozen=True)
class Model:
    """A denoiser of real size between tiny parts. `sizes`: the first one is measured."""

    name: str
    source: str  # in `real_size`
    sizes: tuple[dict[str, int], ...]
    guidance: dict[str, float]
    tiny_sizes: tuple[dict[str, int], ...]

    def make(self, folder: Path, tiny: bool, blocks: int | None = None) -> Path:
        checkpoint, configs = MODELS[self.source]
        denoiser = {k: v for k, v in configs["transformer"].items() if k != "joint_attention_dim"}
        if tiny:
            return make_changed(checkpoint, {}, folder)
        return make_changed(checkpoint, {"transformer": denoiser | ({"num_layers": blocks} if blocks else {})}, folder)


def _sizes(*sizes: tuple[int, ...]) -> tuple[dict[str, int], ...]:
    return tuple(dict(zip(("width", "height", "num_frames"), size, strict=False)) for size in sizes)


PICTURES = Model(
    "qwen-image", "qwen-image", _sizes((1024, 1024), (1024, 768), (512, 512)), {}, _sizes((64, 64), (64, 96), (32, 32))
)
VIDEOS = Model(
    "wan-14b",
    "wan-14b",
    _sizes((832, 480, 33), (480, 832, 17), (640, 352, 33)),
    {"guidance_scale": 1.0},
    _sizes((64, 64, 9), (64, 96, 5), (32, 32, 9)),
)


class Measured:
    """One engine."""

    def __init__(self, config: EngineConfig, pipeline: Any, device: torch.device, model: Model) -> None:
        self.engine, self.clock, self.model = DiffusionEngine(config, pipeline, device), Clock(device), model

    def run(self, size: dict[str, int], steps: int, requests: int = 1) -> list[torch.Tensor]:
        """The latents of so many at once."""
        params = OmniDiffusionSamplingParams(
            **size, **self.model.guidance, num_inference_steps=steps, output_type="latent", seed=1
        )
        for i in range(requests):
            self.engine.add(Request(request_id=f"{i}", prompt=PROMPT, params=replace(params, seed=i)))
        made = []
        while self.engine.busy:
            for event in self.engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Finished):
                    made.append(torch.tensor(from_wire(event.outputs[0][0])).float())
        return made

    def seconds_per_step(self, size: dict[str, int], steps: int, rounds: int) -> float:
        """Each length counts with its best round: what disturbs one only makes it longer."""
        self.run(size, FEW)
        best = {FEW: float("inf"), steps: float("inf")}
        for _ in range(rounds):
            for length in best:
                best[length] = min(best[length], self.clock.seconds(lambda: self.run(size, length)))  # noqa: B023
        return (best[steps] - best[FEW]) / (steps - FEW)

    def close(self) -> None:
        self.engine.close()
        torch._dynamo.reset()
        gc.collect()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def cache_of(model: Model, scratch: Path) -> Path:
    return scratch / f"cache-{model.name}"  # without spaces: inductor does not quote it for g++


def measure(model: Model, args: argparse.Namespace, scratch: Path, table: Table) -> None:
    device, folder = resolve_device("auto"), model.make(scratch, args.tiny)
    flat = {"model": str(folder), "load_format": "dummy", "max_batched_tokens": 1 << 20}
    config = EngineConfig.from_flat(**flat)
    pipeline = load_pipeline(config.model, device, auto_dtype("auto", device))
    sizes = model.tiny_sizes if args.tiny else model.sizes
    eager_seconds, eager_latents = float("nan"), torch.zeros(())
    for kind, knobs in KINDS.items():
        if kind == AUTOMATIC and not args.automatic:
            continue
        if "compilation_config" in knobs:
            compilation = knobs["compilation_config"] | {"cache_dir": str(cache_of(model, scratch))}
            knobs = {"compilation_config": compilation}
        measured, counts = Measured(EngineConfig.from_flat(**flat, **knobs), pipeline, device, model), [graphs()]
        measured.engine.warm_up()
        counts.append(graphs())
        seconds = measured.seconds_per_step(sizes[0], args.steps, args.rounds)
        (latents,) = measured.run(sizes[0], args.steps)
        for size in sizes[1:]:
            measured.run(size, FEW)
        counts.append(graphs())
        measured.run(sizes[-1], FEW, requests=2)
        counts.append(graphs())
        if kind == "eager":
            eager_seconds, eager_latents = seconds, latents
        table.add(
            model=model.name,
            blocks=kind,
            **{"s/step": seconds, "eager_/_this": eager_seconds / seconds},
            difference=float((latents - eager_latents).norm() / eager_latents.norm()),
            graphs=" + ".join(str(after - before) for before, after in pairwise(counts)),
        )
        measured.close()


def warm_up_seconds(folder: Path, cache: Path | None) -> float:
    """In this process; without a cache: eager."""
    flat: dict[str, Any] = {"model": str(folder), "load_format": "dummy"}
    knobs = {"compilation_config": {"cache_dir": str(cache)}} if cache else {"enforce_eager": True}
    engine = DiffusionEngine.load(EngineConfig.from_flat(**flat, **knobs))
    start = time.perf_counter()
    engine.warm_up()
    Clock(engine.device).sync()
    seconds = time.perf_counter() - start
    engine.close()
    return seconds


def in_process_of_its_own(*words: str) -> float:
    done = subprocess.run(
        [sys.executable, __file__, "--warm-up", *words], check=True, stdout=subprocess.PIPE, text=True
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=10, help=f"more than {FEW}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--automatic", action="store_true", help="also with the sizes as torch decides")
    parser.add_argument("--only", choices=(PICTURES.name, VIDEOS.name))
    parser.add_argument("--warm-up", nargs="+", metavar="FOLDER [CACHE]", help="what this script runs by itself")
    args = parser.parse_args(words)
    if args.steps <= FEW:
        parser.error(f"--steps {args.steps}: must be more than {FEW}")
    return args


def main() -> None:
    args = arguments()
    logs.configure(LogConfig())
    if args.warm_up:
        folder, *cache = map(Path, args.warm_up)
        print(json.dumps(warm_up_seconds(folder, cache[0] if cache else None)))
        return
    models = [model for model in (PICTURES, VIDEOS) if args.only in (None, model.name)]
    with tempfile.TemporaryDirectory() as scratch:
        warm = Table("warm-up", ("model", "eager s", "empty cache s", "full cache s"))
        for model in models:
            small = str(model.make(Path(scratch, "small"), args.tiny, blocks=2))
            cache = str(cache_of(model, Path(scratch)))
            eager, empty, full = (in_process_of_its_own(small, *rest) for rest in ((), (cache,), (cache,)))
            warm.add(model=model.name, eager_s=eager, empty_cache_s=empty, full_cache_s=full)
        steps = Table("steps", ("model", "blocks", "s/step", "eager / this", "difference", "graphs"))
        for model in models:
            measure(model, args, Path(scratch), steps)
    save("compile.json", [warm, steps], steps=args.steps)


if __name__ == "__main__":
    main()
