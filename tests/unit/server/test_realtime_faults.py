"""WS /v1/realtime: the order of items, and what is wrong, refused, or given up. No model."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from talker import CREATE, HELLO, NO_TURNS, RATE, TURNS, Talker, heard, run, said, sound, talking
from websockets.exceptions import ConnectionClosed, InvalidStatus


def test_items_have_an_order_and_may_go() -> None:
    async def work() -> None:
        omni = Talker()
        async with talking(omni) as client:

            def item(name: str, text: str, role: str = "user", kind: str = "input_text", **more: Any) -> dict[str, Any]:
                made = {"type": "message", "id": name, "role": role, "content": [{"type": kind, "text": text}]}
                return {"type": "conversation.item.create", "item": made} | more

            for event in (item("a", "one"), item("b", "two", "assistant", "output_text"), item("c", "three"),
                          item("d", "zero", "system", previous_item_id="root"),
                          item("e", "extra", previous_item_id="a")):  # fmt: skip
                await client.send(event)
                added, _ = await client.until("conversation.item.done")
                assert (
                    added["previous_item_id"]
                    == {"a": None, "b": "a", "c": "b", "d": None, "e": "a"}[added["item"]["id"]]
                )
            assert (await client.error(item("a", "again")))["param"] == "item.id"
            assert (await client.error(item("f", "x", previous_item_id="g")))["param"] == "previous_item_id"
            assert (await client.error(item("f", "x" * 40_000)))["param"] == "item"
            assert (await client.error({"type": "conversation.item.delete", "item_id": "f"}))["param"] == "item_id"
            await client.send({"type": "conversation.item.delete", "item_id": "e"})
            assert (await client.next())["type"] == "conversation.item.deleted"
            await client.send(CREATE)
            await client.until("response.done")
            audio = {"type": "input_audio", "audio": sound(300)["audio"]}
            await client.send({"type": "conversation.item.create", "item": HELLO | {"content": [audio]}}, CREATE)
            await client.until("response.done")
            assert (await client.error(CREATE | {"event_id": "x"}))["event_id"] == "x"  # the answer is the last item
        expected = [("system", ["zero"]), ("user", ["one"]), ("assistant", ["two"]), ("user", ["three"])]
        assert said(omni, 0) == expected and heard(omni) == [(300, RATE)]

    run(work())


def of_session(**fields: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": fields, "event_id": "mine"}


def of_item(**fields: Any) -> dict[str, Any]:
    return {"type": "conversation.item.create", "item": HELLO | fields, "event_id": "mine"}


WRONG: list[tuple[Any, str | None]] = [
    ("{", None), ("[]", "type"), ('{"type": 1}', "type"), ({"type": "session.close"}, "type"),
    ({"type": "conversation.item.truncate", "item_id": "a"}, "type"),
    (of_session(voice="ben"), "session.voice"), (of_session(modalities=["text"]), "session.modalities"),
    (of_session(output_modalities=["text", "audio"]), "session.output_modalities"),
    (of_session(type="transcription"), "session.type"), (of_session(model="other"), "model"),
    (of_session(max_output_tokens=0), "session.max_output_tokens"),
    (of_session(max_output_tokens="all"), "session.max_output_tokens"),
    (of_session(temperature=-1), "session.temperature"), (of_session(seed=-1), "session.seed"),
    (of_session(extra_args={"x": 1}), "session.extra_args.x"),
    (of_session(instructions="a" * 40_000), "session.instructions"),
    (of_session(tools=[{"type": "function"}]), "session.tools"),
    (of_session(audio={"output": {"voice": "eve"}}), "session.audio.output.voice"),
    (of_session(audio={"output": {"speed": 2}}), "session.audio.output.speed"),
    (of_session(audio={"input": {"format": {"type": "audio/pcmu"}}}), "session.audio.input.format.type"),
    (of_session(audio={"input": {"format": {"type": "audio/pcm", "rate": 8000}}}),
     "session.audio.input.format.rate"),
    (of_session(audio={"input": {"turn_detection": {"type": "semantic_vad"}}}),
     "session.audio.input.turn_detection.type"),
    (of_session(audio={"input": {"turn_detection": {"type": "server_vad", "threshold": 2}}}),
     "session.audio.input.turn_detection.threshold"),
    ({"type": "input_audio_buffer.append", "audio": "AAA"}, "audio"),
    ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "audio"),
    ({"type": "input_audio_buffer.append", "audio": base64.b64encode(bytes(4000)).decode()}, "audio"),
    ({"type": "input_audio_buffer.append"}, "audio"), ({"type": "input_audio_buffer.clear", "x": 1}, "x"),
    (of_item(role="tool"), "item"), (of_item(content=[]), "item.content"),
    (of_item(type="function_call"), "item.type"),
    (of_item(content=[{"type": "input_image", "image_url": "a"}]), "item.content.0"),
    (of_item(content=[{"type": "input_text"}]), "item.content.0.text"),
    (of_item(content=[{"type": "input_audio", "audio": "?"}]), "item.content.0.audio"),
    ({"type": "response.create", "response": {"input": []}}, "response.input"),
    ({"type": "response.create", "response": {"temperature": -1}}, "response.temperature"),
    ({"type": "response.create", "response": {"conversation": "none"}}, "response.conversation"),
    (CREATE, None), ('{"type": "response.cancel", "event_id": "\\ud800"}', None),
]  # fmt: skip


def test_what_is_wrong_is_told_and_the_session_goes_on() -> None:
    async def work() -> None:
        omni = Talker()
        async with talking(omni, max_media_bytes=3000) as client:
            before = await client.session()
            for event, param in WRONG:
                error = await client.error(event)
                assert (error["type"], error["param"]) == ("invalid_request_error", param), (event, error)
                assert error["event_id"] == (event.get("event_id") if isinstance(event, dict) else error["event_id"])
            assert await client.session() == before
            assert not omni.requests

    run(work())


def test_a_model_that_neither_hears_nor_speaks() -> None:
    async def work() -> None:
        omni = Talker(media={}, makes=("text",), voices=())
        async with talking(omni) as client:
            session = await client.session()
            assert session["output_modalities"] == ["text"] and session["audio"]["input"]["turn_detection"] is None
            for event, param in (
                (of_session(output_modalities=["audio"]), "session.output_modalities"),
                (of_session(**TURNS), "session.audio.input.turn_detection"),
                (of_session(audio={"output": {"voice": "ben"}}), "session.audio.output.voice"),
                (sound(10), "audio"),
                (of_item(content=[{"type": "input_audio", "audio": "AAA="}]), "item.content.0"),
                (CREATE | {"response": {"output_modalities": ["audio"]}}, "response.output_modalities"),
            ):
                assert (await client.error(event))["param"] == param
            await client.say()
            await client.send(CREATE)
            assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"

    run(work())


def test_what_was_appended_can_be_cleared() -> None:
    async def work() -> None:
        async with talking(Talker(), max_media_bytes=20_000) as client:
            await client.session(**NO_TURNS)
            await client.send(sound(300))
            assert (await client.error(sound(300)))["param"] == "audio"  # too much together
            await client.send({"type": "input_audio_buffer.clear"}, sound(300))
            assert (await client.next())["type"] == "input_audio_buffer.cleared"
            await client.session(**TURNS)
            for _ in range(9):  # nobody speaks: it does not fill up
                await client.send(sound(100, False))
            await client.session()

    run(work())


@pytest.mark.parametrize(
    ("query", "changes", "param"),
    [
        ("?model=other", {}, "model"),
        ("?intent=transcription", {}, "intent"),
        ("?model=fake/model", {"chats": False}, "model"),
    ],
)
def test_who_cannot_be_talked_with(query: str, changes: dict[str, Any], param: str) -> None:
    async def work() -> None:
        async with talking(Talker(**changes), query) as client:
            assert (await client.next())["error"]["param"] == param
            with pytest.raises(ConnectionClosed) as closed:
                await client.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008

    run(work())


def test_silence_and_keys() -> None:
    async def work() -> None:
        omni = Talker()
        omni.hold.clear()
        async with talking(omni, realtime_idle_timeout=0.3) as client:
            await client.say()
            await client.send(CREATE)
            await omni.started.wait()
            await asyncio.sleep(0.6)  # to answer is not to be idle
            omni.hold.set()
            await client.until("response.done")
            assert (await client.next())["error"]["code"] == "receive_timeout"
        with pytest.raises(InvalidStatus) as refused:
            async with talking(omni, api_key=("k",)):
                pass
        assert refused.value.response.status_code == 401

    run(work())
