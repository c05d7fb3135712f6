"""POST /v1/audio/speech/batch, for real: each item is what /v1/audio/speech makes of it, and fails alone."""

from __future__ import annotations

import base64
import contextlib
from typing import Any

import httpx
import pytest
from server_process import MODEL, Server, error_of, until

URL, SINGLE = "/v1/audio/speech/batch", "/v1/audio/speech"
SHARED: dict[str, Any] = {"model": MODEL, "response_format": "wav", "seed": 1, "voice": "1"}


def batch(server: Server, *items: dict[str, Any], **fields: Any) -> httpx.Response:
    return server.http.post(URL, json=SHARED | {"items": list(items)} | fields)


def test_items_are_what_they_are_alone(speaker: Server) -> None:
    items: list[dict[str, Any]] = [
        {"input": "Hello there. Second sentence."},
        {"input": "And now.", "voice": None, "speaker": "0", "seed": 7},
        {"input": "Quick.", "speed": 2, "response_format": "mp3"},
        {"input": "Hello there. Second sentence.", "response_format": "pcm", "model": None},
    ]
    answer = batch(speaker, *items)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["total"], body["succeeded"], body["failed"]) == (4, 4, 0) and body["id"].startswith("speech-batch-")
    for i, (item, result) in enumerate(zip(items, body["results"], strict=True)):
        alone = speaker.http.post(SINGLE, json=SHARED | {"voice": "1"} | _plain(item))
        assert (result["index"], result["status"], result["error"]) == (i, "success", None)
        assert base64.b64decode(result["audio_data"]) == alone.content and result["seed"] == int(
            alone.headers["x-seed"]
        )
        assert result["media_type"] == alone.headers["content-type"] and result["usage"]["input_tokens"] > 0


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in item.items() if value is not None}
    return given | ({"voice": given.pop("speaker")} if "speaker" in given else {})


def test_a_wrong_item_fails_alone(speaker: Server) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": ""}, "input"), ({}, "input"), ({"input": "你好"}, "input"), ({"input": "hi", "voice": "x"}, "voice"),
        ({"input": "hi", "speed": 99}, "speed"), ({"input": "hi", "response_format": "xyz"}, "response_format"),
        ({"input": "hi", "tone": 1}, "tone"), ({"input": 5}, "input"), ({"input": "hi", "stream": True}, "stream"),
        ({"input": "hi", "ref_audio": "data:,", "ref_text": "x"}, "ref_audio"),
        ({"input": "hi", "model": "y"}, "model"),
    ]  # fmt: skip
    before = speaker.outcomes()
    answer = batch(speaker, {"input": "Good."}, *(item for item, _ in wrong), {"input": "Good."})
    assert answer.status_code == 200
    first, *failed, last = answer.json()["results"]
    assert first["status"] == last["status"] == "success" and first["audio_data"] == last["audio_data"]
    assert [result["error"]["param"] for result in failed] == [param for _, param in wrong]
    assert all(result["status"] == "error" and result["audio_data"] is None for result in failed)
    after = speaker.outcomes()
    assert after["completed"] == before["completed"] + 2 and after["refused"] == before["refused"] + len(wrong)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": []}, "items"), ({"items": [{"input": "a"}] * 33}, "items"), ({"items": "a"}, "items"),
        ({"items": ["a"]}, "items.0"), ({"input": "a"}, "input"), ({"stream": True}, "stream"),
        ({"speed": "x"}, "speed"),
    ],
)  # fmt: skip
def test_a_wrong_batch_is_refused(speaker: Server, fields: dict[str, Any], param: str) -> None:
    answer = batch(speaker, {"input": "a"}, **fields)
    assert answer.status_code == 400 and error_of(answer)["param"] == param, answer.text


def test_a_wrong_session_is_refused(speaker: Server) -> None:
    body = {"items": [{"input": "good day."}] * 2}
    answer = speaker.http.post("/v1/audio/speech/batch", json=body, headers={"x-session-id": "no session!"})
    assert answer.status_code == 400 and error_of(answer)["param"] == "x-session-id"


def test_other_refusals(speaker: Server) -> None:
    assert batch(speaker, {"input": "a"}, model="other").status_code == 404
    late = speaker.http.post(
        URL, json=SHARED | {"items": [{"input": "word. " * 4000}]}, headers={"x-request-timeout": "0.3"}
    )
    assert late.status_code == 504


def test_leaving_cancels_all(speaker: Server) -> None:
    before = speaker.outcomes()["aborted"]
    items = [{"input": "one word more. " * 2000}] * 6
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(speaker.url + URL, json=SHARED | {"items": items}, timeout=1)
    until(lambda: speaker.running() == speaker.waiting() == 0)
    assert speaker.outcomes()["aborted"] == before + 6
