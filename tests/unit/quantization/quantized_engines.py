"""What tests of quantization share: engines, the pictures they make, and the same without packed layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.media.wire import from_wire
from polymux.quantization.layer import PackedLinear
from polymux.request import Event, Finished, LoRARequest, OmniDiffusionSamplingParams, Request

Array = np.ndarray[Any, Any]
OFFLOAD: dict[str, dict[str, Any]] = {
    "resident": {},
    "model-level": {"enable_cpu_offload": True},
    "layerwise": {"enable_layerwise_offload": True, "dlo_prefetch_layers": 0},
}
ROUNDING = 2e-5  # of the output: where a tensor begins in memory decides in which order a CPU takes sums


def engine(model: Path | str = "demo", **settings: Any) -> DiffusionEngine:
    return DiffusionEngine.load(EngineConfig.from_flat(model=str(model), **settings))


def add(at: DiffusionEngine, name: str = "a", seed: int = 1, lora: Path | None = None, steps: int = 2) -> None:
    adapters = () if lora is None else (LoRARequest(path=str(lora)),)
    params = OmniDiffusionSamplingParams(
        height=64, width=64, num_inference_steps=steps, seed=seed, output_type="np", lora=adapters
    )
    at.add(Request(request_id=name, prompt="a red circle", params=params))


def run(at: DiffusionEngine) -> dict[str, Array]:
    events: list[Event] = []
    while at.busy:
        events += at.step()
    done = [event for event in events if isinstance(event, Finished)]
    return {event.request_id: from_wire(event.outputs[0][0]) for event in done}


def picture(at: DiffusionEngine, **how: Any) -> Array:
    add(at, **how)
    return run(at)["a"]


def apart(one: Array, other: Array) -> float:
    return float(np.abs(one - other).max())


def transformer(at: DiffusionEngine) -> torch.nn.Module:
    module = at.pipeline.transformer
    assert isinstance(module, torch.nn.Module)
    return module


def unquantized(at: DiffusionEngine) -> None:
    """Put plain layers with the same weights in the place of the packed ones."""
    model = transformer(at)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, PackedLinear):
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            state = {"weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias})
            plain.load_state_dict(state)
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, plain.requires_grad_(False))


def write_gguf(file: Path, state: dict[str, torch.Tensor], kind: str) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    number = GGMLQuantizationType[kind]
    writer = GGUFWriter(str(file), "test")
    for name, tensor in state.items():
        array = tensor.float().numpy()
        if array.ndim == 2 and array.shape[1] % 32 == 0 and "blocks" in name:
            writer.add_tensor(name, quants.quantize(array, number), raw_dtype=number)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
