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
import torch.nn.functional as F
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

    order: torch.Tensor  # [batch, heads, blocks, blocks]: of keys, those that matter most first, and text last
    count: torch.Tensor  # [batch, heads, blocks]: so many of them
    text: torch.Tensor  # [blocks]: whether it has tokens of the text; all look at these
    texts: int  # such blocks

    def table(self) -> torch.Tensor:
        """[batch, heads, blocks, blocks]: whether it is looked at."""
        rank = torch.arange(self.order.shape[-1], device=self.order.device)
        taken = (rank < self.count[..., None]).expand(self.order.shape)
        return torch.zeros_like(taken).scatter(-1, self.order.long(), taken) | self.text


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
    blocks = len(always)
    scores = _means(query) @ _means(key).transpose(-1, -2)
    own = torch.eye(blocks, dtype=torch.bool, device=query.device)
    scores = scores.masked_fill(always | own, math.inf).masked_fill(text, -math.inf)
    order = scores.argsort(dim=-1, descending=True).to(torch.int32)
    count = torch.where(always, blocks - texts, kept(tokens, sparsity) - texts).to(torch.int32)
    return Choice(order, count.expand(order.shape[:-1]).contiguous(), text, texts)


def _means(values: torch.Tensor) -> torch.Tensor:
    """Of each block of tokens."""
    batch, heads, length, channels = values.shape
    padded = F.pad(values.float(), (0, 0, 0, -length % BLOCK))
    sums = padded.view(batch, heads, -1, BLOCK, channels).sum(3)
    sums[:, :, -1] *= BLOCK / (length - (sums.shape[2] - 1) * BLOCK)  # of the last one, less is there
    return sums / BLOCK


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    choice: Choice,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """As scaled_dot_product_attention does with the keys of `choice`. `key_mask`: [batch, tokens], True: is there."""
    table = choice.table()
    if key_mask is None:

        def looked_at(b: Any, h: Any, q: Any, k: Any) -> Any:
            return table[b, h, q // BLOCK, k // BLOCK]

    else:
        there = key_mask

        def looked_at(b: Any, h: Any, q: Any, k: Any) -> Any:
            return table[b, h, q // BLOCK, k // BLOCK] & there[b, k]

    texts = torch.full_like(choice.count, choice.texts)
    first = choice.text.to(torch.int8).argsort(descending=True, stable=True).to(torch.int32)
    mask = BlockMask.from_kv_blocks(
        texts,  # the blocks that are masked token by token
        first.expand(choice.order.shape).contiguous(),
        choice.count,  # those that are not
        choice.order,
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
