"""LoRA files in a pipeline's modules: put beside the layers that they are for, or added to them for good.

Knows diffusers' conversions of formats and its messages; not requests, and not which adapters act when.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

import torch
from diffusers.loaders.lora_base import LoraBaseMixin

from polymux.config import AdapterConfig
from polymux.diffusion.tuned import TunedLayers
from polymux.errors import ConfigError, InvalidRequestError
from polymux.loading.lora import LoRAFile, find_lora
from polymux.quantization.layer import PackedLinear
from polymux.request import LoRARequest

log = logging.getLogger(__name__)

DENOISERS = ("transformer", "transformer_2")  # of which a model may have both
SHOWN = 3  # names of layers in a message
SHOWN_CHARACTERS = 300  # of an error that is passed on


def standing(config: AdapterConfig) -> list[LoRARequest]:
    """What acts on every request. `transformer_2=FILE` is for that denoiser, where there are two."""
    return [_of_flag(path, config.lora_scale) for path in config.lora_path]


def check_takes_lora(pipeline: Any) -> None:
    """Raises ConfigError."""
    if not isinstance(pipeline, LoraBaseMixin):
        raise ConfigError(f"--lora-path: {type(pipeline).__name__} takes no LoRA", param="lora_path")


def inject(pipeline: Any, file: LoRAFile, component: str | None, name: str) -> None:
    """Put an adapter beside the layers. Raises InvalidRequestError; then some layers may have it."""
    second = {"load_into_transformer_2": True} if component == DENOISERS[1] else {}
    keys = file.keys()
    try:
        if file.is_peft:
            pipeline.load_lora_weights(file.peft_state(_prefix(pipeline)), adapter_name=name, **second)
        else:
            folder, weights = str(file.path.parent), file.path.name
            pipeline.load_lora_weights(folder, weight_name=weights, adapter_name=name, local_files_only=True, **second)
    except ImportError as error:
        raise ConfigError(f"LoRA needs the package peft: {error}") from None
    except Exception as error:  # the conversions of other formats raise whatever they stumble over
        raise InvalidRequestError(f"{_nothing(pipeline, file, len(keys))}: {_short(error)}", param="lora") from None


def check_match(pipeline: Any, file: LoRAFile, layers: Collection[str]) -> None:
    """`layers` have it now, by path. Raise if nothing of the file has a place; say so if only a part has."""
    if not layers:
        raise InvalidRequestError(_nothing(pipeline, file, len(file.keys())), param="lora")
    wanted = _layers_in(pipeline, file)
    if len(layers) < len(wanted):
        missing = sorted(wanted - set(layers)) or ["some"]
        log.warning(
            "lora %s: %d of %d layers matched; without a place are %s%s",
            file.path.name, len(layers), len(wanted), ", ".join(missing[:SHOWN]),
            ", ..." if len(missing) > SHOWN else "",
        )  # fmt: skip


def fuse(pipeline: Any, config: AdapterConfig) -> None:
    """Add the files of --lora-path to the weights themselves, which are on the host or the device and whole.

    Raises ConfigError.
    """
    check_takes_lora(pipeline)
    for name, module in _modules(pipeline).items():
        if hasattr(module, "hf_quantizer") or any(isinstance(layer, PackedLinear) for layer in module.modules()):
            what = f"--lora-backend distill: the weights of {name} are quantized in the checkpoint"
            raise ConfigError(f"{what}, and nothing can be added to them; use peft", param="lora_backend")
    several = hasattr(pipeline, DENOISERS[1])
    for asked in standing(config):
        if (asked.component is not None) != several:
            names = " or ".join(f"{name}=FILE" for name in DENOISERS)
            allowed = f"this model has two denoisers: {names}" if several else "this model has one denoiser: FILE alone"
            raise ConfigError(f"--lora-path {asked.path!r}: {allowed}", param="lora_path")
        try:
            _fuse(pipeline, find_lora(asked.path), asked)
        except InvalidRequestError as error:
            raise ConfigError(f"--lora-path: {error.message}", param="lora_path") from None


def _fuse(pipeline: Any, file: LoRAFile, asked: LoRARequest) -> None:
    inject(pipeline, file, asked.component, "fused")
    modules = _modules(pipeline)
    layers = {f"{name}.{path}" for name, module in modules.items() for path in _layers_with(module, "fused")}
    check_match(pipeline, file, layers)
    tuned = sorted({layer.partition(".")[0] for layer in layers})
    pipeline.fuse_lora(components=tuned, lora_scale=asked.scale, adapter_names=["fused"])
    pipeline.unload_lora_weights()  # leaves the plain layers, with their new weights
    log.info("lora %s: fused into %d layers of %s at %g", file.path.name, len(layers), ", ".join(tuned), asked.scale)


def _modules(pipeline: Any) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}


def _layers_with(module: torch.nn.Module, name: str) -> Iterable[str]:
    layers = TunedLayers(module)
    layers.refresh()
    return layers.layers_with(name)


def _layers_in(pipeline: Any, file: LoRAFile) -> set[str]:
    """The layers of the file under the names that they have after conversion."""
    if file.is_peft:
        keys: Iterable[str] = file.peft_state(_prefix(pipeline))
    else:
        converted = pipeline.lora_state_dict(str(file.path.parent), weight_name=file.path.name)
        keys = converted[0] if isinstance(converted, tuple) else converted
    return {key.partition(".lora")[0].partition(".lokr")[0] for key in keys if not key.endswith(".alpha")}


def _prefix(pipeline: Any) -> str:
    """The denoiser that a bare model's keys are those of."""
    return "unet" if hasattr(pipeline, "unet") else "transformer"


def _of_flag(given: str, scale: float) -> LoRARequest:
    component, equals, path = given.partition("=")
    if equals and component in DENOISERS:
        return LoRARequest(path=path, scale=scale, component=component)
    return LoRARequest(path=given, scale=scale)


def _nothing(pipeline: Any, file: LoRAFile, keys: int) -> str:
    return f"lora {file.path.name!r}: 0 of {keys} keys matched {type(pipeline).__name__}"


def _short(error: Exception) -> str:
    """What went wrong, and the first layer that it went wrong with: some list every layer of the model."""
    first = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
    return first if len(first) <= SHOWN_CHARACTERS else f"{first[:SHOWN_CHARACTERS]}..."
