"""A part of a model of transformers: one of its children with its weights, what other stages have without theirs.

The class stays the model's own. Children that come before the part are not there at all, those that come after it are
there in name: their settings are asked for, and they have no storage. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from polymux.errors import ConfigError
from polymux.loading.component import Part, load_model
from polymux.loading.libraries import reading
from polymux.loading.options import LoadFlags


def load_part(
    whole: Part, children: Sequence[str], kept: str, device: torch.device, dtype: torch.dtype, flags: LoadFlags
) -> torch.nn.Module:
    """`children`: all that have weights, in the order of the way; `kept`: the one whose weights are read. Raises
    CheckpointError, and ConfigError if the checkpoint has not all of these parts."""
    with reading(f"{whole.folder}: {whole.cls.__name__}"), torch.device("meta"):
        in_name = whole.cls(whole.cls.config_class.from_pretrained(str(whole.folder), local_files_only=True))
    for child in children:
        if child not in in_name._modules:
            what = f"{whole.folder}: this checkpoint has no {child}: there is nothing to split"
            raise ConfigError(f"split_stages: {what}", param="split_stages")
    part = replace(whole, name=kept, cls=_without(whole.cls, [name for name in children if name != kept]))
    model = load_model(part, part.weights(flags), device, dtype, flags)
    for child in children[list(children).index(kept) + 1 :]:
        setattr(model, child, getattr(in_name, child))
    return model.eval().requires_grad_(False)


def _without(cls: type[Any], children: Sequence[str]) -> type[Any]:
    """The class of a model that is made without these children, and does not miss their weights."""

    def __init__(self: Any, config: object) -> None:
        cls.__init__(self, config)
        for name in children:
            setattr(self, name, None)
        self.post_init()  # what it has noted of its children is noted again

    named = {
        "__init__": __init__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "_keys_to_ignore_on_load_unexpected": [rf"^{name}\." for name in children],
    }
    return type(cls.__name__, (cls,), named)
