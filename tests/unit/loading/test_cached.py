"""What comes from the runtime cache is what loading would give, and it is loaded only once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polymux.config import ModelConfig
from polymux.diffusion.component import Role, role_of
from polymux.loading import cached, load_pipeline
from polymux.loading.cached import CachedLoader
from polymux.memory.runtime_cache import CacheSettings, RuntimeCache
from polymux.memory.runtime_cache.manifest import WEIGHTS
from polymux.testing.tiny import TINY, Ctx
from polymux.testing.tiny.driver import call_pipeline

CPU = torch.device("cpu")
Checkpoint = Callable[..., Path]


class Loads:
    """Counts how often a component's weight files are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(cached, "load_model", self)

    def __call__(self, *arguments: Any) -> torch.nn.Module:
        self.count += 1
        return _LOAD_MODEL(*arguments)


_LOAD_MODEL = cached.load_model


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def loader(root: Path, role: Role = "denoiser", **settings: Any) -> CachedLoader:
    cache = RuntimeCache(CacheSettings(root=root, threads=2, **settings))
    return CachedLoader(cache, lambda name: role_of(name) == role, label="tiny")


def load(folder: Path, cached: CachedLoader | None = None, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    return load_pipeline(ModelConfig(model=str(folder), **config), CPU, dtype, loader=cached)


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    found, wanted = tensors(ours), tensors(theirs)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    assert not ours.training
    assert not any(parameter.requires_grad for parameter in ours.parameters())


@pytest.fixture
def copied(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """A tiny checkpoint that the test may change."""
    return lambda name, **ctx: Path(shutil.copytree(tiny_checkpoint(name, **ctx), tmp_path / name))


@pytest.mark.parametrize(
    ("name", "mapped", "dtype"),
    [
        ("flux-dev", ["transformer"], torch.float32),  # blocks of two kinds
        ("qwen-image", ["transformer"], torch.float32),  # rotary frequencies that are no buffers
        ("wan22-t2v-moe", ["transformer", "transformer_2"], torch.float32),  # buffers that no checkpoint holds
        ("wan22-t2v-moe", ["transformer", "transformer_2"], torch.bfloat16),  # and parts that are kept in fp32
        ("sdxl", ["unet"], torch.bfloat16),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_a_warm_start_loads_nothing_and_has_everything(
    tiny_checkpoint: Checkpoint, root: Path, loads: Loads, name: str, mapped: list[str], dtype: torch.dtype
) -> None:
    folder = tiny_checkpoint(name)
    plain = load(folder, dtype=dtype)
    for start in ("cold", "warm"):
        own = loader(root)
        pipeline = load(folder, own, dtype)
        assert sorted(own.mappings) == mapped, start
        assert loads.count == len(mapped), "only the cold start loads"
        for part in mapped:
            assert_same(pipeline.components[part], plain.components[part])
    if dtype == torch.float32:
        wanted = call_pipeline(plain, Ctx(), TINY[name].call)
        for key, value in call_pipeline(pipeline, Ctx(), TINY[name].call).items():
            assert (value - wanted[key]).abs().max() <= 2e-5 * wanted[key].abs().max()


def test_the_blocks_are_views_of_the_file(tiny_checkpoint: Checkpoint, root: Path) -> None:
    own = loader(root)
    pipeline = load(tiny_checkpoint("flux-dev"), own)
    memory = own.mappings["transformer"].memory
    inside = {
        name
        for name, tensor in tensors(pipeline.transformer).items()
        if memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + memory.nbytes
    }
    assert inside == {name for name in tensors(pipeline.transformer) if "transformer_blocks" in name}


def test_random_weights_are_cached_too(tiny_checkpoint: Checkpoint, root: Path) -> None:
    folder = tiny_checkpoint("flux-dev")
    plain = load(folder, load_format="dummy")
    for _ in range(2):
        own = loader(root)
        assert_same(load(folder, own, load_format="dummy").transformer, plain.transformer)
        assert own.mappings
    own = loader(root)
    assert_same(load(folder, own).transformer, load(folder).transformer)


def flip(file: Path) -> None:
    """Change the last weight, and nothing that `ls -l` shows."""
    times = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([byte ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_changed_source_is_loaded_anew(copied: Callable[..., Path], root: Path, loads: Loads) -> None:
    folder = copied("flux-dev")
    before = load(folder, loader(root)).transformer
    flip(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    after = load(folder, loader(root)).transformer
    assert loads.count == 2
    assert_same(after, load(folder).transformer)
    with pytest.raises(AssertionError):
        assert_same(after, before)


def test_another_dtype_is_loaded_anew(tiny_checkpoint: Checkpoint, root: Path, loads: Loads) -> None:
    load(tiny_checkpoint("flux-dev"), loader(root))
    load(tiny_checkpoint("flux-dev"), loader(root), torch.bfloat16)
    assert loads.count == 2


def test_files_that_change_while_they_are_loaded_are_not_cached(
    copied: Callable[..., Path], root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied("flux-dev")

    def load_and_change(*arguments: Any) -> torch.nn.Module:
        model = _LOAD_MODEL(*arguments)
        flip(folder / "transformer" / "diffusion_pytorch_model.safetensors")
        return model

    monkeypatch.setattr(cached, "load_model", load_and_change)
    own = loader(root)
    load(folder, own)
    assert not own.mappings
    assert "its files changed while they were loaded" in caplog.text
    assert RuntimeCache(CacheSettings(root=root)).store.digests() == []


def damage(root: Path) -> None:
    (entry,) = [path for path in root.iterdir() if path.is_dir()]
    (entry / WEIGHTS).chmod(0o644)
    with (entry / WEIGHTS).open("r+b") as stream:
        stream.seek(-300000, os.SEEK_END)
        stream.write(b"\xff" * 100)


def test_a_damaged_entry_never_becomes_weights(
    tiny_checkpoint: Checkpoint, root: Path, loads: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_checkpoint("flux-dev")
    load(folder, loader(root))
    damage(root)
    own = loader(root, verify_full=True)
    assert_same(load(folder, own).transformer, load(folder).transformer)
    assert "damaged: the bytes of 1 blocks are wrong" in caplog.text
    assert loads.count == 2
    assert own.mappings, "it was written anew"


def test_a_cache_that_cannot_be_written_costs_nothing_but_sharing(
    tiny_checkpoint: Checkpoint, root: Path, loads: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    root.write_text("a file where the directory should be")
    own = loader(root)
    folder = tiny_checkpoint("flux-dev")
    assert_same(load(folder, own).transformer, load(folder).transformer)
    assert not own.mappings
    assert "private memory" in caplog.text


def test_a_model_without_known_blocks_is_loaded_as_always(
    tiny_checkpoint: Checkpoint, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = loader(root, "decoder")
    folder = tiny_checkpoint("qwen-image")
    assert_same(load(folder, own).vae, load(folder).vae)
    assert "which of its parts are blocks is not known" in caplog.text
    assert not own.mappings


def test_what_is_not_a_diffusers_model_is_loaded_as_always(
    tiny_checkpoint: Checkpoint, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = loader(root, "encoder")
    folder = tiny_checkpoint("sdxl")
    assert_same(load(folder, own).text_encoder, load(folder).text_encoder)
    assert "not an unquantized model of diffusers" in caplog.text
