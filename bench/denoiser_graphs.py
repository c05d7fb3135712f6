"""Calls of denoisers as CUDA graphs against plain ones: seconds of a step, of eager and of compiled blocks.

    python bench/denoiser_graphs.py            one GPU: the demo model, and SD 1.5's and PixArt's denoisers
    python bench/denoiser_graphs.py --only sd15        one of demo, sd15, pixart, large
    python bench/denoiser_graphs.py --tiny     small, to see that it works; also on a CPU, with a tape

"large": the denoiser of Z-Image (6 billion weights), which auto leaves alone; to see what it would gain.
For 1 and for 4 requests at a time, in one engine after the other, on the same weights, with guidance where a model has
it. What is no step is taken out: it is the difference of runs with STEPS and with 2 steps, over that of their numbers;
the best of the rounds counts. "plain / graphs": above 1 graphs are faster. "replayed": the share of the calls that may
be graphs. "recording": seconds of the first run with graphs over those of a later one. "difference": of the latents,
relative. All but the demo model has random weights. Encoders stay tiny. JSON goes to the folder that OUT names.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from real_size import MODELS, Config, make_changed
from report import GIB, Clock, Table, save

from polymux import logs
from polymux.compilation_config import Compilation
from polymux.config import EngineConfig, LogConfig
from polymux.diffusion.call_graphs import CallGraphs
from polymux.engine.device import resolve_device
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.loading import auto_dtype, load_pipeline
from polymux.media.wire import from_wire
from polymux.request import Failed, Finished, OmniDiffusionSamplingParams, Request
from polymux.testing.tape import TapeRecorder

FEW = 2  # steps of the run that is taken off
PROMPT = "a red circle"

SD15: dict[str, Config] = {
    "unet": {
        "block_out_channels": [320, 640, 1280, 1280], "layers_per_block": 2, "attention_head_dim": 8,
        "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
        "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
        "cross_attention_dim": 768, "norm_num_groups": 32, "sample_size": 64,
    },
    "text_encoder": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
}  # fmt: skip
PIXART: dict[str, Config] = {
    "transformer": {
        "num_attention_heads": 16, "attention_head_dim": 72, "cross_attention_dim": 1152, "num_layers": 28,
        "sample_size": 64,
    },
}  # fmt: skip
LARGE = {"transformer": {k: v for k, v in MODELS["z-image"][1]["transformer"].items() if k != "cap_feat_dim"}}


@dataclass(frozen=True)
class Model:
    """`configs`: changes to the tiny checkpoint `source`; None: the demo model."""

    name: str
    source: str
    configs: dict[str, Config] | None
    sizes: tuple[int, ...]
    params: dict[str, Any]

    def make(self, folder: Path, tiny: bool) -> dict[str, Any]:
        """Arguments of the engine's configuration."""
        if self.configs is None:
            return {"model": "demo"}
        made = make_changed(self.source, {} if tiny else self.configs, folder)
        return {"model": str(made), "load_format": "dummy"}


MODELS_HERE = (
    Model("demo", "", None, (128, 256), {"negative_prompt": " ", "true_cfg_scale": 3.0}),
    Model("sd15", "sd15", SD15, (512,), {}),
    Model("pixart", "pixart-sigma", PIXART, (512,), {"extra_args": {"use_resolution_binning": False}}),
    Model("large", "z-image", LARGE, (512,), {}),
)


