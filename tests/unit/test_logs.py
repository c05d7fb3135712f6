"""Log lines: text that cannot look like two lines, JSON that is one object each."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from polymux.config import LogConfig
from polymux.logs import FIELDS, JsonFormatter, Stderr, TextFormatter, configure


def record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error is not None else None
    return logging.LogRecord("polymux.x", logging.WARNING, "f.py", 1, message, args, info)


EVIL = ["a\nb", "a\rb", "a\r\nb", "a\x0bb", "a\x0cb", "a\x85b", "a\u2028b", "a\x1b[2Kb", "a\x00b", "a\x9bb", "a\bb"]


@pytest.mark.parametrize("text", EVIL)
def test_text_cannot_look_like_two_lines_or_move_the_cursor(text: str) -> None:
    lines = TextFormatter().format(record("%s", text)).split("\n")
    assert all(line.isprintable() for line in lines)
    assert all(line.startswith("  | ") for line in lines[1:])


@pytest.mark.parametrize("text", EVIL)
def test_json_is_one_line_and_loses_nothing(text: str) -> None:
    line = JsonFormatter().format(record("%s", text))
    assert line.isprintable()
    assert json.loads(line)["message"] == text


def test_a_traceback_belongs_to_its_record() -> None:
    error = ValueError("x\n2026-01-01 00:00:00,000 INFO forged")
    lines = TextFormatter().format(record("it failed", error=error)).split("\n")
    assert "WARNING it failed" in lines[0]
    assert lines[1:]
    assert all(line.startswith("  | ") for line in lines[1:])
    assert "forged" in json.loads(JsonFormatter().format(record("it failed", error=error)))["traceback"]


def test_json_has_the_fields_of_the_record() -> None:
    one = record("a message")
    one.__dict__[FIELDS] = {"status": 200}
    line = json.loads(JsonFormatter().format(one))
    assert set(line) == {"time", "level", "logger", "message", "status"}
    assert (line["level"], line["logger"], line["message"], line["status"]) == (
        "warning",
        "polymux.x",
        "a message",
        200,
    )


def test_text_of_other_languages_stays_readable() -> None:
    assert "Ein Café, 東京" in TextFormatter().format(record("Ein Café, 東京"))


def test_configuring_twice_logs_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root, ours = logging.getLogger(), logging.getLogger("polymux")
    monkeypatch.setattr(root, "handlers", [])
    configure(LogConfig())
    (handler,) = [h for h in root.handlers if isinstance(h, Stderr)]
    handler.setStream(sys.stderr)
    configure(LogConfig(log_format="json", log_level="warning"))
    ours.info("not this")
    ours.warning("this")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "this"
