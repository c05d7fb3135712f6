"""The list of tiny checkpoints, and what there is to say about each.

Knows neither how one is built (`makers`) nor how it is written and run (`driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from polymux.errors import ConfigError

Kind = Literal["diffusers", "modular", "transformers"]
Tensors = dict[str, torch.Tensor]


class Saveable(Protocol):
    """Pipelines, models, tokenizers, processors: whatever writes itself into a folder."""

    def save_pretrained(self, save_directory: Path, **kwargs: Any) -> object: ...


@dataclass(frozen=True)
class Ctx:
    """How to make a checkpoint. `shard` is a maximal file size such as "200KB"; `published`: see `layout`."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    shard: str | None = None
    published: bool = False


DEFAULT = Ctx()


Build = Callable[[Ctx], Any]  # gives one Saveable (diffusers, modular) or the list that shares a folder (transformers)
Run = Callable[[Path, Ctx], Tensors]


@dataclass
class Tiny:
    """One checkpoint: `build` makes it in memory, and the smoke call shows that it works.

    The smoke call of a pipeline is `from_pretrained(path, **load)(**call)`, two steps unless `call` says otherwise; of
    a transformers model it is `run`.
    """

    name: str
    kind: Kind
    build: Build
    call: Mapping[str, Any] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)
    needs_torchvision: bool = False  # its processor holds a video processor or one that works on tensors only
    run: Run | None = None


TINY: dict[str, Tiny] = {}


def tiny(
    name: str,
    kind: Kind = "diffusers",
    *,
    needs_torchvision: bool = False,
    load: Mapping[str, Any] | None = None,
    **call: Any,
) -> Callable[[Build], Build]:
    """Register the decorated function as the maker of checkpoint `name`; the rest is its smoke call."""

    def register(build: Build) -> Build:
        TINY[name] = Tiny(name, kind, build, call, load or {}, needs_torchvision)
        return build

    return register


def runner(name: str) -> Callable[[Run], Run]:
    """Register the decorated function as the smoke call of transformers checkpoint `name`."""

    def register(run: Run) -> Run:
        TINY[name].run = run
        return run

    return register


def find(name: str) -> Tiny:
    if name not in TINY:
        raise ConfigError(f"unknown tiny checkpoint {name!r}; known: {', '.join(TINY)}", param="name")
    return TINY[name]


def names(kind: Kind | None = None) -> list[str]:
    """Names of all checkpoints, or of those of one kind."""
    return [spec.name for spec in TINY.values() if kind in (None, spec.kind)]


def select(wanted: Iterable[str]) -> list[Tiny]:
    """The checkpoints behind names, kinds ("diffusers", "modular", "transformers") and "all"."""
    chosen: dict[str, Tiny] = {}
    for word in wanted:
        group = [spec for spec in TINY.values() if word in ("all", spec.kind)] or [find(word)]
        chosen.update({spec.name: spec for spec in group})
    return list(chosen.values())
