"""Blocks as compiled code: one compilation for all of them, for all sizes; what cannot be compiled runs as it is."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_pipeline import CHANNELS, Denoiser, engine_of, outcome, pipeline_of, pixels, request_of
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters

from polymux.compilation_config import CompilationConfig
from polymux.config import EngineConfig
from polymux.diffusion import compiled_blocks
from polymux.diffusion.recording import Recording
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import ConfigError
from polymux.families import generate_family_of
from polymux.families.settings import check_settings
from polymux.request import LoRARequest
from polymux.testing.tape import TapeRecorder

BLOCKS = 6
BUDGET = {"max_batched_tokens": 1 << 20}  # everything is merged
SIZES = ((64, 64), (64, 128), (64, 192))
CACHE = "TORCHINDUCTOR_CACHE_DIR"


class Block(torch.nn.Module):
    """As a transformer's: weights of its own, a tensor of all tokens, and one for each sample."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(CHANNELS, CHANNELS)
        torch.nn.init.constant_(self.inner.weight, 0.1 * number)

    def forward(self, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        if hidden_states.shape[-1] != CHANNELS:
            raise ValueError("this is no picture")
        return hidden_states + torch.tanh(self.inner(hidden_states) * temb.reshape(-1, 1, 1))


class BlockDenoiser(Denoiser):
    _repeated_blocks = ("Block",)

    def __init__(self, limit: int = 64) -> None:
        super().__init__(limit)
        self.transformer_blocks = torch.nn.ModuleList(Block(i) for i in range(BLOCKS))

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor]:
        hidden_states = hidden_states[:]  # a view, as what a model's first layer puts out
        for block in self.transformer_blocks:
            hidden_states = block(hidden_states, temb=timestep / 1000)
            if len(hidden_states) == 1:  # a part of something larger
                hidden_states = torch.cat([hidden_states, hidden_states], 1)[:, : hidden_states.shape[1]]
        return super().forward(hidden_states, timestep, encoder_hidden_states)


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "polymux")
    return caplog


def blocked_pipeline() -> Any:
    made = pipeline_of()
    torch.manual_seed(0)
    made.register_modules(transformer=BlockDenoiser().requires_grad_(False))
    return made


def pictures(engine: Any, sizes: Any = SIZES, batch: int = 2) -> list[np.ndarray[Any, Any]]:
    """Of each size one alone, and then so many at once."""
    made = []
    for height, width in sizes:
        for number in (1, batch):
            for i in range(number):
                engine.add(request_of(f"{i}", steps=2, seed=i, height=height, width=width))
            done = outcome(engine)
            made += [pixels(done[f"{i}"]) for i in range(number)]
    return made


