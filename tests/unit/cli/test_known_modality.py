"""What a model makes is known without loading it, where its pipeline's class is at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from polymux.cli.known_modality import known_modality
from polymux.config import ModelConfig


@pytest.mark.parametrize(
    ("pipeline", "made"),
    [("WanPipeline", "video"), ("StableAudioPipeline", "audio"), ("FluxPipeline", "image"), ("MadeUpPipeline", None)],
)
@pytest.mark.parametrize("index", ["model_index.json", "modular_model_index.json"])
def test_of_a_folder(pipeline: str, made: str | None, index: str, tmp_path: Path) -> None:
    (tmp_path / index).write_text(f'{{"_class_name": "{pipeline}"}}')
    assert known_modality(ModelConfig(model=str(tmp_path))) == made


def test_of_other_models(tmp_path: Path) -> None:
    assert known_modality(ModelConfig(model="demo")) == "image"
    assert known_modality(ModelConfig(model="owner/name")) is None
    assert known_modality(ModelConfig(model="owner/name", model_class_name="MochiPipeline")) == "video"
    for text in ("no JSON", "[]", '{"_class_name": 3}', "{}"):
        (tmp_path / "model_index.json").write_text(text)
        assert known_modality(ModelConfig(model=str(tmp_path))) is None


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ('{"architectures": ["VitsModel"]}', "audio"),
        ('{"architectures": ["LlamaForCausalLM"]}', "text"),
        ('{"architectures": []}', None),
        ('{"architectures": 3}', None),
        ("no JSON", None),
        ("[]", None),
    ],
)
def test_of_models_of_transformers(text: str, made: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert known_modality(ModelConfig(model=str(tmp_path))) == made
