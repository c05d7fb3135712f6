"""The identity follows what determines the bytes, and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polymux.errors import CheckpointError
from polymux.memory.runtime_cache.identity import SAMPLE_BYTES, WHOLE_BELOW, Adapter, Identity, source_files

BIG = WHOLE_BELOW + 12345


def make(folder: Path, **other: Any) -> Identity:
    known: dict[str, Any] = dict(
        model_class="diffusers.Model",
        sources=source_files(folder, folder.iterdir()),
        libraries=(("diffusers", "0.42"),),
        blocks=("blocks.0", "blocks.1"),
        dtype="bfloat16",
    )
    return Identity(**known | other)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "transformer"
    path.mkdir()
    (path / "config.json").write_text('{"layers": 2}')
    (path / "small.safetensors").write_bytes(bytes(1000))
    (path / "big.safetensors").write_bytes(bytes(range(256)) * (BIG // 256))
    return path


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))


def test_the_same_files_give_the_same_identity(folder: Path) -> None:
    assert make(folder) == make(folder)
    assert make(folder).digest == make(folder).digest


def test_it_survives_its_wire_form(folder: Path) -> None:
    identity = make(folder, adapters=(Adapter(make(folder).sources, 0.5),))
    again = msgspec.json.decode(msgspec.json.encode(identity), type=Identity)
    assert (again, again.digest) == (identity, identity.digest)


@pytest.mark.parametrize("at", [0, 999])
@pytest.mark.parametrize("name", ["small.safetensors", "config.json"])
def test_a_changed_byte_of_a_small_file_is_another_identity(folder: Path, name: str, at: int) -> None:
    before, file = make(folder).digest, folder / name
    times = file.stat()
    flip(file, min(at, times.st_size - 1))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert make(folder).digest != before


def test_small_files_may_be_written_again(folder: Path) -> None:
    before = make(folder).digest
    os.utime(folder / "config.json", ns=(1, 1))
    assert make(folder).digest == before


def test_a_changed_byte_of_a_big_file_is_another_identity_though_it_is_not_sampled(folder: Path) -> None:
    """Size, name and modification time are as before; the byte lies between two samples."""
    before, file = make(folder), folder / "big.safetensors"
    times = file.stat()
    flip(file, SAMPLE_BYTES + 1000)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = make(folder)
    assert after.digest != before.digest
    assert [f.content for f in after.sources] == [f.content for f in before.sources]
    assert file.stat().st_mtime_ns == times.st_mtime_ns


def test_a_big_file_replaced_by_one_with_its_times_is_another_identity(folder: Path, tmp_path: Path) -> None:
    before, file, other = make(folder).digest, folder / "big.safetensors", tmp_path / "other"
    shutil.copyfile(file, other)
    flip(other, SAMPLE_BYTES + 1000)
    shutil.copystat(file, other)
    other.rename(file)
    assert make(folder).digest != before


def test_samples_alone_tell_other_weights_apart(folder: Path) -> None:
    before = make(folder).sources
    (folder / "big.safetensors").write_bytes(bytes(range(255, -1, -1)) * (BIG // 256))
    assert [f.content for f in make(folder).sources] != [f.content for f in before]


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float32"},
        {"tensor_parallel": (2, 0)},
        {"tensor_parallel": (2, 1)},
        {"quantization": "fp8"},
        {"model_class": "diffusers.Other"},
        {"libraries": (("diffusers", "0.43"),)},
        {"blocks": ("blocks.0",)},
        {"made_up": "seed 0 on cpu"},
        {"format_version": 2},
    ],
)
def test_whatever_changes_the_bytes_changes_the_identity(folder: Path, other: dict[str, Any]) -> None:
    assert make(folder, **other).digest != make(folder).digest


def test_fused_adapters_their_scale_and_their_order_change_the_identity(folder: Path, tmp_path: Path) -> None:
    def adapter(content: bytes, scale: float) -> Adapter:
        (tmp_path / "lora").write_bytes(content)
        return Adapter(source_files(tmp_path, [tmp_path / "lora"]), scale)

    one, stronger, other = adapter(b"one", 1.0), adapter(b"one", 1.5), adapter(b"two", 1.0)
    kinds = [(), (one,), (stronger,), (other,), (one, other), (other, one)]
    assert len({make(folder, adapters=adapters).digest for adapters in kinds}) == len(kinds)


def test_the_folder_is_not_part_of_it(folder: Path, tmp_path: Path) -> None:
    before = make(folder).digest
    (tmp_path / "link").symlink_to(folder)
    assert make(tmp_path / "link").digest == before


def test_a_missing_file_is_a_checkpoint_error(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        source_files(folder, [folder / "gone.safetensors"])
