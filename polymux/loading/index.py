"""What a checkpoint says it is made of: model_index.json, or modular_model_index.json.

Reads the file and nothing else; whether the classes exist and the weights are there is for others to find out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polymux.errors import CheckpointError

CLASSIC_INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"


@dataclass(frozen=True)
class ComponentEntry:
    """One component. `library` and `class_name` are None if the checkpoint leaves it empty. `subfolder` is where its
    files are; `source` is another repository or folder that may hold them (modular checkpoints)."""

    name: str
    library: str | None
    class_name: str | None
    subfolder: str
    source: str | None = None


@dataclass(frozen=True)
class PipelineIndex:
    """`class_module` names a file in the checkpoint that defines the pipeline's class: code of its own."""

    file: Path
    modular: bool
    class_name: str
    class_module: str | None
    components: Mapping[str, ComponentEntry]
    values: Mapping[str, object]


def read_json(file: Path) -> dict[str, object]:
    """A JSON object. Raises CheckpointError that names the file."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return data


def read_index(folder: Path, *, prefer_modular: bool = False) -> PipelineIndex:
    """The checkpoint's index; if it has both kinds, the classic one unless told otherwise."""
    order = [CLASSIC_INDEX, MODULAR_INDEX]
    if prefer_modular:
        order.reverse()
    for name in order:
        if (folder / name).is_file():
            return parse_index(folder / name)
    raise CheckpointError(f"{folder}: not a diffusers checkpoint: it holds neither {CLASSIC_INDEX} nor {MODULAR_INDEX}")


def parse_index(file: Path) -> PipelineIndex:
    data = read_json(file)
    modular = file.name == MODULAR_INDEX
    module, class_name = _class_of(file, data.get("_class_name"))
    components: dict[str, ComponentEntry] = {}
    values: dict[str, object] = {}
    for name, value in data.items():
        if name.startswith("_"):
            continue
        entry = _component(name, value, modular)
        if entry is None:
            values[name] = value
        else:
            components[name] = entry
    return PipelineIndex(file, modular, class_name, module, components, values)


def _class_of(file: Path, value: object) -> tuple[str | None, str]:
    match value:
        case str():
            return None, value
        case [str() as module, str() as name]:
            return module, name
    raise CheckpointError(f"{file}: _class_name is {value!r}: it must name the pipeline's class")


def _component(name: str, value: object, modular: bool) -> ComponentEntry | None:
    """A component, or None if the value is a plain setting of the pipeline."""
    match value:
        case [None, None] if not modular:
            return ComponentEntry(name, None, None, name)
        case [str() as library, str() as class_name] if not modular:
            return ComponentEntry(name, library, class_name, name)
        case [str() | None as library, str() | None as class_name, {**spec}] if modular:
            hint = spec.get("type_hint")
            if library is None and isinstance(hint, list) and len(hint) == 2:
                library, class_name = hint
            source = spec.get("pretrained_model_name_or_path") or spec.get("repo")
            subfolder = spec.get("subfolder")
            return ComponentEntry(
                name,
                library,
                class_name,
                subfolder if isinstance(subfolder, str) else name,
                source if isinstance(source, str) else None,
            )
    return None
