"""One rank against several, in one run: seconds per denoising step, and the memory of the device.

    python bench/parallel.py [--model wan-14b] [--ranks 2] [--modes cfg ulysses ...] [--steps 4] [--size 832x480]

Models of real size with random weights (`--model wan-tiny`: to see that the script works, on a CPU, too). Each way of
using the ranks is a model of its own, started anew; its time per step is the difference of two requests of different
step counts, so that encoding and decoding do not count. "vs one" is the time of one rank divided by it: 2 is all that
two ranks can give. Every request is guided, and alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from real_size import MODELS, make_model
from report import GIB, Table, save

from polymux import Omni, OmniDiffusionSamplingParams

FEW, RUNS = 2, 3
MODES: dict[str, tuple[str, ...]] = {  # the knobs that get the number of ranks, and switches
    "cfg": ("cfg_parallel_size",),
    "ulysses": ("ulysses_degree",),
    "ring": ("ring_degree",),
    "tensor": ("tensor_parallel_size",),
    "cfg, hsdp": ("cfg_parallel_size", "use_hsdp"),
    "ulysses, vae": ("ulysses_degree", "vae_patch_parallel_size"),
}


def settings(mode: str, ranks: int) -> dict[str, Any]:
    return {name: True if name.startswith("use_") else ranks for name in MODES[mode]}


def asked(arguments: argparse.Namespace, steps: int) -> OmniDiffusionSamplingParams:
    width, height = map(int, arguments.size.split("x"))
    wan = arguments.model.startswith("wan")
    guidance: dict[str, Any] = {"true_cfg_scale": 4.0} if "qwen" in arguments.model else {"guidance_scale": 5.0}
    frames = {"num_frames": arguments.frames} if wan else {}
    return OmniDiffusionSamplingParams(
        width=width, height=height, num_inference_steps=steps, seed=1, negative_prompt="blurry", **guidance, **frames
    )


def measured(arguments: argparse.Namespace, model: Path, flat: dict[str, Any]) -> dict[str, float]:
    begin = time.perf_counter()
    with Omni(str(model), load_format="dummy", **flat) as omni:
        ready = time.perf_counter() - begin

        def seconds(steps: int) -> float:
            start = time.perf_counter()
            omni.generate("a red bicycle by the sea", asked(arguments, steps))
            return time.perf_counter() - start

        many = FEW + arguments.steps
        seconds(FEW)
        best = {steps: min(seconds(steps) for _ in range(RUNS)) for steps in (FEW, many)}
        memory = gauge(omni, "polymux:device_memory_bytes")
    return {
        "step": (best[many] - best[FEW]) / arguments.steps,
        "request": best[many],
        "device_GiB": memory / GIB,
        "ready": ready,
    }


def gauge(omni: Omni, name: str) -> float:
    families = text_string_to_metric_families(omni.metrics.render().decode())
    return max((sample.value for family in families for sample in family.samples if sample.name == name), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wan-14b", choices=sorted(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--steps", type=int, default=4, help="that are measured")
    parser.add_argument("--size", default="832x480")
    parser.add_argument("--frames", type=int, default=33)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(arguments.model, Path(folder))
        title = f"{arguments.model}, {arguments.size}, guided, {arguments.ranks} ranks"
        table = Table(title, ("mode", "step", "vs one", "request", "device GiB", "ready"))
        one = measured(arguments, model, {})
        table.add(mode="one rank", vs_one=1.0, **one)
        for mode in arguments.modes:
            row = measured(arguments, model, settings(mode, arguments.ranks))
            table.add(mode=mode, vs_one=one["step"] / row["step"], **row)
        save("parallel.json", [table], model=arguments.model, ranks=arguments.ranks)


if __name__ == "__main__":
    main()
