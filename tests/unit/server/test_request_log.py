"""What the log says about a request: never media, prompts only if asked, one line whatever comes."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import pytest
from fake_omni import FakeOmni, client

from polymux.errors import GenerationError
from polymux.logs import FIELDS, JsonFormatter, TextFormatter
from polymux.server import shortened

URL = "/v1/images/generations"


def lines_of(
    caplog: pytest.LogCaptureFixture,
    formatter: logging.Formatter,
    body: Any,
    omni: FakeOmni | None = None,
    **server: Any,
) -> list[str]:
    caplog.set_level(logging.INFO)

    async def send() -> None:
        async with client(omni or FakeOmni(), **server) as http:
            await http.post(URL, json=body, headers={"x-request-id": "id-1"})

    asyncio.run(send())
    return [formatter.format(r) for r in caplog.records if r.name == "polymux.server"]


def test_prompts_only_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "a SECRET", "seed": 3}
    (line,) = lines_of(caplog, TextFormatter(), body)
    assert "SECRET" not in line
    caplog.clear()
    (line,) = lines_of(caplog, TextFormatter(), body, log_requests=True)
    assert json.loads(line.partition(" request=")[2]) == {"prompt": "a SECRET", "seed": 3}


def test_as_json(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_of(caplog, JsonFormatter(), {"prompt": "a\nb", "user": "u 1"}, log_requests=True)
    parsed = json.loads(line)
    assert set(parsed) == {
        "time", "level", "logger", "message", "request_id", "method", "path", "status", "seconds", "user", "request",
    }  # fmt: skip
    assert (parsed["request_id"], parsed["path"], parsed["status"]) == ("id-1", URL, 200)
    assert json.loads(parsed["request"])["prompt"] == "a\nb"


def test_a_stream_that_fails_late_is_told_from_one_that_does_not(caplog: pytest.LogCaptureFixture) -> None:
    omni = FakeOmni()
    omni.fails_with = GenerationError("the model failed")
    body = {"prompt": "a", "stream": True}
    (line,) = lines_of(caplog, TextFormatter(), body, omni)
    assert re.search(r" 200 [0-9.]+s ended=generation_failed$", line)
    caplog.clear()
    (line,) = lines_of(caplog, TextFormatter(), body)
    assert "ended" not in line


def test_a_request_stays_one_line_and_short(caplog: pytest.LogCaptureFixture) -> None:
    nested: Any = {"a": {"b": {"c": {"d": {"e": "f"}}}}}
    body = {
        "prompt": "x\n2026 INFO forged \x1b[2K\u2028" + "word " * 5000,
        "negative_prompt": "QUJD" * 5000,
        "extra_args": {"eta": nested, "x": [1] * 5000, "data": "data:image/png;base64,iVBORw0KGgo"},
    }
    (line,) = lines_of(caplog, TextFormatter(), body, log_requests=True)
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < shortened.MAX_LINE + 200
    for media in ("QUJD", "iVBOR", '"f"'):
        assert media not in line
    assert "... (25" in line  # characters


PICTURE = "data:image/png;base64," + "iVBORw0KGgo" * 50


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("/v1/images/edits", {"data": {"prompt": "a cat"}, "files": {"image": ("a.png", b"iVBORw0KGgo")}}),
        ("/v1/images/edits", {"json": {"prompt": "a cat", "image": PICTURE}}),
        ("/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a cat"}, {"type": "image_url", "image_url": {"url": PICTURE}}]}]}}),
    ],
)  # fmt: skip
def test_every_route_logs_what_it_is_asked_and_none_logs_pictures(
    url: str, sent: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def send() -> None:
        async with client(FakeOmni(), log_requests=True) as http:
            await http.post(url, **sent)

    asyncio.run(send())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "polymux.server"]
    assert "a cat" in line
    assert "iVBOR" not in line


@pytest.mark.parametrize(
    "text",
    [
        PICTURE,
        PICTURE.replace("data:", "DATA:"),
        PICTURE[:60],
        PICTURE.replace("iVBORw0KGgo", "iVBORw0KGgo "),
        " " + PICTURE,
        "like this: " + PICTURE,
        "like this: " + PICTURE[:60],
        PICTURE.partition(",")[2],
        "like this: " + PICTURE.partition(",")[2],
        "\n".join(["iVBORw0KGgo" * 7] * 9),
    ],
)
def test_pictures_are_not_logged_wherever_they_stand(text: str) -> None:
    assert "iVBOR" not in shortened._short_text(text)


def test_what_is_no_picture_is_logged() -> None:
    for text in ("data: a chart, in blue", "a" * 69, "wide/tall-shot_2 " * 10):
        assert shortened._short_text(text) == text


def test_a_long_prompt_without_spaces_is_still_a_prompt() -> None:
    assert shortened._short_text("雪" * 1000).startswith("雪" * shortened.MAX_TEXT)


def test_what_is_logged_is_bounded_whatever_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "a", "extra_args": {f"name-{i}" + "z" * 300: "w " * 300 for i in range(500)}}
    (line,) = lines_of(caplog, JsonFormatter(), body, log_requests=True)
    assert len(line) < 2 * (shortened.MAX_LINE + 600)
    assert FIELDS not in line
