"""`polymux speak` refuses what cannot be before anything is loaded."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from polymux.cli.main import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["hi", "--model", "x", "-o", "a.png"], "argument --output: 'a.png'"),
        (["hi", "--model", "x", "-o", "none/a.wav"], "no folder"),
        (["hi"], "no model is given"),
        (["  ", "--model", "x"], "nothing to say"),
        (["hi", "--model", "demo"], "argument --model: demo does not speak"),
        (["hi", "--model", "x", "--dtype", "int3"], "--dtype"),
    ],
)
def test_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["speak", *words])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2 and says in capsys.readouterr().err.splitlines()[-1]


def test_an_unknown_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["speak", "hi", "--model", "x", "--steps", "3"])
    assert "--steps" in capsys.readouterr().err


def test_nothing_on_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["speak", "-", "--model", "x"]) == 2
    assert "nothing to say" in capsys.readouterr().err
