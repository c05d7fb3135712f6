"""A modular pipeline: which parts its blocks ask for, where they lie, and how they become a ModularPipeline.

diffusers builds the pipeline without its components; they are made like those of any other pipeline and then
registered. (Its own `load_components` only warns when one fails.) Knows no weights and no devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers

from polymux.errors import CheckpointError
from polymux.loading.component import Part
from polymux.loading.diffusers_classes import component_class
from polymux.loading.index import PipelineIndex, read_json
from polymux.loading.libraries import reading
from polymux.loading.options import LoadOptions

# Repository, revision, subfolder -> the folder that holds the repository.
Fetch = Callable[[str, str | None, str], Path]


class ModularPlan:
    """The parts of a modular pipeline, and what to do with them once they are made."""

    def __init__(self, cls: type[Any], index: PipelineIndex, options: LoadOptions, fetch: Fetch) -> None:
        self._index = index
        self._fetch = fetch
        root = str(index.file.parent)
        with reading(f"{index.file}: {cls.__name__}"):
            if index.modular or cls is diffusers.ModularPipeline:
                trust = options.flags.trust_remote_code
                self._pipeline = cls.from_pretrained(root, trust_remote_code=trust, local_files_only=True)
            else:  # `from_pretrained` would choose a class of its own by the classic index
                self._pipeline = cls(pretrained_model_name_or_path=root, local_files_only=True)
        self.class_name = type(self._pipeline).__name__
        components = set(self._pipeline.component_names)
        values = {name for name in self._pipeline.config if not name.startswith("_") and name not in components}
        options.check_names(components | values, type(self._pipeline).__name__)
        self._given_components = {n: v for n, v in options.given.items() if n in components}
        self._given_values = {n: v for n, v in options.given.items() if n in values}
        wanted = [n for n in self._pipeline.pretrained_component_names if n not in self._given_components]
        self.parts = [part for name in wanted if (part := self._part(name)) is not None]

    def assemble(self, made: Mapping[str, object]) -> diffusers.ModularPipeline:
        with reading(f"{self._index.file}: {type(self._pipeline).__name__}"):
            self._pipeline.register_components(**made, **self._given_components)
            self._pipeline.update_components(**self._given_values)
        return self._pipeline

    def _part(self, name: str) -> Part | None:
        """A component, or None if neither the checkpoint nor the blocks say where one could come from."""
        spec = self._pipeline.get_component_spec(name)
        subfolder = spec.subfolder or name
        folder = self._index.file.parent / subfolder
        if not folder.is_dir():
            source = spec.pretrained_model_name_or_path
            if source is None:
                return None
            root = Path(source) if Path(source).is_dir() else self._fetch(source, spec.revision, spec.subfolder or "")
            folder = root / (spec.subfolder or "")
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: missing: the folder of the component {name!r}")
        return Part(name, spec.type_hint or self._class_in(name, folder), folder)

    def _class_in(self, name: str, folder: Path) -> type[Any]:
        """The class that a component's own config names, for indices that leave it open."""
        config = read_json(folder / "config.json")
        architectures = config.get("architectures")
        cls: type[Any] | None = None
        if isinstance(config.get("_class_name"), str):
            cls = component_class("diffusers", str(config["_class_name"]))
        elif isinstance(architectures, list) and architectures:
            cls = component_class("transformers", str(architectures[0]))
        if cls is None:
            raise CheckpointError(f"{folder / 'config.json'}: names no known class for the component {name!r}")
        return cls
