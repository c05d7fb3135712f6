"""Weight files that are damaged, incomplete or inconsistent: one error that names the file and the tensor."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from polymux.config import ModelConfig
from polymux.errors import CheckpointError
from polymux.loading import load_pipeline
from polymux.loading.options import LoadFlags
from polymux.loading.weights import DIFFUSERS_NAMES, TRANSFORMERS_NAMES, choose, find_weights, is_shard_of

Checkpoint = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
SINGLE = "diffusion_pytorch_model.safetensors"
INDEX = "diffusion_pytorch_model.safetensors.index.json"


def load(folder: Path, **settings: object) -> object:
    return load_pipeline(ModelConfig(model=str(folder), **settings), torch.device("cpu"), torch.float32)


@pytest.fixture
def checkpoint(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("sdxl"), tmp_path / "sdxl"))


@pytest.fixture
def sharded(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("sdxl", shard="200KB"), tmp_path / "sdxl"))


def change(file: Path, how: Callable[[Tensors], object]) -> None:
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-of-*.safetensors"))


def refused(folder: Path, *words: str) -> None:
    """The checkpoint is refused with one line that has all the words."""
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert "\n" not in error.value.message
    for word in words:
        assert word in error.value.message


def test_a_truncated_file(checkpoint: Path) -> None:
    file = checkpoint / "unet" / SINGLE
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    last = max((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"][1])
    refused(checkpoint, f"unet/{SINGLE}", "truncated", repr(last))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "cut off"),
        (b"\x10", "cut off"),
        (b"\xff" * 8 + b"{}", "cut off"),
        (b"\x02" + b"\x00" * 7 + b"{]", "damaged"),
        (b"\x0a" + b"\x00" * 7 + b'{"a": 123}', "damaged"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_a_file_that_is_no_safetensors(checkpoint: Path, content: bytes, word: str) -> None:
    (checkpoint / "vae" / SINGLE).write_bytes(content)
    refused(checkpoint, f"vae/{SINGLE}", word)


def test_a_file_that_is_too_long(checkpoint: Path) -> None:
    with (checkpoint / "vae" / SINGLE).open("ab") as stream:
        stream.write(b"12345")
    refused(checkpoint, f"vae/{SINGLE}", "5 bytes too long")


def test_a_missing_file(checkpoint: Path) -> None:
    (checkpoint / "unet" / SINGLE).rename(checkpoint / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    refused(checkpoint, "/unet: no weights", "diffusion_pytorch_model.fp16.safetensors", "variant")


@pytest.mark.parametrize("part", ["unet", "text_encoder_2"])
def test_a_tensor_that_is_missing(checkpoint: Path, part: str) -> None:
    [file] = (checkpoint / part).glob("*.safetensors")
    name = next(key for key in load_file(file) if key.endswith("weight"))
    change(file, lambda tensors: tensors.pop(name))
    refused(checkpoint, str(file), repr(name), "is missing")


def test_many_tensors_that_are_missing(checkpoint: Path) -> None:
    file = checkpoint / "vae" / SINGLE
    change(file, lambda tensors: [tensors.pop(name) for name in list(tensors)[:7]])
    refused(checkpoint, str(file), "is missing (and 6 more tensors)")


@pytest.mark.parametrize("part", ["unet", "text_encoder_2"])
def test_a_tensor_of_the_wrong_shape(checkpoint: Path, part: str) -> None:
    [file] = (checkpoint / part).glob("*.safetensors")
    name = next(key for key, value in load_file(file).items() if value.dim() == 2)
    shape = list(load_file(file)[name].shape)
    change(file, lambda tensors: tensors.update({name: tensors[name][1:].clone()}))
    refused(checkpoint, str(file), repr(name), f"{shape}", f"{[shape[0] - 1, *shape[1:]]}")


def test_tensors_that_are_not_needed(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = checkpoint / "unet" / SINGLE
    change(file, lambda tensors: tensors.update({"old.one": torch.zeros(2), "old.two": torch.zeros(2)}))
    total = len(load_file(file))
    with caplog.at_level(logging.WARNING, "polymux"):
        load(checkpoint)
    assert f"unet (UNet2DConditionModel): 2 of {total} tensors in the files are not used" in caplog.text
    assert "old.one" not in caplog.text


def test_tied_weights_are_not_missing(tiny_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    """T5 ties its embedding to that of its encoder; the file holds one of the two."""
    with caplog.at_level(logging.WARNING, "polymux"):
        load(tiny_checkpoint("flux-dev"))
    assert caplog.text == ""


def test_a_missing_shard(sharded: Path) -> None:
    file = shards(sharded / "unet")[1]
    tensor = next(iter(load_file(file)))
    file.unlink()
    refused(sharded, str(file), "missing", INDEX)
    assert tensor in (sharded / "unet" / INDEX).read_text()


def test_a_truncated_shard(sharded: Path) -> None:
    file = shards(sharded / "unet")[-1]
    file.write_bytes(file.read_bytes()[:-1000])
    refused(sharded, str(file), "truncated")


@pytest.mark.parametrize("part", ["unet", "text_encoder_2"])
def test_an_index_that_names_what_the_shard_lacks(sharded: Path, part: str) -> None:
    file = shards(sharded / part)[0]
    name = next(iter(load_file(file)))
    change(file, lambda tensors: tensors.pop(name))
    refused(sharded, str(file), repr(name), "stale index")


@pytest.mark.parametrize("part", ["unet", "text_encoder_2"])
def test_a_shard_that_holds_what_the_index_does_not_name(sharded: Path, part: str) -> None:
    file = shards(sharded / part)[0]
    change(file, lambda tensors: tensors.update({"stray.weight": torch.zeros(3)}))
    refused(sharded, str(file), "'stray.weight'", "does not place there")


def test_an_index_that_places_a_tensor_in_the_wrong_shard(sharded: Path) -> None:
    index = sharded / "unet" / INDEX
    data = json.loads(index.read_text())
    first, second = sorted(set(data["weight_map"].values()))[:2]
    name = next(key for key, file in data["weight_map"].items() if file == first)
    data["weight_map"][name] = second
    index.write_text(json.dumps(data))
    refused(sharded, repr(name))


def test_an_index_that_forgets_tensors(sharded: Path) -> None:
    """Both the index and the shards lack it: only the model knows."""
    index = sharded / "unet" / INDEX
    data = json.loads(index.read_text())
    name, shard = next(iter(data["weight_map"].items()))
    del data["weight_map"][name]
    index.write_text(json.dumps(data))
    change(sharded / "unet" / shard, lambda tensors: tensors.pop(name))
    refused(sharded, str(index), repr(name), "is missing")


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}'])
def test_a_broken_index(sharded: Path, text: str) -> None:
    (sharded / "unet" / INDEX).write_text(text)
    refused(sharded, f"unet/{INDEX}")


def test_all_files_are_checked_before_any_is_loaded(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A later component is damaged; an earlier one, which would warn when it is loaded, does not."""
    change(sharded / "text_encoder" / "model.safetensors", lambda tensors: tensors.update({"extra": torch.zeros(1)}))
    file = shards(sharded / "unet")[-1]
    file.write_bytes(file.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "polymux"):
        refused(sharded, str(file))
    assert caplog.text == ""


