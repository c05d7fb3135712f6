"""From a name to a folder: local, embedded, or from a hub, of which only what is needed is fetched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_hub import UNREACHABLE, FakeHub

from polymux.config import ModelConfig
from polymux.errors import CheckpointError, ConfigError
from polymux.loading import resolve
from polymux.loading.index import parse_index
from polymux.loading.options import LoadOptions, parse_options
from polymux.loading.source import component_files, pipeline_files

Checkpoint = Callable[..., Path]


def test_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in (str(tmp_path / "a"), "a", "./a"):
        assert resolve(ModelConfig(model=name)) == tmp_path / "a"
    assert resolve(ModelConfig(model="a/b")) == tmp_path / "a" / "b"


def test_the_embedded_model() -> None:
    folder = resolve(ModelConfig(model="demo"))
    assert folder.name == "demo_model"
    assert (folder / "model_index.json").is_file()


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere-at-all", "a/b/c", "a b", "a\\b"])
def test_what_is_neither_a_folder_nor_a_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder, and not a hub id"):
        resolve(ModelConfig(model=name))


@pytest.mark.parametrize("name", ["a" * 5000, "~no-such-user/model"])
def test_names_that_the_system_refuses(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"model '{name[:20]}"):
        resolve(ModelConfig(model=name))


def test_no_name_at_all() -> None:
    with pytest.raises(ConfigError, match="model=' '"):
        resolve(ModelConfig(model=" "))


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="a file; give the folder"):
        resolve(ModelConfig(model=str(tmp_path / "model.safetensors")))


@pytest.mark.parametrize("name", [".", "demo"])
def test_only_hub_models_have_revisions(name: str) -> None:
    with pytest.raises(ConfigError, match="revision='main'") as error:
        resolve(ModelConfig(model=name, revision="main"))
    assert error.value.param == "revision"


def test_offline_and_not_cached(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"some/model: no such folder, not in the hub's cache, and HF_HUB_OFFLINE"
    ):
        resolve(ModelConfig(model="some/model", cache_dir=str(tmp_path)))


REPOSITORY = [
    "README.md",
    "model_index.json",
    "flux1-dev.safetensors",
    "image.png",
    "my_pipeline.py",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/flax_model.msgpack",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/model.onnx",
    "text_encoder/model.safetensors",
    "text_encoder/pytorch_model.bin",
    "tokenizer/merges.txt",
    "tokenizer/vocab.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
    "transformer/diffusion_pytorch_model.bin",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "transformer/code.py",
    "unused/model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.bin",
    "vae/diffusion_pytorch_model.fp16.bin",
]
CLASSIC = {
    "_class_name": "FluxPipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "unused": [None, None],
    "vae": ["diffusers", "AutoencoderKL"],
}


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., set[str]]:
    def get(names: list[str], index: dict[str, Any], options: LoadOptions, name: str = "model_index.json") -> set[str]:
        (tmp_path / name).write_text(json.dumps(index))
        return set(pipeline_files(names, parse_index(tmp_path / name), options, weights=True))

    return get


def test_needed_files(files: Callable[..., set[str]]) -> None:
    assert files(REPOSITORY, CLASSIC, LoadOptions()) == {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/merges.txt",
        "tokenizer/vocab.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "vae/config.json",
        "vae/diffusion_pytorch_model.bin",
    }


@pytest.mark.parametrize(
    ("kwargs", "more", "less"),
    [
        (
            {"variant": "fp16"},
            {"text_encoder/model.fp16.safetensors", "vae/diffusion_pytorch_model.fp16.bin"},
            {"text_encoder/model.safetensors", "vae/diffusion_pytorch_model.bin"},
        ),
        ({"trust_remote_code": True}, {"my_pipeline.py", "transformer/code.py"}, set()),
        ({"vae": None}, set(), {"vae/config.json", "vae/diffusion_pytorch_model.bin"}),
    ],
)
def test_needed_files_by_options(
    files: Callable[..., set[str]], kwargs: dict[str, Any], more: set[str], less: set[str]
) -> None:
    plain = files(REPOSITORY, CLASSIC, LoadOptions())
    assert files(REPOSITORY, CLASSIC, parse_options(kwargs)) == (plain | more) - less
    assert less <= plain and not more & plain


def test_needed_files_of_a_modular_index(files: Callable[..., set[str]]) -> None:
    index = {
        "_class_name": "FluxModularPipeline",
        "vae": ["diffusers", "AutoencoderKL", {"pretrained_model_name_or_path": "a/b", "subfolder": "vae"}],
        "transformer": [None, None, {"pretrained_model_name_or_path": "c/d", "subfolder": "elsewhere"}],
    }
    names = ["modular_model_index.json", "modular_config.json", *REPOSITORY]
    assert files(names, index, LoadOptions(), "modular_model_index.json") == {
        "model_index.json",
        "modular_model_index.json",
        "modular_config.json",
        "vae/config.json",
        "vae/diffusion_pytorch_model.bin",
    }


def test_old_pipelines_keep_their_model_at_the_root(files: Callable[..., set[str]]) -> None:
    names = ["model_index.json", "config.json", "scheduler_config.json", "diffusion_pytorch_model.bin", "x/y.json"]
    index = {"_class_name": "DDPMPipeline", "scheduler": ["diffusers", "DDPMScheduler"], "unet": ["diffusers", "UNet"]}
    assert files(names, index, LoadOptions()) == set(names) - {"x/y.json"}


def test_only_other_weights_than_those_asked_for() -> None:
    names = ["vae/config.json", "vae/diffusion_pytorch_model.fp16.safetensors"]
    with pytest.raises(CheckpointError, match=r"vae: none of its weights .* diffusion_pytorch_model.fp16.safetensors"):
        component_files(names, "vae", LoadOptions().flags, weights=True)


def test_random_weights_need_no_files() -> None:
    wanted = component_files(REPOSITORY, "transformer", LoadOptions().flags, weights=False)
    assert wanted == ["transformer/config.json", "transformer/diffusion_pytorch_model.safetensors.index.json"]


# Runs in a process of its own, since huggingface_hub reads HF_ENDPOINT when it is imported.
CHILD = """
import json, os, sys
import torch
from polymux.config import ModelConfig
from polymux.errors import PolymuxError
from polymux.loading import load_pipeline, resolve

