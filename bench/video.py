"""Videos: a step against bare diffusers, four jobs against four times one, and frames between frames.

    python bench/video.py            one GPU: Wan-14B's size at 480x832x33, random weights
    python bench/video.py --tiny     small, to see that it works; also on a CPU

steps: seconds per denoising step of the bare pipeline and of the engine, in the same process with the same weights,
taking turns. What is no step (the prompt, the start) is taken out: it is the difference of runs with STEPS and with 2
steps, over that of their numbers. jobs: through a stage process and an encoder into files, as the server runs them;
"overlap" is the time of four jobs one after the other, over that of four at once with one place in flight: what is more
than 1 is output and encoding of one job during the computing of the next. between: frames that are put between two of
the size, by a network of the released layout's size. Prints Markdown tables; JSON goes to the folder that OUT names.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from async_output import JOBS, file_seconds
from real_size import make_model
from report import Clock, Table, save

from polymux.config import EngineConfig
from polymux.engine.device import resolve_device
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.interpolation.frames import Smoothing
from polymux.interpolation.network import Layout
from polymux.loading import auto_dtype, load_pipeline
from polymux.request import Failed, OmniDiffusionSamplingParams, Request
from polymux.testing.flow_network import TINY, random_network

FEW = 2  # steps of the run that is taken off
PROMPT = "a lighthouse in a storm"
RELEASED = Layout(encoder=16, features=4, widths=(192, 128, 64, 32))


@dataclass(frozen=True)
class Settings:
    tiny: bool
    params: OmniDiffusionSamplingParams
    rounds: int

    @property
    def steps(self) -> int:
        assert self.params.num_inference_steps is not None
        return self.params.num_inference_steps


class Paths:
    """One pipeline, bare and in an engine. Both stop before the frames are decoded."""

    def __init__(self, config: EngineConfig, settings: Settings) -> None:
        device = resolve_device("auto")
        self.clock, self.settings = Clock(device), settings
        self.pipeline: Any = load_pipeline(config.model, device, auto_dtype("auto", device))
        self.engine = DiffusionEngine(config, self.pipeline, device)

    def bare(self, steps: int) -> torch.Tensor:
        """Outside a request, a component's own code runs."""
        params = self.settings.params
        result = self.pipeline(
            prompt=PROMPT, height=params.height, width=params.width, num_frames=params.num_frames,
            num_inference_steps=steps, guidance_scale=params.guidance_scale, output_type="latent",
            generator=torch.Generator().manual_seed(1),
        )  # fmt: skip
        latents: torch.Tensor = result.frames
        return latents

    def engines(self, steps: int) -> None:
        params = replace(self.settings.params, num_inference_steps=steps, output_type="latent")
        self.engine.add(Request(request_id="steps", prompt=PROMPT, params=params))
        while self.engine.busy:
            for event in self.engine.step():
                assert not isinstance(event, Failed), event

    def seconds_per_step(self) -> list[float]:
        """Of both. Each run counts with its best round: what disturbs one only makes it longer."""
        both, lengths = (self.bare, self.engines), (FEW, self.settings.steps)
        for path in both:
            path(FEW)  # what is chosen or compiled once
        best = {(path, steps): float("inf") for path in both for steps in lengths}
        for _ in range(self.settings.rounds):
            for path, steps in best:
                best[path, steps] = min(best[path, steps], self.clock.seconds(lambda: path(steps)))  # noqa: B023
        few, many = lengths
        return [(best[path, many] - best[path, few]) / (many - few) for path in both]

    def close(self) -> None:
        self.engine.close()
        del self.engine, self.pipeline
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def between_seconds(settings: Settings) -> float:
    """Seconds of one frame between two."""
    device = resolve_device("auto")
    network = random_network(TINY if settings.tiny else RELEASED).to(device)
    smoothing, params = Smoothing(network, 2, 1.0), settings.params
    assert params.height is not None and params.width is not None
    frames = torch.rand(2, 3, params.height, params.width, device=device)
    smoothing.rows(frames, 1, 2, channels_first=True)
    return Clock(device).seconds(lambda: smoothing.rows(frames, 1, 2, channels_first=True), runs=5)


def arguments() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=10, help=f"more than {FEW}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--guidance-scale", type=float, default=1.0, help="above 1: two calls a step")
    parser.add_argument("--size", help="WIDTHxHEIGHTxFRAMES")
    args = parser.parse_args()
    if args.steps <= FEW:
        parser.error(f"--steps {args.steps}: must be more than {FEW}")
    width, height, frames = map(int, (args.size or ("128x128x17" if args.tiny else "832x480x33")).split("x"))
    params = OmniDiffusionSamplingParams(
        width=width,
        height=height,
        num_frames=frames,
        num_inference_steps=args.steps,
        guidance_scale=args.guidance_scale,
        seed=1,
    )
    return Settings(args.tiny, params, args.rounds)


def main() -> None:
    settings = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model("wan-tiny" if settings.tiny else "wan-14b", Path(scratch))
        config = EngineConfig.from_flat(
            model=str(model),
            load_format="dummy",
            max_num_seqs=1,
            enforce_eager=True,
            output_chunk_bytes=2**16 if settings.tiny else 8 * 2**20,
        )
        steps = Table("steps", ("bare s/step", "engine s/step", "engine / bare"))
        paths = Paths(config, settings)
        bare, engine = paths.seconds_per_step()
        paths.close()
        steps.add(**{"bare_s/step": bare, "engine_s/step": engine, "engine_/_bare": engine / bare})
        jobs = Table("jobs", ("jobs", "one after the other s", "at once s", "overlap"))
        alone, together = asyncio.run(file_seconds(config, settings.params, Path(scratch)))
        jobs.add(jobs=JOBS, one_after_the_other_s=alone, at_once_s=together, overlap=alone / together)
        between = Table("between", ("frame s",))
        between.add(frame_s=between_seconds(settings))
        asked = settings.params
        size = f"{asked.width}x{asked.height}x{asked.num_frames}"
        save("video.json", [steps, jobs, between], size=size, steps=settings.steps, guidance_scale=asked.guidance_scale)


if __name__ == "__main__":
    main()
