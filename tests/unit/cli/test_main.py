"""What the command says and how it exits, without a model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from polymux.cli import generate, serve
from polymux.cli.main import main
from polymux.errors import CheckpointError, GenerationError, PolymuxError, StageDeadError
from polymux.families import all_families
from polymux.version import VERSION

GENERATE = ["generate", "--model", "demo", "--prompt", "a"]


def run(*words: str) -> int:
    try:
        return main(words)
    except SystemExit as exit:
        assert isinstance(exit.code, int)
        return exit.code


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a command line that is wrong."""
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(("polymux: error: ", f"polymux {words[0]}: error: "))
    return line


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"polymux {VERSION}\n"


def test_no_command_shows_the_commands() -> None:
    assert run() == 2


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["generate", "--help"], ["models", "--help"]])
def test_help(words: list[str]) -> None:
    assert run(*words) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["serve"], "no model"),
        (["serve", "m", "--max-num-seq", "3"], "did you mean --max-num-seqs?"),
        (["serve", "m", "--max-num-seq=3"], "did you mean --max-num-seqs?"),
        (["serve", "m", "extra"], "extra"),
        (["serve", "m", "--port"], "--port"),
        (["serve", "m", "--port", "abc"], "--port"),
        (["serve", "m", "--port", "70000"], "argument --port: port=70000: must be at most 65535"),
        (["serve", "m", "--max-num-seqs", "0"], "argument --max-num-seqs"),
        (["serve", "m", "--shutdown-grace", "nan"], "argument --shutdown-grace"),
        (["serve", "m", "--dtype", "fp8"], "bf16"),
        (["serve", "m", "--no-restart-stages"], "--no-restart-stages"),
        (["serve", "a", "--model", "b"], "two models"),
        (["models", "--nonsense"], "--nonsense"),
        (["generate", "--prompt", "a"], "no model"),
        (["generate", "--model", "demo"], "--prompt"),
        ([*GENERATE, "--port", "1"], "--port"),
        ([*GENERATE, "-o", "x.gif"], "demo makes pictures: the file must end in one of .png"),
        ([*GENERATE, "-o", "x.bmp"], "must end in one of .png"),
        ([*GENERATE, "-o", "x"], ".webp"),
        ([*GENERATE, "-o", "/no/such/folder/x.png"], "/no/such/folder"),
        ([*GENERATE, "--size", "64"], "WIDTHxHEIGHT"),
        ([*GENERATE, "--size", "0x64"], "WIDTHxHEIGHT"),
        ([*GENERATE, "--size", "٦٤x64"], "WIDTHxHEIGHT"),
        ([*GENERATE, "--size", "99999x99999"], "--max-generated-image-size"),
        ([*GENERATE, "--steps", "0"], "argument --steps"),
        ([*GENERATE, "--steps", "1001"], "--max-inference-steps"),
        ([*GENERATE, "--num-images", "0"], "argument --num-images"),
        ([*GENERATE, "--seed", "-1"], "argument --seed"),
        ([*GENERATE, "--seed", str(2**64)], "argument --seed"),
        ([*GENERATE, "--seed", "1.5"], "argument --seed"),
        ([*GENERATE, "--guidance-scale", "nan"], "argument --guidance-scale"),
        ([*GENERATE, "--strength", "2"], "argument --strength"),
        ([*GENERATE, "--sigmas", "1,x"], "argument --sigmas"),
        ([*GENERATE, "--sigmas", "1,0.5", "--steps", "3"], "sigmas has 2 entries"),
        ([*GENERATE, "--extra-args", "[]"], "argument --extra-args"),
        ([*GENERATE, "--extra-args", '{"seed": 1}'], "use the field seed"),
        ([*GENERATE, "--image", "/no/such/picture.png"], "/no/such/picture.png"),
        ([*GENERATE, "--image", __file__], "not a whole picture"),
        ([*GENERATE, "--video", __file__], "argument --video"),
        ([*GENERATE, "--audio", __file__], "argument --audio"),
        ([*GENERATE, "--mask", __file__], "argument --mask"),
        ([*GENERATE, "--last-image", __file__], "argument --last-image"),
        ([*GENERATE, "--media", "cat.png"], "NAME=FILE"),
        ([*GENERATE, "--media", f"image={__file__}"], "argument --media"),
        ([*GENERATE, "--num-frames", "0"], "argument --num-frames"),
        ([*GENERATE, "--fps", "0"], "argument --fps"),
        ([*GENERATE, "--seconds", "0"], "argument --seconds"),
        ([*GENERATE, "--seconds", "1", "--num-frames", "9"], "argument --seconds: it says the same as --num-frames"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_a_wrong_command_line_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refused(capsys, *words)


@pytest.mark.parametrize(
    ("error", "code"),
    [(CheckpointError("x.safetensors: no tensor 'a'"), 1), (StageDeadError("gone"), 1), (GenerationError("a\nb"), 1)],
)
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_what_fails_later_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, error: PolymuxError, code: int
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(serve, "run", fail)
    monkeypatch.setattr(generate, "run", fail)
    assert run(command, *(["m"] if command == "serve" else GENERATE[1:])) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert " ".join(error.message.split()) in line


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run", interrupted)
    assert run(*GENERATE) == 130


def test_models_lists_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models") == 0
    lines = capsys.readouterr().out.splitlines()
    first = [line.split()[0] for line in lines if line]
    assert {family.name for family in all_families()} <= set(first)
    for family in all_families():
        row = next(line for line in lines if line.split()[:1] == [family.name])
        assert family.modality in row.split()
        assert all(task in row for task in family.tasks)
        assert family.unmerged_because is None or family.unmerged_because in row


def test_models_can_list_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "--pipelines") == 0
    words = capsys.readouterr().out.split()
    assert {name for family in all_families() for name in family.pipelines} <= set(words)


def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "polymux.cli", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"polymux {VERSION}\n")
