"""The weight files of one component: which ones count, and whether they are whole and agree with their index.

Knows file formats (safetensors, pickled state dicts, shard indices) and the libraries' naming rules, not what the
tensors are for: whether a model gets all that it needs is found out when it is loaded.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from polymux.errors import CheckpointError
from polymux.loading.index import read_json
from polymux.loading.options import LoadFlags

_MAX_HEADER = 100 * 2**20  # bytes; the limit of the safetensors library


@dataclass(frozen=True)
class Naming:
    """How a library names its weight files. If a folder holds both a single file and an index, the library reads
    one of them and never looks at the other."""

    safe_stem: str
    pickle_stem: str
    index_first: bool

    def candidates(self, variant: str | None, use_safetensors: bool | None) -> list[str]:
        """File names in the order in which they are looked for."""
        mark = f".{variant}" if variant else ""
        formats = {True: (self.safe_stem, "safetensors"), False: (self.pickle_stem, "bin")}
        names: list[str] = []
        for safe in (True, False):
            if use_safetensors in (None, safe):
                stem, suffix = formats[safe]
                pair = [f"{stem}{mark}.{suffix}", f"{stem}.{suffix}.index{mark}.json"]
                names += reversed(pair) if self.index_first else pair
        return names


DIFFUSERS_NAMES = Naming("diffusion_pytorch_model", "diffusion_pytorch_model", index_first=True)
TRANSFORMERS_NAMES = Naming("model", "pytorch_model", index_first=False)


def choose(names: Collection[str], naming: Naming, flags: LoadFlags) -> tuple[str, str | None] | None:
    """The file that leads to the weights among the names in a folder, a single file or an index, and its variant.

    A component that lacks the variant asked for is taken without it, as diffusers does.
    """
    for variant in dict.fromkeys((flags.variant, None)):
        for name in naming.candidates(variant, flags.use_safetensors):
            if name in names:
                return name, variant
    return None


def is_shard_of(index: str, name: str) -> bool:
    """Whether `name` is named like a shard of the index: model.fp16-00001-of-00002.safetensors and the like."""
    match = re.fullmatch(r"(?P<stem>.+)\.(?P<suffix>safetensors|bin)\.index(?P<mark>\..+)?\.json", index)
    if match is None:
        return False
    stem = re.escape(match["stem"] + (match["mark"] or ""))
    return re.fullmatch(rf"{stem}-\d+-of-\d+\.{match['suffix']}", name) is not None


@dataclass(frozen=True)
class TensorEntry:
    file: Path
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    """Checked weight files of one component. `main` is the single file or the index."""

    main: Path
    files: tuple[Path, ...]
    variant: str | None
    tensors: Mapping[str, TensorEntry]

    @property
    def safetensors(self) -> bool:
        return self.files[0].suffix == ".safetensors"

    def file_of(self, tensor: str) -> Path:
        """Where a tensor lies; the single file or the index if the library calls it otherwise than the file."""
        entry = self.tensors.get(tensor)
        return self.main if entry is None else entry.file


def find_weights(folder: Path, naming: Naming, flags: LoadFlags) -> Weights:
    """Find and check a component's weights without reading them. Raises CheckpointError naming file and tensor."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    chosen = choose(names, naming, flags)
    if chosen is None:
        wanted = " or ".join(naming.candidates(flags.variant, flags.use_safetensors))
        others = sorted(n for n in names if n.endswith((".safetensors", ".bin", ".index.json")))
        found = f"; it holds {', '.join(others[:6])} (diffusers_load_kwargs: variant)" if others else ""
        raise CheckpointError(f"{folder}: no weights: looked for {wanted}{found}")
    name, variant = chosen
    main = folder / name
    if main.suffix != ".json":
        return Weights(main, (main,), variant, _entries(main))
    weight_map = _weight_map(main)
    files = tuple(folder / shard for shard in sorted(set(weight_map.values())))
    tensors = _check_shards(main, weight_map, files)
    return Weights(main, files, variant, tensors)


def _entries(file: Path) -> dict[str, TensorEntry]:
    shapes = safetensors_shapes(file) if file.suffix == ".safetensors" else _pickled_shapes(file)
    return {name: TensorEntry(file, shape) for name, shape in shapes.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """tensor -> shard, out of an index. Shards lie beside their index, nowhere else."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index}: {tensor}: {shard!r} is not the name of a file in the same folder")
    return weight_map


def _check_shards(index: Path, weight_map: Mapping[str, str], files: Collection[Path]) -> dict[str, TensorEntry]:
    """Hold the index against what the shards hold. The libraries trust the index, and load half a model."""
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        named = [tensor for tensor, shard in weight_map.items() if shard == file.name]
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, though {index.name} places {_some(named)} there")
        held = _entries(file)
        if absent := [tensor for tensor in named if tensor not in held]:
            raise CheckpointError(f"{file}: lacks {_some(absent)}, which {index.name} places there: a stale index?")
        if unnamed := [tensor for tensor in held if weight_map.get(tensor) != file.name]:
            raise CheckpointError(f"{file}: holds {_some(unnamed)}, which {index.name} does not place there")
        tensors |= held
    return tensors


def _some(tensors: Collection[str]) -> str:
    first = next(iter(tensors))
    return f"{first!r}" if len(tensors) == 1 else f"{first!r} and {len(tensors) - 1} more tensors"


def safetensors_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes out of a header, checked against the size of the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == b"version ":
            raise CheckpointError(f"{file}: a git-lfs pointer, not the file itself: run git lfs pull")
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(_MAX_HEADER, size - 8):
            raise CheckpointError(f"{file}: not a safetensors file, or cut off inside its header ({size} bytes)")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        spans = {k: v["data_offsets"] for k, v in header.items() if k != "__metadata__"}
        shapes = {k: tuple(int(n) for n in header[k]["shape"]) for k in spans}
        ends = {k: int(end) for k, (_, end) in spans.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: damaged safetensors header: {error}") from None
    expected = 8 + length + max(ends.values(), default=0)
    if size < expected:
        cut = min((k for k, end in ends.items() if 8 + length + end > size), key=lambda k: ends[k])
        raise CheckpointError(f"{file}: truncated: {size} bytes of {expected}; the first tensor cut off is {cut!r}")
    if size > expected:
        raise CheckpointError(f"{file}: {size - expected} bytes too long for its header: damaged")
    return shapes


def _pickled_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a pickled state dict. Only tensors are unpickled; no code runs."""
    try:
        state = torch.load(file, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (OSError, RuntimeError, ValueError, EOFError, LookupError, pickle.UnpicklingError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{file}: truncated or not a state dict: {first[:300]}") from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{file}: not a state dict of tensors")
    return {name: tuple(value.shape) for name, value in state.items()}