class TakeApart:
    """A denoiser without its reading of marks, and with a number from the host."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor]:
        for block in self.module.transformer_blocks:
            hidden_states = block(hidden_states * torch.as_tensor(0.5), temb=timestep / 1000)
        return (hidden_states,)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_a_graph_for_all_blocks_and_sizes(info: pytest.LogCaptureFixture) -> None:
    """One more for batches of one, which torch takes for a case of their own. The warm-up compiles both."""
    plain = pictures(engine_of(blocked_pipeline(), **BUDGET))
    assert graphs() == 0
    engine = engine_of(blocked_pipeline(), compilation_config={"backend": "eager"}, **BUDGET)
    engine.warm_up()
    assert graphs() == 2
    for ours, theirs in zip(pictures(engine), plain, strict=True):
        assert np.array_equal(ours, theirs)
    assert graphs() == 2
    assert "compile: transformer: 6 × Block: eager, one graph for all sizes (--compilation-config)" in info.text
    assert "compile: transformer: 1 more" in info.text


def test_static_graphs_are_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_blocks, "MOST_GRAPHS", 3)
    plain = pictures(engine_of(blocked_pipeline(), **BUDGET))
    config = {"backend": "eager", "dynamic": False}
    engine = engine_of(blocked_pipeline(), compilation_config=config, **BUDGET)
    for ours, theirs in zip(pictures(engine), plain, strict=True):
        assert np.array_equal(ours, theirs)
    assert graphs() == 3
    assert caplog.text.count("there are 3 graphs of Block already: of what is new, blocks run eagerly") == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with a C++ compiler")
def test_code_for_this_machine_is_kept(tmp_path: Path, info: pytest.LogCaptureFixture) -> None:
    plain = pictures(engine_of(blocked_pipeline(), max_num_seqs=1), SIZES[:1], batch=0)
    folder = tmp_path / "mine"
    for _ in range(2):
        engine = engine_of(blocked_pipeline(), compilation_config={"cache_dir": str(folder)}, max_num_seqs=1)
        for ours, theirs in zip(pictures(engine, SIZES[:1], batch=0), plain, strict=True):
            assert np.abs(ours - theirs).max() < 1e-4
        assert "runs eagerly" not in info.text
        hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
        engine.close()
        torch._dynamo.reset()
    assert hits > 0
    assert any(folder.rglob("*.so")) and f"kept in {folder}" in info.text


def test_what_cannot_be_compiled_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    plain = pictures(engine_of(blocked_pipeline(), **BUDGET), SIZES[:1])
    engine = engine_of(blocked_pipeline(), enforce_eager=False, **BUDGET)
    with torch._inductor.config.patch({"cpp.cxx": ("/no/compiler",)}):
        for ours, theirs in zip(pictures(engine, SIZES[:1]), plain, strict=True):
            assert np.array_equal(ours, theirs)
    assert caplog.text.count("Block cannot be compiled, and runs eagerly from now on") == 1


def test_faults_of_a_block_are_its_own(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = blocked_pipeline()
    engine = engine_of(pipeline, compilation_config={"backend": "eager"}, max_num_seqs=1)
    block = engine.pipeline.transformer.transformer_blocks[0]
    with pytest.raises(ValueError, match="this is no picture"):
        block(torch.zeros(1, 2, 3), torch.zeros(1))
    assert "cannot be compiled" not in caplog.text


def test_blocks_are_streamed_as_ever() -> None:
    plain = pictures(engine_of(blocked_pipeline(), **BUDGET), SIZES[:2])
    knobs = {"enable_layerwise_offload": True, "dlo_prefetch_layers": 1}
    engine = engine_of(blocked_pipeline(), compilation_config={"backend": "eager"}, **knobs, **BUDGET)
    for ours, theirs in zip(pictures(engine, SIZES[:2]), plain, strict=True):
        assert np.array_equal(ours, theirs)
    assert engine.stats.offload_bytes["transformer"] > 0 and graphs() > 0
    engine.close()


def test_compiled_blocks_are_recorded() -> None:
    """Nothing is compiled anew for it, though what comes from the host is noted meanwhile."""
    engine = engine_of(blocked_pipeline(), compilation_config={"backend": "eager"}, max_num_seqs=1)
    (denoiser,) = [c for c in engine.components if c.role == "denoiser"]
    assert denoiser.compiled is not None
    given = {
        "hidden_states": torch.ones(1, 4, CHANNELS),
        "timestep": torch.full((1,), 500.0),
        "encoder_hidden_states": torch.zeros(1, 6, CHANNELS),
    }
    denoiser.module.forward = TakeApart(denoiser.module).forward  # type: ignore[assignment]
    denoiser.look_up()

    def run(arguments: dict[str, Any]) -> Any:
        assert denoiser.compiled is not None
        with denoiser.compiled.active(()):
            return denoiser.run("forward", arguments)

    want = run(given)
    before = graphs()
    assert before > 0
    recording = Recording(run, given, TapeRecorder(), denoiser.compiled)
    assert torch.equal(recording.run(given)[0], want[0]) and torch.equal(run(given)[0], want[0])
    assert graphs() == before


def test_calls_with_adapters_run_eagerly(info: pytest.LogCaptureFixture) -> None:
    engine = engine_of(blocked_pipeline(), compilation_config={"backend": "eager"}, max_num_seqs=1)
    (denoiser,) = [c for c in engine.components if c.role == "denoiser"]
    assert denoiser.compiled is not None
    arguments = (torch.zeros(1, 4, CHANNELS), torch.zeros(1), torch.zeros(1, 6, CHANNELS))
    for adapters in ((("a", 1.0),), (("a", 0.5),)):
        with denoiser.compiled.active(adapters):
            denoiser.module(*arguments)
    assert graphs() == 0 and info.text.count("calls with adapters run its blocks eagerly") == 1
    with denoiser.compiled.active(()):
        denoiser.module(*arguments)
    assert graphs() == 1


def test_adapters_compile_nothing_for_others(
    tiny_checkpoint: Callable[..., Path], tiny_lora: Callable[[str], Path], tmp_path: Path
) -> None:
    """Neither when the first one comes nor when it goes, and requests with and without run at the same time."""
    first = tiny_lora("qwen-image")
    state = {key: -0.5 * value for key, value in load_file(first).items() if ".to_q." in key}
    second = tmp_path / "second.safetensors"
    save_file(state, second)
    knobs = {"max_num_seqs": 2, "max_loras": 1, "max_batched_tokens": 1}  # nothing is merged: that takes more graphs
    wanted = engine_from(tiny_checkpoint("qwen-image"), enforce_eager=True, **knobs)
    engine = engine_from(tiny_checkpoint("qwen-image"), compilation_config={"backend": "eager"}, **knobs)

    plain = drawn(engine, (), ())
    before = compiled_so_far()
    assert before[0] > 0
    for files in ((first,), (), (second,), (first, second)):
        for ours, theirs in zip(drawn(engine, (), files), drawn(wanted, (), files), strict=True):
            assert np.abs(ours - theirs).max() < 2e-5
        assert compiled_so_far() == before
    for ours, theirs in zip(drawn(engine, (), ()), plain, strict=True):
        assert np.array_equal(ours, theirs)
    assert compiled_so_far() == before
    wanted.close()
    engine.close()


def engine_from(folder: Path, **knobs: Any) -> DiffusionEngine:
    return DiffusionEngine.load(EngineConfig.from_flat(model=str(folder), dtype="fp32", **knobs))


def drawn(engine: DiffusionEngine, *asked: Sequence[Path]) -> list[np.ndarray[Any, Any]]:
    """Requests at the same time, each with these adapters."""
    for i, files in enumerate(asked):
        adapters = tuple(LoRARequest(path=str(file)) for file in files)
        engine.add(request_of(f"{i}", steps=2, seed=i, height=64, width=64, lora=adapters))
    done = outcome(engine)
    return [pixels(done[f"{i}"]) for i in range(len(asked))]


def compiled_so_far() -> tuple[int, ...]:
    """Graphs, and functions that torch has looked at in order to compile them."""
    return graphs(), sum(counters["frames"].values()), sum(counters["recompile_limit"].values())


def test_hooks_inside_blocks(info: pytest.LogCaptureFixture) -> None:
    pipeline = blocked_pipeline()
    handle = pipeline.transformer.transformer_blocks[2].inner.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="nothing can be compiled: transformer: there are hooks inside its blocks"):
        engine_of(pipeline, compilation_config={"backend": "eager"})
    handle.remove()


def test_without_blocks() -> None:
    with pytest.raises(ConfigError, match="--no-enforce-eager: nothing can be compiled: transformer: nothing tells"):
        engine_of(pipeline_of(), enforce_eager=False)


def test_everything_is_put_back() -> None:
    pipeline = blocked_pipeline()
    engine_of(pipeline, compilation_config={"backend": "eager"}).close()
    assert all("forward" not in block.__dict__ for block in pipeline.transformer.transformer_blocks)


@pytest.mark.parametrize(
    ("knobs", "device", "compiled", "why"),
    [
        ({}, "cuda", True, "on a GPU"),
        ({}, "cpu", False, "on a CPU"),
        ({"enforce_eager": True}, "cuda", False, "--enforce-eager"),
        ({"enforce_eager": False}, "cpu", True, "--no-enforce-eager"),
        ({"compilation_config": {"mode": "default"}}, "cpu", True, "--compilation-config"),
    ],
)
def test_what_decides(knobs: dict[str, Any], device: str, compiled: bool, why: str) -> None:
    settings, reason = CompilationConfig(**knobs).choice(device)
    assert (settings is not None) == compiled and reason.startswith(why)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"backend": "tvm"}, "Invalid enum value 'tvm' - at `$.backend`; allowed: inductor, aot_eager, eager"),
        ({"level": 3}, "unknown field `level`; allowed: backend, mode, dynamic, cache_dir"),
        ({"mode": "reduce-overhead"}, "at `$.mode`; allowed: default, max-autotune-no-cudagraphs"),
        ({"dynamic": "yes"}, "at `$.dynamic`; allowed: true, false and null"),
        ({"backend": "eager", "mode": "default"}, "mode acts only with the backend inductor"),
    ],
)
def test_what_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CompilationConfig(compilation_config=config)
    assert said in str(refused.value) and refused.value.param == "compilation_config"


def test_two_that_contradict() -> None:
    with pytest.raises(ConfigError, match="--enforce-eager and --compilation-config exclude each other"):
        CompilationConfig(enforce_eager=True, compilation_config={"backend": "eager"})


def test_models_of_transformers_have_no_such_blocks() -> None:
    family = generate_family_of("VitsModel")
    assert family is not None
    check_settings(EngineConfig.from_flat(model="a"), family)
    with pytest.raises(ConfigError, match="acts only on pipelines of diffusers"):
        check_settings(EngineConfig.from_flat(model="a", enforce_eager=False), family)
