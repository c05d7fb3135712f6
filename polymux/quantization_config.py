"""What may be chosen for the weights of components: the method, and which layers stay as they are. Not what can run
where, nor what the methods do: that is in `polymux.quantization`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from polymux.errors import ConfigError
from polymux.knobs import Checked, knob

Method = Literal["fp8", "int8", "int4", "nf4", "fp4", "gguf"]
METHODS: tuple[str, ...] = get_args(Method)
ActivationScheme = Literal["dynamic", "weight_only"]
DENOISERS = None  # stands for all denoisers where a component's name would stand
_PARAM = "diffusion_quantization_config"


class QuantizationSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the linear layers of a component keep their weights, and compute.

    activation_scheme: "dynamic": inputs are quantized too, each token with a scale of its own; "weight_only": they are
        not. None: for fp8 what the device can do, for all others weight_only.
    ignored_layers: paths in the component that stay as they are: a layer, a part with all its layers, or a pattern.
    file: where the weights are, for gguf.
    """

    method: Method
    activation_scheme: ActivationScheme | None = None
    ignored_layers: tuple[str, ...] = ()
    file: str | None = None

    def __post_init__(self) -> None:
        if self.activation_scheme == "dynamic" and self.method not in ("fp8", "int8"):
            raise ValueError(f"activation_scheme: with {self.method} inputs are never quantized")
        if (self.file is not None) != (self.method == "gguf"):
            raise ValueError("file: needed for gguf, and for no other method")
        if self.method == "gguf" and self.ignored_layers:
            raise ValueError("ignored_layers: a GGUF file says itself which layers are quantized")


Choice = Mapping[str | None, QuantizationSpec]  # by component; DENOISERS: all denoisers


def parse_choice(value: Mapping[str, Any]) -> Choice:
    """`value`: one spec for the denoisers, or specs by component, where a method alone stands for its defaults.

    Raises ConfigError, which says where and what is allowed.
    """
    if not value:
        raise ConfigError(f"{_PARAM}={{}}: names neither a method nor a component", param=_PARAM)
    if "method" in value:
        return {DENOISERS: _spec(value, "")}
    return {name: _spec({"method": one} if isinstance(one, str) else one, f"{name}: ") for name, one in value.items()}


def _spec(value: object, where: str) -> QuantizationSpec:
    try:
        return msgspec.convert(value, QuantizationSpec, strict=True)
    except msgspec.ValidationError as error:
        allowed = f"methods are {', '.join(METHODS)}; fields are {', '.join(QuantizationSpec.__struct_fields__)}"
        raise ConfigError(f"{_PARAM}: {where}{error}; {allowed}", param=_PARAM) from None


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig(Checked):
    """Quantization: smaller weights, and faster linear layers where the device has them (docs/quantization.md)"""

    quantization: str | None = knob(None, "how the denoisers' linear layers keep their weights", choices=METHODS)
    diffusion_quantization_config: dict[str, Any] | None = knob(
        None, "the same in detail: one method with its options, or one for each component named", metavar="JSON"
    )
    gguf_file: tuple[str, ...] = knob(
        (), "the denoiser's weights in a GGUF file; of several denoisers NAME=FILE for each", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("quantization", _PARAM) if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                "--quantization and --diffusion-quantization-config exclude each other: both choose the method",
                param="quantization",
            )
        if self.gguf_file and self.quantization not in (None, "gguf"):
            raise ConfigError(
                f"--gguf-file and --quantization {self.quantization} exclude each other: what is in a GGUF file is "
                "quantized already",
                param="gguf_file",
            )
        if self.quantization == "gguf" and not self.gguf_file:
            raise ConfigError("--quantization gguf needs --gguf-file", param="quantization")
        _ = self.choice

    @property
    def asked_by(self) -> str:
        """The knob that chooses methods for layers; files have a knob of their own."""
        return _PARAM if self.diffusion_quantization_config is not None else "quantization"

    def check_files(self, others: Mapping[str, bool]) -> None:
        """Raise ConfigError if there are GGUF files beside one of these settings: they take weights from elsewhere."""
        for name, is_set in others.items():
            if is_set and any(spec.file for spec in self.choice.values()):
                flag = name.replace("_", "-")
                raise ConfigError(
                    f"--gguf-file and --{flag} exclude each other: weights come from one place", param="gguf_file"
                )

    @property
    def choice(self) -> Choice:
        """What is asked for; empty: nothing. Raises ConfigError."""
        given = self.diffusion_quantization_config
        chosen = dict(parse_choice(given)) if given is not None else {}
        if self.quantization not in (None, "gguf"):
            chosen[DENOISERS] = QuantizationSpec(method=self.quantization)  # type: ignore[arg-type]  # one of METHODS
        for text in self.gguf_file:
            name, equals, file = text.rpartition("=")
            component = name if equals else DENOISERS
            if component in chosen or (component is DENOISERS and len(self.gguf_file) > 1):
                raise ConfigError(f"gguf_file={text!r}: one file for each component, as NAME=FILE", param="gguf_file")
            chosen[component] = QuantizationSpec(method="gguf", file=file)
        return chosen
