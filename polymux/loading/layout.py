"""What a folder of transformers is: the class that its config.json names, and the family that declares it.

A checkpoint of diffusers has an index in place of that. Reads one small file, and no weights.
"""

from __future__ import annotations

from pathlib import Path

from polymux.errors import CheckpointError
from polymux.families import all_generate_families, generate_family_of
from polymux.families.generate import GenerateFamily
from polymux.loading.index import CLASSIC_INDEX, MODULAR_INDEX, read_json

CONFIG = "config.json"


def model_class_in(folder: Path) -> str | None:
    """The class that a folder of transformers names; None: it is none, or one of diffusers."""
    if any((folder / index).is_file() for index in (CLASSIC_INDEX, MODULAR_INDEX)) or not (folder / CONFIG).is_file():
        return None
    names = read_json(folder / CONFIG).get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def declared_model(folder: Path, who: str) -> tuple[str, GenerateFamily]:
    """The class and its family. Raises CheckpointError if there is none of them that is served."""
    name = model_class_in(folder)
    if name is None:
        what = f"it holds neither {CLASSIC_INDEX} nor {MODULAR_INDEX}"
        raise CheckpointError(f"{who}: not a checkpoint: {what}, and its {CONFIG} names no class (architectures)")
    family = generate_family_of(name)
    if family is None:
        known = ", ".join(model for f in all_generate_families() for model in f.models)
        raise CheckpointError(f"{who}: {name} is not served; of transformers, these are: {known}")
    return name, family
