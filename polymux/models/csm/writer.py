"""Writes frames: the backbone and the first code of each frame, the depth decoder the frame's other codes.

All of it is for many requests at once, each a row with noise and settings of its own; a row's codes do not depend on
the others. Knows neither texts nor sounds, nor where keys and values of the backbone are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from polymux.models.drawing import COLUMNS, draw
from polymux.models.layer_caches import FEW, few, one_by_one
from polymux.models.mimi import own_config

Tensor = torch.Tensor


class Rows(NamedTuple):
    """What is known of each row: `key` (rows) of its noise; `how` (rows, 2, columns), settings of the first code and of
    the others, see `drawing`; `frame` (rows), how many calls it has had, its prompt and its frames. Of a frame, `state`
    (rows, 1, channels) and `code` (rows), which the last call gave."""

    key: Tensor
    how: Tensor
    frame: Tensor
    state: Tensor
    code: Tensor


class Fuses(Protocol):
    """Has functions run as few kernels."""

    def function(self, given: Callable[..., Tensor]) -> Callable[..., Tensor]: ...


def empty_rows(count: int, like: Tensor) -> Rows:
    """Such as know nothing yet. `like` (..., channels) of the backbone."""
    numbers = torch.zeros(count, dtype=torch.long, device=like.device)
    how = torch.ones(count, 2, COLUMNS, device=like.device)
    state = like.new_zeros(count, 1, like.shape[-1])
    return Rows(numbers, how, numbers.clone(), state, numbers.clone())


class Writer:
    """Implements `ar.frames.FrameWriter`. From now on the model's own `generate` does not run any more."""

    def __init__(self, model: Any) -> None:
        self._model, self._depth = model, model.depth_decoder
        self.groups, self._end = int(model.config.num_codebooks), int(model.config.codebook_eos_token_id)
        self._choose, self._choose_other = _first, _other
        own_config(model.backbone_model)
        AttentionInterface.register(FEW, few)
        own_config(self._depth.model)._attn_implementation = FEW
        for layer in self._depth.model.layers:  # code that is compiled for one is that of all, if they do not differ
            layer.self_attn.layer_idx = 0

    @property
    def backbone(self) -> Any:
        return self._model.backbone_model

    @property
    def decoders(self) -> tuple[torch.nn.Module, ...]:
        return (self._model.backbone_model, self._depth.model)

    def fuse(self, fuses: Fuses) -> None:
        """Have what is drawn from layers run as few kernels."""
        self._choose, self._choose_other = fuses.function(_first), fuses.function(_other)

    def empty(self, rows: int) -> Rows:
        return empty_rows(rows, self._model.lm_head.weight)

    def through(self, embeds: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """The backbone."""
        backbone, hidden = self._model.backbone_model, embeds
        angles = backbone.rotary_emb(hidden, positions)
        for layer in backbone.layers:
            hidden = layer(hidden, position_embeddings=angles, **attention)
        normed: Tensor = backbone.norm(hidden)
        return normed

    def frame(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Codes of a frame (rows, groups), and what they embed to (rows, 1, channels)."""
        depth = self._depth.model
        run = one_by_one(depth, len(rows.code), self.groups, rows.state)
        run(depth.inputs_embeds_projector(rows.state), 0)
        number, how = (rows.frame - 1) * self.groups, rows.how[:, 1]
        codes = [rows.code]
        for i, head in enumerate(self._depth.codebooks_head.weight):
            embeds = depth.embed_tokens(codes[i][:, None] + i * depth.vocab_size)
            made = run(depth.inputs_embeds_projector(embeds), i + 1)
            codes.append(self._choose_other(made, depth.norm, head, rows.key, number + i + 1, how))
        frame = torch.stack(codes, dim=1)
        return frame, self._model.backbone_model.embed_tokens(frame[:, None])

    def first(self, state: Tensor, rows: Rows) -> Rows:
        """Draws the first code of the next frame, from a state (rows, 1, channels)."""
        number = rows.frame * self.groups
        code = self._choose(self._model.lm_head(state[:, 0]), rows.key, number, rows.how[:, 0])
        return Rows(rows.key, rows.how, rows.frame + 1, state, code)

    def verdict(self, codes: list[int]) -> tuple[bool, bool]:
        """A frame whose codes are all the end, but perhaps for the last one, is the last; if that is too, it is no
        sound."""
        *frame, _ = codes
        ends = [code == self._end for code in frame]
        return not all(ends), bool(ends) and all(ends[:-1])


def _first(logits: Tensor, key: Tensor, number: Tensor, how: Tensor) -> Tensor:
    """Of logits (rows, codes)."""
    return draw(logits, key, number, how)


def _other(hidden: Tensor, norm: torch.nn.Module, head: Tensor, key: Tensor, number: Tensor, how: Tensor) -> Tensor:
    """Of what the last layer gives (rows, channels); `head` (channels, codes)."""
    return draw(norm(hidden) @ head, key, number, how)
