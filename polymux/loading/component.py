"""One component, from its folder to the device: loaded by its own class and proven complete.

A model that lacks a tensor, or got one of the wrong shape, is an error here: the libraries only warn, and serve random
numbers. Which components a pipeline has, and where their folders are, is not known here.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from polymux.errors import CheckpointError
from polymux.loading.index import read_json
from polymux.loading.libraries import (
    is_diffusers_model,
    is_transformers_model,
    reading,
    tokenizers_in,
)
from polymux.loading.options import LoadFlags
from polymux.loading.weights import DIFFUSERS_NAMES, TRANSFORMERS_NAMES, Weights, find_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """A component to be made: its name in the pipeline, its class, and the folder with its files."""

    name: str
    cls: type[Any]
    folder: Path
    plain: bool = False  # a loading that its class has of its own is not used

    @property
    def load(self) -> Callable[..., Any]:
        """The library's function that makes it."""
        if self.plain:
            function: Callable[..., Any] = transformers.PreTrainedModel.from_pretrained.__func__
            return functools.partial(function, self.cls)
        made: Callable[..., Any] = self.cls.from_pretrained
        return made

    @property
    def has_weights(self) -> bool:
        return issubclass(self.cls, torch.nn.Module)

    def weights(self, flags: LoadFlags) -> Weights:
        """This part's weight files, checked."""
        if is_diffusers_model(self.cls):
            naming = DIFFUSERS_NAMES
        elif is_transformers_model(self.cls):
            naming = TRANSFORMERS_NAMES
        else:
            raise CheckpointError(
                f"{self.folder}: {self.cls.__name__} is a model of neither diffusers nor transformers"
            )
        with reading(self.folder):
            return find_weights(self.folder, naming, flags)


def load_plain(part: Part) -> object:
    """A component without weights: scheduler, tokenizer, processor, guider."""
    who = f"{part.name} ({part.cls.__name__})"
    with reading(f"{part.folder}: {who}"):
        made: object = part.cls.from_pretrained(str(part.folder), local_files_only=True)
    held = {path.name for path in part.folder.rglob("*") if path.is_file()}
    for tokenizer in tokenizers_in(made):
        if not _has_vocabulary(set((tokenizer.vocab_files_names or {}).values()), held):
            raise CheckpointError(
                f"{part.folder}: {who}: no vocabulary: there is neither a tokenizer.json nor its like"
            )
    return made


def _has_vocabulary(declared: set[str], held: set[str]) -> bool:
    """Whether a tokenizer's folder holds its vocabulary, in one file or in all of the several that the class declares.
    Without one the library makes a tokenizer that knows no word, and says nothing."""
    whole = any(re.fullmatch(r"tokenizer\..*json|tekken\.json|.*\.(model|tiktoken)", name) for name in held)
    several = declared - {"tokenizer.json"}
    return whole or not declared or (bool(several) and several <= held)


def load_model(
    part: Part, weights: Weights, device: torch.device, dtype: torch.dtype, flags: LoadFlags
) -> torch.nn.Module:
    """A component with weights, complete and on the device. Parts that the model keeps in fp32 stay so."""
    arguments: dict[str, Any] = {
        "local_files_only": True,
        "output_loading_info": True,
        "use_safetensors": weights.safetensors,
        "variant": weights.variant,
    }
    if flags.disable_mmap:
        arguments["disable_mmap"] = True
    if read_json(part.folder / "config.json").get("quantization_config") is None:
        # Ask for a report in place of an error that does not name the tensor. Quantized tensors are packed: their
        # shapes are compared by the library alone.
        arguments["ignore_mismatched_sizes"] = True
    if is_diffusers_model(part.cls):
        from polymux.loading.diffusers_classes import DIFFUSERS_DTYPE  # diffusers

        # Without a device map: with one, a missing tensor ends in an error about the meta device that names nothing.
        arguments[DIFFUSERS_DTYPE] = dtype
    else:
        arguments["dtype"] = dtype
        if device.type != "cpu":
            arguments["device_map"] = {"": device}
    with reading(f"{weights.main}: {part.name} ({part.cls.__name__})"):
        model, report = part.load(str(part.folder), **arguments)
    check_report(part, weights, report)
    return place(part.name, model, device)


def check_report(part: Part, weights: Weights, report: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the library's loading report says that the model is not what the files say."""
    who = f"{part.name} ({part.cls.__name__})"
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise CheckpointError(
            f"{weights.file_of(name)}: {who}: tensor {name!r} has shape {list(found)}, the model needs "
            f"{list(expected)}{_more(mismatched)}"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(f"{weights.main}: {who}: tensor {missing[0]!r} is missing{_more(missing)}")
    if report["error_msgs"]:
        raise CheckpointError(f"{weights.main}: {who}: {report['error_msgs'][0]}")
    unexpected = report["unexpected_keys"]
    if unexpected:
        # Published checkpoints often hold buffers of older versions of a model; the libraries leave them out.
        logger.warning("%s: %d of %d tensors in the files are not used", who, len(unexpected), len(weights.tensors))


def _more(tensors: Collection[object]) -> str:
    return f" (and {len(tensors) - 1} more tensors)" if len(tensors) > 1 else ""


def place(name: str, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Ready for inference, on the device. What is there already is not touched, so that mapped files stay mapped."""
    model.eval().requires_grad_(False)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for tensor_name, tensor in tensors:
        if tensor.device.type == "meta":
            raise CheckpointError(f"{name} ({type(model).__name__}): tensor {tensor_name!r} got no value")
    if any(tensor.device != device for _, tensor in tensors):
        with reading(name):
            model.to(device)
    return model
