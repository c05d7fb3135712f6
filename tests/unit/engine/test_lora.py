"""Adapters of requests: what each does is what diffusers does with it, and nothing of it stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from fake_pipeline import engine_of, kind_of, outcome, pipeline_of, pixels
from fake_pipeline import request_of as plain_request
from safetensors.torch import load_file, save_file

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import ConfigError, InvalidRequestError
from polymux.request import LoRARequest, Request

Array = np.ndarray[Any, Any]
NAME = "qwen-image"
SIZE = dict(height=64, width=64)


def request_of(request_id: str, *paths: Path | LoRARequest, scale: float = 1.0, **params: Any) -> Request:
    asked = tuple(p if isinstance(p, LoRARequest) else LoRARequest(path=str(p), scale=scale) for p in paths)
    return plain_request(request_id, lora=asked, **{"steps": 2} | SIZE | params)


def load(checkpoint: Path, **knobs: Any) -> DiffusionEngine:
    return DiffusionEngine.load(EngineConfig.from_flat(model=str(checkpoint), max_num_seqs=4, **knobs))


def generate(engine: DiffusionEngine, *paths: Path | LoRARequest, **params: Any) -> Array:
    engine.add(request_of("one", *paths, **params))
    return pixels(outcome(engine)["one"])


def by_diffusers(checkpoint: Path, *loras: tuple[Path, float]) -> Array:
    pipeline = DiffusionPipeline.from_pretrained(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    for i, (file, _) in enumerate(loras):
        pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=f"a{i}")
    if loras:
        pipeline.set_adapters([f"a{i}" for i in range(len(loras))], [scale for _, scale in loras])
    result = pipeline(
        prompt="a cat",
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **SIZE,
    )
    return np.asarray(result.images[0])


def same(got: Array, want: Array) -> None:
    """Weights at other addresses: the CPU's kernels round differently."""
    np.testing.assert_allclose(got, want, atol=5e-6)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint(NAME)


@pytest.fixture(scope="module")
def file(tiny_lora: Callable[[str], Path]) -> Path:
    return tiny_lora(NAME)


