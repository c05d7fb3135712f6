"""A component's weights out of a GGUF file, by diffusers' own reader; the component's folder says what it is."""

from __future__ import annotations

import struct
from pathlib import Path

import torch

from polymux.errors import CheckpointError, ConfigError
from polymux.loading.component import Part
from polymux.loading.libraries import is_diffusers_model, reading
from polymux.quantization.gguf import make_plain

MAGIC = b"GGUF"


def load_gguf(part: Part, file: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The model on the host, its linear layers as in the file. Raises CheckpointError, ConfigError."""
    who = f"{part.name} ({part.cls.__name__})"
    _check_file(file)
    if not is_diffusers_model(part.cls) or not hasattr(part.cls, "from_single_file"):
        raise ConfigError(f"gguf_file={str(file)!r}: diffusers reads no such files for {who}", param="gguf_file")
    from diffusers import GGUFQuantizationConfig  # only there if gguf is, which is optional

    with reading(f"{file}: {who}"):
        model: torch.nn.Module = part.cls.from_single_file(
            str(file),
            config=str(part.folder),
            quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
            dtype=dtype,
            local_files_only=True,
        )
        _check_complete(file, who, model)
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


def _check_complete(file: Path, who: str, model: torch.nn.Module) -> None:
    missing = [name for name, tensor in model.named_parameters() if tensor.device.type == "meta"]
    if missing:
        more = f" (and {len(missing) - 1} more tensors)" if len(missing) > 1 else ""
        raise CheckpointError(f"{file}: {who}: tensor {missing[0]!r} is missing{more}")
