"""Prompts, pictures and sounds that the smoke calls share."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from polymux.testing import torchvision_cpu

PROMPT = "a photo of a cat on a red chair"
NEG = "low quality"
VIDEO: dict[str, Any] = dict(prompt=PROMPT, width=32, height=32, num_frames=5)


def picture(width: int = 64, height: int = 64, seed: int = 7) -> Image.Image:
    """An RGB picture of random 8 x 8 squares."""
    g = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 256, (height // 8, width // 8, 3), generator=g, dtype=torch.uint8)
    return Image.fromarray(coarse.repeat_interleave(8, 0).repeat_interleave(8, 1).numpy())


def tone(seconds: float, rate: int) -> npt.NDArray[np.float32]:
    """Two sines, mono, within -0.4..0.4; `rate` in samples per second."""
    t = torch.arange(int(seconds * rate), dtype=torch.float32) / rate
    wave = 0.3 * torch.sin(2 * math.pi * 220 * t) + 0.1 * torch.sin(2 * math.pi * 990 * t)
    return np.asarray(wave, dtype=np.float32)


@functools.cache
def have_torchvision() -> bool:
    """Whether torchvision can be imported; beside a CPU torch it is helped to."""
    torchvision_cpu.enable()
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # not there, or built for another torch
        return False
    return True