@pytest.fixture(scope="module")
def other(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second adapter, of other layers and strength."""
    state = {key: -0.5 * value for key, value in load_file(file).items() if ".to_q." in key}
    path = tmp_path_factory.mktemp("lora") / "other.safetensors"
    save_file(state, path)
    return path


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[DiffusionEngine]:
    engine = load(checkpoint)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(engine: DiffusionEngine) -> Array:
    return generate(engine)


def test_as_diffusers_does(engine: DiffusionEngine, checkpoint: Path, file: Path, other: Path) -> None:
    np.testing.assert_array_equal(generate(engine), by_diffusers(checkpoint))
    np.testing.assert_array_equal(generate(engine, file), by_diffusers(checkpoint, (file, 1.0)))
    np.testing.assert_array_equal(generate(engine, file, scale=0.3), by_diffusers(checkpoint, (file, 0.3)))
    both = [LoRARequest(path=str(file), scale=0.5), LoRARequest(path=str(other), scale=2.0)]
    np.testing.assert_array_equal(generate(engine, *both), by_diffusers(checkpoint, (file, 0.5), (other, 2.0)))


def test_nothing_of_it_stays(engine: DiffusionEngine, plain: Array, file: Path, other: Path) -> None:
    first = generate(engine, file)
    assert not np.array_equal(first, plain)
    np.testing.assert_array_equal(generate(engine, file, scale=0.0), plain)
    assert not np.array_equal(generate(engine, other), first)
    np.testing.assert_array_equal(generate(engine, file), first)
    np.testing.assert_array_equal(generate(engine), plain)


def test_different_ones_in_flight_at_once(engine: DiffusionEngine, file: Path, other: Path) -> None:
    asked: dict[str, dict[str, Any]] = {
        "plain": {},
        "one": {"paths": [file]},
        "off": {"paths": [other], "scale": 0.0},
        "again": {"paths": [file]},
        "weak": {"paths": [file], "scale": 0.25},
        "other": {"paths": [other]},
    }
    alone = {name: generate(engine, *kw.get("paths", []), scale=kw.get("scale", 1.0)) for name, kw in asked.items()}
    before = engine.stats
    for name, kw in asked.items():
        engine.add(request_of(name, *kw.get("paths", []), scale=kw.get("scale", 1.0)))
    done = outcome(engine)
    for name, want in alone.items():
        np.testing.assert_allclose(pixels(done[name]), want, atol=2e-5)
    calls = engine.stats.calls["transformer"] - before.calls["transformer"]
    assert calls < engine.stats.merged["transformer"] - before.merged["transformer"]  # equal ones went together


@pytest.mark.parametrize("knobs", [{"enable_cpu_offload": True}, {"enable_layerwise_offload": True}], ids=str)
def test_with_offload(
    checkpoint: Path, engine: DiffusionEngine, plain: Array, file: Path, knobs: dict[str, Any]
) -> None:
    offloaded = load(checkpoint, **knobs)
    same(generate(offloaded), plain)
    same(generate(offloaded, file), generate(engine, file))
    same(generate(offloaded), plain)
    offloaded.sleep(1)
    offloaded.wake_up()
    same(generate(offloaded, file), generate(engine, file))
    offloaded.close()


def test_after_the_weights_were_dropped(checkpoint: Path, engine: DiffusionEngine, file: Path) -> None:
    sleeper = load(checkpoint)
    want = generate(sleeper, file)
    sleeper.sleep(2)
    sleeper.wake_up()
    np.testing.assert_array_equal(generate(sleeper, file), want)
    sleeper.close()


def test_a_peft_folder(engine: DiffusionEngine, file: Path, tmp_path: Path) -> None:
    state = load_file(file)
    bare = {"base_model.model." + key.removeprefix("transformer."): value for key, value in state.items()}
    rank = next(value.shape[1] for key, value in state.items() if ".lora_B." in key)
    save_file(bare, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank // 2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(generate(engine, tmp_path), generate(engine, file, scale=0.5), atol=1e-6)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(InvalidRequestError, match="use_dora=True"):
        generate(engine, tmp_path)


def test_kohya_s_format(tiny_checkpoint: Callable[..., Path], tiny_lora: Callable[[str], Path], tmp_path: Path) -> None:
    state, made = load_file(tiny_lora("sd15")), {}
    for key, value in state.items():
        layer, _, which = key.partition(".lora_")
        name = "lora_" + layer.replace(".", "_")
        made[f"{name}.lora_{'down' if which[0] == 'A' else 'up'}.weight"] = value
        if which[0] == "A":
            made[f"{name}.alpha"] = torch.tensor(value.shape[0] / 2)
    kohya = tmp_path / "style.safetensors"
    save_file(made, kohya)
    engine = load(tiny_checkpoint("sd15"))
    half = generate(engine, tiny_lora("sd15"), scale=0.5)
    with pytest.raises(InvalidRequestError, match="leave the component out"):
        generate(engine, LoRARequest(path=str(tiny_lora("sd15")), component="transformer"))
    np.testing.assert_allclose(generate(engine, kohya), half, atol=1e-5)
    engine.close()


def test_layers_without_a_place(
    engine: DiffusionEngine, plain: Array, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = load_file(file)
    none, half = tmp_path / "none.safetensors", tmp_path / "half.safetensors"
    save_file({key.replace("transformer_blocks", "layers"): value for key, value in state.items()}, none)
    with pytest.raises(InvalidRequestError, match=f"0 of {len(state)} keys matched QwenImagePipeline") as caught:
        engine.add(request_of("none", none))
    assert caught.value.param == "lora"
    save_file({key.replace("to_q", "to_w"): value for key, value in state.items()}, half)
    layers = len(state) // 2
    moved = sum(".to_q.lora_A" in key for key in state)
    generate(engine, half)
    assert f"half.safetensors: {layers - moved} of {layers} layers matched" in caplog.text
    assert "to_w" in caplog.text
    np.testing.assert_array_equal(generate(engine), plain)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.safetensors", "No such file"),
        ("weights.bin", "must be a .safetensors file"),
        ("text.safetensors", "not a whole safetensors file"),
        ("empty", "has 0 safetensors files"),
    ],
)
def test_unusable_files(engine: DiffusionEngine, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    (tmp_path / "text.safetensors").write_text("no weights")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequestError, match=message):
        engine.add(request_of("bad", tmp_path / name))
    assert not engine.busy


def test_what_does_not_fit_is_told_in_a_line(engine: DiffusionEngine, plain: Array, file: Path, tmp_path: Path) -> None:
    wide = {key: torch.zeros(value.shape[0], 999) for key, value in load_file(file).items() if ".lora_A." in key}
    save_file(load_file(file) | wide, tmp_path / "wide.safetensors")
    with pytest.raises(InvalidRequestError, match=r"size mismatch for .*999") as caught:
        engine.add(request_of("bad", tmp_path / "wide.safetensors"))
    assert len(caught.value.message) < 500 and "\n" not in caught.value.message
    np.testing.assert_array_equal(generate(engine), plain)


def test_a_component_that_the_model_lacks(engine: DiffusionEngine, file: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"has the denoisers transformer;"):
        engine.add(request_of("bad", LoRARequest(path=str(file), component="transformer_2")))


def test_a_file_that_has_changed_is_read_again(engine: DiffusionEngine, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "style.safetensors"
    shutil.copy(file, path)
    first = generate(engine, path)
    save_file({key: 2 * value for key, value in load_file(file).items()}, path)
    assert not np.array_equal(generate(engine, path), first)
    shutil.copy(file, path)
    np.testing.assert_array_equal(generate(engine, path), first)


def test_how_many_are_kept(checkpoint: Path, file: Path, tmp_path: Path) -> None:
    small = load(checkpoint, max_loras=2)
    copies = [Path(shutil.copy(file, tmp_path / f"{i}.safetensors")) for i in range(4)]

    def kept() -> int:
        return len(small.pipeline.transformer.peft_config)

    want = generate(small, copies[0])
    for path in copies:
        small.add(request_of(path.stem, path))
    assert kept() == 4  # none that a request in flight needs is dropped
    for event in outcome(small).values():
        np.testing.assert_allclose(pixels(event), want, atol=2e-5)
    generate(small, copies[3])
    assert kept() == 2
    for path in copies:  # what is read for a request that is refused counts, too
        with pytest.raises(InvalidRequestError, match="No such file"):
            small.add(request_of("bad", path, tmp_path / "missing.safetensors"))
        assert kept() == 2
    np.testing.assert_array_equal(generate(small, copies[0]), want)
    small.close()


def test_one_that_acts_on_every_request(checkpoint: Path, engine: DiffusionEngine, file: Path, other: Path) -> None:
    standing = load(checkpoint, lora_path=(str(file),), lora_scale=0.5)
    want = generate(engine, file, scale=0.5)
    np.testing.assert_array_equal(generate(standing), want)
    np.testing.assert_array_equal(generate(standing), want)
    both = [LoRARequest(path=str(file), scale=0.5), LoRARequest(path=str(other))]
    np.testing.assert_array_equal(generate(standing, other), generate(engine, *both))
    standing.close()
    with pytest.raises(ConfigError, match="No such file"):
        load(checkpoint, lora_path=("nowhere.safetensors",))
    with pytest.raises(ConfigError, match="--lora-scale acts only with --lora-path"):
        EngineConfig.from_flat(model="x", lora_scale=0.5)


def test_models_with_two_denoisers(tiny_checkpoint: Callable[..., Path], tiny_lora: Callable[[str], Path]) -> None:
    name = "wan22-t2v-moe"
    engine, file = load(tiny_checkpoint(name)), tiny_lora(name)
    video: dict[str, Any] = {"num_frames": 5, "steps": 4}  # the last ones are the second denoiser's
    generate(engine, **video)  # from the second one on, the calls of a step go together
    plain = generate(engine, **video)
    with pytest.raises(InvalidRequestError, match="name the one that it is for"):
        generate(engine, file, **video)
    pictures = [
        generate(engine, LoRARequest(path=str(file), component=part), **video)
        for part in ("transformer", "transformer_2")
    ]
    assert not np.array_equal(pictures[0], plain)
    assert not np.array_equal(pictures[1], plain)
    assert not np.array_equal(*pictures)
    np.testing.assert_array_equal(generate(engine, **video), plain)
    engine.close()


def test_a_pipeline_that_takes_none(file: Path) -> None:
    engine = engine_of(pipeline_of())
    assert not engine.capabilities.lora
    with pytest.raises(InvalidRequestError, match="takes no LoRA"):
        engine.add(request_of("one", file))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ([{"path": "x"}], "must be a list of LoRARequest"),
        ((LoRARequest(path=""),), "must be a path"),
        ((LoRARequest(path="x", scale=float("nan")),), "must be a number"),
        ((LoRARequest(path="x", scale=101),), "must be a number"),
        ((LoRARequest(path="x"),) * 9, "9 given, allowed are 8"),
    ],
)
def test_values_that_mean_nothing(engine: DiffusionEngine, lora: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        engine.add(plain_request("one", lora=lora, **SIZE))


def test_the_same_one_twice(engine: DiffusionEngine, file: Path) -> None:
    with pytest.raises(InvalidRequestError, match="the same adapter twice"):
        engine.add(request_of("one", file, file))


def test_an_error_of_one_is_nobody_else_s(engine: DiffusionEngine, plain: Array, file: Path, tmp_path: Path) -> None:
    broken = load_file(file)
    key = next(key for key in broken if ".lora_A." in key)
    broken[key] = torch.full_like(broken[key], float("nan"))
    save_file(broken, tmp_path / "nan.safetensors")
    engine.add(request_of("broken", tmp_path / "nan.safetensors"))
    engine.add(request_of("sound"))
    done = outcome(engine)
    assert kind_of(done["broken"]) == "NonFiniteOutputError"
    np.testing.assert_allclose(pixels(done["sound"]), plain, atol=2e-5)
