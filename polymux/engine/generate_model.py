"""The model of a generate engine: objects of transformers whose calls are captured and whose weights are in place.

May be taken down and loaded again while the engine lives. Knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import torch
import torch.distributed as dist

from polymux.config import EngineConfig
from polymux.diffusion.component import SUBMODULE_DEPTH, Component, Role
from polymux.diffusion.replica import LISTS, replica
from polymux.families.generate import GenerateFamily, Parts
from polymux.loading import load_parts, part_of
from polymux.memory.place import place
from polymux.memory.residency import Residency, Tenant
from polymux.memory_config import MemoryConfig
from polymux.request import Capabilities
from polymux.sampling import REFERENCE


def not_profiled(config: EngineConfig) -> dict[str, str]:
    """Why no request can have a profile, by the name of its field."""
    return {"profile": "a model in several stages tells none"} if config.stages.split_stages else {}


@dataclass(frozen=True)
class GenerateModel:
    """One per engine at a time."""

    family: GenerateFamily
    parts: Parts
    components: tuple[Component, ...]
    weights: Residency

    @classmethod
    def load(cls, config: EngineConfig, device: torch.device, group: dist.ProcessGroup | None = None) -> GenerateModel:
        """From a checkpoint; without what is another stage's, and with `group` without what other ranks have. Raises
        CheckpointError, ConfigError."""
        family, parts = load_parts(config, device, None if group is None else (group.rank(), group.size()))
        if group is not None:
            from polymux.parallel.language import shard_language  # diffusers, which one rank does without

            shard_language(parts.model, group)
        return cls.of(family, parts, device, alone=config.stages.split_stages, part=part_of(config, family))

    @classmethod
    def of(
        cls,
        family: GenerateFamily,
        parts: Parts,
        device: torch.device,
        alone: bool = False,
        part: str | None = None,
    ) -> GenerateModel:
        """Of loaded parts. `alone`: what is beside the model is there in name only; `part`: of the model itself, only
        this child is really there."""
        modules = _captured(family, parts.model)
        tenants = [Tenant("model", "decoder", parts.model)]
        if part is not None:
            modules = {path: module for path, module in modules.items() if path.startswith(f"{part}.")}
            tenants = [Tenant(part, "decoder", parts.model.get_submodule(part))]
        if family.beside is not None and not alone:
            modules[family.beside[1]] = parts.beside
            tenants.append(Tenant(family.beside[1], "decoder", parts.beside))
        components = tuple(Component(name, module, _role(family, name)) for name, module in modules.items())
        weights = place(tenants, MemoryConfig(), device)
        for component in components:
            component.attach()
        return cls(family, parts, components, weights)

    def own(self) -> Parts:
        """The parts for one session: what it stores on the model reaches nobody else. Weights are shared."""
        return replace(self.parts, model=replica(self.parts.model, SUBMODULE_DEPTH))

    def facts(self) -> Capabilities:
        """What is known of every model; it takes nothing yet."""
        parameters = {id(p): p.numel() for c in self.components for p in c.module.parameters()}
        return Capabilities(
            family=self.family.name,
            pipeline=type(self.parts.model).__name__,
            modality=self.family.modality,
            arguments=(),
            required=(),
            media={},
            samples=True,
            device=str(self.parts.model.device),
            dtype=str(self.parts.model.dtype).removeprefix("torch."),
            parameters=sum(parameters.values()),
            storage=self.weights.describe(),
        )

    def describe(self, config: EngineConfig) -> Capabilities:
        """What it takes and makes."""
        return described_by(self.facts(), self.family, self.parts, config)

    def sleep(self) -> None:
        """Move everything to the host. Raises ConfigError, with everything in place, if it cannot."""
        self.weights.sleep()

    def wake(self, device: torch.device) -> None:
        self.weights.wake()

    def close(self) -> None:
        """Give everything back."""
        for component in self.components:
            component.detach()
        self.weights.close()


def described_by(facts: Capabilities, family: GenerateFamily, parts: Parts, config: EngineConfig) -> Capabilities:
    """What a model takes and makes, by what its family declares; `facts`: what is known of it otherwise."""
    adapter = family.adapter
    languages = adapter.languages(parts)
    arguments = tuple(name for name in family.arguments if name != "language" or languages)
    deaf = adapter.deaf(parts) if REFERENCE in arguments else None
    if deaf is not None:
        arguments = tuple(name for name in arguments if name not in (REFERENCE, "ref_text"))
    without = adapter.without(parts)
    arguments = tuple(name for name in arguments if name not in without)
    refused = dict(without) | {"partial_images": "there are none of sound"} | not_profiled(config)
    if REFERENCE not in arguments:
        why = f"{family.name} models speak with no voice of a recording: {family.unheard_because}"
        refused[REFERENCE] = deaf or (why if family.speaks else "the model does not speak")
    return msgspec.structs.replace(
        facts,
        arguments=("prompt", *(name for name in arguments if name != REFERENCE), *family.extra),
        required=("prompt",),
        media={REFERENCE: 1} if REFERENCE in arguments else {},
        sample_rate=adapter.sample_rate(parts),
        refused=refused,
        voices=adapter.voices(parts) if family.speaks else (),
        languages=languages,
        merges=config.scheduler.merge_decoding and bool(family.merge),
        speaker_marks=adapter.speaker_marks(),
        embedding_size=adapter.embedding_size(parts),
        max_new_tokens=adapter.longest(parts, config.limits.max_audio_seconds),
        extra=family.extra,
        bounds=family.bounds,
    )


def _captured(family: GenerateFamily, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules whose calls are captured, by name. A checkpoint may lack some of those that its family names."""
    if family.components:
        return {path: module for path, module in model.named_modules() if path in family.components}
    return {name: child for name, child in model.named_children() if not isinstance(child, LISTS)}


def _role(family: GenerateFamily, name: str) -> Role:
    if name in family.decoders:
        return "decoder"
    return "denoiser" if any(path.rpartition(".")[0] == name for path in family.steps) else "encoder"
