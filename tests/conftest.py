"""Fixtures that all tests share: tiny checkpoints, made once per run however many workers there are."""

from __future__ import annotations

import os

# Before anything imports huggingface_hub or torch. Servers and stages that tests start inherit both.
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import gc
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


def pytest_configure() -> None:
    """Ctrl-C is tested, and a run in a shell's background starts with SIGINT ignored, its children too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What the tests have imported stays: the search for garbage that runs beside them need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder of this test run, the same one in all workers."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def tiny_checkpoint(run_dir: Path) -> Callable[..., Path]:
    """`tiny_checkpoint("flux-dev", dtype=torch.bfloat16)`: the folder of a tiny checkpoint, see `polymux.testing.tiny`.

    It is made when first asked for, and shared: copy it before changing anything in it.
    """

    def get(name: str, **ctx: Any) -> Path:
        from polymux.testing.tiny import TINY, Ctx, make
        from polymux.testing.tiny.inputs import have_torchvision

        if TINY[name].needs_torchvision and not have_torchvision():
            pytest.skip(f"{name} needs torchvision")
        wanted = Ctx(**ctx)
        variant = f"{wanted.dtype}-seed{wanted.seed}-shard{wanted.shard}-published{wanted.published}"
        folder = run_dir / "tiny" / variant
        folder.mkdir(parents=True, exist_ok=True)
        done = folder / f"{name}.done"
        with FileLock(folder / f"{name}.lock"):
            if not done.exists():
                make(name, folder, wanted)
                done.touch()
        return folder / name

    return get


@pytest.fixture(scope="session")
def tiny_lora(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """`tiny_lora("flux-dev")`: a LoRA file for that tiny checkpoint, in diffusers' layout. Shared, as that is."""

    def get(name: str) -> Path:
        from polymux.testing.tiny import make_lora

        checkpoint = tiny_checkpoint(name)
        file = checkpoint.parent / f"{name}-lora" / "pytorch_lora_weights.safetensors"
        with FileLock(checkpoint.parent / f"{name}-lora.lock"):
            if not file.exists():
                make_lora(name, checkpoint.parent)
        return file

    return get
