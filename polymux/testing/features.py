"""Makes `polymux/families/features.json`: `python -m polymux.testing.features > polymux/families/features.json`.

Makes every tiny checkpoint in a temporary folder, loads it, and looks.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from polymux.config import ModelConfig
from polymux.diffusion.pipeline_call import CallShape, declared_family, describe
from polymux.loading import load_pipeline
from polymux.testing.tiny import TINY, Ctx, make, names


def features_of_all(folder: Path) -> dict[str, tuple[str, ...]]:
    """By pipeline class. Checkpoints of one class have the same features, or it raises ValueError."""
    found: dict[str, tuple[str, ...]] = {}
    for name in (*names("diffusers"), *names("modular")):
        make(name, folder, Ctx())
        config = ModelConfig(model=str(folder / name))
        pipeline = load_pipeline(config, torch.device("cpu"), torch.float32, components=dict(TINY[name].load))
        family = declared_family(pipeline)
        described = describe(pipeline, family, CallShape.of(pipeline, family.modality))
        if found.setdefault(described.pipeline, described.features) != described.features:
            raise ValueError(f"{name}: {described.features}, and not {found[described.pipeline]}")
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = sorted(features_of_all(Path(folder)).items())
    print("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(features)}" for name, features in found) + "\n}")


if __name__ == "__main__":
    main()
