"""What the engine of language models has on the device beside the weights: the cache, its blocks, the captured steps.

Made for a model that is there, and gone while it sleeps. Knows no requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from polymux.ar.blocks import BlockPool
from polymux.ar.network import Network
from polymux.ar.paged_cache import PagedCache, Room
from polymux.ar.runner import Runner
from polymux.ar.scheduler import Scheduler
from polymux.ar.step_graphs import Graphs
from polymux.config import EngineConfig
from polymux.decoding_config import GIB, SHARE_BESIDE_SPEECH, SHARE_OF_THE_GPU, TOKENS_OF_A_STEP, DecodingConfig
from polymux.errors import ConfigError
from polymux.memory.measure import release

log = logging.getLogger(__name__)

BLOCK = 16  # tokens
SPARE = 2  # times what all requests together can have: the rest is for what comes again


@dataclass(frozen=True)
class ArState:
    pool: BlockPool
    scheduler: Scheduler
    runner: Runner
    handle: int  # of the cache

    @classmethod
    def make(cls, config: EngineConfig, network: Network, handle: int | None, context: int | None) -> ArState:
        """`handle`: of the network's last cache. `context`: the most tokens of a sequence, where the model knows.
        Raises ConfigError if there is no room."""
        settings, rows = config.decoding, config.scheduler.max_num_seqs
        size = settings.block_size or BLOCK
        count = block_count(settings, network, size, rows, context)
        caching = settings.enable_prefix_caching is not False
        pool = BlockPool(count, size, caching)
        longest = min(count * size, context or count * size)
        cache = PagedCache(network.shape, Room(count, size, rows, longest), network.device, handle)
        budget = settings.max_num_batched_tokens or TOKENS_OF_A_STEP
        scheduler = Scheduler(pool, rows, budget, chunked=settings.enable_chunked_prefill is not False)
        graphs = graphs_of(settings, network.device)
        if graphs == "compiled" and network.listens:
            what = "decode_graphs='compiled': cannot act on a model whose states are handed on to be spoken"
            raise ConfigError(what, param="decode_graphs")
        gib = network.shape.token_bytes * size * count / GIB
        log.info("%d blocks of %d tokens for keys and values (%.2f GiB); graphs: %s", count, size, gib, graphs)
        return cls(pool, scheduler, Runner(network, cache, graphs), cache.handle)

    @property
    def tokens(self) -> int:
        """That the cache has room for."""
        return self.pool.count * self.pool.block_size


def graphs_of(settings: DecodingConfig, device: torch.device) -> Graphs:
    """Raises ConfigError for what a device cannot do."""
    on_gpu = device.type == "cuda"
    match settings.decode_graphs:
        case "compiled" | "plain" as chosen:
            if not on_gpu:
                raise ConfigError(f"decode_graphs={chosen!r}: {device} is no GPU", param="decode_graphs")
            return "compiled" if chosen == "compiled" else "plain"
        case "auto" if on_gpu:
            return "plain"
    return "off"


def block_count(settings: DecodingConfig, network: Network, size: int, rows: int, context: int | None) -> int:
    """Blocks that there is room for, and no more than can ever be of use. Raises ConfigError."""
    device, shape = network.device, network.shape
    param = "kv_cache_memory_bytes"
    if settings.gpu_memory_utilization is not None and device.type != "cuda":
        raise ConfigError(f"gpu_memory_utilization: {device} is no GPU", param="gpu_memory_utilization")
    if settings.kv_cache_memory_bytes is not None:
        room = settings.kv_cache_memory_bytes
    elif device.type == "cuda":
        release(device)
        free, total = torch.cuda.mem_get_info(device)
        # Where it is spoken, too, that needs room: in the same process or in others, which may be on the same device.
        usual = SHARE_BESIDE_SPEECH if network.listens else SHARE_OF_THE_GPU
        room, param = int((settings.gpu_memory_utilization or usual) * total) - (total - free), "gpu_memory_utilization"
    else:
        room = GIB
    needed = shape.token_bytes * size
    if room < needed:
        what = f"the cache has {max(room, 0)} bytes, and a block of {size} tokens takes {needed}"
        raise ConfigError(f"{param}: {what}", param=param)
    useful = room // needed if context is None else SPARE * rows * -(-context // size)
    return min(room // needed, useful)
