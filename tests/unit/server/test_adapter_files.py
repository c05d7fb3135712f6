"""Which files clients may use as adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from polymux.errors import ConfigError, InvalidRequestError
from polymux.request import LoRARequest
from polymux.server import adapter_files
from polymux.server.adapter_files import AdapterFiles
from polymux.server.protocol import AdapterField
from polymux.server_config import AdapterFilesConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    allowed = tmp_path / "loras"
    (allowed / "deep").mkdir(parents=True)
    for path in (allowed / "ink.safetensors", allowed / "deep" / "oil.safetensors", tmp_path / "secret.safetensors"):
        path.write_bytes(b"")
    (allowed / "out.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (allowed / "in.safetensors").symlink_to(allowed / "ink.safetensors")
    for name, leads_to in (("leaky", tmp_path / "secret.safetensors"), ("linked", allowed / "ink.safetensors")):
        (allowed / name).mkdir()
        (allowed / name / "adapter.safetensors").symlink_to(leads_to)
    (tmp_path / "loras-not").mkdir()
    (tmp_path / "loras-not" / "x.safetensors").write_bytes(b"")
    return allowed


def files(*folders: Path) -> AdapterFiles:
    return AdapterFiles(AdapterFilesConfig(allowed_lora_path=tuple(map(str, folders))))


def chosen(folder: Path, path: str) -> str:
    (one,) = files(folder).chosen([AdapterField(path=path, scale=0.5)])
    assert one == LoRARequest(path=one.path, scale=0.5)
    return one.path


@pytest.mark.parametrize(
    "path", ["ink.safetensors", "deep/oil.safetensors", "deep/../ink.safetensors", "deep", "linked"]
)
def test_below_the_folder(folder: Path, path: str) -> None:
    assert chosen(folder, path) == str((folder / path).resolve())
    assert chosen(folder, str(folder / path)) == str((folder / path).resolve())


def test_a_link_that_stays_inside(folder: Path) -> None:
    assert chosen(folder, "in.safetensors") == str(folder / "ink.safetensors")


@pytest.mark.parametrize(
    "path",
    [
        "../secret.safetensors",
        "deep/../../secret.safetensors",
        "out.safetensors",
        "leaky",
        "leaky/adapter.safetensors",
        "{parent}/secret.safetensors",
        "{parent}/loras-not/x.safetensors",
        "../loras-not/x.safetensors",
        "/etc/passwd",
        "missing.safetensors",
        "ink.safetensors\0.png",
        "",
        ".",
        "~/x",
        "file:///etc/passwd",
        "x" * 5000,
    ],
)
def test_everything_else(folder: Path, path: str) -> None:
    with pytest.raises(InvalidRequestError, match="no such file in the folders of --allowed-lora-path") as caught:
        chosen(folder, path.format(parent=folder.parent))
    assert caught.value.param == "lora"
    assert str(folder) not in caught.value.message.partition(": ")[2]


def test_nothing_by_default(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="files are not served here"):
        files().chosen([AdapterField(path=str(folder / "ink.safetensors"))])


def test_a_folder_that_is_none(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        files(folder / "ink.safetensors")


def test_names(folder: Path) -> None:
    adapters = files(folder)
    adapters.name("ink", "ink.safetensors")
    assert adapters.chosen([AdapterField(name="ink")]) == (LoRARequest(path=str(folder / "ink.safetensors")),)
    with pytest.raises(InvalidRequestError, match="is in use"):
        adapters.name("ink", "deep/oil.safetensors")
    with pytest.raises(InvalidRequestError, match="known are ink"):
        adapters.chosen([AdapterField(name="oil")])
    with pytest.raises(InvalidRequestError, match=r"lora_path='\.\.': there is no such file"):
        adapters.name("up", "..")
    adapters.forget("ink")
    with pytest.raises(InvalidRequestError, match="no adapter has this name"):
        adapters.forget("ink")


def test_names_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "MAX_NAMES", 40)
    adapters = files(folder)
    for i in range(40):
        adapters.name(f"{i:02}" + "x" * 200, "ink.safetensors")
    with pytest.raises(InvalidRequestError, match="40 names are in use"):
        adapters.name("one more", "ink.safetensors")
    with pytest.raises(InvalidRequestError, match=r"known are 00x.*19x* and others, 40 in all") as caught:
        adapters.chosen([AdapterField(name="oil")])
    assert len(caught.value.message) < 2000
    adapters.forget("00" + "x" * 200)
    adapters.name("one more", "ink.safetensors")


@pytest.mark.parametrize("field", [AdapterField(), AdapterField(name="a", path="b")])
def test_a_name_or_a_path(folder: Path, field: AdapterField) -> None:
    with pytest.raises(InvalidRequestError, match="give either name or path"):
        files(folder).chosen([field])