class Measured:
    """One engine."""

    def __init__(self, config: EngineConfig, pipeline: Any, device: torch.device, params: dict[str, Any]) -> None:
        self.engine, self.clock, self.params = DiffusionEngine(config, pipeline, device), Clock(device), params
        if device.type == "cpu" and config.compilation.settings.cudagraphs is not False:
            denoisers = [c for c in self.engine.components if c.role == "denoiser"]
            self.graphs: CallGraphs | None = CallGraphs(Compilation(cudagraphs=True), denoisers, device, TapeRecorder())
            self.engine.runner.way = self.graphs
        else:
            self.graphs = self.engine.loaded.graphs

    def run(self, size: int, steps: int, requests: int) -> list[torch.Tensor]:
        """The latents of so many at once."""
        params = OmniDiffusionSamplingParams(
            width=size, height=size, num_inference_steps=steps, output_type="latent", **self.params
        )
        for i in range(requests):
            self.engine.add(Request(request_id=f"{i}", prompt=PROMPT, params=replace(params, seed=i)))
        made: dict[str, torch.Tensor] = {}
        while self.engine.busy:
            for event in self.engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Finished):
                    made[event.request_id] = torch.tensor(from_wire(event.outputs[0][0])).float()
        return [made[f"{i}"] for i in range(requests)]

    def measure(self, size: int, requests: int, args: argparse.Namespace) -> dict[str, Any]:
        """Seconds of a step, and what they were made of."""
        first = self.clock.seconds(lambda: self.run(size, args.steps, requests))
        self.run(size, args.steps, requests)  # what the first one has recorded is proven now
        before = (self.graphs.runs, self.graphs.replays) if self.graphs else (0, 0)
        best = {FEW: float("inf"), args.steps: float("inf")}
        for _, length in product(range(args.rounds), best):
            best[length] = min(best[length], self.clock.seconds(lambda: self.run(size, length, requests)))  # noqa: B023
        after = (self.graphs.runs, self.graphs.replays) if self.graphs else (0, 0)
        return {
            "latents": torch.stack(self.run(size, args.steps, requests)),
            "step": (best[args.steps] - best[FEW]) / (args.steps - FEW),
            "recording": first / best[args.steps],
            "replayed": (after[1] - before[1]) / max(after[0] - before[0], 1),
            "graphs": self.graphs.kept if self.graphs else 0,
            "held": self.graphs.held / GIB if self.graphs else 0.0,
        }

    def close(self) -> None:
        self.engine.close()
        torch._dynamo.reset()
        gc.collect()


def compare(model: Model, args: argparse.Namespace, scratch: Path, table: Table) -> None:
    device, flat = resolve_device("auto"), model.make(scratch, args.tiny)
    pipeline = load_pipeline(EngineConfig.from_flat(**flat).model, device, auto_dtype("auto", device))
    sizes = (64,) if args.tiny else model.sizes
    for blocks, given in kinds(device, args):
        found: dict[bool, dict[tuple[int, int], dict[str, Any]]] = {}
        for graphs in (False, True):
            config = given["compilation_config"] | (
                {"cudagraphs": graphs} if device.type == "cuda" or not graphs else {}
            )
            knobs = given | {"compilation_config": config or None}
            measured = Measured(EngineConfig.from_flat(**flat, **knobs), pipeline, device, model.params)
            measured.engine.warm_up()  # has blocks compiled
            found[graphs] = {at: measured.measure(*at, args) for at in product(sizes, args.requests)}
            measured.close()
        for (size, requests), ours in found[True].items():
            plain = found[False][size, requests]
            table.add(
                model=model.name, size=size, requests=requests, blocks=blocks,
                **{"plain_s/step": plain["step"], "graphs_s/step": ours["step"]},
                **{"plain_/_graphs": plain["step"] / ours["step"]},
                difference=float((ours["latents"] - plain["latents"]).norm() / plain["latents"].norm()),
                replayed=ours["replayed"], recording=ours["recording"], graphs=ours["graphs"], GiB=ours["held"],
            )  # fmt: skip


def kinds(device: torch.device, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """How blocks run."""
    yield "eager", {"compilation_config": {}, "enforce_eager": True}
    if device.type == "cuda" and not args.eager_only:
        yield "compiled", {"compilation_config": {"backend": "inductor"}}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=20, help=f"more than {FEW}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4], help="at a time")
    parser.add_argument("--eager-only", action="store_true", help="not with compiled blocks, which take minutes")
    parser.add_argument("--only", choices=[model.name for model in MODELS_HERE])
    args = parser.parse_args(words)
    if args.steps <= FEW:
        parser.error(f"--steps {args.steps}: must be more than {FEW}")
    return args


def main() -> None:
    args = arguments()
    logs.configure(LogConfig())
    columns = ("model", "size", "requests", "blocks", "plain s/step", "graphs s/step", "plain / graphs", "difference")
    table = Table("steps", (*columns, "replayed", "recording", "graphs", "GiB"))
    models = [model for model in MODELS_HERE if args.only in (None, model.name)]
    for model in models:
        with tempfile.TemporaryDirectory() as scratch:
            compare(model, args, Path(scratch), table)
    save("denoiser_graphs.json", [table], steps=args.steps)


if __name__ == "__main__":
    main()
