"""The decision where each component's weights live: a pure function of sizes and settings.

    resident   on the device all the time
    swapped    on the host, and on the device while its group is in use (`exchange`)
    streamed   blocks on the host, streamed through slots; some blocks and the rest stay on the device (`block_stream`)

Moves nothing and measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from polymux.errors import ConfigError
from polymux.memory_config import MemoryConfig

GIB = 2**30
STEPS = 30  # of a request, where strategies are compared that cost per request and per step
ACTIVATIONS = 0.15  # the share of a memory limit that is left to activations ...
ACTIVATIONS_MOST = 8 * GIB  # ... but not more than this

Role = Literal["encoder", "denoiser", "decoder"]
How = Literal["resident", "swapped", "streamed"]


@dataclass(frozen=True)
class Part:
    """A component's sizes in bytes. `blocks` are those of its blocks, in order; empty if nobody knows its blocks."""

    name: str
    role: Role
    nbytes: int
    blocks: tuple[int, ...] = ()

    @property
    def rest(self) -> int:
        return self.nbytes - sum(self.blocks)


@dataclass(frozen=True)
class Placement:
    """Where one part lives. `resident` are the blocks of a streamed part that stay on the device."""

    part: Part
    how: How
    resident: tuple[int, ...] = ()

    @property
    def streamed(self) -> list[int]:
        """The sizes of the blocks that are streamed."""
        if self.how != "streamed":
            return []
        return [size for index, size in enumerate(self.part.blocks) if index not in self.resident]

    @property
    def kept(self) -> int:
        """Bytes that this part alone takes on the device, all the time."""
        return {"resident": self.part.nbytes, "swapped": 0, "streamed": self.part.nbytes - sum(self.streamed)}[self.how]


@dataclass(frozen=True)
class Plan:
    """Where all parts live, and why."""

    placements: tuple[Placement, ...]
    slots: int  # device buffers for streamed blocks
    reason: str
    bandwidth: float | None = None  # bytes per second from the host to the device, where it was measured

    @property
    def strategy(self) -> str:
        kinds = {p.how for p in self.placements}
        return "layerwise" if "streamed" in kinds else "model-level" if "swapped" in kinds else "resident"

    @property
    def groups(self) -> list[list[str]]:
        """The swapped parts in groups that are never needed at once."""
        swapped = [p.part for p in self.placements if p.how == "swapped"]
        encoders = [part.name for part in swapped if part.role != "denoiser"]
        denoisers = [part.name for part in swapped if part.role == "denoiser"]
        together = any(name.startswith("controlnet") for name in denoisers)  # runs before the denoiser in every step
        return [group for group in (encoders, *([denoisers] if together else [[d] for d in denoisers])) if group]

    @property
    def device_bytes(self) -> int:
        """Weights on the device at most, with the buffers that they move through."""
        sizes = {p.part.name: p.part.nbytes for p in self.placements}
        arena = max((sum(sizes[name] for name in group) for group in self.groups), default=0)
        largest = max((size for p in self.placements for size in p.streamed), default=0)
        return sum(p.kept for p in self.placements) + arena + self.slots * largest

    @property
    def request_bytes(self) -> int:
        """Bytes that go to the device once per request, if requests come one by one."""
        swapped = sum(p.part.nbytes for p in self.placements if p.how == "swapped")
        return swapped + sum(sum(p.streamed) for p in self.placements if p.part.role != "denoiser")

    @property
    def step_bytes(self) -> int:
        """Bytes that go to the device in a step; where there are two denoisers, one of them runs in a step."""
        return max((sum(p.streamed) for p in self.placements if p.part.role == "denoiser"), default=0)

    def describe(self) -> str:
        """One line: the decision, its reason, and what it costs."""
        words = [f"weights: {self.strategy} ({self.reason})"]
        for how, verb in (("resident", "on the device"), ("swapped", "swapped in when used")):
            names = [f"{p.part.name} {size(p.part.nbytes)}" for p in self.placements if p.how == how]
            words += [f"{verb}: {', '.join(names)}"] if names else []
        for p in self.placements:
            if p.how == "streamed":
                count, total = len(p.streamed), len(p.part.blocks)
                words.append(f"{p.part.name}: {count} of {total} blocks streamed ({size(sum(p.streamed))})")
        words.append(f"{size(self.device_bytes)} of device memory")
        if self.bandwidth:
            pace = f"at {self.bandwidth / 1e9:.3g} GB/s"
            if self.request_bytes:
                words.append(f"{self.request_bytes / self.bandwidth:.2g} s per request {pace}")
            if self.step_bytes:
                words.append(f"at least {self.step_bytes / self.bandwidth:.2g} s per step {pace}")
        return "; ".join(words)


