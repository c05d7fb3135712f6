"""A pipeline described by model_index.json: which parts it needs, and how they become a DiffusionPipeline.

The pipeline's constructor is the contract: its parameters are the components and the values that it takes. Knows no
weights and no devices.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers

from polymux.errors import CheckpointError
from polymux.loading.component import Part
from polymux.loading.diffusers_classes import code_class, component_class
from polymux.loading.index import ComponentEntry, PipelineIndex
from polymux.loading.libraries import LIBRARY_ERRORS, one_line, reading
from polymux.loading.options import LoadOptions


class ClassicPlan:
    """The parts of a classic pipeline, and what to do with them once they are made."""

    def __init__(self, cls: type[Any], index: PipelineIndex, options: LoadOptions) -> None:
        self.class_name = cls.__name__
        self._cls = cls
        self._index = index
        self._given = options.given
        parameters = inspect.signature(cls.__init__).parameters
        self._parameters = {name: p for name, p in parameters.items() if name != "self" and p.kind is not p.VAR_KEYWORD}
        options.check_names(self._parameters, cls.__name__)
        self.parts = [
            _part(entry, index.file.parent, options.flags.trust_remote_code)
            for name, entry in index.components.items()
            if self._is_component(name) and name not in self._given and entry.class_name is not None
        ]

    def assemble(self, made: Mapping[str, object]) -> diffusers.DiffusionPipeline:
        """The pipeline. Raises CheckpointError if a component that it cannot do without is nowhere to be had."""
        arguments = {**self._values(), **made, **self._given}
        absent = [name for name in self._parameters if name not in arguments]
        optional = [n for n in absent if n in self._cls._optional_components]
        arguments |= dict.fromkeys(optional)
        required = [n for n in absent if n not in optional and self._has_no_default(n)]
        if required:
            raise CheckpointError(
                f"{self._index.file}: {self._cls.__name__} needs the component {required[0]!r}, which the checkpoint "
                f"does not have; {_way(required[0])}"
            )
        try:
            pipeline = self._cls(**arguments)
        except ImportError as error:
            empty = [n for n in self._cls._optional_components if n in self._parameters and arguments.get(n) is None]
            raise CheckpointError(
                f"{self._index.file}: {self._cls.__name__} cannot make its component {' or '.join(empty) or '?'}: "
                f"{one_line(error)} Install the package, or {_way(empty[0] if empty else 'component')}"
            ) from error
        except LIBRARY_ERRORS as error:
            raise CheckpointError(f"{self._index.file}: {self._cls.__name__}: {one_line(error)}") from error
        pipeline.register_to_config(_name_or_path=str(self._index.file.parent))
        return pipeline

    def _values(self) -> dict[str, object]:
        """The settings that the checkpoint records for the constructor, such as boundary_ratio."""
        return {name: value for name, value in self._index.values.items() if name in self._parameters}

    def _is_component(self, name: str) -> bool:
        """diffusers' own rule: what has a default and is not declared an optional component, the pipeline makes."""
        return name in self._parameters and (name in self._cls._optional_components or self._has_no_default(name))

    def _has_no_default(self, name: str) -> bool:
        return self._parameters[name].default is inspect.Parameter.empty


def _way(name: str) -> str:
    return f"pass one of your own: diffusers_load_kwargs={{{name!r}: ...}}"


def _part(entry: ComponentEntry, root: Path, trust_remote_code: bool) -> Part:
    folder = root / entry.subfolder
    library, class_name = str(entry.library), str(entry.class_name)
    if (folder / f"{library}.py").is_file():
        if not trust_remote_code:
            raise CheckpointError(
                f"{folder / library}.py: the component {entry.name!r} is code that comes with the checkpoint; it runs "
                "only with diffusers_load_kwargs={'trust_remote_code': true}"
            )
        with reading(folder / f"{library}.py"):
            return Part(entry.name, code_class(folder, library, class_name), folder)
    cls = component_class(library, class_name)
    if cls is None:
        raise CheckpointError(
            f"{root}: the component {entry.name!r} is a {library}.{class_name}, which the installed diffusers "
            f"{diffusers.__version__} does not know how to load; {_way(entry.name)}"
        )
    return Part(entry.name, cls, folder if folder.is_dir() else _flat(root, entry, cls))


def _flat(root: Path, entry: ComponentEntry, cls: type[Any]) -> Path:
    """Old pipelines of one model keep its files beside the index."""
    config_name = cls.config_name if issubclass(cls, diffusers.ConfigMixin) else "config.json"
    if not (root / config_name).is_file():
        raise CheckpointError(f"{root / entry.subfolder}: missing: the folder of the component {entry.name!r}")
    return root
