"""The types of components' weights.

Some pipelines cast a component around a call and cast it back (autoencoders that overflow in half precision). The
weights are shared, so each session sees its own types: what it casts is undone when it is suspended and done again when
it goes on, and a call runs with the weights it was made with. Moves between devices are not known here.
"""

from __future__ import annotations

import torch


class Weights:
    """The floating-point weights of a module, and the types they were loaded with."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.relearn()
        # A parameter stays the same object when it is cast. Of several types one that is not kept in full precision
        # tells most.
        parameters = [p for p in module.parameters() if p.is_floating_point()]
        self.probe = next((p for p in parameters if p.dtype != torch.float32), next(iter(parameters), None))
        self.probe_dtype = None if self.probe is None else self.probe.dtype

    def relearn(self) -> None:
        """Tensors have come or gone, while nothing is cast."""
        self.loaded = {name: tensor.dtype for name, tensor in _floating(self.module)}

    @property
    def cast_to(self) -> torch.dtype | None:
        """What a pipeline has cast them to; None while they are as they were loaded."""
        if self.probe is None or self.probe.dtype == self.probe_dtype:
            return None
        return self.probe.dtype

    def cast(self, dtype: torch.dtype | None) -> None:
        """Cast all of them, or for None each back to what it was loaded with."""
        if dtype == self.cast_to:
            return
        for name, tensor in list(_floating(self.module)):
            path, _, leaf = name.rpartition(".")
            owner = self.module.get_submodule(path)
            wanted = tensor.to(self.loaded.get(name, tensor.dtype) if dtype is None else dtype)
            if leaf in owner._buffers:
                owner._buffers[leaf] = wanted
            else:
                tensor.data = wanted


def _floating(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    tensors: list[tuple[str, torch.Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor) for name, tensor in tensors if tensor.is_floating_point()]
