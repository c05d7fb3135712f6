"""A language model without weights: what is asked of it while a request is prepared, where another library runs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from polymux.config import EngineConfig
from polymux.errors import CheckpointError, ConfigError
from polymux.families.chat import ChatFamily
from polymux.families.generate import Parts
from polymux.loading.component import Part, load_plain
from polymux.loading.generate import class_named
from polymux.loading.layout import declared_model
from polymux.loading.libraries import quiet, reading
from polymux.loading.source import resolve
from polymux.request import Capabilities

_SETTINGS = "generation_config.json"


class Bare:
    """Stands for a model whose weights are elsewhere. Its tensors are on the CPU, as those that requests bring."""

    device = torch.device("cpu")

    def __init__(self, model: Any, settings: GenerationConfig) -> None:
        """`model`: of transformers, on the meta device."""
        self._model = model
        self.config, self.generation_config = model.config, settings

    def get_input_embeddings(self) -> Any:
        return self._model.get_input_embeddings()

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())


@dataclass(frozen=True)
class Outline:
    """`parts`: with a `Bare` in the model's place."""

    folder: Path
    name: str  # of the class
    family: ChatFamily
    parts: Parts

    def facts(self, device: str, dtype: str) -> Capabilities:
        """What is known of it beside what its family declares."""
        return Capabilities(
            family=self.family.name,
            pipeline=self.name,
            modality=self.family.modality,
            arguments=(),
            required=(),
            media={},
            samples=True,
            device=device,
            dtype=dtype,
            parameters=self.parts.model.parameters,
        )


def load_outline(config: EngineConfig) -> Outline:
    """Raises CheckpointError, and ConfigError for a model that is more than a language model."""
    folder = resolve(config.model)
    name, family = declared_model(folder, str(folder))
    if not isinstance(family, ChatFamily) or family.takes or family.speaks:
        does = "which has media or sound in its conversations: with vllm they are of text alone"
        raise ConfigError(f"--decoding vllm: {name} is a model of the family {family.name}, {does}", param="decoding")
    kind: Any = class_named(name)
    with quiet(), reading(folder):
        with torch.device("meta"):
            model = kind(kind.config_class.from_pretrained(folder))
        read = GenerationConfig.from_pretrained if (folder / _SETTINGS).is_file() else _settings_in
        settings = read(folder)
    parts = Parts(
        model=Bare(model, settings), processor=load_plain(Part("processor", class_named(family.processor), folder))
    )
    lacks = family.adapter.check(parts)
    if lacks is not None:
        raise CheckpointError(f"{folder}: {lacks}")
    return Outline(folder, name, family, parts)


def _settings_in(folder: Path) -> GenerationConfig:
    """Those that stand in the model's own config, as older checkpoints have them."""
    return GenerationConfig.from_pretrained(folder, config_file_name="config.json")
