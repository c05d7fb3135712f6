"""Which ways of using several ranks go together, as data; the table in the documentation is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Mode = Literal["ulysses", "ring", "guidance", "tensor", "hsdp", "vae", "data"]

REFUSED: Mapping[frozenset[Mode], str] = {}


def check_modes(modes: Mapping[Mode, str]) -> None:
    """Raise ConfigError if two of the modes in use, each with the flag that asked for it, do not go together."""
    raise NotImplementedError


def table() -> str:
    """A markdown table of all pairs."""
    raise NotImplementedError
