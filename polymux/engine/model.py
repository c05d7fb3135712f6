"""The model of a diffusion engine: a pipeline whose components' calls are captured and whose weights are in place.

May be taken down and loaded again while the engine lives. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Mapping as Dict
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from polymux.config import EngineConfig, ModelConfig, attention_choice
from polymux.diffusion.adapters import Adapters
from polymux.diffusion.attention import AttentionChoice, choose_attention
from polymux.diffusion.call_graphs import CallGraphs, hooks_at_times
from polymux.diffusion.compilation import CompiledDenoisers
from polymux.diffusion.component import Component, components_of, is_denoiser
from polymux.diffusion.lora_weights import fuse
from polymux.diffusion.pipeline_call import declared_family
from polymux.diffusion.step_cache import StepCache
from polymux.diffusion.tiling import enable_pieces
from polymux.engine.cached_loader import cached_loader
from polymux.engine.sharded import Sharding, shard
from polymux.errors import ConfigError
from polymux.families.base import Family
from polymux.interpolation.network import FlowNetwork
from polymux.interpolation.weights import load_network
from polymux.loading import Ranks, SlicedLoader, auto_dtype, load_pipeline
from polymux.memory.place import place
from polymux.memory.residency import Residency, Tenant
from polymux.memory.runtime_cache.mapped import Mapping
from polymux.parallel.mesh import ALONE, Mesh
from polymux.quantization.prequantized import check_movable
from polymux.quantization.quantizer import Quantizer


@dataclass(frozen=True)
class Model:
    """One per engine at a time."""

    pipeline: Any
    family: Family
    components: tuple[Component, ...]
    weights: Residency
    adapters: Adapters
    attention: AttentionChoice
    step_cache: StepCache
    compiled: CompiledDenoisers
    graphs: CallGraphs | None = None
    between: FlowNetwork | None = None  # makes frames between the frames of videos
    sharding: Sharding = Sharding()
    cache_queries: Dict[str, int] = field(default_factory=dict)  # what was looked for while it was loaded, by cache
    cache_hits: Dict[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, config: EngineConfig, device: torch.device, given: Dict[str, object], mesh: Mesh = ALONE) -> Model:
        """From a checkpoint; `given`: parts that it lacks. Raises CheckpointError, ConfigError."""
        dtype = auto_dtype(config.model.dtype, device)
        on_host = config.memory.offloads or config.parallel.divides_weights
        first = torch.device("cpu") if on_host else device
        quantizer = _quantizer(config, device)
        cached, tensor = cached_loader(config, quantizer), Ranks(mesh.rank_in("tp"), mesh.degree("tp"))
        sliced = SlicedLoader(tensor, is_denoiser, device) if tensor.size > 1 else None
        loader, parts = cached or sliced, dict(given)
        pipeline = load_pipeline(config.model, first, dtype, components=parts, loader=loader, quantizer=quantizer)
        if cached is None:
            return cls.of(config, pipeline, device, mesh=mesh, sliced=sliced.sliced if sliced else ())
        made = cls.of(config, pipeline, device, cached.mappings, mesh)
        queries, hits = {"runtime_cache": cached.queries}, {"runtime_cache": cached.hits}
        return replace(made, cache_queries=queries, cache_hits=hits)

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        pipeline: Any,
        device: torch.device,
        mappings: Dict[str, Mapping] | None = None,
        mesh: Mesh = ALONE,
        sliced: Collection[str] = (),
    ) -> Model:
        """Of a loaded pipeline. `mappings`: of components that are mapped from the runtime cache; `mesh`: this rank's
        place among those that share it; `sliced`: components of which only this rank's part is there."""
        family = declared_family(pipeline)
        between = _between(config.model, family, device)
        if config.adapters.distills:
            fuse(pipeline, config.adapters)
        quantizer = _quantizer(config, device)
        quantizer.family = family
        quantizer.check_applied(pipeline.components)
        quantizer.report(pipeline.components)
        enable_pieces(pipeline.components, config.memory)
        components = tuple(components_of(pipeline.components.items(), family.denoisers, family.loops))
        attention = choose_attention(*attention_choice(config.attention), components, device, family)
        sharding = shard(components, family, config, mesh, sliced)
        if mesh.size > 1:  # their modules' functions are others now
            components = tuple(components_of(pipeline.components.items(), family.denoisers, family.loops))
        why = "its layers or tokens are divided among ranks, which is not compiled"
        split = why if config.parallel.divides_denoisers else None
        compiled = CompiledDenoisers.apply(config.compilation, components, family, device, split)
        step_cache = StepCache.apply(config.caches.steps, components, family)
        compiled.settle()
        tenants = [Tenant(c.name, c.role, c.module, family.blocks if c.role == "denoiser" else ()) for c in components]
        for strategy in (name for name in config.memory.STRATEGIES if getattr(config.memory, name)):
            for component in components:
                check_movable(component.name, component.module, strategy)
        sharers = mesh.world if config.gathers_blocks else None
        weights = place(tenants, config.memory, device, sharers, mappings=dict(mappings or {}))
        for component in components:
            component.attach()
        why = "the ranks of this model have parts of its layers, and an adapter is made for whole ones"
        adapters = Adapters(pipeline, components, config.adapters, why if sharding.divided else None)
        refused = why_no_graphs(config, family, mesh) or hooks_at_times(pipeline.components.values())
        graphs = CallGraphs.apply(config.compilation, components, device, refused)
        return cls(
            pipeline,
            family,
            components,
            weights,
            adapters,
            attention,
            step_cache,
            compiled,
            graphs,
            between,
            sharding,
        )

    def sleep(self) -> None:
        """Move everything to the host. Raises ConfigError, with everything in place, if it cannot."""
        if self.sharding.fixed:
            raise ConfigError("--use-hsdp: weights that are shared out cannot be moved; level 2 drops them")
        if self.graphs is not None:
            self.graphs.forget()
        self.weights.sleep()
        if self.between is not None:
            self.between.to("cpu")

    def wake(self, device: torch.device) -> None:
        self.weights.wake()
        if self.between is not None:
            self.between.to(device)

    def close(self) -> None:
        """Give everything back. The pipeline, if somebody still has it, is without the weights that were moved."""
        if self.graphs is not None:
            self.graphs.forget()
        for component in self.components:
            component.detach()
        self.sharding.undo()
        self.attention.undo()
        self.step_cache.undo()
        self.compiled.undo()
        self.weights.close()


