"""Denoisers on the host by way of the runtime cache: loaded once per host, mapped by every engine.

If the cache has a component's final weights, the model is built without any and gets all its tensors from there; no
weight file of the checkpoint is read. Otherwise it is loaded as always and, if the cache takes it, written; then it too
uses the file, so that all engines of the host share one copy. The model that is returned is complete either way: its
blocks are views of the mapping, or private memory where there is none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import diffusers
import torch

from polymux.errors import CacheError, ConfigError
from polymux.families.base import UNKNOWN
from polymux.loading.component import Part, load_model, place
from polymux.loading.dummy import SEED, STD, dummy_model
from polymux.loading.empty import empty_diffusers_model
from polymux.loading.index import read_json
from polymux.loading.libraries import is_diffusers_model, reading
from polymux.loading.options import LoadFlags
from polymux.loading.weights import Weights
from polymux.memory.containers import block_paths
from polymux.memory.layout import bind, layout_of
from polymux.memory.runtime_cache import Content, Entry, Identity, RuntimeCache, Turn, source_files
from polymux.memory.runtime_cache.mapped import Mapping
from polymux.memory.runtime_cache.packing import check_fits, file_layout, reader
from polymux.quantization.quantizer import Quantizer
from polymux.version import VERSION

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")


class CachedLoader:
    """Loads the denoisers of one pipeline. `mappings` has the memory of those that are mapped, by name; whoever streams
    from it takes it over."""

    def __init__(
        self,
        cache: RuntimeCache,
        is_denoiser: Callable[[str], bool],
        *,
        label: str,
        making: torch.device = HOST,
        quantizer: Quantizer | None = None,
    ) -> None:
        """`is_denoiser`: by a component's name, where the family does not say so. `label`: the model's name, for
        people. `making`: where random weights are made. `quantizer`: of what is cached, which is quantized then."""
        self.family = UNKNOWN  # until it is known
        self.mappings: dict[str, Mapping] = {}
        self.queries = self.hits = 0  # components that were looked for in the cache, and were there
        self.cache = cache
        self._is_denoiser = is_denoiser
        self._label = label
        self._making = making
        self._quantizer = quantizer or Quantizer({}, HOST, is_denoiser)

    def wants(self, part: Part) -> bool:
        return part.has_weights and (part.name in self.family.denoisers or self._is_denoiser(part.name))

    def load(
        self, part: Part, weights: Weights, dtype: torch.dtype, flags: LoadFlags, read_ahead: Callable[[], None]
    ) -> torch.nn.Module:
        """A component of a checkpoint. `read_ahead` is called if its weight files will be read."""

        def load() -> torch.nn.Module:
            read_ahead()
            model = load_model(part, weights, HOST, dtype, flags)
            self._quantizer.apply(part.name, model, dtype)
            return model

        names = {path for path in part.folder.iterdir() if path.suffix in (".json", ".py")}
        return self._load(part, dtype, [*weights.files, *sorted(names)], None, load)

    def make_up(self, part: Part, dtype: torch.dtype) -> torch.nn.Module:
        """A component with random weights."""
        made_up = f"seed {SEED}, deviation {STD}, on {self._making.type}"

        def load() -> torch.nn.Module:
            model = dummy_model(part, self._making, dtype)
            self._quantizer.apply(part.name, model, dtype)
            return model

        return self._load(part, dtype, [part.folder / "config.json"], made_up, load)

    def _load(
        self,
        part: Part,
        dtype: torch.dtype,
        files: Sequence[Path],
        made_up: str | None,
        load: Callable[[], torch.nn.Module],
    ) -> torch.nn.Module:
        start = time.perf_counter()
        config = read_json(part.folder / "config.json")
        if not is_diffusers_model(part.cls) or config.get("quantization_config") is not None:
            logger.warning("runtime cache: %s: not cached: not an unquantized model of diffusers", part.name)
            return place(part.name, load(), HOST)
        with reading(f"{part.folder}: {part.name} ({part.cls.__name__})"):
            empty = empty_diffusers_model(part.cls, config, dtype)
        blocks = block_paths(empty, self.family.blocks)
        if not blocks:
            logger.warning("runtime cache: %s: not cached: which of its parts are blocks is not known", part.name)
            return place(part.name, load(), HOST)
        self._quantizer.apply(part.name, empty, dtype)

        def identity() -> Identity:
            # Whatever else comes to change a component's tensors between the files and the end of `load` (adapters that
            # are fused, a tensor-parallel part) must be named here as well.
            return Identity(
                model_class=f"{part.cls.__module__}.{part.cls.__qualname__}",
                sources=source_files(part.folder, files),
                libraries=_libraries(),
                blocks=tuple(blocks),
                dtype=str(dtype).removeprefix("torch."),
                quantization=self._quantizer.identity(part.name),
                made_up=made_up,
            )

        with self.cache.turn(identity()) as turn:
            self.queries += 1
            if turn.entry is not None and self._take(part, empty, turn.entry):
                self.hits += 1
                logger.info("%s: mapped in %.2f s", part.name, time.perf_counter() - start)
                return place(part.name, empty, HOST)
            model = load()
            if turn.may_write:
                self._write(part, model, turn, identity)
        return place(part.name, model, HOST)

    def _write(self, part: Part, model: torch.nn.Module, turn: Turn, identity: Callable[[], Identity]) -> None:
        """Put what was loaded into the cache, and use it from there."""
        if identity() != turn.identity:
            logger.warning("runtime cache: %s: not written: its files changed while they were loaded", part.name)
            return
        try:
            layout = layout_of(model, turn.identity.blocks)
            content = Content(turn.identity, f"{self._label} {part.name}", file_layout(layout), reader(model))
        except (CacheError, ConfigError) as error:
            logger.warning("runtime cache: %s: not written: %s", part.name, error.message)
            return
        turn.publish(content)
        if turn.entry is not None:
            self._take(part, model, turn.entry)

    def _take(self, part: Part, model: torch.nn.Module, entry: Entry) -> bool:
        """Give the model the entry's tensors. False, and the model is as it was, if they are not all that it needs."""
        mapping = Mapping(entry)
        try:
            check_fits(model, mapping.layout)
        except CacheError as error:
            logger.warning("runtime cache: not used: %s: %s", entry.path, error.message)
            return False
        for index, image in enumerate(mapping.layout.blocks):
            bind(model, image, mapping.image(index))
        # What is not streamed is small, and some models write to buffers: a copy of their own.
        bind(model, mapping.layout.rest, mapping.rest.clone())
        self.mappings[part.name] = mapping
        return True


def _libraries() -> tuple[tuple[str, str], ...]:
    """Whose code makes weights out of files."""
    return (("polymux", VERSION), ("diffusers", diffusers.__version__), ("torch", str(torch.__version__)))
