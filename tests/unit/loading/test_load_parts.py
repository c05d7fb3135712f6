"""Models of transformers: found in a folder or on a hub, proven complete, with settings that act or are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_hub import FakeHub
from safetensors.torch import load_file, save_file

from polymux.config import EngineConfig
from polymux.errors import CheckpointError, ConfigError
from polymux.loading import load_parts, model_class_in
from polymux.loading.options import LoadFlags
from polymux.loading.source import model_files

Checkpoint = Callable[..., Path]


def load(folder: Path, **settings: Any) -> Any:
    return load_parts(EngineConfig.from_flat(model=str(folder), **settings), torch.device("cpu"))


@pytest.fixture
def copy(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(tiny_checkpoint(name), tmp_path / name))


def test_which_folders_are_of_transformers(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert model_class_in(tiny_checkpoint("vits")) == "VitsModel"
    assert model_class_in(tiny_checkpoint("flux-dev")) is None and model_class_in(tmp_path) is None
    (tmp_path / "config.json").write_text('{"architectures": []}')
    assert model_class_in(tmp_path) is None


def test_parts_are_loaded_for_inference(tiny_checkpoint: Checkpoint) -> None:
    family, parts = load(tiny_checkpoint("speecht5-tts"))
    assert family.name == "speecht5" and type(parts.beside).__name__ == "SpeechT5HifiGan"
    for model in (parts.model, parts.beside):
        assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_the_type_of_the_weights(tiny_checkpoint: Checkpoint) -> None:
    for settings, dtype in (({}, torch.float32), ({"dtype": "bf16"}, torch.bfloat16)):
        _, parts = load(tiny_checkpoint("dia"), **settings)
        assert parts.model.dtype == parts.beside.dtype == dtype


def test_one_that_is_not_served(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"MimiModel is not served; .*VitsModel"):
        load(tiny_checkpoint("mimi"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="names no class"):
        load(tmp_path)


def test_a_tensor_is_missing_or_of_another_shape(copy: Callable[[str], Path]) -> None:
    file = copy("vits") / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.startswith("text_encoder"))
    save_file({k: v for k, v in tensors.items() if k != name}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        load(file.parent)
    save_file(tensors | {name: torch.zeros(3)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has shape \[3\]"):
        load(file.parent)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load(file.parent)


def test_no_vocabulary(copy: Callable[[str], Path]) -> None:
    folder = copy("vits")
    (folder / "vocab.json").unlink()
    with pytest.raises(CheckpointError, match="processor"):
        load(folder)


def test_a_package_that_the_tokenizer_needs(copy: Callable[[str], Path]) -> None:
    folder = copy("vits")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"phonemize": True}))
    with pytest.raises(CheckpointError, match="needs the package phonemizer"):
        load(folder)


def test_the_vocoder_is_elsewhere(copy: Callable[[str], Path], tmp_path: Path, tiny_checkpoint: Checkpoint) -> None:
    folder = copy("speecht5-tts")
    (folder / "vocoder").rename(tmp_path / "gan")
    with pytest.raises(CheckpointError, match="--vocoder"):
        load(folder)
    _, parts = load(folder, vocoder=str(tmp_path / "gan"))
    assert type(parts.beside).__name__ == "SpeechT5HifiGan"
    with pytest.raises(CheckpointError, match="a VitsModel, and a SpeechT5HifiGan is needed"):
        load(folder, vocoder=str(tiny_checkpoint("vits")))
    with pytest.raises(CheckpointError, match="no such folder"):
        load(folder, vocoder="/no/where")


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((2, 8), np.float32), "one vector"),
        (np.zeros(8, np.int64), "one vector"),
        (np.full(8, np.nan, np.float32), "finite"),
        (np.zeros(7, np.float32), r"8 values each, unlike anna \(7\)"),
        (np.array([{}], object), "anna.npy"),
    ],
)
def test_voices_that_are_none(array: Any, problem: str, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    np.save(tmp_path / "anna.npy", array)
    with pytest.raises(CheckpointError, match=problem):
        load(tiny_checkpoint("speecht5-tts"), voice_path=str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"enable_cpu_offload": True}, "enable_cpu_offload"),
        ({"enable_layerwise_offload": True}, "enable_layerwise_offload"),
        ({"gpu_memory_limit_gib": 1.0}, "gpu_memory_limit_gib"),
        ({"lora_path": ("x",)}, "lora_path"),
        ({"model_class_name": "FluxPipeline"}, "model_class_name"),
        ({"diffusers_call_kwargs": {"eta": 1}}, "diffusers_call_kwargs"),
        ({"diffusers_load_kwargs": {"vae": None}}, "diffusers_load_kwargs"),
        ({"load_format": "dummy"}, "load_format"),
        ({"vocoder": "x"}, "vocoder"),
        ({"voice_path": "x"}, "voice_path"),
    ],
)
def test_settings_that_cannot_act(settings: dict[str, Any], name: str, tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError) as error:
        load(tiny_checkpoint("vits"), **settings)
    assert error.value.param == name


def test_voice_path_without_voices(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for place, problem in ((tmp_path / "none", "no such folder"), (tmp_path, "no .npy file")):
        with pytest.raises(ConfigError, match=problem):
            load(tiny_checkpoint("speecht5-tts"), voice_path=str(place))


def test_settings_of_speech_on_other_models() -> None:
    with pytest.raises(ConfigError, match="--vocoder acts only on models that speak"):
        EngineConfig.from_flat(model="demo", vocoder="x").speech.check_unused()


def test_files_that_are_needed() -> None:
    names = [
        "README.md", "config.json", "vocab.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5",
        "vocoder/config.json", "vocoder/model.safetensors", "vocoder/pytorch_model.bin", "onnx/model.onnx",
        "speaker_embeddings/v2/a.npy", "code.py",
    ]  # fmt: skip
    assert set(model_files(names, LoadFlags())) == {
        "README.md", "config.json", "vocab.json", "model.safetensors", "vocoder/config.json",
        "vocoder/model.safetensors", "speaker_embeddings/v2/a.npy",
    }  # fmt: skip


# Runs in a process of its own, since huggingface_hub reads HF_ENDPOINT when it is imported.
CHILD = """
import json, torch
from polymux.config import EngineConfig
from polymux.errors import PolymuxError
from polymux.loading import load_parts

def attempt(**settings):
    try:
        _, parts = load_parts(EngineConfig.from_flat(**settings), torch.device("cpu"))
        return type(parts.beside).__name__
    except PolymuxError as error:
        return f"{type(error).__name__}: {error}"

print(json.dumps([attempt(model="tiny/speech", vocoder="tiny/gan"), attempt(model="tiny/words")]))
"""


def test_hub(copy: Callable[[str], Path], tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    speech = copy("speecht5-tts")
    (speech / "vocoder").rename(tmp_path / "gan")
    hub = FakeHub({"tiny/speech": speech, "tiny/gan": tmp_path / "gan", "tiny/words": tiny_checkpoint("mimi")})
    with hub.serve():
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        child = subprocess.run(
            [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert child.returncode == 0, child.stderr
    made, refused = json.loads(child.stdout.splitlines()[-1])
    assert made == "SpeechT5HifiGan"
    assert refused.startswith("CheckpointError: tiny/words: MimiModel is not served")
    asked = {path for path in hub.requests if "/tiny/words/resolve/" in path}
    assert {path.rpartition("/")[2] for path in asked} == {"config.json"}  # and none of what is large
