"""A component of which each rank has a part: only that part is read, and no rank ever holds the whole.

For tensor parallelism of diffusers' models, and of language models of transformers, from safetensors. Which part it is,
`polymux.parallel` says; what is done with it is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open

from polymux.errors import ConfigError
from polymux.families.base import UNKNOWN
from polymux.families.sharding import TensorPlan
from polymux.loading.component import Part, check_report, load_model, place
from polymux.loading.dummy import dummy_model
from polymux.loading.empty import empty_diffusers_model, empty_language_model
from polymux.loading.index import read_json
from polymux.loading.libraries import is_diffusers_model, reading
from polymux.loading.options import LoadFlags
from polymux.loading.weights import Weights
from polymux.parallel.language import language_slices
from polymux.parallel.plans import tensor_plan
from polymux.parallel.slices import Slice, slices
from polymux.parallel.tensor import check_tensor

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """Among how many ranks a component is divided, and which of them this is."""

    rank: int
    size: int


def load_sliced(
    part: Part, weights: Weights, device: torch.device, dtype: torch.dtype, ranks: Ranks
) -> tuple[torch.nn.Module, TensorPlan]:
    """This rank's part of a component, on the device, and the plan by which it was cut: `shard_tensor` with `sliced`
    makes one model of the ranks' parts.

    Raises ConfigError if the model cannot be divided among so many, and CheckpointError if the files are not all of it.
    """
    who = f"{part.name} ({part.cls.__name__})"
    config = read_json(part.folder / "config.json")
    if not is_diffusers_model(part.cls) or not weights.safetensors or config.get("quantization_config") is not None:
        raise ConfigError(
            f"tensor parallelism: {who}: only unquantized safetensors of diffusers' models are read in parts",
            param="tensor_parallel_size",
        )
    with reading(f"{weights.main}: {who}"):
        model = empty_diffusers_model(part.cls, config, dtype)
    plan = tensor_plan(model)
    check_tensor(model, plan, ranks.size)
    _Filling(part, model, dtype, device).fill(weights, slices(model, plan, ranks.rank, ranks.size))
    return place(part.name, model, device), plan


def load_language_sliced(
    part: Part, weights: Weights, device: torch.device, dtype: torch.dtype, ranks: Ranks
) -> torch.nn.Module:
    """This rank's part of a language model: `shard_language` makes one model of the ranks' parts. Raises as above."""
    who = f"{part.name} ({part.cls.__name__})"
    if not weights.safetensors or read_json(part.folder / "config.json").get("quantization_config") is not None:
        what = f"tensor parallelism: {who}: only unquantized safetensors are read in parts"
        raise ConfigError(what, param="tensor_parallel_size")
    with reading(f"{weights.main}: {who}"):
        model = empty_language_model(part.cls, part.folder, dtype)
    head = model.get_output_embeddings()
    tied = {f"{path}.weight" for path, module in model.named_modules() if module is head} - weights.tensors.keys()
    parts = language_slices(model, ranks.rank, ranks.size)
    _Filling(part, model, dtype, device, tied if model.config.tie_word_embeddings else set()).fill(weights, parts)
    if tied and model.config.tie_word_embeddings:
        head.weight = model.get_input_embeddings().weight
    return place(part.name, model, device)


class _Filling:
    """A model on meta that gets its values; `tied`: but for these, which are the same as others."""

    def __init__(
        self,
        part: Part,
        model: torch.nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        tied: Collection[str] = (),
    ) -> None:
        self._part, self._model, self._dtype, self._device = part, model, dtype, device
        kept = part.cls._keep_in_fp32_modules or ()
        self._in_fp32 = {kept} if isinstance(kept, str) else set(kept)
        self._wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}

    def fill(self, weights: Weights, parts: Mapping[str, Slice]) -> None:
        held = {name: entry.shape for name, entry in weights.tensors.items()}
        check_report(
            self._part,
            weights,
            {
                "missing_keys": self._wanted.keys() - held.keys(),
                "unexpected_keys": held.keys() - self._wanted.keys(),
                "mismatched_keys": [(n, held[n], s) for n, s in self._wanted.items() if n in held and held[n] != s],
                "error_msgs": [],
            },
        )
        for file in weights.files:
            with reading(file), safe_open(file, framework="pt") as tensors:
                for name in self._wanted.keys() & tensors.keys():
                    cut = parts.get(name)
                    self._set(name, tensors.get_tensor(name) if cut is None else cut.of(tensors.get_slice(name)))

    def _set(self, name: str, value: torch.Tensor) -> None:
        path, _, last = name.rpartition(".")
        owner = self._model.get_submodule(path)
        if value.is_floating_point():
            value = value.to(torch.float32 if self._in_fp32 & set(name.split(".")) else self._dtype)
        value = value.to(self._device)
        if last in dict(owner.named_parameters(recurse=False)):
            owner.register_parameter(last, torch.nn.Parameter(value, requires_grad=False))
        else:
            owner.register_buffer(last, value)


class SlicedLoader:
    """Loads denoisers in parts where they can be, and says which. Implements `pipeline.DenoiserLoader`."""

    def __init__(self, ranks: Ranks, is_denoiser: Callable[[str], bool], making: torch.device = HOST) -> None:
        self.family = UNKNOWN  # until it is known
        self._making = making  # where random weights are drawn
        self.ranks, self._is_denoiser = ranks, is_denoiser
        self.sliced: set[str] = set()  # names of those of which there is only a part

    def wants(self, part: Part) -> bool:
        return part.has_weights and (part.name in self.family.denoisers or self._is_denoiser(part.name))

    def make_up(self, part: Part, dtype: torch.dtype) -> torch.nn.Module:
        """Whole: it is cut afterwards."""
        return dummy_model(part, HOST, dtype, self._making)

    def load(
        self, part: Part, weights: Weights, dtype: torch.dtype, flags: LoadFlags, read_ahead: Callable[[], None]
    ) -> torch.nn.Module:
        """A component of a checkpoint: this rank's part, or the whole where it cannot be read in parts."""
        in_parts = is_diffusers_model(part.cls) and weights.safetensors
        if not in_parts or read_json(part.folder / "config.json").get("quantization_config") is not None:
            read_ahead()
            return load_model(part, weights, HOST, dtype, flags)
        self.sliced.add(part.name)
        return load_sliced(part, weights, HOST, dtype, self.ranks)[0]
