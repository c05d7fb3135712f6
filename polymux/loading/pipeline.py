"""The whole way: a model's name in, a pipeline on the device out.

Reads in the order of what can go wrong: the index, the class, every component's files; then the components, one after
the other, each on the device before the next is read, so that host memory holds one at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging

from polymux.config import ModelConfig
from polymux.errors import CheckpointError, ConfigError
from polymux.families import family_of
from polymux.families.base import Family
from polymux.loading.classic import ClassicPlan
from polymux.loading.component import Part, load_plain, place
from polymux.loading.diffusers_classes import code_class, pipeline_class
from polymux.loading.index import PipelineIndex, read_index
from polymux.loading.libraries import quiet, reading
from polymux.loading.maker import Maker
from polymux.loading.modular import ModularPlan
from polymux.loading.options import LoadFlags, LoadOptions, parse_options
from polymux.loading.readahead import ReadAhead
from polymux.loading.source import fetch_component, resolve
from polymux.loading.weights import Weights
from polymux.quantization.quantizer import Quantizer

logger = logging.getLogger(__name__)

Pipeline: TypeAlias = "diffusers.DiffusionPipeline | diffusers.ModularPipeline"


class DenoiserLoader(Protocol):
    """Loads denoisers in a way of its own, to the host."""

    family: Family  # set when it is known

    def wants(self, part: Part) -> bool: ...

    def load(
        self, part: Part, weights: Weights, dtype: torch.dtype, flags: LoadFlags, read_ahead: Callable[[], None]
    ) -> torch.nn.Module:
        """A component of a checkpoint. `read_ahead` is called if its weight files will be read."""
        ...

    def make_up(self, part: Part, dtype: torch.dtype) -> torch.nn.Module:
        """A component with random weights."""
        ...


class Plan(Protocol):
    """The parts of one pipeline, and how they are put together."""

    class_name: str
    parts: list[Part]

    def assemble(self, made: Mapping[str, object]) -> Pipeline: ...


def load_pipeline(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    components: Mapping[str, object] | None = None,
    loader: DenoiserLoader | None = None,
    quantizer: Quantizer | None = None,
) -> Pipeline:
    """Load a pipeline: every component on `device`, in eval mode, without gradients and progress bars.

    `components` are ready-made ones by name, used in place of the checkpoint's. `loader` loads the denoisers, by way of
    the runtime cache or in parts; they are on the host, so `device` must be the CPU. `quantizer` says what is
    quantized. Raises CheckpointError if the checkpoint is missing, incomplete or inconsistent, and ConfigError if the
    settings ask for what cannot be.
    """
    start = time.perf_counter()
    options = parse_options(config.diffusers_load_kwargs, components)
    folder = resolve(config)
    with quiet(diffusers_logging):
        plan = _plan(folder, config, options)
        family = family_of(plan.class_name)
        if loader is not None:
            loader.family = family
        maker = Maker(device, dtype, options.flags, quantizer or Quantizer({}, device, lambda name: False))
        maker.quantizer.family = family
        maker.quantizer.check_names([part.name for part in plan.parts if part.has_weights], options.given)
        if config.load_format == "dummy":
            made = _make_up(plan.parts, maker, loader)
        else:
            threads = config.num_weight_load_threads if config.enable_multithread_weight_load else 0
            with ReadAhead(threads) as ahead:
                made = _load(plan.parts, maker, ahead, loader)
        pipeline = plan.assemble(made)
        pipeline.set_progress_bar_config(disable=True)
        for name, component in pipeline.components.items():
            if isinstance(component, torch.nn.Module):
                place(name, component, device)
    logger.info("loaded %s from %s in %.1f s", type(pipeline).__name__, folder, time.perf_counter() - start)
    return pipeline


def _plan(folder: Path, config: ModelConfig, options: LoadOptions) -> Plan:
    """Find the pipeline's class and take stock of its parts."""
    override: type | None = None
    if config.model_class_name is not None:
        override = pipeline_class(config.model_class_name)
        if override is None:
            raise ConfigError(
                f"model_class_name={config.model_class_name!r}: not a pipeline of the installed diffusers "
                f"{diffusers.__version__}",
                param="model_class_name",
            )
    wants_modular = override is not None and issubclass(override, diffusers.ModularPipeline)
    index = read_index(folder, prefer_modular=wants_modular)
    if override is not None and index.modular and not wants_modular:
        raise ConfigError(
            f"model_class_name={config.model_class_name!r}: {folder} is a modular checkpoint and needs a modular class",
            param="model_class_name",
        )
    cls = override or _class_of(index, options.flags)
    if issubclass(cls, diffusers.ModularPipeline):
        return ModularPlan(cls, index, options, lambda *place: fetch_component(config, options, *place))
    return ClassicPlan(cls, index, options)


