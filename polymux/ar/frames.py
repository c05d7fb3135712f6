"""Sentences that are written together, frame by frame: each frame is several codes, which a small decoder writes one
after the other, and one step of a large decoder, whose keys and values are paged. On a GPU all of it is one graph.

What a row goes on with stays on the device; the host learns the codes later. Knows writers by what they can do, and
nothing of texts, sounds or requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from polymux.ar.attention import IMPLEMENTATION, register
from polymux.ar.blocks import BlockPool
from polymux.ar.crossing import Landing, to_device, to_host
from polymux.ar.features import Ints
from polymux.ar.layers import CompiledLayers
from polymux.ar.paged_cache import PagedCache, Room, Shape, Stretches
from polymux.ar.prompt_batch import Span, side_by_side
from polymux.ar.step_graphs import Graphs, StepGraphs

Tensor = torch.Tensor
Rows = Any  # a named tuple of tensors (rows, ...); `frame` of them counts frames, with the prompt as one


class FrameWriter(Protocol):
    """What writes frames: a model, or the part of it that does. `groups`: codes of a frame."""

    groups: int

    @property
    def backbone(self) -> Any:
        """The large decoder, whose attention is to be paged: a module with a `config` of transformers."""

    @property
    def decoders(self) -> tuple[torch.nn.Module, ...]:
        """All of them, whose layers are worth compiling."""

    def fuse(self, layers: CompiledLayers) -> None:
        """Have what else is worth it compiled as well."""

    def empty(self, rows: int) -> Rows: ...

    def through(self, embeds: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """The backbone: (1, tokens, channels) at (1, tokens)."""

    def frame(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Codes of a frame (rows, groups), and what they embed to (rows, 1, channels)."""

    def first(self, state: Tensor, rows: Rows) -> Rows:
        """The rows with the first code of their next frame, which is `code` of them, from a state (rows, 1, channels)
        of the backbone."""

    def verdict(self, codes: list[int]) -> tuple[bool, bool]:
        """Of what a step has written for a row, the codes of a frame (of a prompt there are none) and the first one of
        the next: whether that frame is a sound, and whether it is the last one."""


class Start(Protocol):
    """What a sentence begins with. `embeds` (1, n, channels); `trailing` (1, m, channels) is added to what its frames
    embed to, one each, and then `after` (1, 1, channels). `rows`: one. `most`: first codes."""

    embeds: Tensor
    trailing: Tensor
    after: Tensor
    rows: Rows
    most: int


@dataclass
class FrameFlight:
    """Codes that are being written, of these rows: (rows, groups + 1), of a prompt (rows, 1); on the host once the
    device has got there."""

    rows: list[int]
    codes: Tensor
    landed: Landing

    def wait(self) -> list[list[int]]:
        self.landed.wait()
        written: list[list[int]] = self.codes.tolist()
        return written


class _Network:
    """A step of all rows, as `StepGraphs` calls networks."""

    def __init__(self, writer: FrameWriter, rows: int, device: torch.device) -> None:
        register(writer.backbone)
        writer.backbone.config._attn_implementation = IMPLEMENTATION
        self.writer, self.device = writer, device
        self.state = writer.empty(rows + 1)
        self.trailing = torch.zeros(0)  # (rows, most frames of any, channels)
        self.trails = torch.zeros(rows + 1, dtype=torch.long, device=device)
        self.after = torch.zeros(0)

    @cached_property
    def layers(self) -> CompiledLayers:
        made = CompiledLayers(*self.writer.decoders)
        self.writer.fuse(made)
        return made

    def __call__(self, ids: Tensor, positions: Tensor, keep: int, cache: int) -> Tensor:
        """ids: the rows themselves."""
        rows = self.of(ids)
        codes, total = self.writer.frame(rows)
        embeds = total.transpose(0, 1).contiguous() + self._text(ids, rows.frame - 1)
        state = self.writer.through(embeds, positions[None], attention_mask=None, paged=cache)
        now = self.writer.first(state.transpose(0, 1), rows)
        self.put(ids, now)
        return torch.cat([codes, now.code[:, None]], dim=1)

    def of(self, ids: Tensor) -> Rows:
        return type(self.state)(*(each[ids] for each in self.state))

    def put(self, ids: Tensor, rows: Rows) -> None:
        for mine, given in zip(self.state, rows, strict=True):
            mine[ids] = given

    def begin(self, row: int, start: Start) -> bool:
        """Take in what a sentence begins with. Whether tensors have moved."""
        count, channels = start.trailing.shape[1:]
        for mine, given in zip(self.state, start.rows, strict=True):
            mine[row] = given[0]
        self.trails[row] = count
        if grows := not len(self.trailing) or self.trailing.shape[1] < count:
            room = 1 << max(count - 1, 0).bit_length()  # and so seldom again
            made = start.embeds.new_zeros(len(self.trails), room, channels)
            if len(self.trailing):
                made[:, : self.trailing.shape[1]] = self.trailing
            self.trailing, self.after = made, start.after[0].clone()
        self.trailing[row, :count] = start.trailing[0]
        return grows

    def _text(self, ids: Tensor, frame: Tensor) -> Tensor:
        said = self.trailing[ids, frame.clamp(0, self.trailing.shape[1] - 1)]
        return torch.where((frame < self.trails[ids])[:, None], said, self.after)[None]


