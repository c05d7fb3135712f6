"""A run of a call before it is recorded: what it does that no recording can, and what it reads beside its arguments.

A recording that fails on the way can leave a device unusable, so what makes it fail is looked for before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from polymux.diffusion.call import tensors_in


class NotRecordable(Exception):
    """Why a call cannot be replayed."""


class Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around the run. `outside`: tensors that are used and were not made meanwhile, by identity."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside: dict[int, torch.Tensor] = {}
        self._made = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = tensors_in([args, kwargs])
        for tensor in used:
            if tensor not in self._made and id(tensor) not in self.outside:
                self.outside[id(tensor)] = tensor
        if _asks_for_values(func, args, kwargs or {}):
            raise NotRecordable(f"what it does depends on values that are on the device ({func})")
        result = func(*args, **(kwargs or {}))
        made = tensors_in(result)
        if _crosses(func, [*used, *made]):
            raise NotRecordable(f"it moves something between the host and the device ({func})")
        for tensor in made:
            self._made[tensor] = None
        return result


def _asks_for_values(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the operation, in order to know its result or how large that is."""
    if "index" in func.name():
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1:2]))
    if kwargs.get("output_size") is not None:
        return False
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _crosses(func: Any, tensors: list[torch.Tensor]) -> bool:
    """Numbers on the host may go into an operation as they are; they cannot be copied."""
    copies = func.name() in ("aten::_to_copy", "aten::copy_")
    kinds = {tensor.device.type for tensor in tensors if tensor.ndim or copies}
    return len(kinds) > 1
