"""Score a saved pipeline on held-out prompts: `python -m training.evaluate --model DIR --out DIR`.

The judge is `parse.py`, which is scored first on rendered pictures of the same scenes: its own accuracy is the most a
model could reach. Prompts are wordings of held-out scenes (`Scene.held_out`), which training never saw.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers as D
import torch
from torch import Tensor

from training import captions, components, export
from training.parse import Parser
from training.render import render_scenes
from training.run import sheet
from training.scenes import CANVASES, Scene, sample
from training.score import rates, score

STEPS = 16
GUIDANCE = 3.0
SHOWN = (
    "a large red circle in the center on a white background",
    "a blue striped square on a cream background",
    "two green triangles on a light blue background",
    "a yellow star to the left of a purple heart on a dark blue background",
    "a red square above a green circle on a white background",
    "three orange rings on black",
    "a pink letter A on a dark green background",
    "four cyan diamonds on a lavender background",
    "a small black cross in the top left corner on a light green background",
    "a big checkered purple circle on a background that fades from white to light blue",
    "an orange triangle below a blue diamond",
    "a red heart, a yellow star and a green square on black",
    "Blue circle, top right, cream background",
    "a white ring in the bottom right corner on a dark blue background",
    "a brown dotted heart on a cream background",
    "two red letters X on a light blue background",
)
Paint = Callable[[list[str], tuple[int, int], float, int], Tensor]


def prompts(
    kind: str, size: tuple[int, int], number: int, seed: int, fits: Callable[[str], bool] | None = None
) -> list[tuple[Scene, str]]:
    """Held-out scenes of one kind with a wording each; never-together pairs only if the kind is `novel`."""
    rng = random.Random(f"{seed}/{kind}/{size}")
    found: list[tuple[Scene, str]] = []
    while len(found) < number:
        scene = sample(rng, size, "one" if kind == "novel" else kind, held_out=True)
        if scene.novel == (kind == "novel"):
            text = captions.caption(scene, rng)
            if fits is None or fits(text):
                found.append((scene, text))
    return found


def painter(pipe: D.QwenImagePipeline, steps: int, batch: int) -> Paint:
    """Prompts to pictures (number, 3, height, width) in 0..1, by the pipeline's own call."""

    def paint(texts: list[str], size: tuple[int, int], guidance: float, seed: int) -> Tensor:
        done = []
        for begin in range(0, len(texts), batch):
            part = texts[begin : begin + batch]
            generators = [torch.Generator().manual_seed(seed + begin + i) for i in range(len(part))]
            result = pipe(
                part,
                negative_prompt=[" "] * len(part) if guidance > 1 else None,
                true_cfg_scale=guidance,
                width=size[0],
                height=size[1],
                num_inference_steps=steps,
                generator=generators,
                output_type="pt",
            )
            done.append(result.images.float().cpu())
        return torch.cat(done)

    return paint


def judge(parser: Parser, asked: list[tuple[Scene, str]], pictures: Tensor) -> dict[str, float]:
    return rates([score(s, pieces) for (s, _), pieces in zip(asked, parser(pictures), strict=True)])


def checker(parser: Parser, number: int, seed: int) -> dict[str, dict[str, float]]:
    """The judge on rendered pictures with a little noise, per kind of scene."""
    found = {}
    for kind in ("one", "two", "many", "three"):
        asked = prompts(kind, CANVASES[0], number, seed + 1)
        noise = torch.randn(number, 3, *CANVASES[0], generator=torch.Generator().manual_seed(seed)) * 0.02
        found[kind] = judge(parser, asked, render_scenes([s for s, _ in asked]) + noise)
    return found


@dataclass(frozen=True)
class Setting:
    """How pictures are made for scoring: `number` prompts of each kind, `batch` at a time."""

    number: int
    batch: int
    steps: int = STEPS
    guidance: float = GUIDANCE


def evaluate(
    pipe: D.QwenImagePipeline, setting: Setting, log: Callable[[str], None]
) -> tuple[dict[str, Any], list[Tensor]]:
    """All scores, and pictures to look at: those of SHOWN and of the first held-out prompts of each kind."""
    number, guidance, seed = setting.number, setting.guidance, 20
    parser, paint = Parser(), painter(pipe, setting.steps, setting.batch)
    report: dict[str, Any] = asdict(setting)
    report["checker on rendered scenes"] = checker(parser, number, seed)
    shown = [paint(list(SHOWN), CANVASES[0], guidance, 1)]
    sets = [(kind, CANVASES[0]) for kind in ("one", "two", "many", "three", "novel")]
    for kind, size in [*sets, ("one", CANVASES[1]), ("one", CANVASES[2]), ("two", CANVASES[1]), ("two", CANVASES[2])]:
        asked = prompts(kind, size, number, seed)
        pictures = paint([text for _, text in asked], size, guidance, 1000)
        report[f"{kind} {size[0]}x{size[1]}"] = scores = judge(parser, asked, pictures)
        log(f"{kind} {size[0]}x{size[1]}: {scores}")
        if size == CANVASES[0]:
            shown.append(pictures[:8])
    return report, shown


def sweep(pipe: D.QwenImagePipeline, number: int, batch: int) -> dict[str, float]:
    """The share of two-thing prompts that come out wholly right, by steps and guidance."""
    parser, found = Parser(), {}
    asked = prompts("two", CANVASES[0], number, 30)
    for steps, guidance in ((16, 1.0), (16, 2.0), (16, 3.0), (16, 4.0), (16, 6.0), (8, 3.0), (24, 3.0)):
        pictures = painter(pipe, steps, batch)([text for _, text in asked], CANVASES[0], guidance, 1000)
        found[f"{steps} steps, guidance {guidance}"] = judge(parser, asked, pictures)["all"]
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--number", type=int, default=200, help="prompts of each kind")
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--guidance", type=float, default=GUIDANCE)
    arguments.add_argument("--batch", type=int, default=50)
    arguments.add_argument("--device", default="cpu")
    args = arguments.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pipe = export.load(args.model, args.device)
    painter(pipe, args.steps, 1)([SHOWN[0]], CANVASES[0], args.guidance, 0)
    began = time.monotonic()
    painter(pipe, args.steps, 1)([SHOWN[0]], CANVASES[0], args.guidance, 0)
    report = {"seconds per picture": round(time.monotonic() - began, 2), "threads": torch.get_num_threads()}
    setting = Setting(args.number, args.batch, args.steps, args.guidance)
    scores, pictures = evaluate(pipe, setting, lambda text: print(text, flush=True))
    sheet(torch.cat(pictures), args.out / "sheet.png", 8)
    report |= scores
    report["bytes"] = components.size_in_bytes(args.model)
    (args.out / "metrics.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
