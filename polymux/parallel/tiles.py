"""Autoencoders on several ranks: the tiles of a tiled encoding or decoding are dealt out.

Which tiles there are and how they are blended, the autoencoder's own code says. It runs twice: once to compute the
tiles of this rank, the others' being left without values; and, after the ranks have told each other, once more with
all of them. All ranks get the same arguments, and all return the whole result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from diffusers.models.autoencoders.vae import AutoencoderMixin
from torch import Tensor

from polymux.errors import ConfigError
from polymux.parallel.wrapping import Forward, Wrapping, shapes_of

MOST_KNOWN = 1024  # forms of tiles that are remembered
CODERS = {"encode": "encoder", "decode": "decoder"}  # what computes a tile, by the method that makes tiles
Phase = Literal["alone", "computing", "repeating"]


@dataclass(frozen=True)
class _Spec:
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class SharedTiles:
    """What was put on the autoencoder, until `undo`."""

    def __init__(self) -> None:
        self._wrapping = Wrapping()

    def undo(self) -> None:
        """The autoencoder as it was, but for tiling, which stays on. An engine must have let go of it before."""
        self._wrapping.undo()

    def _share(self, vae: torch.nn.Module, method: str, group: dist.ProcessGroup) -> None:
        deal = _Deal(group)
        if callable(getattr(type(vae), "clear_cache", None)):  # a tile is computed piece by piece
            deal.pieces = True
            self._wrapping.around(vae, partial(_next_tile, deal), "clear_cache")
        self._wrapping.around(vae.get_submodule(CODERS[method]), partial(_dealt, deal))
        self._wrapping.around(vae, partial(_twice, deal), method)


def share_tiles(vae: torch.nn.Module, group: dist.ProcessGroup) -> SharedTiles:
    """Turn tiling on and have each rank compute a part of the tiles.

    Raises ConfigError if the autoencoder has no tiling, or computes its tiles in another way.
    """
    kind = type(vae).__name__
    try:
        if not isinstance(vae, AutoencoderMixin):
            raise NotImplementedError
        vae.enable_tiling()
    except NotImplementedError:
        raise ConfigError(f"{kind} has no tiles to share among ranks", param="vae_patch_parallel_size") from None
    names = {name for name, _ in vae.named_children()}
    if any(
        "conv_cache" in inspect.signature(vae.get_submodule(c).forward).parameters for c in names & {*CODERS.values()}
    ):
        raise ConfigError(f"{kind} hands on what it remembers of a tile: its tiles cannot be shared among ranks")
    shared = SharedTiles()
    for method, coder in CODERS.items():
        if coder in names:
            shared._share(vae, method, group)
    return shared


class _Deal:
    """The tiles of one encoding or decoding."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.pieces = False
        self.phase: Phase = "alone"
        self._group = group
        self._form: Hashable = ()  # of the whole call
        self._fresh = True
        self._tiles: list[list[Tensor]] = []
        self._results: list[list[Tensor]] = []
        self._expected: list[_Spec] | None = None
        self._forms: list[Hashable] = []
        self._known: dict[Hashable, list[_Spec]] = {}  # what the pieces of a tile look like, by its form

    def run(self, call: Callable[[], Any], form: Hashable) -> Any:
        if self.phase != "alone" or self._group.size() == 1:  # the pictures of a batch, one by one
            return call()
        self._form, self._tiles, self._forms, self._fresh = form, [], [], True
        try:
            self.phase = "computing"
            call()
            self._results = self._exchanged()
            self.phase, self._tiles, self._fresh = "repeating", [], True
            return call()
        finally:
            self.phase, self._tiles, self._results = "alone", [], []

    def next_tile(self) -> None:
        self._fresh = True

    def piece(self, compute: Callable[[], Any], form: Hashable) -> Any:
        """What the coder makes of its arguments, or will have made."""
        if self.phase == "alone":
            return compute()
        if self._fresh or not self.pieces:
            self._fresh = False
            self._tiles.append([])
            self._forms.append((self._form, form))
            mine = (len(self._tiles) - 1) % self._group.size() == self._group.rank()
            self._expected = None if mine else self._known.get(self._forms[-1])
        tile = self._tiles[-1]
        if self.phase == "repeating":
            result = self._results[len(self._tiles) - 1][len(tile)]
        elif self._expected is None:  # also if nobody knows yet what comes out
            result = compute()
        else:
            result = self._expected[len(tile)].empty()
        tile.append(result)
        # Blending writes into tiles; what it makes of these is thrown away.
        return result if self.phase == "repeating" else torch.empty_like(result)

    def _exchanged(self) -> list[list[Tensor]]:
        """Every tile from the rank whose it is."""
        works, flats = [], []
        if len(self._known) > MOST_KNOWN:
            self._known.clear()  # on all ranks at once, which all know the same
        for number, (tile, form) in enumerate(zip(self._tiles, self._forms, strict=True)):
            self._known[form] = [_Spec(piece.shape, piece.dtype, piece.device) for piece in tile]
            flats.append(torch.cat([piece.reshape(-1) for piece in tile]))
            owner = number % self._group.size()
            works.append(dist.broadcast(flats[-1], group=self._group, group_src=owner, async_op=True))
        for work in works:
            if work is not None:
                work.wait()
        return [
            [
                part.view(piece.shape)
                for part, piece in zip(torch.split(flat, [p.numel() for p in tile]), tile, strict=True)
            ]
            for flat, tile in zip(flats, self._tiles, strict=True)
        ]


def _twice(deal: _Deal, method: Forward) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        return deal.run(lambda: method(*args, **kwargs), (shapes_of(args), shapes_of(kwargs)))

    return call


def _dealt(deal: _Deal, forward: Forward) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        return deal.piece(lambda: forward(*args, **kwargs), shapes_of(args[:1]))

    return call


def _next_tile(deal: _Deal, method: Forward) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        deal.next_tile()
        return method(*args, **kwargs)

    return call