def _class_of(index: PipelineIndex, flags: LoadFlags) -> type:
    folder = index.file.parent
    if index.class_module is not None:
        code = folder / f"{index.class_module}.py"
        if not flags.trust_remote_code:
            raise CheckpointError(
                f"{index.file}: the pipeline {index.class_name} is code that comes with the checkpoint ({code.name}); "
                "it runs only with diffusers_load_kwargs={'trust_remote_code': true}"
            )
        with reading(code):
            return code_class(folder, index.class_module, index.class_name)
    found = pipeline_class(index.class_name)
    if found is None:
        raise CheckpointError(
            f"{index.file}: pipeline class {index.class_name!r} does not exist in the installed diffusers "
            f"{diffusers.__version__}"
        )
    return found


def _make_up(parts: Sequence[Part], maker: Maker, loader: DenoiserLoader | None) -> dict[str, object]:
    made: dict[str, object] = {}
    for part in parts:
        if not part.has_weights:
            made[part.name] = load_plain(part)
        elif loader is not None and loader.wants(part):
            made[part.name] = loader.make_up(part, maker.dtype)
        else:
            made[part.name] = maker.make_up(part)
    return made


def _load(parts: Sequence[Part], maker: Maker, ahead: ReadAhead, loader: DenoiserLoader | None) -> dict[str, object]:
    """Check all files of all parts, then load the parts in order, reading one ahead.

    What `loader` loads is not read ahead: it says itself when its files are needed.
    """
    models = [part for part in parts if part.has_weights]
    for part in models:
        maker.check(part)
        if loader is not None and loader.wants(part) and maker.is_quantized(part):
            logger.warning("%s: not from the runtime cache: the checkpoint has it quantized", part.name)
    files = {part.name: file for part in models if (file := maker.gguf_file(part)) is not None}
    weights = {part.name: part.weights(maker.flags) for part in models if part.name not in files}
    variant = maker.flags.variant
    if variant is not None and all(w.variant is None for w in weights.values()):
        raise CheckpointError(f"no component has weights of the variant {variant!r}")
    made: dict[str, object] = {part.name: load_plain(part) for part in parts if not part.has_weights}
    for part in models:
        if part.name in files:
            made[part.name] = maker.load_file(part, files[part.name])
        elif loader is not None and loader.wants(part) and not maker.is_quantized(part):
            read_ahead = partial(ahead.queue, weights[part.name].files)
            made[part.name] = loader.load(part, weights[part.name], maker.dtype, maker.flags, read_ahead)
    rest = [part for part in models if part.name not in made]
    _queue(ahead, weights, rest[:1])
    for number, part in enumerate(rest, start=1):
        _queue(ahead, weights, rest[number : number + 1])
        made[part.name] = maker.load(part, weights[part.name])
    return made


def _queue(ahead: ReadAhead, weights: Mapping[str, Weights], parts: Sequence[Part]) -> None:
    for part in parts:
        ahead.queue(weights[part.name].files)
