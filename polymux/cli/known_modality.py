"""What a model makes, told without loading it: by the class of its pipeline, where that is at hand.

Knows folders and class names, and opens no connection; a model on the hub tells when it is loaded.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from polymux.config import ModelConfig
from polymux.families import family_of, generate_family_of
from polymux.families.base import UNKNOWN
from polymux.families.pictures import PictureFamily
from polymux.request import Modality

DEMO = "demo"  # the embedded model
_INDEXES = ("model_index.json", "modular_model_index.json")


def known_modality(config: ModelConfig) -> Modality | None:
    """None: not known yet, or one of several. Whether the folder holds a model at all is for whoever loads it."""
    demo = config.model == DEMO
    folder = Path(str(resources.files("polymux") / "demo_model")) if demo else Path(config.model).expanduser()
    name = config.model_class_name or _class_in(folder)
    if name is None:
        other = generate_family_of(_model_class_in(folder))
        return None if other is None or isinstance(other, PictureFamily) else other.modality
    family = family_of(name)
    return None if family is UNKNOWN else family.modality


def _model_class_in(folder: Path) -> str:
    """Of transformers; "": it is none."""
    try:
        names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        return str(names[0])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _class_in(folder: Path) -> str | None:
    for index in _INDEXES:
        try:
            data = json.loads((folder / index).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        name = data.get("_class_name") if isinstance(data, dict) else None
        if isinstance(name, str):
            return name
    return None
