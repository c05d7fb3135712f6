"""Reading weight files ahead: the flag and the number of threads are honoured, and nothing else changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from polymux.config import ModelConfig
from polymux.errors import CheckpointError
from polymux.loading import load_pipeline
from polymux.loading.readahead import PIECE, THREAD_NAME, ReadAhead, pieces_of

Checkpoint = Callable[..., Path]


class Openings:
    """Which threads were started, as a profile function that every new thread calls tells, and who opened which file,
    as the interpreter's audit events tell."""

    def __init__(self) -> None:
        self.listening = False
        self.files: list[tuple[str, str]] = []
        self.threads: list[str] = []

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.listening and event == "open":
            self.files.append((threading.current_thread().name, str(args[0])))

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        self.threads.append(threading.current_thread().name)
        sys.setprofile(None)  # once per thread is enough

    def readers(self) -> list[str]:
        return [name for name in self.threads if name.startswith(THREAD_NAME)]

    def read_ahead(self) -> list[str]:
        return [path for name, path in self.files if name.startswith(THREAD_NAME)]


OPENINGS = Openings()
sys.addaudithook(OPENINGS.hear)  # there is no removing it: it listens only when told to


@pytest.fixture
def openings() -> Iterator[Openings]:
    OPENINGS.files.clear()
    OPENINGS.threads.clear()
    OPENINGS.listening = True
    threading.setprofile(OPENINGS.profile)
    yield OPENINGS
    threading.setprofile(None)  # type: ignore[arg-type]
    OPENINGS.listening = False


def load(folder: Path, **settings: Any) -> Any:
    return load_pipeline(ModelConfig(model=str(folder), **settings), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("threads", [1, 3])
def test_that_many_threads_read_every_weight_file(
    tiny_checkpoint: Checkpoint, openings: Openings, threads: int
) -> None:
    folder = tiny_checkpoint("sdxl", shard="200KB")
    load(folder, num_weight_load_threads=threads)
    assert sorted(openings.readers()) == [f"{THREAD_NAME}-{number}" for number in range(threads)]
    assert set(openings.read_ahead()) == {str(file) for file in folder.rglob("*.safetensors")}


def test_no_thread_when_disabled(tiny_checkpoint: Checkpoint, openings: Openings) -> None:
    load(tiny_checkpoint("sdxl"), enable_multithread_weight_load=False, num_weight_load_threads=3)
    assert openings.readers() == [] and openings.read_ahead() == []
    assert any(path.endswith(".safetensors") for _, path in openings.files)


def test_no_thread_for_random_weights(tiny_checkpoint: Checkpoint, openings: Openings) -> None:
    load(tiny_checkpoint("sdxl"), load_format="dummy")
    assert openings.readers() == []


def test_the_weights_are_the_same(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint("sdxl", shard="200KB")
    plain = load(folder, enable_multithread_weight_load=False).unet.state_dict()
    ahead = load(folder).unet.state_dict()
    assert plain.keys() == ahead.keys()
    assert all(torch.equal(value, ahead[name]) for name, value in plain.items())


def test_no_thread_outlives_loading(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    load(tiny_checkpoint("sdxl"))
    with pytest.raises(CheckpointError):
        load(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_pieces_cover_a_file(tmp_path: Path, size: int) -> None:
    file = tmp_path / "a"
    with file.open("wb") as stream:
        stream.truncate(size)
    pieces = pieces_of(file)
    covered = [byte for piece in pieces for byte in (piece.offset, min(piece.offset + PIECE, size))]
    assert covered[:1] + covered[-1:] == ([0, size] if size else [])
    assert covered[1:-1:2] == covered[2::2]  # each begins where the one before ends


def bytes_read() -> int:
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not say")
def test_all_bytes_are_read(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as stream:
        stream.truncate(7 * PIECE + 1)
    before = bytes_read()
    with ReadAhead(2) as ahead:
        ahead.queue([file, file])
    assert bytes_read() - before >= 2 * file.stat().st_size


def test_an_error_drops_what_is_not_read_yet(tmp_path: Path, openings: Openings) -> None:
    files = [tmp_path / str(number) for number in range(2000)]
    for file in files:
        file.write_bytes(b"x")
    with pytest.raises(CheckpointError, match="stop"), ReadAhead(1) as ahead:
        ahead.queue(files)
        raise CheckpointError("stop")
    assert len(openings.read_ahead()) < 2000


def test_a_file_that_vanishes_is_left_to_the_loader(tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    file.write_bytes(b"x")
    other.write_bytes(b"x")
    with ReadAhead(1) as ahead:
        ahead.queue([file])
        file.unlink()
        ahead.queue([other])
