"""What all stages of a training run share: the device, the log, the clock, curves."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image, ImageDraw

Curves = dict[str, list[tuple[int, float]]]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class Run:
    """`out` receives results. `compiled` turns torch.compile on, `graphs` CUDA graphs."""

    out: Path
    device: torch.device
    seed: int
    compiled: bool = False
    graphs: bool = False
    profiled: bool = False
    started: float = field(default_factory=time.monotonic)
    curves: Curves = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

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

    def reseed(self, stage: int) -> None:
        """Each stage draws from the device's default generator, the one that CUDA graphs know."""
        torch.manual_seed(self.seed * 7919 + stage)

    def compile(self, function: Function, dynamic: bool | None = None) -> Function:
        if not self.compiled:
            return function
        compiled: Function = torch.compile(function, dynamic=dynamic)
        return compiled

    def probe(self) -> None:
        """Turns compilation off, loudly, where a small function with a gradient cannot be compiled."""
        if not self.compiled:
            return
        x = torch.randn(64, 64, device=self.device, requires_grad=True)
        try:
            torch.compile(lambda t: torch.nn.functional.silu(t * 2).sum())(x).backward()
        except Exception as error:  # any failure of the compilers beneath means the same: do without
            self.compiled = False
            self.trouble(f"NO COMPILATION, everything runs eagerly: {type(error).__name__}: {str(error)[:300]}")
        else:
            self.log("torch.compile works")

    def profile(self, name: str, step: Callable[[], Any]) -> None:
        """How long a step takes and where the device's time goes, into the log; only when asked for."""
        if not self.profiled or self.device.type != "cuda":
            return
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(40):
            step()
        torch.cuda.synchronize()
        self.step_seconds[name] = (time.monotonic() - began) / 40
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                step()
            torch.cuda.synchronize()
        kernels = sorted(profile.key_averages(), key=lambda k: -k.self_device_time_total)
        whole = sum(k.self_device_time_total for k in kernels)
        lines = [f"{k.self_device_time_total / 5000:8.3f} ms {k.count // 5:5d} x {k.key[:90]}" for k in kernels[:18]]
        told = f"{name}: {self.step_seconds[name] * 1000:.2f} ms a step, of which kernels {whole / 5000:.2f} ms"
        self.log("\n".join([told, *lines]))

    def trouble(self, text: str) -> None:
        self.log(text)
        self.troubles.append(text)

    def write_curves(self) -> None:
        draw_curves(self.curves, self.out / "curves.png")


@dataclass
class Pace:
    """How far a stage is: by steps where their number is given (repeatable), else by the clock.

    The rate warms up, stays level and decays at the end: the level part may be of any length, so that a run can go on
    from an earlier one's weights.
    """

    seconds: float
    steps: int = 0
    step: int = 0
    began: float = field(default_factory=time.monotonic)

    def restart(self) -> None:
        """The time so far, spent on compilation, does not count."""
        self.began = time.monotonic()

    def spent(self) -> float:
        return time.monotonic() - self.began

    def progress(self) -> float:
        return self.step / self.steps if self.steps else self.spent() / max(self.seconds, 1e-9)

    def rate(self, peak: float, warmup: int = 200, decay_from: float = 0.6) -> float:
        """Learning rate: a linear start, level, then a cosine down to a hundredth."""
        late = min(max((self.progress() - decay_from) / (1 - decay_from), 0.0), 1.0)
        fall = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * late))
        return peak * min(1.0, (self.step + 1) / warmup) * fall

    def __iter__(self) -> Iterator[int]:
        while self.progress() < 1.0:
            yield self.step
            self.step += 1


def draw_curves(curves: Curves, path: Path) -> None:
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
