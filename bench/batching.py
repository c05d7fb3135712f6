"""Continuous batching against the bare diffusers pipeline, in one run on one device.

    python bench/batching.py [--models qwen-image z-image] [--sizes 256 512 1024] [--steps 20] [--flight 1 4 8]

Models of real size with random weights. Each request has a prompt, a seed and a step count of its own (STEPS, STEPS+1,
STEPS+2, ...). "sequential" is the bare pipeline, one request after the other; "engine" is the same requests all at once
through polymux. "bound" is what the denoiser alone could give: its bare forward on batches of all that is unfinished at
a step, against single forwards. With --tiny the models are tiny: to see that the script works.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from real_size import make_model

from polymux.config import EngineConfig
from polymux.engine.device import resolve_device
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.loading import auto_dtype, load_pipeline
from polymux.request import Failed, OmniDiffusionSamplingParams, Request
from polymux.testing.tiny import make

SUBJECTS = (
    "a cat",
    "two dogs",
    "a red bicycle",
    "an old lighthouse",
    "a bowl of fruit",
    "a steam train",
    "a fox",
    "a map",
)
PLACES = ("on a chair", "at night in the rain", "by the sea", "in a library full of books", "on the moon")


def prompts(count: int) -> list[str]:
    return [f"a photo of {SUBJECTS[i % len(SUBJECTS)]} {PLACES[i % len(PLACES)]}" for i in range(count)]


class Model:
    """One pipeline, run bare and through the engine."""

    def __init__(self, name: str, folder: Path, tiny: bool, guided: bool) -> None:
        self.name, self.guided = name, guided
        path = make(name, folder) if tiny else make_model(name, folder)
        self.config = EngineConfig.from_flat(model=str(path), load_format="auto" if tiny else "dummy")
        self.device = resolve_device("auto")
        dtype = auto_dtype("auto", self.device)
        self.pipeline: Any = load_pipeline(self.config.model, self.device, dtype)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], None]) -> float:
        self.sync()
        start = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - start

    def guidance(self) -> dict[str, Any]:
        if self.name.startswith("qwen"):
            return {"negative_prompt": "blurry", "true_cfg_scale": 4.0} if self.guided else {}
        return {"guidance_scale": 4.0 if self.guided else 0.0}

    def bare(self, count: int, size: int, steps: int) -> None:
        for i, prompt in enumerate(prompts(count)):
            self.pipeline(
                prompt=prompt, height=size, width=size, num_inference_steps=steps + i % 3,
                generator=torch.Generator().manual_seed(i), **self.guidance(),
            )  # fmt: skip

    def engine(self, count: int, size: int, steps: int, budget: int) -> None:
        knobs = {"max_num_seqs": 8, "max_batched_tokens": budget, "enforce_eager": True}
        engine = DiffusionEngine(
            EngineConfig.from_flat(model=self.config.model.model, **knobs), self.pipeline, self.device
        )
        for i, prompt in enumerate(prompts(count)):
            params = OmniDiffusionSamplingParams(
                height=size, width=size, num_inference_steps=steps + i % 3, seed=i, **self.guidance()
            )
            engine.add(Request(request_id=str(i), prompt=prompt, params=params))
        while engine.busy:
            for event in engine.step():
                if isinstance(event, Failed):
                    raise RuntimeError(event.error.message)
        self.calls = {k: (engine.stats.calls[k], engine.stats.merged[k]) for k in engine.stats.calls}
        engine.close()

    def bound(self, count: int, size: int, steps: int) -> float:
        """How many times as fast the bare denoiser is when everything that is unfinished at a step is one batch."""
        wanted = [steps + i % 3 for i in range(count)]
        active = [sum(w > step for w in wanted) for step in range(max(wanted))]
        seconds = self.forward_seconds(size, sorted({1, *active}))
        return seconds[1] * sum(wanted) / sum(min(seconds[k], k * seconds[1]) for k in active)

    def forward_seconds(self, size: int, batches: list[int], runs: int = 5) -> dict[int, float]:
        """Of one bare forward of the denoiser, by batch size."""
        taken: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        denoiser = self.pipeline.transformer

        def spy(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken.append((args, kwargs))

        hook = denoiser.register_forward_pre_hook(spy, with_kwargs=True)
        self.pipeline(prompt=prompts(1)[0], height=size, width=size, num_inference_steps=2, **self.guidance())
        hook.remove()
        args, kwargs = taken[0]
        seconds = {}
        for batch in batches:
            wide_args, wide_kwargs = _repeat(args, batch), {k: _repeat(v, batch) for k, v in kwargs.items()}
            with torch.no_grad():
                seconds[batch] = min(self.seconds(lambda: denoiser(*wide_args, **wide_kwargs)) for _ in range(runs))  # noqa: B023
        return seconds


def _repeat(value: Any, count: int) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        return torch.cat([value] * count)
    if isinstance(value, list):
        return value * count
    return tuple(_repeat(v, count) for v in value) if isinstance(value, tuple) else value


def measure(model: Model, size: int, steps: int, count: int, budget: int) -> dict[str, Any]:
    """Both ways, taking turns; of each the best time, since what disturbs a run only makes it longer."""
    model.bare(1, size, 2)
    model.engine(count, size, 2, budget)  # kernels for the shapes of merged calls are chosen once
    bare, engine = [], []
    for _ in range(5 if count == 1 else 2):
        bare.append(model.seconds(lambda: model.bare(count, size, steps)))
        engine.append(model.seconds(lambda: model.engine(count, size, steps, budget)))
    ratio = min(bare) / min(engine)
    bound = model.bound(count, size, steps) if count > 1 else 1.0
    row = {
        "model": model.name, "guided": model.guided, "size": size, "steps": steps, "in_flight": count,
        "sequential_s": [round(s, 3) for s in bare], "engine_s": [round(s, 3) for s in engine],
        "ratio": round(ratio, 3), "bound": round(bound, 3), "of_bound": round(ratio / bound, 3), "calls": model.calls,
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen-image", "z-image"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[256, 512, 1024])
    parser.add_argument("--flight", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--budget", type=int, default=8192, help="latent tokens per merged call")
    parser.add_argument("--guided", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            model = Model(name, Path(folder), args.tiny, args.guided)
            for size in args.sizes:
                rows += [measure(model, size, args.steps, count, args.budget) for count in args.flight]
            del model
    print("\n| model | guided | size | in flight | engine / sequential | bound | of bound |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            "| {model} | {guided} | {size}² | {in_flight} | {ratio:.2f}× | {bound:.2f}× | {of_bound:.0%} |".format(**r)
        )
    if out := os.environ.get("OUT"):
        Path(out, "batching.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
