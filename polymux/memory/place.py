"""From settings and components to weights in their places: measure, decide, carry out, and say so in one line."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from polymux.errors import ConfigError
from polymux.memory.backing import HostBacking
from polymux.memory.base import HostBlocks
from polymux.memory.gather_blocks import GatherBlocks
from polymux.memory.layout import all_tensors, layout_of
from polymux.memory.measure import bandwidth, limit_bytes
from polymux.memory.plan import GIB, Plan, plan, size
from polymux.memory.residency import MakeBlocks, Residency, Tenant, private_blocks
from polymux.memory.runtime_cache.mapped import Mapping
from polymux.memory_config import MemoryConfig

log = logging.getLogger(__name__)


def place(
    tenants: Sequence[Tenant],
    config: MemoryConfig,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    mappings: dict[str, Mapping] | None = None,
) -> Residency:
    """Place the components, which are on the host or on the device. `group`: the ranks that may share the host copy of
    the blocks. `mappings`: of components that are mapped from the runtime cache. Raises ConfigError for what cannot be.
    """
    limit = None
    if config.gpu_memory_limit_gib is not None:
        limit = limit_bytes(config.gpu_memory_limit_gib, device)
    if config.offloads:
        check_apart(tenants)
    parts = [tenant.part(with_blocks=config.offloads) for tenant in tenants]
    chosen = plan(config, parts, limit=limit, bandwidth=bandwidth(device) if config.offloads else None)
    if limit is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), device)
    _warn(chosen, device)
    made = Residency(tenants, chosen, device, _host_side(config, group, mappings or {}))
    log.debug("%s", made.describe())
    return made


def check_apart(tenants: Sequence[Tenant]) -> None:
    """Raise ConfigError if two components share weights: where one goes the other would have to go, too."""
    owner: dict[int, str] = {}
    for tenant in tenants:
        for name, tensor in all_tensors(tenant.module):
            if owner.setdefault(id(tensor), tenant.name) != tenant.name:
                one = owner[id(tensor)]
                raise ConfigError(f"{one} and {tenant.name} share {name}: such a model cannot be offloaded")


def _warn(chosen: Plan, device: torch.device) -> None:
    """Say so if the user gets nothing for what it costs."""
    everything = sum(placement.part.nbytes for placement in chosen.placements)
    if chosen.strategy != "resident" and device.type == "cpu":
        log.warning("the device is the CPU: to keep weights on the host and copy them saves nothing")
    elif chosen.strategy != "resident" and chosen.device_bytes > 0.95 * everything:
        need = f"{size(chosen.device_bytes)} of {size(everything)} are needed on the device"
        log.warning("%s offload saves little: %s", chosen.strategy, need)


def _host_side(config: MemoryConfig, group: dist.ProcessGroup | None, mappings: dict[str, Mapping]) -> MakeBlocks:
    complete = config.dlo_use_allgather is False or config.dlo_enable_runtime_cache
    if config.enable_distributed_layerwise_offload and complete:
        return HostBacking(mappings, int(config.dlo_runtime_cache_pin_limit_gib * GIB))
    if group is None or group.size() == 1 or not config.enable_distributed_layerwise_offload:
        return private_blocks
    ranks = group

    def gathered(
        tenant: Tenant, paths: Sequence[str], resident: Sequence[int], device: torch.device
    ) -> tuple[HostBlocks, Sequence[int]]:
        layout = layout_of(tenant.module, [path for index, path in enumerate(paths) if index not in resident])
        return GatherBlocks(tenant.module, layout, device, ranks), ()

    return gathered
