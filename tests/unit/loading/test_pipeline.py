"""load_pipeline against diffusers' own from_pretrained, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from polymux.config import ModelConfig
from polymux.errors import CheckpointError, ConfigError
from polymux.loading import load_pipeline
from polymux.testing.tiny import TINY, Ctx
from polymux.testing.tiny.driver import call_pipeline, open_pipeline

CPU = torch.device("cpu")
Checkpoint = Callable[..., Path]


def load(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    return load_pipeline(ModelConfig(model=str(folder), **settings), CPU, dtype)


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_same_components(ours: Any, theirs: Any) -> None:
    assert ours.components.keys() == theirs.components.keys()
    for name, expected in theirs.components.items():
        found = ours.components[name]
        assert type(found) is type(expected), name
        if isinstance(expected, torch.nn.Module):
            wanted, got = tensors_of(expected), tensors_of(found)
            assert wanted.keys() == got.keys()
            for key, value in wanted.items():
                assert got[key].dtype == value.dtype, f"{name}.{key}"
                assert torch.equal(got[key], value), f"{name}.{key}"


@pytest.fixture
def copied(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """A tiny checkpoint that the test may change."""
    return lambda name, **ctx: Path(shutil.copytree(tiny_checkpoint(name, **ctx), tmp_path / name))


@pytest.mark.parametrize(
    ("name", "ctx"),
    [
        ("flux-dev", {}),
        ("sdxl", {"shard": "200KB"}),
        ("z-image", {"published": True}),
        ("wan22-t2v-moe", {}),  # values such as boundary_ratio, and a component that is null
        ("longcat-audiodit", {}),  # an index entry that the pipeline makes itself
    ],
)
def test_output_equals_diffusers_own(tiny_checkpoint: Checkpoint, name: str, ctx: dict[str, Any]) -> None:
    folder = tiny_checkpoint(name, **ctx)
    ours, theirs = load(folder), open_pipeline(folder, Ctx(), {})
    assert_same_components(ours, theirs)
    wanted = call_pipeline(theirs, Ctx(), TINY[name].call)
    got = call_pipeline(ours, Ctx(), TINY[name].call)
    assert wanted.keys() == got.keys()
    for key, value in wanted.items():
        assert (got[key] - value).abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["flux-dev", "kandinsky5-t2i"])
def test_parts_kept_in_fp32_stay_so(tiny_checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> None:
    folder = tiny_checkpoint(name)
    ours = load(folder, dtype)
    assert_same_components(ours, open_pipeline(folder, Ctx(dtype=dtype), {}))
    kept = {p.dtype for c in ours.components.values() if isinstance(c, torch.nn.Module) for p in c.parameters()}
    assert kept == {dtype, torch.float32} or (name, dtype) == ("flux-dev", torch.bfloat16)


def test_ready_for_inference(tiny_checkpoint: Checkpoint, capfd: pytest.CaptureFixture[str]) -> None:
    pipe = load(tiny_checkpoint("flux-dev"))
    modules = [c for c in pipe.components.values() if isinstance(c, torch.nn.Module)]
    assert len(modules) == 4
    assert not any(module.training for module in modules)
    assert not any(p.requires_grad for module in modules for p in module.parameters())
    assert pipe.name_or_path == str(tiny_checkpoint("flux-dev"))
    call_pipeline(pipe, Ctx(), TINY["flux-dev"].call)
    assert "it/s" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["flux-modular", "qwen-image-modular"])
def test_modular_pipelines(tiny_checkpoint: Checkpoint, name: str) -> None:
    folder = tiny_checkpoint(name)
    theirs = diffusers.ModularPipeline.from_pretrained(str(folder), local_files_only=True)
    theirs.load_components(dtype=torch.float32)
    ours = load(folder)
    assert type(ours) is type(theirs)
    assert_same_components(ours, theirs)


def test_modular_index_that_leaves_the_class_open(copied: Callable[..., Path]) -> None:
    folder = copied("flux-modular")
    index = folder / "modular_model_index.json"
    data = json.loads(index.read_text())
    for name in ("transformer", "text_encoder"):
        data[name] = [None, None, {**data[name][2], "type_hint": [None, None]}]
    index.write_text(json.dumps(data))
    pipe = load(folder)
    assert type(pipe.transformer).__name__ == "FluxTransformer2DModel"
    assert type(pipe.text_encoder).__name__ == "CLIPTextModel"


def test_modular_components_are_checked_too(copied: Callable[..., Path]) -> None:
    folder = copied("flux-modular")
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"vae/diffusion_pytorch_model.safetensors: truncated"):
        load(folder)


def test_a_modular_component_that_lies_elsewhere(copied: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied("flux-modular")
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    (folder / "vae").rename(elsewhere / "vae")
    index = folder / "modular_model_index.json"
    data = json.loads(index.read_text())
    data["vae"][2]["pretrained_model_name_or_path"] = str(elsewhere)
    index.write_text(json.dumps(data))
    assert isinstance(load(folder).vae, diffusers.AutoencoderKL)
    data["vae"][2]["pretrained_model_name_or_path"] = "tiny/elsewhere"
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"tiny/elsewhere: .*HF_HUB_OFFLINE"):
        load(folder)


def test_another_class_over_the_same_components(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint("flux-dev")
    assert type(load(folder, model_class_name="FluxImg2ImgPipeline")) is diffusers.FluxImg2ImgPipeline
    modular = load(folder, model_class_name="FluxModularPipeline")
    assert type(modular) is diffusers.FluxModularPipeline
    assert isinstance(modular.transformer, diffusers.FluxTransformer2DModel)


def test_another_class_that_needs_more(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"FluxControlNetPipeline needs the component 'controlnet'"):
        load(tiny_checkpoint("flux-dev"), model_class_name="FluxControlNetPipeline")


@pytest.mark.parametrize("name", ["NoSuchPipeline", "FluxTransformer2DModel", "logging"])
def test_another_class_that_is_none(tiny_checkpoint: Checkpoint, name: str) -> None:
    with pytest.raises(ConfigError, match=f"model_class_name='{name}'") as error:
        load(tiny_checkpoint("flux-dev"), model_class_name=name)
    assert error.value.param == "model_class_name"


def test_a_classic_class_over_a_modular_checkpoint(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="modular"):
        load(tiny_checkpoint("flux-modular"), model_class_name="FluxPipeline")


def test_a_class_that_diffusers_does_not_have(copied: Callable[..., Path]) -> None:
    folder = copied("flux-dev")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("FluxPipeline", "Flux9Pipeline"))
    with pytest.raises(CheckpointError, match=rf"'Flux9Pipeline' does not exist in .*{diffusers.__version__}"):
        load(folder)


@pytest.mark.parametrize("entry", [["diffusers", "NoSuchModel"], ["os", "system"], ["no_such_package", "Model"]])
def test_a_component_class_that_is_not_known(copied: Callable[..., Path], entry: list[str]) -> None:
    folder = copied("flux-dev")
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"vae": entry}))
    with pytest.raises(CheckpointError, match=rf"'vae' is a {entry[0]}.{entry[1]}"):
        load(folder)


@pytest.mark.parametrize("text", ['{"_class_name":', "[]", "{}", '{"_class_name": 3}'])
def test_a_broken_index(copied: Callable[..., Path], text: str) -> None:
    folder = copied("flux-dev")
    (folder / "model_index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model_index.json: "):
        load(folder)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model_index.json nor modular_model_index.json"):
        load(tmp_path)


@pytest.mark.parametrize("part", ["vae", "tokenizer", "scheduler"])
def test_a_component_folder_that_is_missing(copied: Callable[..., Path], part: str) -> None:
    folder = copied("flux-dev")
    shutil.rmtree(folder / part)
    with pytest.raises(CheckpointError, match=rf"/{part}: missing"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "ctx", "part", "lost"),
    [
        ("flux-dev", {}, "tokenizer_2", "tokenizer.json"),
        ("flux-dev", {"published": True}, "tokenizer", "merges.txt"),
        ("qwen-image-edit", {}, "processor", "tokenizer.json"),
    ],
)
def test_a_tokenizer_without_its_vocabulary(
    copied: Callable[..., Path], name: str, ctx: dict[str, Any], part: str, lost: str
) -> None:
    """transformers would make one that knows no word."""
    folder = copied(name, **ctx)
    (folder / part / lost).unlink()
    with pytest.raises(CheckpointError, match=rf"/{part}: {part} \(\w+\): "):
        load(folder)


def test_a_component_that_needs_a_package(tiny_checkpoint: Checkpoint) -> None:
    """The checkpoint leaves the checker out, the pipeline insists on making one, its package is not installed."""
    folder = tiny_checkpoint("cosmos1-t2w")
    with pytest.raises(CheckpointError, match=r"safety_checker.*cosmos_guardrail.*diffusers_load_kwargs"):
        load(folder)
    config, checker = ModelConfig(model=str(folder)), TINY["cosmos1-t2w"].load["safety_checker"]
    pipe = load_pipeline(config, CPU, torch.float32, components={"safety_checker": checker})
    assert pipe.safety_checker is checker


def test_components_given_by_name(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint("sdxl")
    vae = load(folder).vae.train()
    pipe = load(folder, diffusers_load_kwargs={"vae": vae, "force_zeros_for_empty_prompt": False})
    assert pipe.vae is vae and not vae.training
    assert pipe.config.force_zeros_for_empty_prompt is False
    with pytest.raises(ConfigError, match="twice"):
        config = ModelConfig(model=str(folder), diffusers_load_kwargs={"vae": vae})
        load_pipeline(config, CPU, torch.float32, components={"vae": vae})


def test_a_component_left_out(copied: Callable[..., Path]) -> None:
    folder = copied("flux-dev")
    shutil.rmtree(folder / "text_encoder_2")
    assert load(folder, diffusers_load_kwargs={"text_encoder_2": None}).text_encoder_2 is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"vea": None}, "FluxPipeline takes no 'vea'; known are .*vae"),
        ({"torch_dtype": "float16"}, "use the setting dtype"),
        ({"device_map": "balanced"}, "polymux places the components"),
        ({"custom_pipeline": "x"}, "trust_remote_code"),
        ({"variant": 3}, "variant"),
        ({"trust_remote_code": "yes"}, "trust_remote_code"),
    ],
)
def test_load_kwargs_that_are_refused(tiny_checkpoint: Checkpoint, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(tiny_checkpoint("flux-dev"), diffusers_load_kwargs=kwargs)
    assert error.value.param == "diffusers_load_kwargs"


def test_modular_load_kwargs_that_are_unknown(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="FluxModularPipeline takes no 'vea'"):
        load(tiny_checkpoint("flux-modular"), diffusers_load_kwargs={"vea": None})


PIPELINE_CODE = """
from pathlib import Path
from diffusers import FluxPipeline
Path({witness!r}).touch()
class MyPipeline(FluxPipeline):
    pass
"""
COMPONENT_CODE = """
from pathlib import Path
from diffusers import AutoencoderKL
Path({witness!r}).touch()
class MyVae(AutoencoderKL):
    pass
"""


@pytest.mark.parametrize(
    ("entry", "file", "code"),
    [
        ({"_class_name": ["my_pipeline", "MyPipeline"]}, "my_pipeline.py", PIPELINE_CODE),
        ({"vae": ["my_vae", "MyVae"]}, "vae/my_vae.py", COMPONENT_CODE),
    ],
)
def test_code_in_the_folder_runs_only_when_trusted(
    copied: Callable[..., Path], tmp_path: Path, entry: dict[str, list[str]], file: str, code: str
) -> None:
    folder, witness = copied("flux-dev"), tmp_path / "it-ran"
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | entry))
    (folder / file).write_text(code.format(witness=str(witness)))
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        load(folder)
    assert not witness.exists()
    pipe = load(folder, diffusers_load_kwargs={"trust_remote_code": True})
    assert witness.exists()
    assert "My" in type(pipe).__name__ + type(pipe.vae).__name__
