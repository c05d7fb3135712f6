"""The tiny checkpoints that all other tests stand on."""

from __future__ import annotations

import filecmp
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from polymux.errors import ConfigError
from polymux.testing.tiny import TINY, Ctx, make, make_lora, names, open_pipeline, run
from polymux.testing.tiny.__main__ import main
from polymux.testing.tiny.registry import select


def weight_files(path: Path) -> list[Path]:
    return sorted(p.relative_to(path) for p in path.rglob("*.safetensors"))


def tensors(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as handle:
        return {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118


def test_every_family_has_a_checkpoint() -> None:
    assert len(names("diffusers")) >= 55
    assert len(names("transformers")) == 30
    assert {"flux-modular", "minimax-h3", "qwen-image-modular", "wan21-t2v-modular"} <= set(names("modular"))
    assert set(names()) == set(TINY)


def test_every_transformers_checkpoint_has_a_smoke_call() -> None:
    assert [spec.name for spec in TINY.values() if spec.kind == "transformers" and spec.run is None] == []


def test_made_twice_gives_the_same_files(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    first, second = tiny_checkpoint("flux-dev"), make("flux-dev", tmp_path)
    files = sorted(str(p.relative_to(first)) for p in first.rglob("*") if p.is_file())
    assert len(files) > 10
    same, different, errors = filecmp.cmpfiles(first, second, files, shallow=False)
    assert (sorted(same), different, errors) == (files, [], [])


def test_another_seed_gives_other_weights(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    first, second = tiny_checkpoint("sd15"), make("sd15", tmp_path, Ctx(seed=1))
    for file in weight_files(first):
        old, new = tensors(first / file), tensors(second / file)
        assert old.keys() == new.keys()
        assert not any(torch.equal(old[key], new[key]) for key in old if old[key].is_floating_point())


def test_no_tensor_is_left_at_zero_or_one(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("z-image")
    for file in weight_files(path):
        flat = [key for key, t in tensors(path / file).items() if t.numel() > 1 and float(t.float().std()) == 0]
        assert flat == []


def test_dtype_and_shards(tmp_path: Path) -> None:
    path = make("sd15", tmp_path, Ctx(dtype=torch.bfloat16, shard="100KB"))
    index = json.loads((path / "unet" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 1
    assert {p.name for p in (path / "unet").glob("*.safetensors")} == shards
    dtypes = {t.dtype for file in weight_files(path) for t in tensors(path / file).values()}
    assert dtypes == {torch.bfloat16}


def test_published_layout_loads_to_the_same_output(tiny_checkpoint: Callable[..., Path]) -> None:
    plain, published = tiny_checkpoint("sdxl"), tiny_checkpoint("sdxl", published=True)
    assert not (published / "tokenizer" / "tokenizer.json").exists()
    assert (published / "tokenizer" / "vocab.json").exists()
    encoder = tensors(published / "text_encoder" / "model.safetensors")
    assert all(key.startswith("text_model.") for key in encoder)
    one, two = run(TINY["sdxl"], plain, Ctx()), run(TINY["sdxl"], published, Ctx())
    torch.testing.assert_close(two, one)


@pytest.mark.parametrize("name", ["qwen-image-modular", "flux-modular"])
def test_modular_twin_gives_the_same_picture_wherever_it_lies(
    name: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    made = tiny_checkpoint(name)
    assert str(made) not in (made / "modular_model_index.json").read_text()
    moved = tmp_path / "elsewhere"
    shutil.copytree(made, moved)
    twin = {"qwen-image-modular": "qwen-image", "flux-modular": "flux-dev"}[name]
    modular, plain = run(TINY[name], moved, Ctx()), run(TINY[twin], tiny_checkpoint(twin), Ctx())
    torch.testing.assert_close(modular, plain)


def test_lora_acts(tmp_path: Path) -> None:
    folder = make_lora("flux-dev", tmp_path)
    spec = TINY["flux-dev"]
    base = run(spec, tmp_path / "flux-dev", Ctx())
    changed = run(spec, tmp_path / "flux-dev", Ctx(), lora=folder)
    assert float((base["images.0"] - changed["images.0"]).abs().max()) > 1e-3


def test_a_component_can_be_exchanged_at_load(tiny_checkpoint: Callable[..., Path]) -> None:
    spec = TINY["cosmos2-t2i"]
    pipe = open_pipeline(tiny_checkpoint("cosmos2-t2i"), Ctx(), spec.load)
    assert pipe.safety_checker is spec.load["safety_checker"]


def test_selection_by_kind_and_name() -> None:
    assert [s.name for s in select(["transformers"])] == names("transformers")
    assert [s.name for s in select(["sdxl", "sd15", "sdxl"])] == ["sdxl", "sd15"]
    with pytest.raises(ConfigError, match=r"'sd16'.*sd15"):
        select(["sd16"])


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "sd15,mimi", str(tmp_path)]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["name"], r["ok"]) for r in reports] == [("sd15", True), ("mimi", True)]
    assert reports[0]["out"]["images.0"][0] == [1, 3, 64, 64]
    with pytest.raises(SystemExit) as exit_:
        main(["make", "nothing", str(tmp_path)])
    assert exit_.value.code == 2
    assert "unknown tiny checkpoint 'nothing'" in capsys.readouterr().err


def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polymux.testing.tiny", "list"], capture_output=True, text=True, check=True
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == names()