@pytest.fixture
def pickled(checkpoint: Path) -> Path:
    """The same checkpoint with pickled weights alone: one component whole, one sharded."""
    for part, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "pytorch_model")):
        [file] = (checkpoint / part).glob("*.safetensors")
        tensors = load_file(file)
        file.unlink()
        if part == "unet":
            torch.save(tensors, checkpoint / part / f"{stem}.bin")
            continue
        weight_map = {}
        for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), start=1):
            shard = f"{stem}-{number:05}-of-00002.bin"
            torch.save({name: tensors[name] for name in names}, checkpoint / part / shard)
            weight_map |= dict.fromkeys(names, shard)
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (checkpoint / part / f"{stem}.bin.index.json").write_text(json.dumps(index))
    return checkpoint


def test_pickled_weights(pickled: Path, tiny_checkpoint: Checkpoint) -> None:
    ours, expected = load(pickled), load(tiny_checkpoint("sdxl"))
    for part in ("unet", "text_encoder"):
        wanted = getattr(expected, part).state_dict()
        for name, value in getattr(ours, part).state_dict().items():
            assert torch.equal(value, wanted[name])


def test_a_truncated_pickle(pickled: Path) -> None:
    file = pickled / "unet" / "diffusion_pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-2000])
    refused(pickled, str(file), "truncated")


