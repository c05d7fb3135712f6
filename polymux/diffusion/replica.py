"""A module for one session: what its own code keeps on it reaches nobody else. Knows neither calls nor what they do."""

from __future__ import annotations

import copy

import torch

LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)  # only their owner runs what is in them


def replica(module: torch.nn.Module, depth: int) -> torch.nn.Module:
    """The module with attributes and settings of its own, and so its children down to `depth`: as deep as calls are
    captured. What is below runs in captured calls only, which get the original. The tensors are shared."""
    cls = type(module)
    own = cls.__new__(cls)  # not copy.copy: modules with parametrized weights refuse that
    own.__dict__.update(module.__dict__)
    for name, value in vars(module).items():
        if type(value) in (dict, list, set):
            own.__dict__[name] = copy.copy(value)
    if "generation_config" in own.__dict__:
        own.__dict__["generation_config"] = copy.deepcopy(own.__dict__["generation_config"])
    if depth and not isinstance(module, LISTS):
        own.__dict__["_modules"] = {
            name: None if child is None else replica(child, depth - 1) for name, child in module._modules.items()
        }
    return own
