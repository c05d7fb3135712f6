"""LoRA files: which file a path means, and what is in it.

Knows the layouts on disk (a safetensors file in any of the formats that diffusers converts, a folder with one, a PEFT
folder); whether the layers exist in a model is found out where it is put into one.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from polymux.errors import InvalidRequestError

DIFFUSERS_NAME = "pytorch_lora_weights.safetensors"
PEFT_NAME = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
# What a PEFT configuration may ask for and only holds its value for "no" here.
PEFT_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
}


@dataclass(frozen=True)
class LoRAFile:
    """One file as it was found. Equal if nothing on disk has changed."""

    path: Path  # real
    changed: int  # nanoseconds
    size: int  # bytes

    @property
    def is_peft(self) -> bool:
        return self.path.name == PEFT_NAME and (self.path.parent / PEFT_CONFIG).is_file()

    def keys(self) -> list[str]:
        """The names of its tensors. Raises InvalidRequestError."""
        try:
            with safe_open(self.path, "pt") as file:
                return list(file.keys())
        except (OSError, SafetensorError) as error:
            raise _unusable(self.path, f"not a whole safetensors file: {error}") from None

    def peft_state(self, component: str) -> dict[str, torch.Tensor]:
        """Of a PEFT folder, whose keys are a bare model's: as `component`'s, with alpha / rank multiplied into B."""
        config = _peft_config(self.path.parent / PEFT_CONFIG)
        state = {}
        for key, tensor in load_file(self.path).items():
            name = key.removeprefix(PEFT_PREFIX)
            if ".lora_B." in name:
                tensor = tensor * _peft_scale(config, name.partition(".lora_B.")[0], tensor.shape[1])
            state[f"{component}.{name}"] = tensor
        return state


def find_lora(path: str) -> LoRAFile:
    """The file that `path`, a file or a folder, means. Raises InvalidRequestError."""
    given = Path(path).expanduser()
    try:
        file = (_only_file(given) if given.is_dir() else given).resolve(strict=True)
        stat = file.stat()
    except (OSError, ValueError, RuntimeError) as error:
        raise _unusable(given, getattr(error, "strerror", None) or str(error)) from None
    if file.suffix != ".safetensors":
        raise _unusable(given, "must be a .safetensors file, or a folder with one; other formats can run code")
    return LoRAFile(file, stat.st_mtime_ns, stat.st_size)


def _only_file(folder: Path) -> Path:
    for name in (DIFFUSERS_NAME, PEFT_NAME):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise _unusable(folder, f"has {len(found)} safetensors files; name one")
    return found[0]


def _peft_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _unusable(path, f"not a JSON file: {error}") from None
    if not isinstance(config, dict):
        raise _unusable(path, "not a JSON object")
    for name, allowed in PEFT_PLAIN.items():
        if config.get(name, allowed[0]) not in allowed:
            raise _unusable(path, f"{name}={config[name]!r}: allowed is {allowed[0]!r}")
    return config


def _peft_scale(config: dict[str, Any], layer: str, rank: int) -> float:
    patterns = config.get("alpha_pattern") or {}
    own = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", layer))
    alpha = float(next(own, config.get("lora_alpha", rank)))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _unusable(path: Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"lora {path.name!r}: {why}", param="lora")
