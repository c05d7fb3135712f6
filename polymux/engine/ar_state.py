"""What the engine of language models has on the device beside the weights: the cache, its blocks, the captured steps.

Made for a model that is there, and gone while it sleeps. Knows no requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from polymux.ar.blocks import BlockPool
from polymux.ar.network import Network
from polymux.ar.paged_cache import PagedCache, Room, Shape
from polymux.ar.ranks import Accord
from polymux.ar.runner import Runner
from polymux.ar.scheduler import Scheduler
from polymux.ar.step_graphs import Graphs
from polymux.config import EngineConfig
from polymux.decoding_config import GIB, SHARE_OF_THE_GPU, TOKENS_OF_A_STEP, DecodingConfig
from polymux.engine.ar_company import Company
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
    def make(
        cls,
        config: EngineConfig,
        network: Network,
        handle: int | None,
        context: int | None,
        company: Company | None = None,
    ) -> ArState:
        """`handle`: of the network's last cache. `context`: the most tokens of a sequence, where the model knows.
        `company`: other ranks. Raises ConfigError if there is no room."""
        settings = config.decoding
        cache = cache_of(config, network, handle, context, Accord(company.group if company else None))
        caching = settings.enable_prefix_caching is not False
        pool = BlockPool(cache.blocks, cache.block_size, caching)
        budget = settings.max_num_batched_tokens or TOKENS_OF_A_STEP
        scheduler = Scheduler(pool, cache.rows, budget, chunked=settings.enable_chunked_prefill is not False)
        graphs = graphs_of(settings, network.device)
        runner = Runner(network, cache, graphs, company.lead if company else None)
        return cls(pool, scheduler, runner, cache.handle)

    @property
    def tokens(self) -> int:
        """That the cache has room for."""
        return self.pool.count * self.pool.block_size


def cache_of(
    config: EngineConfig, network: Network, handle: int | None, context: int | None, accord: Accord
) -> PagedCache:
    """As large as there is room for, on the rank that has the least. Raises ConfigError if there is none."""
    settings, rows = config.decoding, config.scheduler.max_num_seqs
    size, shape, device = settings.block_size or BLOCK, network.shape, network.device
    count = accord.least(accord.all(lambda: block_count(settings, shape, size, rows, context, device)))
    longest = min(count * size, context or count * size)
    cache = accord.all(lambda: PagedCache(shape, Room(count, size, rows, longest), device, handle))
    graphs, gib = graphs_of(settings, device), shape.token_bytes * size * count / GIB
    log.info("%d blocks of %d tokens for keys and values (%.2f GiB); graphs: %s", count, size, gib, graphs)
    return cache


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


def block_count(
    settings: DecodingConfig, shape: Shape, size: int, rows: int, context: int | None, device: torch.device
) -> int:
    """Blocks that there is room for, and no more than can ever be of use. Raises ConfigError."""
    param = "kv_cache_memory_bytes"
    if settings.gpu_memory_utilization is not None and device.type != "cuda":
        raise ConfigError(f"gpu_memory_utilization: {device} is no GPU", param="gpu_memory_utilization")
    if settings.kv_cache_memory_bytes is not None:
        room = settings.kv_cache_memory_bytes
    elif device.type == "cuda":
        release(device)
        free, total = torch.cuda.mem_get_info(device)
        share = settings.gpu_memory_utilization or SHARE_OF_THE_GPU
        room, param = int(share * total) - (total - free), "gpu_memory_utilization"
    else:
        room = GIB
    needed = shape.token_bytes * size
    if room < needed:
        what = f"the cache has {max(room, 0)} bytes, and a block of {size} tokens takes {needed}"
        raise ConfigError(f"{param}: {what}", param=param)
    useful = room // needed if context is None else SPARE * rows * -(-context // size)
    return min(room // needed, useful)
