"""From a folder with a model of transformers to its parts on the device: the model, what reads texts, what is beside.

Which classes are served is declared in `polymux.families`. Every model is proven complete, as components of pipelines
are.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.utils import DummyObject

from polymux.config import EngineConfig
from polymux.errors import CheckpointError, ConfigError
from polymux.families.chat import ChatFamily
from polymux.families.divisible import check_ranks
from polymux.families.generate import GenerateFamily, Parts
from polymux.families.settings import check_settings
from polymux.importing import many_imports
from polymux.loading.component import Part, load_model, load_plain
from polymux.loading.dtypes import auto_dtype
from polymux.loading.index import read_json
from polymux.loading.layout import CONFIG, declared_model, model_class_in
from polymux.loading.libraries import quiet, reading
from polymux.loading.options import LoadFlags, parse_options
from polymux.loading.partial import load_part
from polymux.loading.source import fetch_model, resolve
from polymux.media.wire import Array
from polymux.models import own_class

logger = logging.getLogger(__name__)

_MOST_VOICES = 1000
_PROCESSOR = "processor_config.json"


def load_parts(
    config: EngineConfig, device: torch.device, ranks: tuple[int, int] | None = None
) -> tuple[GenerateFamily, Parts]:
    """Load a model and all that belongs to it; `ranks`: only the part of this rank, of so many. Raises CheckpointError,
    and ConfigError for settings that cannot act."""
    start = time.perf_counter()
    options = parse_options(config.model.diffusers_load_kwargs)
    options.check_names((), "a model of transformers")
    folder = resolve(config.model)
    name, family = declared_model(folder, str(folder))
    check_settings(config, family)
    check_ranks(config, name)
    dtype = auto_dtype("fp32" if family.precise and config.model.dtype == "auto" else config.model.dtype, device)
    with quiet():
        part = Part("model", class_named(name), folder)
        if ranks is None:
            model = _whole_or_part(config, family, part, device, dtype, options.flags)
        else:
            from polymux.loading.sliced import Ranks, load_language_sliced  # diffusers, which one rank does without

            model = load_language_sliced(part, part.weights(options.flags), device, dtype, Ranks(*ranks))
        if config.stages.split_stages:
            beside = _beside_in_name(config, family, folder)
        else:
            beside = _beside(config, family, folder, device, dtype, options.flags)
        parts = Parts(
            model=model,
            processor=_processor(family, folder, beside),
            beside=beside,
            voices=_voices(config, folder, family),
        )
        lacks = family.adapter.check(parts)
    if lacks is not None:
        raise CheckpointError(f"{folder}: {lacks}")
    logger.info("loaded %s from %s in %.1f s", name, folder, time.perf_counter() - start)
    return family, parts


def _whole_or_part(
    config: EngineConfig, family: GenerateFamily, part: Part, device: torch.device, dtype: torch.dtype, flags: LoadFlags
) -> torch.nn.Module:
    """The model; of one that is cut inside, what this stage has of it."""
    part = replace(part, plain=isinstance(family, ChatFamily) and family.plain_loading)
    kept = part_of(config, family)
    if kept is not None and family.graph is not None:
        model = load_part(part, family.graph.children, kept, device, dtype, flags)
    else:
        model = load_model(part, part.weights(flags), device, dtype, flags)
    if isinstance(family, ChatFamily):
        with reading(f"{part.folder}: {part.cls.__name__}"):
            family.adapter.complete(model, str(part.folder))
    return model


def part_of(config: EngineConfig, family: GenerateFamily) -> str | None:
    """The child of the model that this stage has; None: it has the model, or what is beside it."""
    return family.graph.stages[config.stage].part if config.stages.split_stages and family.graph is not None else None


def class_named(name: str) -> type:
    with many_imports():
        found = own_class(name) or getattr(transformers, name, None)
    if not isinstance(found, type):
        version = transformers.__version__
        raise CheckpointError(f"the class {name} does not exist in the installed transformers {version}")
    if isinstance(found, DummyObject):
        raise CheckpointError(f"{name} needs {' and '.join(found._backends)}, which is not installed here")
    return found


def _model(
    name: str, class_name: str, place: Path, device: torch.device, dtype: torch.dtype, flags: LoadFlags
) -> torch.nn.Module:
    part = Part(name, class_named(class_name), place)
    return load_model(part, part.weights(flags), device, dtype, flags)


def _beside(
    config: EngineConfig,
    family: GenerateFamily,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    flags: LoadFlags,
) -> torch.nn.Module | None:
    if family.beside is None:
        return None
    class_name, inside = family.beside
    return _model(inside, class_name, _place_beside(config, family, folder), device, dtype, flags)


def _beside_in_name(config: EngineConfig, family: GenerateFamily, folder: Path) -> torch.nn.Module | None:
    """What is beside the model, without weights: another stage has them, and here its settings are asked for."""
    if family.beside is None:
        return None
    place, kind = _place_beside(config, family, folder), class_named(family.beside[0])
    with reading(place), torch.device("meta"):
        made: torch.nn.Module = kind(kind.config_class.from_pretrained(place))  # type: ignore[attr-defined]
    return made


def load_decoder(config: EngineConfig, device: torch.device) -> tuple[GenerateFamily, Parts]:
    """Only the part that makes the sound, which is beside the model or in it. Raises CheckpointError, ConfigError."""
    start = time.perf_counter()
    options = parse_options(config.model.diffusers_load_kwargs)
    folder = resolve(config.model)
    name, family = declared_model(folder, str(folder))
    check_settings(config, family)
    dtype = auto_dtype("fp32" if family.precise and config.model.dtype == "auto" else config.model.dtype, device)
    kept = part_of(config, family)
    with quiet():
        if kept is None:
            parts = Parts(
                model=None, processor=None, beside=_beside(config, family, folder, device, dtype, options.flags)
            )
        else:
            model = _whole_or_part(
                config, family, Part("model", class_named(name), folder), device, dtype, options.flags
            )
            parts = Parts(model=model, processor=None, beside=getattr(model, kept))
    logger.info("loaded what makes the sound of %s in %.1f s", name, time.perf_counter() - start)
    return family, parts


def _place_beside(config: EngineConfig, family: GenerateFamily, folder: Path) -> Path:
    """The folder of what is beside the model."""
    assert family.beside is not None
    class_name, inside = family.beside
    if config.speech.vocoder is not None:
        place = fetch_model(config.speech.vocoder, config.model.cache_dir)
    else:
        place = folder / inside
    if not (place / CONFIG).is_file():
        hint = f"{class_name} is a model of its own: name its folder or hub id with --vocoder"
        raise CheckpointError(f"{place}: there is no {CONFIG}: {hint}")
    found = model_class_in(place)
    if found not in (None, class_name):
        raise CheckpointError(f"{place / CONFIG}: it is a {found}, and a {class_name} is needed")
    return place


def _processor(family: GenerateFamily, folder: Path, beside: object) -> object:
    if not family.assembled:
        return load_plain(Part("processor", class_named(family.processor), folder))
    made: dict[str, Any] = {name: load_plain(Part(name, class_named(cls), folder)) for name, cls in family.assembled}
    kind = class_named(family.processor)
    with reading(f"{folder}: {family.processor}"):
        processor: object = kind(**made, audio_tokenizer=beside, **_settings(kind, folder, made))
    return processor


def _settings(kind: type, folder: Path, made: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint says of a processor that is put together here: what it is called with beside its parts, and
    the template of what it reads, which is a file of its own and the tokenizer's too."""
    takes = inspect.signature(kind).parameters
    stored = read_json(folder / _PROCESSOR) if (folder / _PROCESSOR).is_file() else {}
    known = {name: value for name, value in stored.items() if name in takes and not isinstance(value, dict)}
    if "chat_template" in takes:
        known["chat_template"] = made["tokenizer"].chat_template
    return {name: value for name, value in known.items() if name not in made}


def _voices(config: EngineConfig, folder: Path, family: GenerateFamily) -> dict[str, Array]:
    """The arrays in the folder of voices, by their files' names without the ending."""
    if not family.voice_files:
        return {}
    given = config.speech.voice_path
    place = Path(given).expanduser() if given is not None else folder / "voices"
    if given is not None and not place.is_dir():
        raise ConfigError(f"voice_path={given!r}: no such folder", param="voice_path")
    files = sorted(place.glob("*.npy"))
    if given is not None and not files:
        raise ConfigError(f"voice_path={given!r}: there is no .npy file in it", param="voice_path")
    return {file.stem: _vector(file) for file in files[:_MOST_VOICES]}


def _vector(file: Path) -> Array:
    with reading(file):
        array: Array = np.load(file, allow_pickle=False)
    if array.dtype.kind != "f" or array.ndim not in (1, 2) or max(array.shape) != array.size:
        raise CheckpointError(f"{file}: must hold one vector of floats, not {array.dtype.name} {array.shape}")
    if not np.isfinite(array).all():
        raise CheckpointError(f"{file}: its values are not all finite")
    return array.reshape(-1)
