"""Which denoisers are to have recorded calls, what is refused, and what the log says of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from diffusers import ClassifierFreeGuidance, SkipLayerGuidance
from fake_pipeline import MadeUpPipeline, engine_of, pipeline_of
from small_denoisers import CPU, Simple, Small, add_one, small_engine

from polymux.compilation_config import CompilationConfig
from polymux.config import EngineConfig
from polymux.diffusion.call_graphs import CallGraphs, hooks_at_times
from polymux.diffusion.component import Component
from polymux.diffusion.recording import copied, form_of
from polymux.diffusion.rehearsal import NotRecordable
from polymux.engine.model import why_no_graphs
from polymux.errors import ConfigError
from polymux.parallel.mesh import ALONE, Mesh

GPU = torch.device("cuda")


def test_forms() -> None:
    x = torch.ones(2, 3)
    one = {"a": [x, (1, "b", None)], "c": torch.float16}
    assert form_of(one, CPU) == form_of({"a": [x + 1, (1, "b", None)], "c": torch.float16}, CPU)
    others = ([x, (2, "b", None)], [x.half(), (1, "b", None)], [x[:1], (1, "b", None)], (x, (1, "b", None)))
    assert len({form_of({"a": other, "c": torch.float16}, CPU) for other in others}) == len(others)
    assert form_of(1, CPU) != form_of(True, CPU)
    with pytest.raises(NotRecordable, match="an argument is a tensor on cpu"):
        form_of(x, GPU)
    with pytest.raises(NotRecordable):
        copied([{1}])


@pytest.mark.parametrize(
    ("knobs", "device", "on", "why"),
    [
        ({}, "cuda", True, "on a GPU"),
        ({}, "cpu", False, "a CPU has none"),
        ({"enforce_eager": True}, "cuda", False, "--enforce-eager"),
        ({"enforce_eager": True, "compilation_config": {"cudagraphs": True}}, "cuda", True, "--compilation-config"),
        ({"compilation_config": {"cudagraphs": False}}, "cuda", False, "--compilation-config"),
        ({"compilation_config": {"cudagraph_max_tokens": 64}}, "cuda", True, "on a GPU"),
    ],
)
def test_what_decides(knobs: dict[str, Any], device: str, on: bool, why: str) -> None:
    config = CompilationConfig(**knobs)
    settings, reason = config.graphs(device)
    assert (settings is not None) == on and reason.startswith(why)
    assert config.choice("cpu")[0] is None and config.asked_by is None  # of blocks nothing is said


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"cudagraphs": "yes"}, 'at `$.cudagraphs`; allowed: "auto", true and false'),
        ({"cudagraph_max_tokens": 0}, "`int` >= 1 - at `$.cudagraph_max_tokens`; allowed: numbers from 1"),
        ({"cudagraph_max_gib": 0}, "at `$.cudagraph_max_gib`; allowed: numbers above 0"),
        ({"cudagraphs": False, "cudagraph_max_graphs": 3}, "cudagraph_max_graphs acts only with cudagraphs"),
        ({"cudagraphs": True, "cudagraph_max_tokens": 3}, 'cudagraph_max_tokens acts only with cudagraphs "auto"'),
    ],
)
def test_what_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CompilationConfig(compilation_config=config)
    assert said in str(refused.value) and refused.value.param == "compilation_config"


def test_limits_of_graphs_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match="cudagraph_max_gib does not act with enforce_eager") as refused:
        CompilationConfig(enforce_eager=True, compilation_config={"cudagraph_max_gib": 1})
    assert refused.value.param == "compilation_config"
    CompilationConfig(enforce_eager=True, compilation_config={"cudagraphs": True, "cudagraph_max_gib": 1})


def test_asked_for_in_vain() -> None:
    with pytest.raises(ConfigError, match="cudagraphs: transformer: a CPU has none") as refused:
        small_engine(None, compilation_config={"cudagraphs": True})
    assert refused.value.param == "compilation_config"


def applied(module: torch.nn.Module, refused: str | None = None, looped: bool = False, **settings: Any) -> Any:
    component = Component("transformer", module, "denoiser", looped)
    config = CompilationConfig(compilation_config=settings or None)
    return CallGraphs.apply(config, [component], GPU, refused)


def test_what_runs_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "polymux")
    assert applied(Simple(add_one)) is not None
    assert "transformer: calls of up to 8192 latent tokens that come often, as CUDA graphs (on a GPU" in caplog.text
    hooked = Simple(add_one)
    hooked.register_forward_hook(lambda *_: None)
    large = Simple(add_one)
    large.register_buffer("more", torch.empty(2**28))
    assert applied(hooked) is applied(large, cudagraph_max_model_gib=0.5) is None
    assert applied(Simple(add_one), looped=True) is applied(Simple(add_one), "several ranks run it together") is None
    assert applied(large, cudagraphs=True) is not None
    for why in ("hooks in it", "weights are 1.0 GiB, and auto takes up to 0.5", "memory of its own", "several ranks"):
        assert f"graphs: transformer: none: {why}" in caplog.text or why in caplog.text
    with pytest.raises(ConfigError, match="cudagraphs: transformer: several ranks"):
        applied(Simple(add_one), "several ranks run it together", cudagraphs=True)


SPARSE = {"default": {"backend": "TORCH_SDPA", "block_sparse": {"sparsity": 0.5}}}


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({}, None),
        ({"enable_cpu_offload": True}, "move between the host and the device"),
        ({"enable_layerwise_offload": True}, "move between the host and the device"),
        ({"cache_backend": "first_block"}, "cache of steps"),
        ({"diffusion_attention_config": SPARSE}, "block-sparse attention"),
        ({"lora_path": ("a-file",)}, "adapters of --lora-path"),
        ({"lora_path": ("a-file",), "lora_backend": "distill"}, None),
        ({"quantization": "int8"}, None),
    ],
)
def test_what_rules_them_out(knobs: dict[str, Any], why: str | None) -> None:
    """What moves weights, or makes a call depend on more than its arguments."""
    family = small_engine(None).family
    config = EngineConfig.from_flat(model="m", **knobs)
    found = why_no_graphs(config, family, ALONE)
    assert found is None if why is None else found is not None and why in found


def test_guiders_that_change_denoisers() -> None:
    assert hooks_at_times([Small(), ClassifierFreeGuidance()]) is None
    why = hooks_at_times([Small(), SkipLayerGuidance(skip_layer_guidance_layers=1)])
    assert why == "SkipLayerGuidance changes them for some calls"


def test_only_of_known_pipelines_and_one_rank() -> None:
    config, family = EngineConfig.from_flat(model="m"), small_engine(None).family
    unknown = engine_of(pipeline_of(MadeUpPipeline)).family
    assert "nobody has looked at" in (why_no_graphs(config, unknown, ALONE) or "")
    two = Mesh(rank=0, size=2)
    assert "several ranks" in (why_no_graphs(config, family, two) or "")
