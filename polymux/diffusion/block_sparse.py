"""Attention that looks at a part of the keys only: for each block of queries, at the blocks of keys that matter most.

How much a block of keys matters is guessed from means: of its keys, and of the queries. Blocks with tokens that must
not be left out (`Tokens.always`), and each block's own, are among those that are looked at. The work is
FlexAttention's, for which a kernel is compiled on a GPU; on a CPU, where it computes all scores and then masks them, it
is for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # tokens; what the kernels of FlexAttention take


@dataclass(frozen=True)
class Tokens:
    """What a sequence is made of: text and a video, frame after frame."""

    video: int
    frame: int  # tokens of one frame
    text: int = 0
    text_first: bool = False

    @property
    def length(self) -> int:
        return self.video + self.text

    @property
    def always(self) -> tuple[slice, slice]:
        """What no query leaves out, and what leaves nothing out: text, and the first frame."""
        start = self.text if self.text_first else 0
        text = slice(0, self.text) if self.text_first else slice(self.video, self.length)
        return text, slice(start, start + self.frame)


@dataclass(frozen=True)
class Choice:
    """Which blocks of keys each block of queries looks at."""

    table: torch.Tensor  # [batch, heads, blocks, blocks]: whether it does; of text, all do
    text: torch.Tensor  # [blocks]: whether a block has tokens of the text

    def order(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of those of `blocks` that are looked at: how many there are, and their numbers, as FlexAttention wants them.

        They ascend: a kernel that has fewer tokens than its blocks hold leaves out the end of the last one it visits.
        """
        looked_at = self.table & blocks
        numbers = looked_at.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return looked_at.sum(-1, dtype=torch.int32), numbers.to(torch.int32)


@functools.lru_cache(maxsize=64)
def marks(tokens: Tokens, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """[blocks]: whether a block has tokens of the text, and of what is never left out; and how many have."""
    marked = torch.zeros(2, math.ceil(tokens.length / BLOCK) * BLOCK, dtype=torch.bool)
    text, frame = tokens.always
    marked[0, text] = marked[1, text] = marked[1, frame] = True
    of_text, always = marked.view(2, -1, BLOCK).any(2)
    return of_text.to(device), always.to(device), int(of_text.sum()), int(always.sum())


def kept(tokens: Tokens, sparsity: float) -> int:
    """How many blocks of keys an ordinary block of queries looks at."""
    text, _, _, always = marks(tokens, torch.device("cpu"))
    return min(always + max(1, math.ceil(round((1 - sparsity) * (len(text) - always), 6))), len(text))


def leaves_out(tokens: Tokens, sparsity: float) -> bool:
    """Whether anything would be left out. If not, ordinary attention does the same, and faster."""
    return kept(tokens, sparsity) < math.ceil(tokens.length / BLOCK)


def choose(query: torch.Tensor, key: torch.Tensor, tokens: Tokens, sparsity: float) -> Choice:
    """Of queries and keys [batch, heads, tokens, channels]."""
    text, always, texts, _ = marks(tokens, query.device)
    own = torch.eye(len(always), dtype=torch.bool, device=query.device)
    worth = (_means(query) @ _means(key).transpose(-1, -2)).masked_fill(always | own, math.inf)
    worth = worth.masked_fill(text, -math.inf)  # it is there in any case, and takes no place from others
    best = worth.topk(kept(tokens, sparsity) - texts, dim=-1, sorted=False).indices
    table = torch.zeros(worth.shape, dtype=torch.bool, device=query.device).scatter_(-1, best, True)
    return Choice(table | text | always[:, None], text)


def _means(values: torch.Tensor) -> torch.Tensor:
    """Of each block of tokens; the last one may be a part of one."""
    batch, heads, length, channels = values.shape
    whole = length // BLOCK
    blocks = values[:, :, : whole * BLOCK].view(batch, heads, whole, BLOCK, channels)
    means = [blocks.mean(3, dtype=torch.float32)]
    if length % BLOCK:
        means.append(values[:, :, whole * BLOCK :].mean(2, keepdim=True, dtype=torch.float32))
    return torch.cat(means, 2)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    choice: Choice,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """As scaled_dot_product_attention does with the keys of `choice`. `key_mask`: [batch, tokens], True: is there."""
    table = choice.table
    if key_mask is None:

        def looked_at(b: Any, h: Any, q: Any, k: Any) -> Any:
            return table[b, h, q // BLOCK, k // BLOCK]

    else:
        there = key_mask

        def looked_at(b: Any, h: Any, q: Any, k: Any) -> Any:
            return table[b, h, q // BLOCK, k // BLOCK] & there[b, k]

    # Text is masked token by token, which a mask of keys is about; the video is there as a whole.
    mask = BlockMask.from_kv_blocks(
        *choice.order(choice.text),
        *choice.order(~choice.text),
        BLOCK_SIZE=BLOCK,
        mask_mod=looked_at,
        seq_lengths=(query.shape[2], key.shape[2]),
        compute_q_blocks=False,
    )
    attention: torch.Tensor = kernel(query.device.type)(query, key, value, block_mask=mask, scale=scale)
    return attention


@functools.cache
def kernel(device_type: str) -> Callable[..., Any]:
    """FlexAttention; on a GPU, compiled once for all lengths."""
    if device_type == "cpu":
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention
    return torch.compile(flex_attention, dynamic=True)


def problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """What is missing for it here; None: it runs."""
    if device.type not in ("cpu", "cuda"):
        return f"it needs a CUDA device or a CPU, and this is {device.type}"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "its kernel is compiled, and the compiler, the package `triton`, is not installed"
    tokens = Tokens(video=4 * BLOCK, frame=BLOCK)
    values = torch.zeros(1, 2, tokens.length, 128, device=device, dtype=dtype)
    try:
        with torch.no_grad():
            attend(values, values, values, choose(values, values, tokens, 0.5))
    except Exception as error:  # whatever a compiler raises: no C compiler, no rights, no room
        return "its kernel cannot be compiled: " + " ".join(str(error).split())[:400]
    return None
