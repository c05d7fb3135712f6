"""The knobs of how models that write token by token do it, and of the memory in which they keep what they have read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from polymux.errors import ConfigError
from polymux.knobs import Checked, knob
from polymux.tools import CallFormat

TOKENS_OF_A_STEP = 8192
SHARE_OF_THE_GPU = 0.9
SHARE_BESIDE_SPEECH = 0.5  # of a model that speaks, too
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(Checked):
    """Decoding: how models that answer write many answers at once (docs/ar_engine.md)"""

    decoding: str = knob(
        "auto",
        "paged: all answers go on together, in one batch over a shared cache; generate: each in a loop of its own; "
        "auto: paged for the models of which it is proven; vllm: as an installed vLLM has them go on",
        choices=("auto", "paged", "generate", "vllm"),
    )
    max_num_batched_tokens: int | None = knob(
        None, f"tokens that one step computes (default: {TOKENS_OF_A_STEP}); longer prompts take several", minimum=1
    )
    block_size: int | None = knob(
        None, "tokens in a block of the cache, a power of 2 (default: 16)", minimum=8, maximum=256
    )
    enable_prefix_caching: bool | None = knob(
        None, "keep what was computed of a prompt for prompts that begin alike (default: on)",
        off="--no-enable-prefix-caching",
    )  # fmt: skip
    enable_chunked_prefill: bool | None = knob(
        None, "compute a long prompt in parts, between which other answers go on (default: on)",
        off="--no-enable-chunked-prefill",
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = knob(
        None, "memory of the cache (default: on a GPU what --gpu-memory-utilization leaves, on a CPU 1 GiB)", minimum=1
    )
    gpu_memory_utilization: float | None = knob(
        None,
        f"share of the GPU for weights and cache (default: {SHARE_OF_THE_GPU:g}; of a model that speaks, too,"
        f" {SHARE_BESIDE_SPEECH:g})",
        minimum=0.01,
        maximum=1,
    )
    decode_graphs: str = knob(
        "auto",
        "how a step runs on a GPU: compiled: fused kernels in a CUDA graph; plain: the model's own kernels in one; "
        "off: kernel by kernel; auto: compiled on a GPU, off on a CPU",
        choices=("auto", "compiled", "plain", "off"),
    )

    tool_call_parser: str | None = knob(
        None, "how the model writes calls of tools (default: as its chat template shows)",
        choices=get_args(CallFormat),
    )  # fmt: skip

    @property
    def elsewhere(self) -> bool:
        """Whether processes that are not polymux's have the model, and its ranks."""
        return self.decoding == "vllm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size={self.block_size}: must be a power of 2", param="block_size")
        if self.kv_cache_memory_bytes is not None and self.gpu_memory_utilization is not None:
            what = "--kv-cache-memory-bytes and --gpu-memory-utilization exclude each other: both say how large it is"
            raise ConfigError(what, param="kv_cache_memory_bytes")

    @property
    def alone(self) -> dict[str, bool]:
        """The knobs whose values act on one rank only."""
        return {"decoding": self.decoding == "generate", "decode_graphs": self.decode_graphs == "compiled"}
