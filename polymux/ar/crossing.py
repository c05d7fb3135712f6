"""Between the host and a GPU, without waiting for either; on a CPU there is nothing to cross."""

from __future__ import annotations

import numpy as np
import torch

from polymux.ar.features import Ints


def to_device(values: Ints | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Used in the order of the device's stream, it is there."""
    made = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return made.contiguous().pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def to_host(made: torch.Tensor) -> torch.Tensor:
    """It may be looked at when a `Landing` of later has been waited for."""
    if not made.is_cuda:
        return made
    host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
    return host.copy_(made, non_blocking=True)


class Landing:
    """A point in the device's stream."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Until the device has got there."""
        if self._event is not None:
            self._event.synchronize()
