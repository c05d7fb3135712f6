"""What offloading costs: one step of a denoiser of real size under every strategy, in one run.

    python bench/offload.py                      one GPU: every strategy, and diffusers' own
    python bench/offload.py ranks                two GPUs: complete blocks against gathered ones
    python bench/offload.py engines              two GPUs: two engines, private weights against a shared runtime cache
    python bench/offload.py --tiny [...]         small, to see that it works; also on a CPU

Random weights of the published sizes. "floor" is the larger of the step with everything resident and the time that the
streamed bytes take over the bus when nothing computes. Every strategy's output is compared with the resident one's, bit
for bit. Prints Markdown tables; JSON goes to the folder that OUT names.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

import offload_engines
import offload_ranks
import torch
from denoisers import Denoiser, denoisers
from diffusers import DiffusionPipeline
from report import Clock, Table, host_memory, save

from polymux.memory.backing import staged_entry
from polymux.memory.base import HostBlocks
from polymux.memory.block_stream import BlockStream
from polymux.memory.containers import block_paths
from polymux.memory.exchange import Exchange
from polymux.memory.layout import layout_of
from polymux.memory.plan import spread
from polymux.memory.private_blocks import PrivateBlocks
from polymux.memory.runtime_cache import CacheSettings, Content, Identity, RuntimeCache
from polymux.memory.runtime_cache.mapped import CudaRegistrar, MappedBlocks, Mapping
from polymux.memory.runtime_cache.packing import file_layout, reader
from polymux.memory.slots import Slots

COLUMNS = ("strategy", "seconds", "floors", "GB/s", "device GiB", "host PSS GiB", "equal", "set-up s")
STEPS = 5
REQUEST_STEPS = 4


class Bench:
    """All strategies for one denoiser."""

    def __init__(self, denoiser: Denoiser, device: torch.device, cache_dir: Path | None) -> None:
        self.denoiser, self.device, self.clock = denoiser, device, Clock(device)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.inputs = denoiser.inputs(denoiser, device, self.dtype)
        self.cache_dir = cache_dir
        self.bus = 0.0
        self.table = Table(f"{denoiser.name}, {denoiser.size}, one step", COLUMNS)

    def run(self) -> None:
        model = self.denoiser.build(self.device, self.dtype)
        self.wanted = self.denoiser.step(model, self.inputs)
        self.resident = 0.0
        self.resident = self.row("resident", model, 0)
        model.to("cpu")
        self.clock.reset_peak()
        paths = block_paths(model)
        cache = self.published(model, paths) if self.cache_dir else None
        self.private(model, paths)
        if cache:
            self.cached(model, *cache)
        del model
        self.diffusers_groups()
        gc.collect()
        if self.device.type == "cuda":
            torch._C._host_emptyCache()  # torch keeps what it has pinned, and the host has to hold the next model

    def row(
        self, name: str, model: torch.nn.Module, nbytes: int, set_up: float | None = None, floor: float = 0
    ) -> float:
        """Measure a step; `nbytes` are streamed in it."""
        self.clock.reset_peak()
        equal = torch.equal(self.denoiser.step(model, self.inputs), self.wanted)
        took = self.clock.seconds(lambda: self.denoiser.step(model, self.inputs), STEPS)
        floor = floor or max(self.resident, self.bus if nbytes else 0) or took
        self.table.add(
            strategy=name, seconds=took, floors=took / floor, device_GiB=self.clock.peak, equal=equal,
            host_PSS_GiB=host_memory("Pss")["Pss"], **{"GB/s": nbytes / took / 1e9 or None, "set-up_s": set_up},
        )  # fmt: skip
        return took

    def streamed(
        self, name: str, model: torch.nn.Module, source: HostBlocks, slots: int, resident: Collection[int] = (),
        set_up: float | None = None,
    ) -> None:  # fmt: skip
        ring = Slots(slots, source.slot_bytes, self.device)
        ring.allocate()
        stream = BlockStream(model, source, ring, resident)
        sizes = [image.nbytes for i, image in enumerate(source.layout.blocks) if i not in resident]
        share = sum(sizes) / sum(image.nbytes for image in source.layout.blocks)
        floor = max(self.resident, self.bus * share)
        handles = [
            model.register_forward_pre_hook(lambda *_: stream.begin()),
            model.register_forward_hook(lambda *_: stream.end()),
        ]
        self.row(name, model, sum(sizes), set_up, floor)
        for handle in handles:
            handle.remove()
        self.clock.sync()
        stream.detach()

    def private(self, model: torch.nn.Module, paths: list[str]) -> None:
        layout = layout_of(model, paths)
        made: list[PrivateBlocks] = []
        set_up = self.clock.seconds(lambda: made.append(PrivateBlocks(model, layout, self.device)))
        (source,) = made
        model.to(self.device)  # the rest; the blocks are placeholders
        self.bus = bus_seconds(source, self.device, self.clock)
        total = sum(image.nbytes for image in layout.blocks)
        self.table.add(strategy="bus alone", seconds=self.bus, **{"GB/s": total / self.bus / 1e9})
        for slots in (3, 2):
            self.streamed(f"layerwise, private pinned, {slots} slots", model, source, slots, set_up=set_up)
        half = spread(len(paths) // 2, len(paths))
        self.streamed("layerwise, half of the blocks resident", model, source, 3, half)
        first = range(len(paths) // 2)
        self.streamed("layerwise, the first half resident", model, source, 3, first)
        source.close()

    def published(self, model: torch.nn.Module, paths: list[str]) -> tuple[RuntimeCache, Identity]:
        assert self.cache_dir is not None
        cache = RuntimeCache(CacheSettings(root=self.cache_dir))
        kind = str(self.dtype).removeprefix("torch.")
        identity = Identity(model_class=self.denoiser.name, sources=(), libraries=(), blocks=tuple(paths), dtype=kind)
        content = Content(identity, "bench", file_layout(layout_of(model, paths)), reader(model))
        with cache.turn(identity) as turn:
            took = self.clock.seconds(lambda: turn.publish(content))
            assert turn.entry is not None, "not written: see the log"
        print(f"<!-- published in {took:.1f} s -->", flush=True)
        return cache, identity

    def cached(self, model: torch.nn.Module, cache: RuntimeCache, identity: Identity) -> None:
        entry = cache.open(identity)
        assert entry is not None
        with entry:
            mapping, took = Mapping(entry), None
            if self.device.type == "cuda":
                took = self.clock.seconds(lambda: mapping.register(CudaRegistrar(self.device), 2**60))
                assert mapping.registered
            source: HostBlocks = MappedBlocks(mapping, self.device)
            self.streamed("layerwise, registered cache", model, source, 3, set_up=took)
            source.close()
            if self.device.type == "cuda":
                staged = staged_entry(Mapping(entry), self.device)
                self.streamed("layerwise, staged cache", model, staged, 3)
                staged.close()

    def diffusers_groups(self) -> None:
        """diffusers' own streaming."""
        if self.device.type != "cuda":
            return
        model = self.denoiser.build(self.device, self.dtype).to("cpu")
        options = dict(offload_type="block_level", num_blocks_per_group=1, use_stream=True)
        set_up = self.clock.seconds(
            lambda: model.enable_group_offload(self.device, torch.device("cpu"), **options)  # type: ignore[operator]
        )
        total = sum(p.nbytes for p in model.parameters())
        self.row("diffusers enable_group_offload(use_stream=True)", model, total, set_up)


