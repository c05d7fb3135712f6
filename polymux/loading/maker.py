"""Components with weights, made one by one: loaded from their folder or a GGUF file, or made up; quantized if chosen.

What a component is loaded from and how it is kept is decided here, the order of components is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from polymux.loading.component import Part, load_model, place
from polymux.loading.dummy import dummy_model
from polymux.loading.gguf import load_gguf
from polymux.loading.index import read_json
from polymux.loading.libraries import is_diffusers_model
from polymux.loading.options import LoadFlags
from polymux.loading.packed import load_packed
from polymux.loading.weights import Weights
from polymux.quantization.bnb import make_plain
from polymux.quantization.prequantized import check_quantized, layer_reader, method_of
from polymux.quantization.quantizer import Quantizer

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Maker:
    """Of one pipeline: components go to `device`, in `dtype`."""

    device: torch.device
    dtype: torch.dtype
    flags: LoadFlags
    quantizer: Quantizer

    def gguf_file(self, part: Part) -> Path | None:
        """The file that has this component's weights, in place of the checkpoint's."""
        spec = self.quantizer.spec_for(part.name)
        return None if spec is None or spec.file is None else Path(spec.file).expanduser()

    def is_quantized(self, part: Part) -> bool:
        """Whether the checkpoint has it quantized."""
        return _own(part) is not None

    def check(self, part: Part) -> None:
        """Raise ConfigError if this component cannot be quantized as chosen, or not run as it is quantized already."""
        own, chosen = _own(part), self._chosen(part)
        if own is not None and chosen is not None:
            why = f"{part.name}: the checkpoint has it quantized already, by {method_of(own)}: leave the choice out"
            raise self.quantizer.refusal(why, self.quantizer.spec_for(part.name))
        if own is not None:
            check_quantized(part.name, own, is_diffusers_model(part.cls), self.quantizer.device)

    def load(self, part: Part, weights: Weights) -> torch.nn.Module:
        own = _own(part)
        if own is not None:
            return self._load_quantized(part, weights, own)
        if self._chosen(part) is None:
            return load_model(part, weights, self.device, self.dtype, self.flags)
        return self._quantized(part, load_model(part, weights, HOST, self.dtype, self.flags))

    def load_file(self, part: Part, file: Path) -> torch.nn.Module:
        """From a GGUF file."""
        return place(part.name, load_gguf(part, file, self.dtype), self.device)

    def make_up(self, part: Part) -> torch.nn.Module:
        """Its random numbers are drawn on the device that computes."""
        model = dummy_model(part, self.device, self.dtype, self.quantizer.device)
        return model if self._chosen(part) is None else self._quantized(part, model)

    def _load_quantized(self, part: Part, weights: Weights, own: object) -> torch.nn.Module:
        """What the checkpoint has quantized, in plain tensors where that is known how."""
        reader = layer_reader(own, self.quantizer.device) if is_diffusers_model(part.cls) else None
        if reader is not None:
            return place(part.name, load_packed(part, weights, self.dtype, reader), self.device)
        model = load_model(part, weights, self.device, self.dtype, self.flags)
        make_plain(model, self.dtype)
        _compute_in(model, self.dtype)
        return place(part.name, model, self.device)

    def _chosen(self, part: Part) -> object:
        return self.quantizer.spec_for(part.name)

    def _quantized(self, part: Part, model: torch.nn.Module) -> torch.nn.Module:
        self.quantizer.apply(part.name, model, self.dtype)
        return place(part.name, model, self.device)


def _compute_in(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Of a quantized model, libraries leave what is not quantized in the half precision that it was saved in, whatever
    they are asked for, and its layers would compute in two types. Tensors of a library's own kinds are left alone."""
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) in (torch.nn.Parameter, torch.Tensor) and tensor.dtype in (torch.bfloat16, torch.float16):
            tensor.data = tensor.data.to(dtype)


def _own(part: Part) -> object:
    """What the component's config says of its quantization; None: nothing, or it is not there, as its library will
    say."""
    file = part.folder / "config.json"
    return read_json(file).get("quantization_config") if file.is_file() else None
