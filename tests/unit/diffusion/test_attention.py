"""Backends of attention: what was chosen runs, or what it lacks is said; engines do not disturb each other."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers.models.attention_dispatch as dispatch
import numpy as np
import pytest
import torch
from fake_pipeline import outcome, pixels, request_of

from polymux import AttentionConfig, AttentionSpec
from polymux.attention import BACKENDS
from polymux.config import AttentionChoiceConfig, EngineConfig, attention_choice
from polymux.diffusion.attention import KERNELS, find_kernel
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import ConfigError

Checkpoint = Callable[..., Path]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HERE = ("TORCH_SDPA", "TORCH_SDPA_FLASH", "TORCH_SDPA_MATH")  # those that run on a CPU
NOWHERE = ("FLASHINFER_ATTN", "TRTLLM_ATTN", "RAINFUSION_ATTN")  # diffusers has none of them
VARIABLE = "DIFFUSION_ATTENTION_BACKEND"


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def load(checkpoint: Path, **knobs: Any) -> DiffusionEngine:
    return DiffusionEngine.load(EngineConfig.from_flat(model=str(checkpoint), device="cpu", **knobs))


def picture(engine: DiffusionEngine) -> np.ndarray[Any, Any]:
    engine.add(request_of("a", height=64, width=64, steps=2))
    return pixels(outcome(engine)["a"])


def backends(engine: DiffusionEngine) -> dict[str, str | None]:
    """Of each layer of the denoiser that has one, by path."""
    (denoiser,) = [c.module for c in engine.components if c.role == "denoiser"]
    processors = {path: m.processor for path, m in denoiser.named_modules() if hasattr(m, "processor")}
    return {path: p._attention_backend for path, p in processors.items() if hasattr(p, "_attention_backend")}


def test_every_name_is_known() -> None:
    assert set(KERNELS) == set(BACKENDS)


@pytest.mark.parametrize("name", HERE)
def test_what_runs_here_gives_the_same_picture(name: str, tiny_checkpoint: Checkpoint) -> None:
    checkpoint = tiny_checkpoint("flux-dev")
    plain = load(checkpoint)
    assert set(backends(plain).values()) == {None}
    want = picture(plain)
    plain.close()
    engine = load(checkpoint, diffusion_attention_backend=name)
    assert set(backends(engine).values()) == {KERNELS[name][0].name}
    np.testing.assert_allclose(picture(engine), want, atol=2e-5)
    pipeline = engine.pipeline
    engine.close()
    layers = [m.processor for m in pipeline.transformer.modules() if hasattr(m, "processor")]
    assert {layer._attention_backend for layer in layers} == {None}


def test_engines_of_one_process_keep_their_own(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call says which kernel it wants; the one that diffusers has for the process stays what it is."""
    asked: list[str] = []
    for name in ("native", "_native_math"):
        member = dispatch.AttentionBackendName(name)
        original = dispatch._AttentionBackendRegistry._backends[member]

        def noting(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            asked.append(name)
            return original(*args, **kwargs)

        monkeypatch.setitem(dispatch._AttentionBackendRegistry._backends, member, noting)
    active = dispatch._AttentionBackendRegistry.get_active_backend()[0]
    checkpoint = tiny_checkpoint("flux-dev")
    plain, math = load(checkpoint), load(checkpoint, diffusion_attention_backend="TORCH_SDPA_MATH")
    for engine, name in ((plain, "native"), (math, "_native_math"), (plain, "native")):
        asked.clear()
        picture(engine)
        assert set(asked) == {name}
    assert dispatch._AttentionBackendRegistry.get_active_backend()[0] == active
    for engine in (plain, math):
        engine.close()


def test_by_role(tiny_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    config = AttentionConfig(per_role={"cross": AttentionSpec("TORCH_SDPA_MATH")})
    with caplog.at_level(logging.INFO, "polymux"):
        engine = load(tiny_checkpoint("wan21-t2v"), diffusion_attention_config=config)
    set_ = backends(engine)
    assert {path.rpartition(".")[2]: backend for path, backend in set_.items()} == {
        "attn1": None,
        "attn2": "_native_math",
    }
    half = len(set_) // 2
    said = (
        f"transformer: {half} of {2 * half} layers on _native_math, {half} of {2 * half} layers on diffusers' default"
    )
    assert f"attention: {said} (--diffusion-attention-config)" in caplog.messages
    engine.close()


def test_layers_that_cannot_be_chosen_for_are_counted(
    tiny_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """The refiner of the prompt has an attention of another kind."""
    with caplog.at_level(logging.INFO, "polymux"):
        engine = load(tiny_checkpoint("hunyuan-video-t2v"), diffusion_attention_backend="TORCH_SDPA_MATH")
    (said,) = [message for message in caplog.messages if message.startswith("attention: transformer: ")]
    assert re.search(r": \d+ of (\d+) layers on _native_math, \d+ of \1 layers on kernels of their own \(--diff", said)
    engine.close()


def test_the_log_says_what_runs_by_default(tiny_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    for name, said in (
        ("flux-dev", "transformer: native, diffusers' default; no other was chosen"),
        ("sd15", "unet: its own, which does not go through diffusers' dispatcher"),
    ):
        with caplog.at_level(logging.INFO, "polymux"):
            load(tiny_checkpoint(name)).close()
        assert f"attention: {said}" in caplog.messages


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("FLASH_ATTN", "_flash_3: .*missing package.*needs a CUDA device, and this is cpu.*; flash: .*`flash-attn>="),
        (
            "CUDNN_ATTN",
            "_native_cudnn: it needs a CUDA device, and this is cpu, and it needs bf16 or fp16, and .*float32",
        ),
        ("SAGE_ATTN", "install `sageattention"),
        ("SAGE_ATTN_3", "sage_blackwell_hub: .*(`kernels`|does not have it)"),
        ("FLASH_ATTN_HUB", "flash_hub: .*`kernels`"),
        ("FLASH_ATTN_3_HUB", "_flash_3_hub: .*`kernels`"),
        ("TORCH_SDPA_EFFICIENT", "_native_efficient: No viable backend"),
        *((name, "diffusers [0-9.]+ has no such attention") for name in NOWHERE),
    ],
)
def test_what_cannot_run_here_says_what_is_missing(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"attention backend {name} cannot run here: .*{said}"):
        find_kernel(name, CPU, torch.float32)


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.0, and this GPU has 7\.5"):
        find_kernel("CUDNN_ATTN", CUDA, torch.float16)


def test_the_newest_that_is_installed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polymux.diffusion.attention._check_attention_backend_requirements", lambda member: None)
    monkeypatch.setattr("polymux.diffusion.attention._try", lambda member, device, dtype: None)
    for capability, kernel in (((9, 0), "_flash_3"), ((8, 6), "flash")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert find_kernel("FLASH_ATTN", CUDA, torch.bfloat16) == kernel


@pytest.mark.parametrize(
    ("model", "knobs", "said"),
    [
        ("sd15", {"diffusion_attention_backend": "TORCH_SDPA"}, "UNet2DConditionModel does not go through"),
        ("flux-dev", {"diffusion_attention_backend": "CUDNN_ATTN"}, "needs a CUDA device"),
        (
            "flux-dev",
            {"diffusion_attention_config": {"per_role": {"self": {"backend": "TORCH_SDPA"}}}},
            "do not tell self-",
        ),
    ],
)
def test_refused_at_the_start(model: str, knobs: dict[str, Any], said: str, tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tiny_checkpoint(model), **knobs)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"default": {"backend": "FAST"}},
            r"Invalid enum value 'FAST' - at `\$.default.backend`; backends are TORCH_SDPA, ",
        ),
        ({"per_role": {"joint": {"backend": "TORCH_SDPA"}}}, "joint.*roles are self, cross"),
        ({"default": {"backend": "TORCH_SDPA", "quantize": "fp8"}}, "unknown field `quantize`"),
        ({"defaults": {}}, "unknown field `defaults`"),
    ],
)
def test_configs_that_are_wrong(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        AttentionChoiceConfig(diffusion_attention_config=config)
    assert caught.value.param == "diffusion_attention_config"


def test_two_defaults_are_one_too_many() -> None:
    given: dict[str, Any] = {"default": {"backend": "TORCH_SDPA"}}
    with pytest.raises(ConfigError, match="exclude each other"):
        AttentionChoiceConfig(diffusion_attention_backend="TORCH_SDPA", diffusion_attention_config=given)


def test_who_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_choice(AttentionChoiceConfig()) == (AttentionConfig(), "--diffusion-attention-config")
    monkeypatch.setenv(VARIABLE, "SAGE_ATTN")
    chosen, source = attention_choice(AttentionChoiceConfig())
    assert (chosen.default, source) == (AttentionSpec("SAGE_ATTN"), VARIABLE)
    chosen, source = attention_choice(AttentionChoiceConfig(diffusion_attention_backend="FLASH_ATTN"))
    assert (chosen.default, source) == (AttentionSpec("FLASH_ATTN"), "--diffusion-attention-backend")
    given = AttentionConfig(default=AttentionSpec("CUDNN_ATTN"))
    assert attention_choice(AttentionChoiceConfig(diffusion_attention_config=given))[0] == given  # type: ignore[arg-type]
    monkeypatch.setenv(VARIABLE, "FASTEST")
    with pytest.raises(ConfigError, match="DIFFUSION_ATTENTION_BACKEND='FASTEST': allowed are TORCH_SDPA, "):
        attention_choice(AttentionChoiceConfig())
