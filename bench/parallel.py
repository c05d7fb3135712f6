"""One GPU against several, in one run: seconds per step, of decoding, and of four jobs; memory of a device.

    python bench/parallel.py                         everything, on 2 GPUs
    python bench/parallel.py --parts video           on one pair of GPUs (CUDA_VISIBLE_DEVICES), and
    python bench/parallel.py --parts image jobs bare on another one
    python bench/parallel.py --tiny                  small, to see that it works; also on a CPU

video: Wan-14B's size at 832x480x33, guided: sequence, guidance, and tiles of the autoencoder; sharded weights against
guidance alone. image: Qwen-Image at 1024x1024, guided: layers. jobs: four videos at once on one replica and on two.
bare: one forward of the same denoisers, divided by diffusers' own means (`parallel_bare.py`).

Models have random weights. Each way of using the ranks is a model of its own, started anew, and one that fails is
reported and left out. The time of a step is the difference of two requests of different step counts, so that what is
no step does not count. "vs" is the time of one rank over that of several: 2 is all that two can give. Prints Markdown
tables; JSON goes to the folder that OUT names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from real_size import make_model
from report import GIB, Table, save

from polymux import Omni, OmniDiffusionSamplingParams

PARTS = ("video", "image", "jobs", "bare")
FEW, RUNS, JOBS = 2, 2, 4
COLUMNS = ("mode", "step", "vs", "decode", "vs decode", "GiB after", "GiB peak", "ready")
PATIENCE: dict[str, Any] = {"stage_init_timeout": 180.0, "stage_hang_timeout": 90.0}  # a mode that hangs is left out
PROMPT = "a red bicycle by the sea"
Knobs = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What is asked of a model. `steps` are those that are measured."""

    model: str
    size: str
    steps: int
    guidance: Knobs
    more: Knobs = field(default_factory=dict)

    def params(self, steps: int) -> OmniDiffusionSamplingParams:
        width, height = map(int, self.size.split("x"))
        asked = self.guidance | self.more
        return OmniDiffusionSamplingParams(
            width=width, height=height, num_inference_steps=steps, seed=1, negative_prompt="blurry", **asked
        )


def works(tiny: bool) -> tuple[Work, Work]:
    """Video and image."""
    guided: Knobs = {"guidance_scale": 5.0}
    video = Work("wan-14b", "832x480", 2, guided, {"num_frames": 33})
    image = Work("qwen-image", "1024x1024", 6, {"true_cfg_scale": 4.0})
    if tiny:
        video = Work("wan-tiny", "64x64", 2, guided, {"num_frames": 5})
        image = Work("qwen-tiny", "64x64", 2, {"true_cfg_scale": 4.0})
    return video, image


def modes(part: str, ranks: int) -> dict[str, Knobs]:
    """The first is what the others are compared with."""
    if part == "image":
        return {"one": {}, "tensor": {"tensor_parallel_size": ranks}, "ulysses": {"ulysses_degree": ranks}}
    return {
        "one": {},
        "ulysses, vae": {"ulysses_degree": ranks, "vae_patch_parallel_size": ranks},
        "cfg": {"cfg_parallel_size": ranks},
        "ring": {"ring_degree": ranks},
        "cfg, hsdp": {"cfg_parallel_size": ranks, "use_hsdp": True},
        "one, tiled": {"vae_use_tiling": True},
    }


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Model:
    """A started model, and the seconds that it took."""

    def __init__(self, path: Path, knobs: Knobs) -> None:
        begin = time.perf_counter()
        self.omni = Omni(str(path), load_format="dummy", **PATIENCE, **knobs)
        self.ready = time.perf_counter() - begin

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.omni.close()

    def seconds(self, work: Work, steps: int, jobs: int = 1) -> tuple[float, float]:
        """Of so many requests at once, and of the decoding of one."""
        start = time.perf_counter()
        outputs = self.omni.generate([PROMPT] * jobs, work.params(steps))
        took = time.perf_counter() - start
        for output in outputs:
            if output.error is not None:
                raise output.error
        return took, outputs[0].metrics.decode

    def memory(self, kind: str) -> float:
        families = text_string_to_metric_families(self.omni.metrics.render().decode())
        found = [s for f in families for s in f.samples if s.name == "polymux:device_memory_bytes"]
        return max((s.value for s in found if s.labels["kind"] == kind), default=0.0) / GIB


