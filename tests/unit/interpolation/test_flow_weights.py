"""Weights of the network between frames: complete, or refused with what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from polymux.errors import CheckpointError
from polymux.interpolation.network import Layout
from polymux.interpolation.weights import load_network
from polymux.testing.flow_network import random_network, write

CPU = torch.device("cpu")
LAYOUT = Layout(encoder=6, features=3, widths=(12, 8, 6))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "network.safetensors", random_network(LAYOUT))


def load(name: object) -> object:
    return load_network(str(name), None, CPU)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_sizes_come_from_the_weights(tmp_path: Path, prefix: str) -> None:
    before = random_network(LAYOUT)
    network = load_network(str(write(tmp_path / "a.safetensors", before, prefix)), None, CPU)
    assert network.layout == LAYOUT and not network.training
    first, second = torch.rand(2, 1, 3, 16, 16)
    assert torch.allclose(network(first, second, 0.5), before(first, second, 0.5), atol=1e-5)


def test_half_precision_becomes_single(file: Path) -> None:
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    assert {p.dtype for p in load_network(str(file), None, CPU).parameters()} == {torch.float32}


def test_a_folder_with_one_file_will_do(file: Path) -> None:
    (file.parent / "README.md").write_text("weights")
    load(file.parent)
    write(file.with_name("other.safetensors"), random_network())
    with pytest.raises(CheckpointError, match=r"2 \.safetensors files \(network.safetensors, other.safetensors\)"):
        load(file.parent)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda w: w.pop("block1.convblock.3.beta"), "1 tensors are missing: block1.convblock.3.beta"),
        (lambda w: w.pop("block1.conv0.1.0.weight"), "these are not the weights of such a network"),
        (lambda w: w.pop("encode.cnn0.weight"), "these are not the weights of such a network"),
        (lambda w: w.update({"teacher.beta": torch.ones(1)}), "1 tensors are unknown: teacher.beta"),
        (lambda w: w.update({"encode.cnn1.bias": torch.ones(5)}), "1 tensors are of another shape: encode.cnn1.bias"),
        (lambda w: w["encode.cnn1.bias"].fill_(torch.nan), "1 tensors are not finite: encode.cnn1.bias"),
        (lambda w: w.clear(), "these are not the weights of such a network"),
    ],
)
def test_other_weights_are_refused(file: Path, change: object, what: str) -> None:
    weights = load_file(file)
    change(weights)  # type: ignore[operator]
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=what):
        load(file)


def test_what_is_no_such_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pickled, broken = tmp_path / "flownet.pkl", tmp_path / "broken.safetensors"
    pickled.write_bytes(b"x"), broken.write_bytes(b"x")
    for name, what in [
        (pickled, "one .safetensors file is needed, and there is none"),
        (tmp_path / "nowhere", "no such file or folder, and not a hub id"),
        (broken, "broken.safetensors"),
        ("nobody/nothing-here", "not in the hub's cache"),
    ]:
        with pytest.raises(CheckpointError, match=what):
            load(name)
