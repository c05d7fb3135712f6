"""One server for all tests that do not end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_process import Server, serving

from polymux.testing.flow_network import random_network, write
from polymux.testing.tiny.inputs import have_torchvision

FLAGS = ("--max-num-seqs", "4", "--max-inference-steps", "200000", "--max-body-bytes", "1000000")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("demo", tmp_path_factory.mktemp("server"), *FLAGS) as running:
        yield running


@pytest.fixture(scope="session")
def speaker(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that speaks."""
    with serving(tiny_checkpoint("vits"), tmp_path_factory.mktemp("speaker"), "--max-num-seqs", "4") as running:
        yield running


@pytest.fixture(scope="session")
def omni_server(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that hears, sees, and answers with text and speech."""
    if not have_torchvision():
        pytest.skip("its processor needs torchvision")
    with serving(tiny_checkpoint("qwen25-omni"), tmp_path_factory.mktemp("omni"), "--max-num-seqs", "4") as running:
        yield running


@pytest.fixture(scope="session")
def video_server(
    tiny_checkpoint: Callable[..., Path],
    tiny_lora: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Server, Path]]:
    """One that makes videos, one at a time and in small chunks; and the folder that it keeps them in."""
    folder = tmp_path_factory.mktemp("videos")
    flags = (
        "--allowed-lora-path",
        str(tiny_lora("wan21-t2v").parent),
        "--frame-interpolation-model-path",
        str(write(folder / "network.safetensors", random_network())),
        "--max-num-seqs",
        "1",
        "--max-queue",
        "3",
        "--max-inference-steps",
        "200000",
        "--output-chunk-bytes",
        "9000",
    )
    with serving(tiny_checkpoint("wan21-t2v"), folder, *flags, "--video-dir", str(folder / "kept")) as running:
        yield running, folder / "kept"
