"""A linear layer whose weight is kept in few bits.

What is kept is plain: tensors of bytes, whatever they mean. So whatever moves, maps, streams, counts or casts the
weights of a model needs to know nothing of quantization: bytes are cast by nobody. What they mean is the business of
the layer's `Format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.nn import functional as F

Parts = Mapping[str, torch.Tensor]


class Format(Protocol):
    """One way to keep a weight. Equal formats have equal `name`s."""

    @property
    def name(self) -> str: ...

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The weight (out, in) as tensors of bytes. On the meta device too: then only shapes come out."""
        ...

    def unpack(self, layer: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
        """The weight (out, in) that the layer computes with."""
        ...

    def run(self, layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        """The layer's result for inputs (..., in), in their dtype."""
        ...


class PackedLinear(torch.nn.Linear):
    """In the place of a Linear. `parts` are parameters of their own, behind the bias."""

    def __init__(
        self, shape: tuple[int, int], bias: torch.nn.Parameter | None, dtype: torch.dtype, format: Format, parts: Parts
    ) -> None:
        """`shape`: (out, in). `dtype`: of the weight, for whoever asks for it."""
        torch.nn.Module.__init__(self)  # not Linear's own, which would make a weight
        self.out_features, self.in_features = shape
        self.format, self.dtype = format, dtype
        # The bias first: some models ask their first parameter for its type.
        self.register_parameter("bias", bias)
        for name, part in parts.items():
            assert part.dtype == torch.uint8, name
            self.register_parameter(name, torch.nn.Parameter(part, requires_grad=False))
        self.train(False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # a Linear's is a parameter
        """Made anew each time: for what looks at a layer from outside. What is written into it is lost."""
        if self._is_away:
            nothing = torch.full((), float("nan"), dtype=self.dtype, device=self.get_parameter("codes").device)
            return nothing.expand(self.out_features, self.in_features)
        return self.format.unpack(self, self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._is_away:
            return F.linear(input, self.weight.to(input.dtype), self.bias)
        return self.format.run(self, input)

    @property
    def _is_away(self) -> bool:
        """Whether its bytes are not on the device now: then there is one for all of them. A plain layer's weight is NaN
        then, so that what is computed with it by mistake does not pass for a result."""
        return not any(self.get_parameter("codes").stride())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.format.name}"


def run_unpacked(layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """Inputs as they are, times the weight in their type."""
    return F.linear(x, layer.format.unpack(layer, x.dtype), layer.bias)


def pack_linear(linear: torch.nn.Linear, format: Format, device: torch.device) -> PackedLinear:
    """The same layer in this format. The work is done on `device`; the result is where the layer was."""
    weight = linear.weight.detach()
    home = weight.device
    parts = format.pack(weight if home.type == "meta" else weight.to(device))
    parts = {name: part.to(home) for name, part in parts.items()}
    return PackedLinear((linear.out_features, linear.in_features), linear.bias, weight.dtype, format, parts)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A copy: a tensor that counts as contiguous may have strides, of dimensions of size one, that `view` does not take.
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def replace_layer(module: torch.nn.Module, path: str, layer: torch.nn.Module) -> None:
    """Put a layer in the place of the one at this path."""
    parent, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(parent), leaf, layer)


def weight_count(module: torch.nn.Module) -> int:
    """Numbers among a model's parameters, of packed weights those that they stand for."""
    packed = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    bytes_of_packed = sum(p.numel() for layer in packed for n, p in layer.named_parameters() if n != "bias")
    stood_for = sum(layer.in_features * layer.out_features for layer in packed)
    return sum(p.numel() for p in module.parameters()) - bytes_of_packed + stood_for
