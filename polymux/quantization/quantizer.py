"""Carries out what was chosen for the components of one pipeline, while they are loaded, and says what came of it.

A component is loaded as always; then its layers are replaced one after the other, each weight packed on the device that
computes. So the device never holds more than the packed weights and one layer. Where weights come from is not known
here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from polymux.errors import ConfigError
from polymux.families.base import UNKNOWN, Family
from polymux.knobs import flag_of
from polymux.memory.containers import block_paths
from polymux.memory.plan import size
from polymux.quantization.bnb import BnB4
from polymux.quantization.formats import FP8, INT4, INT8
from polymux.quantization.layer import Format, PackedLinear, pack_linear, replace_layer
from polymux.quantization.requirements import check_spec, lack_for_dynamic
from polymux.quantization.selection import NothingToQuantize, choose_layers
from polymux.quantization_config import DENOISERS, Choice, QuantizationSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What a method is on this device: the format of layers that fit it, that of the others, and why it is not more."""

    format: Format
    other: Format | None
    fits: Callable[[torch.nn.Linear], bool]
    reason: str | None = None


class Quantizer:
    """Of one pipeline. `device`: where it computes; `asked_by`: the knob that chooses, which refusals name."""

    def __init__(
        self,
        choice: Choice,
        device: torch.device,
        is_denoiser: Callable[[str], bool],
        asked_by: str = "quantization",
    ) -> None:
        """Raises ConfigError for what cannot be met here."""
        self._asked_by = asked_by
        self.family: Family = UNKNOWN  # until it is known
        self.device = device
        self._choice, self._is_denoiser = choice, is_denoiser
        for spec in choice.values():
            check_spec(spec, device, self.asked_by(spec))

    def asked_by(self, spec: QuantizationSpec | None) -> str:
        """The knob that this comes from."""
        return "gguf_file" if spec is not None and spec.method == "gguf" else self._asked_by

    def spec_for(self, name: str) -> QuantizationSpec | None:
        """What was chosen for this component."""
        if name in self._choice:
            return self._choice[name]
        is_denoiser = name in self.family.denoisers or self._is_denoiser(name)
        return self._choice.get(DENOISERS) if is_denoiser else None

    def check_names(self, models: Collection[str], given: Collection[str]) -> None:
        """Raise ConfigError if something was chosen for what is not there, or is ready-made. `models`: the components
        that are loaded with weights."""
        for name in self._choice:
            if name is DENOISERS:
                self._check_denoisers(models)
            elif name in given:
                raise self.refusal(f"{name} is given ready-made: quantize it before", self._choice[name])
            elif name not in models:
                what = f"there is no component {name!r} with weights; there are {', '.join(models)}"
                raise self.refusal(what, self._choice[name])

    def _check_denoisers(self, models: Collection[str]) -> None:
        denoisers = [name for name in models if self.spec_for(name) is self._choice[DENOISERS]]
        if not denoisers:
            what = f"there is no denoiser that is loaded; there are {', '.join(models) or 'no models'}"
            raise self.refusal(what, self._choice[DENOISERS])
        if len(denoisers) > 1 and self._choice[DENOISERS].method == "gguf":
            files = " ".join(f"{name}=FILE" for name in denoisers)
            raise self.refusal(f"there are several denoisers: --gguf-file {files}", self._choice[DENOISERS])

    def apply(self, name: str, module: torch.nn.Module, dtype: torch.dtype) -> None:
        """Quantize a component that was loaded, on the host or the device, or built on the meta device, in `dtype`."""
        spec = self.spec_for(name)
        if spec is None or spec.method == "gguf":
            return
        try:
            layers = choose_layers(name, module, dtype, self._blocks(name, module), spec.ignored_layers)
        except NothingToQuantize as nothing:
            raise self.refusal(str(nothing), spec) from None
        plan = self._plan(spec)
        formats = {path: plan.format if plan.fits(layer) else plan.other for path, layer in layers.items()}
        if not any(formats.values()):
            raise self.refusal(f"{name}: none of its layers has a shape that {spec.method} takes", spec)
        for path, format in formats.items():
            if format is not None:
                replace_layer(module, path, pack_linear(layers.pop(path), format, self.device))

    def identity(self, name: str) -> str | None:
        """What determines the bytes of a component beside its files and the code."""
        spec = self.spec_for(name)
        if spec is None:
            return None
        return f"{spec.method}, without {sorted(spec.ignored_layers)}" if spec.ignored_layers else spec.method

    def check_applied(self, components: Mapping[str, object]) -> None:
        """Raise ConfigError if something was chosen for a pipeline that somebody else has loaded, as it is."""
        modules = {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}
        absent = [name for name in self._choice if name is not DENOISERS and name not in modules]
        plain = [name for name, module in modules.items() if self.spec_for(name) and not formats_in(module)]
        if absent or plain:
            what = [*absent, *plain][0]
            raise self.refusal(f"{what} was loaded without it: load the pipeline by its name", self.spec_for(what))

    def report(self, components: Mapping[str, object]) -> None:
        """Log what is kept how, of all that is there: also what a checkpoint had quantized already."""
        for name, module in components.items():
            if isinstance(module, torch.nn.Module) and formats_in(module):
                spec = self.spec_for(name)
                reason = None if spec is None or spec.method == "gguf" else self._plan(spec).reason
                log.info("quantization: %s: %s", name, described(module, reason))

    def _blocks(self, name: str, module: torch.nn.Module) -> list[str]:
        is_denoiser = name in self.family.denoisers or self._is_denoiser(name)
        return block_paths(module, self.family.blocks if is_denoiser else ())

    def _plan(self, spec: QuantizationSpec) -> Plan:
        if spec.method in ("fp8", "int8"):
            kind = FP8 if spec.method == "fp8" else INT8
            scheme = spec.activation_scheme or ("dynamic" if spec.method == "fp8" else "weight_only")
            lack = lack_for_dynamic(spec.method, self.device) if scheme == "dynamic" else None
            weights_only = kind(dynamic=False)
            if scheme == "dynamic" and lack is None:
                return Plan(kind(dynamic=True), weights_only, kind.fits)
            return Plan(weights_only, None, lambda layer: True, lack)
        if spec.method == "int4":
            return Plan(INT4(), None, INT4.fits)
        return Plan(BnB4(spec.method), None, BnB4.fits)

    def refusal(self, message: str, spec: QuantizationSpec | None) -> ConfigError:
        """In the name of what asked for `spec`."""
        param = self.asked_by(spec)
        return ConfigError(f"{flag_of(param)}: {message}", param=param)


def described(module: torch.nn.Module, reason: str | None = None) -> str:
    """What runs, for people. `reason`: why it is not more."""
    total = sum(isinstance(layer, torch.nn.Linear) for layer in module.modules())
    packed = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    kinds = Counter(layer.format.name for layer in packed)
    counts = "; ".join(f"{number} of {total} linear layers in {kind}" for kind, number in kinds.items())
    full = sum(layer.in_features * layer.out_features * layer.dtype.itemsize for layer in packed)
    now = sum(p.nbytes for layer in packed for n, p in layer.named_parameters() if n != "bias")
    return f"{counts}; their weights take {size(now)} in place of {size(full)}" + (f" ({reason})" if reason else "")


def formats_in(module: torch.nn.Module) -> tuple[str, ...]:
    """The formats that a component's layers are in."""
    return tuple(dict.fromkeys(m.format.name for m in module.modules() if isinstance(m, PackedLinear)))
