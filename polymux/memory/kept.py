"""Weights that stay on the device, except while the engine sleeps."""

from __future__ import annotations

import torch

from polymux.memory.base import Image
from polymux.memory.layout import all_tensors, bind, image_of, let_go, pack
from polymux.memory.pinned import PinnedBuffer


class Kept:
    """The tensors of `module` that `image` lists (None: all), on `device` or parked on the host."""

    def __init__(self, module: torch.nn.Module, device: torch.device, image: Image | None = None) -> None:
        self._module, self._device, self._image = module, device, image
        self._parked: tuple[Image, PinnedBuffer] | None = None

    def park(self) -> None:
        """Move to the host. Raises ConfigError for tensors that cannot be moved, such as those of quantized layers."""
        if self._parked is not None:
            return
        image = self._image or image_of(all_tensors(self._module))
        buffer = PinnedBuffer(image.nbytes)
        if self._device.type == "cuda":
            buffer.pin()
        pack(self._module, image, buffer.tensor)
        let_go(self._module, image, self._device)
        self._parked = image, buffer

    def unpark(self) -> None:
        """Move back, in one copy."""
        if self._parked is None:
            return
        image, buffer = self._parked
        memory = torch.empty(image.nbytes, dtype=torch.uint8, device=self._device)
        memory.copy_(buffer.tensor)
        bind(self._module, image, memory)
        self._parked = None
        buffer.close()

    def close(self) -> None:
        if self._parked is not None:
            self._parked[1].close()
            self._parked = None