def plan(
    config: MemoryConfig, parts: Sequence[Part], *, limit: int | None = None, bandwidth: float | None = None
) -> Plan:
    """The plan that the settings ask for. `limit`: --gpu-memory-limit-gib, in bytes. Raises ConfigError."""
    slots = config.dlo_prefetch_layers + 1
    if limit is not None:
        return _within(limit, parts, slots, bandwidth)
    if config.enable_cpu_offload:
        made = tuple(Placement(p, "resident" if p.role == "decoder" else "swapped") for p in parts)
        return Plan(made, slots, "--enable-cpu-offload", bandwidth)
    if config.enable_layerwise_offload or config.enable_distributed_layerwise_offload:
        kind = "distributed-layerwise" if config.enable_distributed_layerwise_offload else "layerwise"
        made = tuple(_streamed(p, config.dlo_resident_layers) for p in parts)
        return Plan(made, slots, f"--enable-{kind}-offload", bandwidth)
    return Plan(tuple(Placement(p, "resident") for p in parts), slots, "nothing else was asked for", bandwidth)


def _streamed(part: Part, resident: int) -> Placement:
    if part.role != "denoiser":
        return Placement(part, "resident")
    if not part.blocks:
        raise ConfigError(
            f"{part.name} cannot be streamed: which of its parts are blocks is not known; use --enable-cpu-offload",
            param="enable_layerwise_offload",
        )
    if resident and resident >= len(part.blocks):
        raise ConfigError(
            f"--dlo-resident-layers {resident}: {part.name} has {len(part.blocks)} blocks, nothing would be streamed",
            param="dlo_resident_layers",
        )
    return Placement(part, "streamed", spread(resident, len(part.blocks)))


def _within(limit: int, parts: Sequence[Part], slots: int, bandwidth: float | None) -> Plan:
    """The cheapest plan whose weights leave room for activations within `limit` bytes."""
    usable = limit - int(min(ACTIVATIONS * limit, ACTIVATIONS_MOST))
    reason = f"{size(usable)} for weights and {size(limit - usable)} for the rest of {size(limit)}"
    candidates = [
        Plan(made, slots, reason, bandwidth)
        for made in (
            tuple(Placement(p, "resident") for p in parts),
            tuple(Placement(p, "resident" if p.role == "decoder" else "swapped") for p in parts),
            tuple(Placement(p, "streamed" if p.blocks and p.role != "decoder" else "resident") for p in parts),
        )
    ]
    candidates[2] = _fill(candidates[2], usable)
    fitting = [c for c in candidates if c.device_bytes <= usable]
    if not fitting:
        least = min(c.device_bytes for c in candidates)
        raise ConfigError(
            f"a limit of {size(limit)} leaves {size(usable)} for weights, and the least that this model can do with is "
            f"{size(least)}; the limit must be at least {size(_limit_for(least))}",
            param="gpu_memory_limit_gib",
        )
    return min(fitting, key=lambda c: c.request_bytes + STEPS * c.step_bytes)


def _fill(base: Plan, usable: int) -> Plan:
    """Keep as many blocks on the device as fit: first of the denoisers, which need them in every step, the same share
    of each; then of the others."""
    for denoisers in (True, False):
        mine = [p.part for p in base.placements if p.how == "streamed" and (p.part.role == "denoiser") == denoisers]
        for share in range(max((len(part.blocks) for part in mine), default=0), 0, -1):
            filled = tuple(_keep(p, share) if p.part in mine else p for p in base.placements)
            best = replace(base, placements=filled)
            if best.device_bytes <= usable:
                base = best
                break
    return base


def _keep(placement: Placement, share: int) -> Placement:
    total = len(placement.part.blocks)
    if share >= total:
        return Placement(placement.part, "resident")
    return replace(placement, resident=spread(share, total))


def _limit_for(weights: int) -> int:
    """The smallest limit that leaves so much for weights."""
    return int(min(weights / (1 - ACTIVATIONS), weights + ACTIVATIONS_MOST)) + 1


def spread(count: int, total: int) -> tuple[int, ...]:
    """`count` of `total` positions, evenly: between two streamed blocks computes a resident one, so the bus never waits
    for a free slot as it would if the resident ones stood in a row."""
    return tuple(i * total // count for i in range(count))


def size(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB / 10 else f"{nbytes / 2**20:.1f} MiB"
