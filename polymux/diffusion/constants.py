"""What a call moves from the host to the device: numbers, and tables that a model keeps on the host.

A recording cannot move anything, and need not: what comes from the host is the same for all calls of a form, unless it
depends on something that is no argument, and that shows when the first replay is compared. So what is moved is noted in
one run and given again in the run that is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

MOVES = (torch.tensor, torch.as_tensor, torch.Tensor.to, torch.Tensor.cuda)


class Constants(TorchFunctionMode):
    """Of one call: entered around a run, it notes; after `repeat`, it gives them again."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._inside = device, False
        self._noted: list[tuple[Callable[..., Any], Any, torch.Tensor]] = []
        self._next: int | None = None  # to be given

    def repeat(self) -> Constants:
        self._next = 0
        return self

    def __enter__(self) -> Constants:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._inside = True
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def left(self) -> Iterator[None]:
        """For what has been compiled: that depends on which modes there are. Only where this is the innermost one."""
        if not self._inside:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in MOVES or not args or not self._is_on_host(args[0]):
            return func(*args, **kwargs)
        if self._next is None:
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and result.device.type == self._device.type:
                self._noted.append((func, args[0], result.clone()))
            return result
        if self._next < len(self._noted):
            known, source, value = self._noted[self._next]
            if func is known and _equal(source, args[0]):
                self._next += 1
                return value.clone()
        return func(*args, **kwargs)

    def _is_on_host(self, source: Any) -> bool:
        if isinstance(source, torch.Tensor):
            return source.device.type == "cpu" != self._device.type
        if isinstance(source, (list, tuple)):
            return all(self._is_on_host(item) for item in source if not isinstance(item, (int, float)))
        return isinstance(source, (int, float, np.ndarray, np.generic))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and torch.equal(one, other)
        )
    if isinstance(one, np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)
