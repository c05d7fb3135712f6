"""What the engine of language models has on the device beside the weights: the cache, its blocks, the captured steps.

Made for a model that is there, and gone while it sleeps. Knows no requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from polymux.ar.blocks import BlockPool
from polymux.ar.frames import FrameBatch, FrameWriter, shape_of
from polymux.ar.network import Network
from polymux.ar.paged_cache import PagedCache, Room, Shape
from polymux.ar.ranks import Accord
from polymux.ar.runner import Runner
from polymux.ar.scheduler import Scheduler
from polymux.ar.step_graphs import Graphs
from polymux.config import EngineConfig, use_compile_cache
from polymux.decoding_config import GIB, SHARE_BESIDE_SPEECH, SHARE_OF_THE_GPU, TOKENS_OF_A_STEP, DecodingConfig
from polymux.engine.ar_company import Company
from polymux.errors import ConfigError
from polymux.memory.measure import release

log = logging.getLogger(__name__)

BLOCK = 16  # tokens
FRAMES = 4096  # of a sentence, with its prompt: as many as all may have at once
SPARE = 2  # times what all requests together can have: the rest is for what comes again


class Cached(Protocol):
    """What keys and values are kept of. `listens`: what it writes is spoken, too."""

    @property
    def shape(self) -> Shape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def listens(self) -> bool: ...


@dataclass(frozen=True)
class _Backbone:
    """Of what writes frames, which become sound on the same device."""

    shape: Shape
    device: torch.device
    listens: bool = True


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
        graphs = graphs_of(settings, network.device, config.parallel.tensor_parallel_size)
        runner = Runner(network, cache, graphs, company.lead if company else None)
        return cls(pool, scheduler, runner, cache.handle)

    @property
    def tokens(self) -> int:
        """That the cache has room for."""
        return self.pool.count * self.pool.block_size


def new_frame_batch(config: EngineConfig, writer: FrameWriter, device: torch.device) -> FrameBatch:
    """Raises ConfigError if there is no room."""
    settings, rows, shape = config.decoding, config.scheduler.max_num_seqs, shape_of(writer)
    size, context = settings.block_size or BLOCK, int(writer.backbone.config.max_position_embeddings)
    count = block_count(settings, _Backbone(shape, device), size, rows, min(context, FRAMES // SPARE))
    graphs = graphs_of(settings, device)
    gib = shape.token_bytes * size * count / GIB
    log.info("%d blocks of %d frames for keys and values (%.2f GiB); graphs: %s", count, size, gib, graphs)
    return FrameBatch(writer, Room(count, size, rows, min(count * size, context)), device, graphs)


def cache_of(
    config: EngineConfig, network: Network, handle: int | None, context: int | None, accord: Accord
) -> PagedCache:
    """As large as there is room for, on the rank that has the least. Raises ConfigError if there is none."""
    settings, rows = config.decoding, config.scheduler.max_num_seqs
    size, device = settings.block_size or BLOCK, network.device
    count = accord.least(accord.all(lambda: block_count(settings, network, size, rows, context)))
    longest = min(count * size, context or count * size)
    cache = accord.all(lambda: PagedCache(network.shape, Room(count, size, rows, longest), device, handle))
    gib, ranks = network.shape.token_bytes * size * count / GIB, config.parallel.tensor_parallel_size
    how = graphs_of(settings, device, ranks)
    log.info("%d blocks of %d tokens for keys and values (%.2f GiB); graphs: %s", count, size, gib, how)
    return cache


def graphs_of(settings: DecodingConfig, device: torch.device, ranks: int = 1) -> Graphs:
    """Raises ConfigError for what a device cannot do. What several ranks do together is not compiled."""
    on_gpu = device.type == "cuda"
    match settings.decode_graphs:
        case "compiled" | "plain" as chosen if not on_gpu:
            raise ConfigError(f"decode_graphs={chosen!r}: {device} is no GPU", param="decode_graphs")
        case "plain":
            return "plain"
        case "auto" if on_gpu and ranks > 1:
            return "plain"
        case "compiled" | "auto" if on_gpu:
            use_compile_cache()
            return "compiled"
    return "off"


def block_count(settings: DecodingConfig, network: Cached, size: int, rows: int, context: int | None) -> int:
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
