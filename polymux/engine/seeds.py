"""Where the seed comes from, if a request has none."""

from __future__ import annotations

import dataclasses
import secrets

import msgspec

from polymux.request import Request


def seed_of(asked: int | None) -> int:
    """The seed that was asked for, or one that is drawn."""
    return secrets.randbelow(2**32) if asked is None else asked


def with_seed(request: Request) -> Request:
    """The same request, from which everybody makes the same noise."""
    if request.params.seed is not None or request.generator_state is not None:
        return request
    return msgspec.structs.replace(request, params=dataclasses.replace(request.params, seed=seed_of(None)))