def test_a_pickled_shard_that_lacks_a_tensor(pickled: Path) -> None:
    file = pickled / "text_encoder" / "pytorch_model-00002-of-00002.bin"
    tensors = torch.load(file, weights_only=True)
    name, _ = tensors.popitem()
    torch.save(tensors, file)
    refused(pickled, str(file), repr(name), "stale index")


class Payload:
    """A pickle that runs code when it is opened carelessly."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.witness,)


def test_a_pickle_runs_no_code(pickled: Path, tmp_path: Path) -> None:
    witness = tmp_path / "it-ran"
    torch.save({"a": Payload(witness)}, pickled / "unet" / "diffusion_pytorch_model.bin")
    refused(pickled, "diffusion_pytorch_model.bin")
    assert not witness.exists()


def test_variants(checkpoint: Path) -> None:
    """A variant is taken where there is one, and must exist somewhere."""
    file = checkpoint / "unet" / SINGLE
    shutil.copy(file, file.with_name("diffusion_pytorch_model.half.safetensors"))
    change(file.with_name("diffusion_pytorch_model.half.safetensors"), lambda t: [v.mul_(2) for v in t.values()])
    plain = load(checkpoint).unet.conv_in.weight
    half = load(checkpoint, diffusers_load_kwargs={"variant": "half"}).unet.conv_in.weight
    assert torch.equal(half, 2 * plain)
    with pytest.raises(CheckpointError, match="no component has weights of the variant 'quarter'"):
        load(checkpoint, diffusers_load_kwargs={"variant": "quarter"})


def test_use_safetensors(pickled: Path) -> None:
    with pytest.raises(CheckpointError, match=r"/(unet|text_encoder): no weights: .* it holds .*\.bin"):
        load(pickled, diffusers_load_kwargs={"use_safetensors": True})


def test_which_file_counts() -> None:
    """If both are there, diffusers reads the shards, transformers the single file."""
    both = {SINGLE, INDEX, "diffusion_pytorch_model.bin"}
    assert choose(both, DIFFUSERS_NAMES, LoadFlags()) == (INDEX, None)
    assert choose(both, DIFFUSERS_NAMES, LoadFlags(use_safetensors=False)) == ("diffusion_pytorch_model.bin", None)
    both = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"}
    assert choose(both, TRANSFORMERS_NAMES, LoadFlags()) == ("model.safetensors", None)
    half = {"model.fp16.safetensors", "model.safetensors.index.fp16.json"}
    assert choose(half, TRANSFORMERS_NAMES, LoadFlags(variant="fp16")) == ("model.fp16.safetensors", "fp16")
    assert choose(half, TRANSFORMERS_NAMES, LoadFlags()) is None


def test_shard_names() -> None:
    assert is_shard_of("model.safetensors.index.json", "model-00001-of-00002.safetensors")
    assert is_shard_of("model.safetensors.index.fp16.json", "model.fp16-00001-of-00002.safetensors")
    assert not is_shard_of("model.safetensors.index.json", "model.fp16-00001-of-00002.safetensors")
    assert not is_shard_of("model.safetensors.index.json", "model-00001-of-00002.bin")
    assert not is_shard_of("model.safetensors", "model-00001-of-00002.safetensors")


def test_weights_say_where_a_tensor_lies(sharded: Path) -> None:
    weights = find_weights(sharded / "unet", DIFFUSERS_NAMES, LoadFlags())
    assert set(weights.files) == set(shards(sharded / "unet"))
    for file in weights.files:
        for name, value in load_file(file).items():
            assert weights.file_of(name) == file
            assert weights.tensors[name].shape == tuple(value.shape)
    assert weights.file_of("no.such.tensor") == sharded / "unet" / INDEX
