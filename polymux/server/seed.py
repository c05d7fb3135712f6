"""The seed of a request whose answer tells it before the model's process could."""

from __future__ import annotations

import secrets

from polymux.request import Capabilities


def seed_of(asked: int | None, can: Capabilities) -> int:
    """That of the request, else the operator's default, else one that is drawn here."""
    if asked is not None:
        return asked
    default = can.defaults.get("seed")
    return secrets.randbelow(2**32) if default is None else default
