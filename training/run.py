"""What all stages of a training run share: the device, the log, the clock, checkpoints, curves."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

State = dict[str, Any]


@dataclass
class Run:
    """`out` receives results, `work` checkpoints. `compiled` turns torch.compile on."""

    out: Path
    work: Path
    device: torch.device
    seed: int
    compiled: bool
    started: float = field(default_factory=time.monotonic)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def log(self, text: str) -> None:
        line = f"[{self.elapsed():6.1f}s] {text}"
        print(line, flush=True)
        with (self.out / "log.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def note(self, curve: str, step: int, value: float) -> None:
        self.curves.setdefault(curve, []).append((step, round(value, 6)))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 on CUDA; fp32 on the CPU, where bf16 is slow."""
        if self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()

    def generator(self, offset: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed * 7919 + offset)

    def save(self, name: str, state: State) -> None:
        """A checkpoint, complete or not there at all."""
        path = self.work / f"{name}.pt"
        torch.save({**state, "curves": self.curves}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self, name: str) -> State | None:
        path = self.work / f"{name}.pt"
        if not path.exists():
            return None
        state: State = torch.load(path, map_location=self.device, weights_only=True)
        self.curves = state.pop("curves")
        return state

    def write_curves(self) -> None:
        (self.out / "curves.json").write_text(json.dumps(self.curves), encoding="utf-8")
        draw_curves(self.curves, self.out / "curves.png")


@dataclass
class Pace:
    """How far a stage is: by steps where their number is given (repeatable), else by the clock."""

    seconds: float
    steps: int = 0
    step: int = 0
    before: float = 0.0  # seconds spent before a resume
    began: float = field(default_factory=time.monotonic)

    def spent(self) -> float:
        return self.before + time.monotonic() - self.began

    def progress(self) -> float:
        return self.step / self.steps if self.steps else self.spent() / max(self.seconds, 1e-9)

    def rate(self, peak: float, warmup: int = 200, decay_from: float = 0.5) -> float:
        """Learning rate: a linear start, level, then a cosine down to a fiftieth."""
        late = min(max((self.progress() - decay_from) / (1 - decay_from), 0.0), 1.0)
        fall = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * late))
        return peak * min(1.0, (self.step + 1) / warmup) * fall

    def __iter__(self) -> Iterator[int]:
        while self.progress() < 1.0:
            yield self.step
            self.step += 1


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def adamw(parameters: Iterable[torch.nn.Parameter], device: torch.device, decay: float = 0.0) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        list(parameters), lr=0.0, betas=(0.9, 0.98), eps=1e-8, weight_decay=decay, fused=device.type == "cuda"
    )


def draw_curves(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """One panel per curve, the value on a logarithmic axis."""
    width, height = 640, 160
    sheet = Image.new("RGB", (width, height * max(1, len(curves))), "white")
    draw = ImageDraw.Draw(sheet)
    for k, (name, points) in enumerate(curves.items()):
        steps = [s for s, _ in points]
        values = [math.log10(max(v, 1e-6)) for _, v in points]
        low, high = min(values), max(values)
        x_scale = (width - 20) / max(1, steps[-1] - steps[0])
        y_scale = (height - 50) / max(1e-6, high - low)
        line = [
            (10 + (s - steps[0]) * x_scale, k * height + 35 + (high - v) * y_scale)
            for s, v in zip(steps, values, strict=True)
        ]
        draw.line(line if len(line) > 1 else line * 2, fill=(40, 80, 210))
        draw.text((10, k * height + 8), f"{name}: {10**high:.4g} .. {10**low:.4g}, {steps[-1]} steps", fill="black")
    sheet.save(path)


def sheet(pictures: torch.Tensor, path: Path, columns: int) -> None:
    """(number, 3, height, width) in 0..1 as one PNG."""
    n, _, h, w = pictures.shape
    rows = -(-n // columns)
    canvas = Image.new("RGB", (columns * (w + 2), rows * (h + 2)), "white")
    values = (pictures.detach().float().cpu().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    for i in range(n):
        canvas.paste(Image.fromarray(values[i]), ((i % columns) * (w + 2), (i // columns) * (h + 2)))
    canvas.save(path)