def why_no_graphs(config: EngineConfig, family: Family, mesh: Mesh) -> str | None:
    """Why no call of this model can be recorded and replayed; None: some may be."""
    attention, _ = attention_choice(config.attention)
    reasons = {
        "nobody has looked at what this pipeline does to its denoisers": not family.pipelines,
        "several ranks run it together": mesh.size > 1,
        "its weights move between the host and the device": config.memory.offloads,
        "what a cache of steps leaves out differs from step to step": config.caches.steps is not None,
        "what block-sparse attention leaves out differs from step to step": attention.is_sparse,
        "the adapters of --lora-path act in every call": bool(config.adapters.lora_path)
        and not config.adapters.distills,
    }
    return next((why for why, holds in reasons.items() if holds), None)


def _quantizer(config: EngineConfig, device: torch.device) -> Quantizer:
    return Quantizer(config.quantization.choice, device, is_denoiser, config.quantization.asked_by)


def _between(config: ModelConfig, family: Family, device: torch.device) -> FlowNetwork | None:
    path = config.frame_interpolation_model_path
    if path is None:
        return None
    if family.modality != "video":
        what = f"frame_interpolation_model_path={path!r}: the model makes {family.modality}, not video"
        raise ConfigError(what, param="frame_interpolation_model_path")
    return load_network(path, config.cache_dir, device)
