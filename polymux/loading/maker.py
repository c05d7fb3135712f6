"""Components with weights, made one by one: loaded from their folder or a GGUF file, or made up; quantized if chosen.

What a component is loaded from and how it is kept is decided here, the order of components is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from polymux.errors import ConfigError
from polymux.loading.component import Part, load_model, place
from polymux.loading.dummy import dummy_model
from polymux.loading.gguf import load_gguf
from polymux.loading.index import read_json
from polymux.loading.options import LoadFlags
from polymux.loading.weights import Weights
from polymux.quantization.prequantized import check_quantized, method_of
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

    def check(self, part: Part) -> None:
        """Raise ConfigError if this component cannot be quantized as chosen, or not run as it is quantized already."""
        if not (part.folder / "config.json").is_file():
            return  # its library says what is missing
        own, chosen = read_json(part.folder / "config.json").get("quantization_config"), self._chosen(part)
        if own is not None and chosen is not None:
            why = f"{part.name}: the checkpoint has it quantized already, by {method_of(own)}: leave the choice out"
            raise ConfigError(f"quantization: {why}", param="quantization")
        if own is not None:
            check_quantized(part.name, own, self.quantizer.device)

    def load(self, part: Part, weights: Weights) -> torch.nn.Module:
        if self._chosen(part) is None:
            return load_model(part, weights, self.device, self.dtype, self.flags)
        return self._quantized(part, load_model(part, weights, HOST, self.dtype, self.flags))

    def load_file(self, part: Part, file: Path) -> torch.nn.Module:
        """From a GGUF file."""
        return place(part.name, load_gguf(part, file, self.dtype), self.device)

    def make_up(self, part: Part) -> torch.nn.Module:
        if self._chosen(part) is None:
            return dummy_model(part, self.device, self.dtype)
        return self._quantized(part, dummy_model(part, HOST, self.dtype))

    def _chosen(self, part: Part) -> object:
        return self.quantizer.spec_for(part.name)

    def _quantized(self, part: Part, model: torch.nn.Module) -> torch.nn.Module:
        self.quantizer.apply(part.name, model, self.dtype)
        return place(part.name, model, self.device)
