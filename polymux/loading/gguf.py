"""A component's weights out of a GGUF file, by diffusers' own reader; the component's folder says what it is."""

from __future__ import annotations

import struct
from pathlib import Path

import torch

from polymux.errors import CheckpointError, ConfigError
from polymux.loading.component import Part
from polymux.loading.empty import empty_diffusers_model
from polymux.loading.index import read_json
from polymux.loading.libraries import is_diffusers_model, reading
from polymux.quantization.gguf import is_read_for, make_plain

MAGIC = b"GGUF"


def load_gguf(part: Part, file: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The model on the host, its linear layers as in the file. Raises CheckpointError, ConfigError."""
    who = f"{part.name} ({part.cls.__name__})"
    _check_file(file)
    if not is_diffusers_model(part.cls) or not is_read_for(part.cls):
        raise ConfigError(f"gguf_file={str(file)!r}: diffusers reads no such files for {who}", param="gguf_file")
    from diffusers import GGUFQuantizationConfig  # only there if gguf is, which is optional

    with reading(f"{file}: {who}"):
        try:
            model: torch.nn.Module = part.cls.from_single_file(
                str(file),
                config=str(part.folder),
                quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
                dtype=dtype,
                local_files_only=True,
            )
        except NotImplementedError:  # from torch, which is to move a tensor that got no value
            raise CheckpointError(f"{file}: {who}: {_missing(part, file)}") from None
        make_plain(model, dtype)
    # What diffusers notes to tell its own kind of layer from others.
    for note in ("hf_quantizer", "quantization_method"):
        if note in vars(model):
            delattr(model, note)
    return model


def _check_file(file: Path) -> None:
    """Before a library maps it: that it is there and says what it is."""
    try:
        with file.open("rb") as stream:
            head = stream.read(8)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None
    if head[:4] != MAGIC or len(head) < 8 or struct.unpack("<I", head[4:])[0] not in (2, 3):
        raise CheckpointError(f"{file}: not a GGUF file of version 2 or 3")


def _missing(part: Part, file: Path) -> str:
    """What the model needs and the file lacks; its tensors may have other names than the model's."""
    from gguf import GGUFReader

    held = {tensor.name for tensor in GGUFReader(str(file)).tensors}
    config = read_json(part.folder / "config.json")
    needed = empty_diffusers_model(part.cls, config, torch.float32).state_dict().keys()
    missing = sorted(needed - held)
    if len(missing) == len(needed):
        return "it lacks tensors that the model needs"
    return f"tensor {missing[0]!r} is missing" + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