def measured(path: Path, work: Work, knobs: Knobs) -> dict[str, float]:
    with Model(path, knobs) as model:
        say(f"ready after {model.ready:.1f} s")
        many = FEW + work.steps
        model.seconds(work, FEW)
        times = {steps: [model.seconds(work, steps) for _ in range(runs)] for steps, runs in ((FEW, 1), (many, RUNS))}
        best = {steps: min(took for took, _ in runs) for steps, runs in times.items()}
        return {
            "step": (best[many] - best[FEW]) / work.steps,
            "decode": min(decode for runs in times.values() for _, decode in runs),
            "GiB_after": model.memory("allocated"),
            "GiB_peak": model.memory("peak"),
            "ready": model.ready,
        }


def compare(part: str, work: Work, path: Path, arguments: argparse.Namespace) -> Table:
    """All modes of a part."""
    table = Table(f"{work.model}, {work.size}, guided, {arguments.ranks} ranks", COLUMNS)
    one: dict[str, float] | None = None
    for mode, knobs in modes(part, arguments.ranks).items():
        if one is not None and arguments.modes and mode not in arguments.modes:
            continue
        say(f"{part}: {mode}")
        try:
            row = measured(path, work, knobs)
        except Exception:  # one mode less; the others are of use all the same
            traceback.print_exc()
            table.add(mode=f"{mode}: failed")
            continue
        one = one or row
        table.add(mode=mode, vs=one["step"] / row["step"], vs_decode=_over(one["decode"], row["decode"]), **row)
    return table


def ratios(table: Table) -> Table:
    """What the rows say of each other."""
    rows = {row["mode"]: row for row in table.rows}
    found = Table(f"{table.title}: of each other", ("what", "ratio"))
    pairs = (
        ("sharded weights: time of a step, over that of guidance alone", "cfg, hsdp", "cfg", "step"),
        ("sharded weights: memory after a request, over that of guidance alone", "cfg, hsdp", "cfg", "GiB after"),
        ("tiles: time of one rank, over that of all", "one, tiled", "ulysses, vae", "decode"),
    )
    for what, over, under, column in pairs:
        if over in rows and under in rows:
            found.add(what=what, ratio=_over(rows[over][column], rows[under][column]))
    return found


def jobs(work: Work, path: Path, ranks: int) -> Table:
    """Requests at once, on one replica and on as many as there are GPUs."""
    table = Table(f"{work.model}, {work.size}: {JOBS} jobs of {work.steps} steps", ("replicas", "seconds", "vs"))
    one: float | None = None
    for replicas in (1, ranks):
        say(f"jobs: {replicas} replicas")
        try:
            with Model(path, {"data_parallel_size": replicas, "max_num_seqs": 1 + JOBS}) as model:
                say(f"ready after {model.ready:.1f} s")
                model.seconds(work, FEW, replicas)
                took, _ = model.seconds(work, work.steps, JOBS)
        except Exception:
            traceback.print_exc()
            table.add(replicas=f"{replicas}: failed")
            continue
        one = took if replicas == 1 else one
        table.add(replicas=replicas, seconds=took, vs=None if one is None else one / took)
    return table


def bare(arguments: argparse.Namespace) -> None:
    """In a process of its own, which prints its table."""
    words = [sys.executable, str(Path(__file__).with_name("parallel_bare.py")), "--ranks", str(arguments.ranks)]
    say("bare")
    try:
        subprocess.run(words + (["--tiny"] if arguments.tiny else []), timeout=240, check=True)
    except subprocess.SubprocessError:
        traceback.print_exc()


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--modes", nargs="+", help="of the parts video and image; that of one rank is always run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    video, image = works(arguments.tiny)
    tables: list[Table] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.parts:
            if part == "bare":
                bare(arguments)
                continue
            work = image if part == "image" else video
            path = make_model(work.model, Path(folder, part))
            if part == "jobs":
                tables.append(jobs(work, path, arguments.ranks))
            else:
                tables.append(compare(part, work, path, arguments))
                if part == "video":
                    tables.append(ratios(tables[-1]))
            save(f"parallel_{'_'.join(arguments.parts)}.json", tables, ranks=arguments.ranks)
    say("done")


if __name__ == "__main__":
    main()