def attempt(**settings):
    try:
        return str(resolve(ModelConfig(**settings)))
    except PolymuxError as error:
        return f"{type(error).__name__}: {error}"

answers = {
    "found": attempt(model="tiny/flux"),
    "no revision": attempt(model="tiny/flux", revision="nope"),
    "no repository": attempt(model="tiny/none"),
    "no index": attempt(model="tiny/raw"),
    "unreachable": attempt(model=UNREACHABLE),
    "commit": attempt(model="tiny/flux", revision=COMMIT, cache_dir=CACHE),
}
print(json.dumps(answers), flush=True)

os.environ["HF_HUB_OFFLINE"] = "1"
opened = []
sys.addaudithook(lambda event, args: opened.append(event) if event.startswith("socket.") else None)
answers = {
    "found": attempt(model="tiny/flux"),
    "no repository": attempt(model="tiny/none"),
    "type": type(load_pipeline(ModelConfig(model="tiny/flux"), torch.device("cpu"), torch.float32)).__name__,
    "modular": type(
        load_pipeline(ModelConfig(model=MODULAR), torch.device("cpu"), torch.float32)
    ).__name__,
    "opened": opened,
}
print(json.dumps(answers), flush=True)
"""


def test_hub(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    repository = Path(shutil.copytree(tiny_checkpoint("flux-dev"), tmp_path / "flux"))
    for extra in ("README.md", "flux1-dev.safetensors", "vae/diffusion_pytorch_model.bin", "transformer/model.onnx"):
        (repository / extra).write_bytes(b"not needed")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "other.json").write_text("{}")
    hub = FakeHub({"tiny/flux": repository, "tiny/raw": tmp_path / "raw"})
    constants = {
        "UNREACHABLE": UNREACHABLE,
        "COMMIT": hub.commit,
        "CACHE": str(tmp_path / "other cache"),
        "MODULAR": str(tiny_checkpoint("flux-modular")),
    }
    script = "".join(f"{name} = {value!r}\n" for name, value in constants.items()) + CHILD
    with hub.serve():
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", script]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr
    online, offline = (json.loads(line) for line in child.stdout.splitlines() if line.startswith("{"))

    folder = Path(online["found"])
    assert folder.is_relative_to(tmp_path / "home")
    fetched = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    original = tiny_checkpoint("flux-dev")
    assert fetched == {file.relative_to(original).as_posix() for file in original.rglob("*") if file.is_file()}
    assert hub.downloaded() == fetched
    assert online["commit"].startswith(str(tmp_path / "other cache"))
    assert "no revision 'nope'" in online["no revision"]
    assert "no such folder, and no such repository" in online["no repository"]
    assert "neither model_index.json nor modular_model_index.json" in online["no index"]
    assert "the hub cannot be reached" in online["unreachable"]
    assert all(online[key].startswith("CheckpointError: ") for key in online if key not in ("found", "commit"))

    assert offline == {
        "found": online["found"],
        "no repository": offline["no repository"],
        "type": "FluxPipeline",
        "modular": "FluxModularPipeline",
        "opened": [],
    }
    assert "HF_HUB_OFFLINE forbids" in offline["no repository"]
