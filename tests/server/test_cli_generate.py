"""`polymux generate`, for real: files, formats, and what is left after an interrupt."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from server_process import BASE, START_S, Server, alive, pixels, until

from polymux.config import stage_environment

ENVIRONMENT = stage_environment()  # the commands run in other folders, and import from the same places
FLAGS = ["--prompt", "a", "--size", "64x64", "--seed", "1"]


def generate(folder: Path, *words: str, model: str = "demo") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polymux.cli", "generate", "--model", model, *FLAGS, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, timeout=START_S)


def test_several_pictures_are_those_of_the_server(server: Server, tmp_path: Path) -> None:
    done = generate(tmp_path, "--steps", "2", "--num-images", "2", "-o", "cat.png")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["cat-0.png", "cat-1.png"]
    assert "seed: 1, 2" in done.stderr
    assert "100%" in done.stderr  # the progress bar has come to its end
    for i, name in enumerate(done.stdout.splitlines()):
        picture = np.asarray(Image.open(tmp_path / name)).astype(int)
        assert np.abs(picture - pixels(server.post(BASE | {"seed": 1 + i}))).max() <= 1


def test_the_extension_decides_the_format(tmp_path: Path) -> None:
    done = generate(tmp_path, "--steps", "2", "-o", "cat.JPG")
    assert (done.returncode, done.stdout) == (0, "cat.JPG\n")
    assert Image.open(tmp_path / "cat.JPG").format == "JPEG"


def test_what_only_the_model_can_refuse_is_code_2(tmp_path: Path) -> None:
    done = generate(tmp_path, "--steps", "1", "--strength", "0.5")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("polymux generate: error: argument --strength: ")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_is_code_1(tmp_path: Path) -> None:
    done = generate(tmp_path, model=str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("polymux generate: error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("level", ["warning", "debug"])
def test_what_fails_inside_the_model_is_one_line(tmp_path: Path, level: str) -> None:
    arguments = '{"latents": [1]}'  # no tensor
    done = generate(tmp_path, "--diffusers-call-kwargs", arguments, "--no-warmup", "--log-level", level)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("polymux generate: error: the model failed: AttributeError")
    assert ("  | " in done.stderr) == (level == "debug")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    words = ["--model", "demo", "--prompt", "a", "--steps", "1000", "--size", "512x512"]
    command = [sys.executable, "-m", "polymux.cli", "generate", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=tmp_path, env=ENVIRONMENT) as process:
        until(lambda: psutil.Process(process.pid).children() or process.poll() is not None, START_S)
        stages = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        until(lambda: not any(map(alive, stages)))
    assert list(tmp_path.iterdir()) == []
