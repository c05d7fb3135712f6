"""A recorder for devices that have no graphs: notes torch's operations, and repeats them in the tensors they had.

As with a CUDA graph, Python does not run again, whatever it read is as it was, and nothing may be read back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polymux.diffusion.call import tensors_in

Operation = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class TapeRecorder:
    """Implements `diffusion.recording.Recorder`."""

    def __init__(self) -> None:
        self.held = 0

    def record(self, run: Callable[[], Any], within: AbstractContextManager[Any]) -> tuple[Callable[[], None], Any]:
        with _Tape() as tape, within:
            result = run()
        self.held += sum(tensor.nbytes for tensor in tensors_in(result))
        return tape.replay, result

    def forget(self) -> None:
        self.held = 0


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.lift_fresh.default:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.operations:
            for old, new in zip(tensors_in(result), tensors_in(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # else it is a view of what has been filled already
                    old.copy_(new)
