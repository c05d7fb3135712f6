"""Which submodules of a model are its blocks, in the order in which a forward runs them.

The libraries name the classes of a model's repeated blocks; where they do not, or where the blocks run in another order
than they are registered in, the family declares the containers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from polymux.errors import ConfigError


def block_paths(module: torch.nn.Module, declared: Sequence[str] = ()) -> list[str]:
    """The paths of the blocks. `declared` names containers (lists of blocks, or single blocks) that the model may have;
    without any of these the model's own classes count. Empty if nothing tells what a block is.

    Raises ConfigError if only some of the declared containers exist: the declaration is for another model.
    """
    own = [name for name in declared if _has(module, name)]
    if own and len(own) < len(declared):
        missing = next(name for name in declared if name not in own)
        raise ConfigError(f"{type(module).__name__} has the blocks {own[0]!r} but no {missing!r}")
    found = [path for name in own for path in _members(module.get_submodule(name), name)]
    return found or list(_of_classes(module, _block_classes(module), ""))


def _has(module: torch.nn.Module, path: str) -> bool:
    return any(name == path for name, _ in module.named_modules())


def _members(container: torch.nn.Module, path: str) -> list[str]:
    if isinstance(container, torch.nn.ModuleList):
        return [f"{path}.{i}" for i in range(len(container))]
    return [path]


def _block_classes(module: torch.nn.Module) -> set[str]:
    """diffusers calls them `_repeated_blocks`, both libraries have `_no_split_modules`."""
    names: set[str] = set()
    for attribute in ("_repeated_blocks", "_no_split_modules"):
        names.update(getattr(module, attribute, None) or ())
    return names


def _of_classes(module: torch.nn.Module, classes: set[str], prefix: str) -> Iterator[str]:
    """The outermost lists with members of these classes."""
    for name, child in module.named_children():
        path = prefix + name
        if isinstance(child, torch.nn.ModuleList) and any(type(block).__name__ in classes for block in child):
            yield from _members(child, path)
        else:
            yield from _of_classes(child, classes, path + ".")