class Pair(DiffusionPipeline):  # type: ignore[misc]
    """An encoder and a denoiser, for diffusers' own model-level offload."""

    model_cpu_offload_seq = "encoder->transformer"

    def __init__(self, encoder: torch.nn.Module, transformer: torch.nn.Module) -> None:
        super().__init__()
        self.register_modules(encoder=encoder, transformer=transformer)


class Encoder(torch.nn.Module):
    """As large as a text encoder; takes no time."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__()
        rows = max(nbytes // 2**24, 1)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.ones(2**22, dtype=torch.float32, device=device), requires_grad=False)
            for _ in range(rows)
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    @property
    def device(self) -> torch.device:
        return self.weights[0].device

    def forward(self) -> torch.Tensor:
        return self.weights[0][:1] + self.weights[-1][:1]


def model_level(denoiser: Denoiser, device: torch.device, encoder_bytes: int) -> Table:
    """One request: the encoder, then a few steps of the denoiser."""
    clock, dtype = Clock(device), torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = denoiser.inputs(denoiser, device, dtype)
    table = Table(
        f"{denoiser.name}, {denoiser.size}, a request of {REQUEST_STEPS} steps",
        ("strategy", "seconds", "device GiB", "set-up s"),
    )

    def measured(name: str, request: Callable[[], object], set_up: float | None) -> None:
        request()
        clock.reset_peak()
        table.add(strategy=name, seconds=clock.seconds(request, 2), device_GiB=clock.peak, **{"set-up_s": set_up})

    encoder, model = Encoder(encoder_bytes, device), denoiser.build(device, dtype)

    def plain() -> None:
        encoder()
        for _ in range(REQUEST_STEPS):
            denoiser.step(model, inputs)

    measured("resident", plain, None)
    made: list[Exchange] = []
    groups: list[dict[str, torch.nn.Module]] = [{"encoder": encoder}, {"transformer": model}]
    set_up = clock.seconds(lambda: made.append(Exchange(groups, device)))

    def exchanged() -> None:
        made[0].before("encoder")
        encoder()
        made[0].before("transformer")
        for _ in range(REQUEST_STEPS):
            denoiser.step(model, inputs)

    measured("model-level", exchanged, set_up)
    made[0].close()
    if device.type == "cuda":
        del made, groups
        encoder, model = Encoder(encoder_bytes, device).to("cpu"), denoiser.build(device, dtype).to("cpu")
        pipeline = Pair(encoder, model)
        set_up = clock.seconds(lambda: pipeline.enable_model_cpu_offload(device=device))

        def hooked() -> None:
            plain()
            pipeline.maybe_free_model_hooks()  # as every pipeline does at the end of its call

        measured("diffusers enable_model_cpu_offload", hooked, set_up)
    return table


def bus_seconds(source: HostBlocks, device: torch.device, clock: Clock) -> float:
    """All blocks through two slots while nothing computes."""
    slots = [torch.empty(source.slot_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def once() -> None:
        arrivals = [source.fetch(i, slots[i % 2], None) for i in range(len(source.layout.blocks))]
        arrivals[-1].wait()

    source.expect(range(len(source.layout.blocks)))
    once()
    return clock.seconds(once, 2)


def one_gpu(arguments: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tables = []
    for denoiser in denoisers(arguments.tiny, arguments.layers):
        if arguments.models and denoiser.name not in arguments.models:
            continue
        folder = Path(tempfile.mkdtemp(dir=arguments.dir)) if denoiser.name == "qwen-image" else None
        try:
            bench = Bench(denoiser, device, folder)
            bench.run()
            tables.append(bench.table)
        finally:
            if folder:
                shutil.rmtree(folder)
        gc.collect()
        if denoiser.name == "qwen-image":
            tables.append(model_level(denoiser, device, 2**26 if arguments.tiny else 16 * 2**30))
            gc.collect()
    save("offload.json", tables)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("one", "ranks", "engines"), default="one")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, default=None, help="of every denoiser (default: the published number)")
    parser.add_argument("--models", nargs="+", choices=("qwen-image", "wan-14b"), default=None)
    parser.add_argument("--dir", type=Path, default=None, help="where files are made (default: a temporary folder)")
    arguments = parser.parse_args()
    {"one": one_gpu, "ranks": offload_ranks.main, "engines": offload_engines.main}[arguments.what](arguments)


if __name__ == "__main__":
    main()
