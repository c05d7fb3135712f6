"""The layers of a component that have adapters beside them, and which of these are switched on."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

AdapterSet = tuple[tuple[str, float], ...]  # names and scales, in the order in which they are added up


class TunedLayers:
    """Of one module. Empty until adapters have been put in."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._layers: dict[str, Any] = {}  # by path
        self._active: AdapterSet | None = ()

    def refresh(self) -> None:
        """Layers have come or gone. Whatever was switched on is off."""
        if importlib.util.find_spec("peft") is None:
            return
        from peft.tuners.tuners_utils import BaseTunerLayer  # optional, and slow to import

        layers = self._module.named_modules()
        self._layers = {path: layer for path, layer in layers if isinstance(layer, BaseTunerLayer)}
        self._active = None
        self.activate(())

    def layers_with(self, name: str) -> list[str]:
        """The paths of the layers that this adapter is beside."""
        return [path for path, layer in self._layers.items() if _has(layer, name)]

    def mine(self, adapters: AdapterSet) -> AdapterSet:
        """Those of the adapters that are in this component."""
        return tuple((n, s) for n, s in adapters if any(_has(layer, n) for layer in self._layers.values()))

    def activate(self, adapters: AdapterSet) -> None:
        """Switch on exactly these, each at its scale."""
        if adapters == self._active:
            return
        for layer in self._layers.values():
            here = [(name, scale) for name, scale in adapters if _has(layer, name)]
            if here:
                layer.set_adapter([name for name, _ in here])
            layer.enable_adapters(bool(here))
            for name, scale in here:
                layer.set_scale(name, scale)
        self._active = adapters

    def remove(self, name: str) -> None:
        """Take an adapter out. The layers stay as they are, with one less beside them."""
        for path in self.layers_with(name):
            self._layers[path].delete_adapter(name)
        getattr(self._module, "peft_config", {}).pop(name, None)


def _has(layer: Any, name: str) -> bool:
    return any(name in getattr(layer, group) for group in layer.adapter_layer_names)
