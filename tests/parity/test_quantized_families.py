"""Quantized denoisers of different families: what comes out is what plain layers with the same weights give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polymux.config import EngineConfig
from polymux.diffusion.component import is_denoiser
from polymux.loading import load_pipeline
from polymux.quantization.layer import PackedLinear, replace_layer
from polymux.quantization.quantizer import Quantizer, formats_in
from polymux.testing.tiny import TINY, Ctx
from polymux.testing.tiny.driver import call_pipeline

CPU = torch.device("cpu")
DENOISERS = {  # by checkpoint: what else than attention and feed-forward its blocks have
    "flux-dev": ["transformer"],  # two kinds of blocks, modulations inside
    "sd15": ["unet"],  # convolutions, and blocks nested in blocks
    "wan22-t2v-moe": ["transformer", "transformer_2"],  # parts that are kept in fp32
    "nucleus-moe-image": ["transformer"],  # experts, and a layer with one output
    "sana": ["transformer"],  # linear attention
    "ltx2": ["transformer"],  # picture and sound
}


@pytest.mark.parametrize("name", DENOISERS)
def test_family(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(name)), quantization="int8")
    quantizer = Quantizer(config.quantization.choice, CPU, is_denoiser)
    load = dict(TINY[name].load)
    pipeline = load_pipeline(config.model, CPU, torch.float32, components=load, quantizer=quantizer)
    modules = {n: m for n, m in pipeline.components.items() if isinstance(m, torch.nn.Module)}
    assert [n for n, m in modules.items() if formats_in(m)] == DENOISERS[name]
    got = call_pipeline(pipeline, Ctx(), TINY[name].call)
    for module in modules.values():
        for path, layer in list(module.named_modules()):
            if isinstance(layer, PackedLinear):
                replace_layer(module, path, unpacked(layer))
    for key, expected in call_pipeline(pipeline, Ctx(), TINY[name].call).items():
        assert (got[key] - expected).abs().max() <= 2e-5 * expected.abs().max()


def unpacked(layer: PackedLinear) -> torch.nn.Linear:
    plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    plain.load_state_dict({"weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias}))
    return plain.requires_grad_(False)