class FrameBatch:
    """The sentences under way: each has a row, and blocks for all that it may become."""

    def __init__(self, writer: FrameWriter, room: Room, device: torch.device, graphs: Graphs) -> None:
        self._network = _Network(writer, room.rows, device)
        self._cache = PagedCache(shape_of(writer), room, device)
        self._pool = BlockPool(room.blocks, room.block_size, caching=False)
        self.graphs, self._context = graphs, room.context
        self._steps = self._new_steps()
        self._free = list(range(room.rows))
        self._held: dict[int, list[int]] = {}  # blocks by row
        self._position: dict[int, int] = {}

    @property
    def blocks(self) -> tuple[int, int]:
        """Those in use, and all."""
        return self._pool.used, self._pool.count

    def prepare(self) -> None:
        """Record steps for all numbers of rows. A sentence must have been written before."""
        self._steps.prepare()

    def fits(self, start: Start) -> bool:
        """Whether it could be written if it were alone."""
        length = self._length(start)
        return length <= self._context and self._pool.blocks_for(length) <= self._pool.count

    def has_room(self, starts: Many[Start]) -> bool:
        """For all of them."""
        blocks = sum(self._pool.blocks_for(self._length(start)) for start in starts)
        return len(starts) <= len(self._free) and blocks <= self._pool.free

    def begin(self, starts: Many[Start]) -> FrameFlight:
        """Read their prompts, and draw their first codes. There must be room for each after those before it. What is
        raised leaves no row taken."""
        rows = [self._place(start) for start in starts]
        try:
            return self._read(rows, starts)
        except Exception:
            for row in rows:
                self.leave(row)
            raise

    def _read(self, rows: list[int], starts: Many[Start]) -> FrameFlight:
        for row, start in zip(rows, starts, strict=True):
            self._cache.table[row, : len(self._held[row])] = self._upload(np.array(self._held[row])).int()
            if self._network.begin(row, start):
                self._steps = self._new_steps()  # what is recorded reads what has been there
        lengths = [start.embeds.shape[1] for start in starts]
        ends = np.cumsum(lengths)
        wholes: dict[int, list[Span]] = defaultdict(list)
        for length, end in zip(lengths, ends.tolist(), strict=True):
            wholes[(length - 1).bit_length()].append((end - length, end))
        slots = [self._cache.slot(self._held[row], i) for row, n in zip(rows, lengths, strict=True) for i in range(n)]
        self._cache.batch = Stretches(
            self._upload(np.array(slots)), (), tuple(side_by_side(spans, self._upload) for spans in wholes.values())
        )
        embeds = torch.cat([start.embeds for start in starts], dim=1)
        positions = self._upload(np.concatenate([np.arange(n) for n in lengths]))
        network, ids = self._network, self._upload(np.array(rows))
        state = network.writer.through(embeds, positions[None], attention_mask=None, paged=self._cache.handle)
        now = network.writer.first(state[:, self._upload(ends - 1)].transpose(0, 1), network.of(ids))
        network.put(ids, now)
        return self._flight(rows, now.code[:, None])

    def step(self, rows: list[int]) -> FrameFlight:
        """The next frame of each."""
        positions = [self._position[row] for row in rows]
        slots = [self._cache.slot(self._held[row], self._position[row]) for row in rows]
        for row in rows:
            self._position[row] += 1
        return self._flight(rows, self._steps.run(positions, rows, slots))

    def leave(self, row: int) -> None:
        """Its sentence is over."""
        self._pool.give_back(self._held.pop(row))
        del self._position[row]
        self._free.append(row)

    def _length(self, start: Start) -> int:
        return start.embeds.shape[1] + start.most - 1

    def _place(self, start: Start) -> int:
        row = self._free.pop()
        self._held[row] = [self._pool.take() for _ in range(self._pool.blocks_for(self._length(start)))]
        self._position[row] = start.embeds.shape[1]
        return row

    def _new_steps(self) -> StepGraphs:
        rows = torch.arange(self._cache.rows + 1, device=self._cache.device)
        return StepGraphs(self._network, self._cache, rows, self.graphs)

    def _flight(self, rows: list[int], codes: Tensor) -> FrameFlight:
        return FrameFlight(rows, to_host(codes), Landing(self._cache.device))

    def _upload(self, values: Ints) -> Tensor:
        return to_device(values, self._cache.device)


def shape_of(writer: FrameWriter) -> Shape:
    """Of what the backbone keeps of each position."""
    config = writer.backbone.config
    dtype = next(writer.backbone.parameters()).dtype
    return Shape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, dtype)
