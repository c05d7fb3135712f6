"""Small modules and cache entries that hold them."""

from __future__ import annotations

from pathlib import Path

import torch

from polymux.memory.base import Layout
from polymux.memory.layout import layout_of
from polymux.memory.runtime_cache import CacheSettings, Content, Entry, Identity, RuntimeCache
from polymux.memory.runtime_cache.packing import file_layout, reader

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width + 1)
        self.norm = torch.nn.LayerNorm(width + 1)
        self.register_buffer("frequencies", torch.rand(width, 3), persistent=False)
        self.register_buffer("steps", torch.arange(width))


class Model(torch.nn.Module):
    """Blocks of different sizes, several dtypes, buffers that a checkpoint would hold and buffers that it would not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(3, 4)
        self.blocks = torch.nn.ModuleList([Block(5), Block(300), Block(8).to(torch.bfloat16)])
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("scale", torch.tensor(1.5, dtype=torch.float16))


def model() -> Model:
    """The same values each time."""
    torch.manual_seed(1)
    return Model().requires_grad_(False)


def model_layout(module: torch.nn.Module) -> Layout:
    return layout_of(module, BLOCKS)


def identity(version: str = "1") -> Identity:
    return Identity(
        model_class="tests.Model", sources=(), libraries=(("tests", version),), blocks=BLOCKS, dtype="float32"
    )


def published(root: Path, module: torch.nn.Module) -> Entry:
    """An open entry with the module's tensors."""
    content = Content(identity(), "tests", file_layout(model_layout(module)), reader(module))
    cache = RuntimeCache(CacheSettings(root=root, threads=2))
    with cache.turn(identity()) as turn:
        turn.publish(content)
    entry = cache.open_or_none(identity())
    assert entry is not None
    return entry
