"""WS /v1/realtime against a generator that computes nothing: events, turns, what cancels, and what is refused."""

from __future__ import annotations

import asyncio
import base64

import pytest
from live_server import listening
from talker import CREATE, NO_TURNS, RATE, TURNS, Client, Talker, heard, kinds, run, said, sound, talking
from websockets.asyncio.client import connect

from polymux.errors import GenerationError
from polymux.request import FinishReason


def test_a_text_is_answered_with_text() -> None:
    async def work() -> None:
        omni = Talker()
        async with talking(omni) as client:
            await client.session(output_modalities=["text"], instructions="Be brief.", max_output_tokens=9, seed=3)
            await client.say()
            await client.say("and?")
            await client.send(CREATE)
            events = await client.until("response.done")
            assert kinds(events) == [
                "response.created", "response.output_item.added", "conversation.item.added",
                "response.content_part.added", "response.output_text.delta", "response.output_text.delta",
                "response.output_text.done", "response.content_part.done", "response.output_item.done",
                "conversation.item.done", "response.done",
            ]  # fmt: skip
            assert events[6]["text"] == "".join(e["delta"] for e in events[4:6]) == "Hello you"
            done = events[-1]["response"]
            assert done["status"] == "completed" and done["seed"] == 5 and done["id"] == events[0]["response"]["id"]
            assert done["usage"] == {"total_tokens": 9, "input_tokens": 7, "output_tokens": 2,
                                     "output_token_details": {"text_tokens": 2, "audio_tokens": 0}}  # fmt: skip
            content = [{"type": "output_text", "text": "Hello you"}]
            assert [item["content"] for item in done["output"]] == [content]
            assert omni.requests[0].modalities == ("text",)
            assert omni.requests[0].sampling.max_new_tokens == 9 and omni.requests[0].sampling.seed == 3  # type: ignore[union-attr]
            await client.say("bye")
            await client.send(CREATE | {"response": {"instructions": "Be long.", "max_output_tokens": "inf"}})
            await client.until("response.done")
        assert said(omni, 0) == [("system", ["Be brief."]), ("user", ["hello", "and?"])]
        assert said(omni) == [
            ("system", ["Be long."]),
            *said(omni, 0)[1:],
            ("assistant", ["Hello you"]),
            ("user", ["bye"]),
        ]
        assert omni.requests[1].sampling.max_new_tokens is None  # type: ignore[union-attr]

    run(work())


def test_sound_is_answered_with_sound() -> None:
    async def work() -> None:
        omni = Talker()
        async with talking(omni) as client:
            session = await client.session(audio=NO_TURNS["audio"] | {"output": {"voice": "ben"}}, temperature=0.5)
            assert session["output_modalities"] == ["audio"] and session["audio"]["output"]["voice"] == "ben"
            await client.send(sound(300), sound(200), {"type": "input_audio_buffer.commit"})
            committed, added, done = [await client.next() for _ in range(3)]
            assert committed["type"] == "input_audio_buffer.committed" and committed["previous_item_id"] is None
            assert committed["item_id"] == added["item"]["id"] == done["item"]["id"]
            assert done["item"]["content"] == [{"type": "input_audio", "transcript": None}]
            await client.send(CREATE)
            events = await client.until("response.done")
            deltas = [e["delta"] for e in events if e["type"] == "response.output_audio.delta"]
            assert len(b"".join(map(base64.b64decode, deltas))) == 2 * RATE and len(deltas) > 1
            assert kinds(events)[-6:-4] == ["response.output_audio.done", "response.output_audio_transcript.done"]
            assert events[-5]["transcript"] == "Hello you"
            assert events[-1]["response"]["output"][0]["content"] == [
                {"type": "output_audio", "transcript": "Hello you"}
            ]
            assert events[-1]["response"]["usage"]["output_token_details"]["audio_tokens"] == 3
            assert (await client.error({"type": "input_audio_buffer.commit"}))["message"].startswith(
                "the buffer holds 0"
            )
        assert said(omni) == [("user", ["audio"])] and heard(omni) == [(500, RATE)]
        sampling = omni.requests[0].sampling
        assert sampling is not None and (sampling.voice, sampling.temperature) == ("ben", 0.5)

    run(work())


@pytest.mark.parametrize(
    ("reason", "failure", "status", "why"),
    [
        ("length", None, "incomplete", "max_output_tokens"),
        ("stop", GenerationError("no /root/secret"), "failed", None),
    ],
)
def test_how_a_response_ends(reason: FinishReason, failure: Exception | None, status: str, why: str | None) -> None:
    async def work() -> None:
        omni = Talker()
        omni.reason, omni.fails_with = reason, failure
        async with talking(omni) as client:
            await client.say()
            await client.send(CREATE)
            response = (await client.until("response.done"))[-1]["response"]
            assert response["status"] == status and response["status_details"]["reason"] == why
            assert (response["usage"] is None) == (failure is not None)
            assert response["output"][0]["status"] == "incomplete"
            if failure is not None:
                error = response["status_details"]["error"]
                assert error == {"type": "server_error", "code": "generation_failed", "message": "no ..."}
            omni.fails_with = None
            await client.say()
            await client.send(CREATE)  # it goes on
            assert (await client.until("response.done"))[-1]["response"]["status"] != "failed"

    run(work())


def test_turns_are_told_and_answered() -> None:
    async def work() -> None:
        omni = Talker()
        async with talking(omni) as client:
            await client.session(**TURNS)
            for event in (sound(1000, False), sound(60), sound(340), sound(100, False)):
                await client.send(event)
            began = await client.next()
            assert began["type"] == "input_audio_buffer.speech_started" and began["audio_start_ms"] == 1000 - 300
            await client.send(sound(500, False))
            ended, committed, *_ = events = await client.until("response.done")
            assert ended["type"] == "input_audio_buffer.speech_stopped" and ended["audio_end_ms"] == 1600
            assert committed["type"] == "input_audio_buffer.committed"
            assert began["item_id"] == ended["item_id"] == committed["item_id"]
            assert events[-1]["response"]["status"] == "completed"
            await client.send(sound(400), sound(300, False))  # the next turn
            began, *_ = await client.until("response.done")
            assert began["audio_start_ms"] == 2000 - 300
        assert heard(omni) == [(900, RATE), (900, RATE)]
        assert said(omni) == [("user", ["audio"]), ("assistant", ["Hello you"]), ("user", ["audio"])]

    run(work())


def test_turns_without_an_answer() -> None:
    async def work() -> None:
        omni = Talker()
        async with talking(omni) as client:
            detection = TURNS["audio"]["input"]["turn_detection"] | {"create_response": False}
            await client.session(audio={"input": {"turn_detection": detection}})
            await client.send(sound(400), sound(300, False))
            await client.until("conversation.item.done")
            assert (await client.session())["audio"]["input"]["turn_detection"]["create_response"] is False
        assert not omni.requests

    run(work())


def test_a_turn_that_has_no_room_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr("polymux.server.realtime_conversation.MAX_ITEMS", 0)
        async with talking(Talker()) as client:
            await client.session(**TURNS)
            turn = sound(400)["audio"], sound(400, False)["audio"]
            both = b"".join(base64.b64decode(part) for part in turn * 2)
            await client.send({"type": "input_audio_buffer.append", "audio": base64.b64encode(both).decode()})
            events = [await client.next() for _ in range(6)]
            began, ended = "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"
            assert kinds(events) == [began, ended, "error"] * 2
            assert [events[i]["audio_start_ms"] for i in (0, 3)] == [0, 600]

    run(work())


@pytest.mark.parametrize("interrupts", [True, False])
def test_who_begins_to_speak_ends_the_response(interrupts: bool) -> None:
    async def work() -> None:
        omni = Talker()
        omni.hold.clear()
        async with talking(omni) as client:
            detection = TURNS["audio"]["input"]["turn_detection"] | {"interrupt_response": interrupts}
            await client.session(audio={"input": {"turn_detection": detection}})
            await client.say()
            await client.send(CREATE)
            await omni.started.wait()
            await client.send(sound(400))
            await client.until("input_audio_buffer.speech_started")
            if interrupts:
                response = (await client.until("response.done"))[-1]["response"]
                assert response["status"] == "cancelled" and response["usage"] is None
                assert response["status_details"]["reason"] == "turn_detected"
                assert response["output"][0]["content"][0]["transcript"] == "Hello you"
                assert omni.aborted == [omni.requests[0].request_id]
            await client.send(sound(300, False))
            await client.until("input_audio_buffer.committed")
            omni.hold.set()
            for _ in range(1 if interrupts else 2):
                assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"
        assert said(omni) == [("user", ["hello"]), ("assistant", ["Hello you"]), ("user", ["audio"])]
        assert len(omni.requests) == 2

    run(work())


def test_a_response_is_cancelled_by_its_client() -> None:
    async def work() -> None:
        omni = Talker()
        omni.hold.clear()
        async with talking(omni) as client:
            cancel = {"type": "response.cancel"}
            assert (await client.error(cancel))["param"] == "response_id"
            await client.say()
            await client.send(CREATE)
            name = (await client.next())["response"]["id"]
            await omni.started.wait()
            await client.until("response.output_audio_transcript.delta")
            await client.until("response.output_audio_transcript.delta")
            assert (await client.error(CREATE | {"event_id": "mine"}))["event_id"] == "mine"  # one at a time
            assert (await client.error(cancel | {"response_id": "resp_other"}))["param"] == "response_id"
            await client.send(cancel | {"response_id": name})
            response = (await client.until("response.done"))[-1]["response"]
            assert response["status_details"]["reason"] == "client_cancelled" and response["id"] == name
        assert len(omni.aborted) == 1

    run(work())


def test_leaving_aborts() -> None:
    async def work() -> None:
        omni = Talker()
        omni.hold.clear()
        async with listening(omni) as port:
            async with connect(f"ws://127.0.0.1:{port}/v1/realtime") as socket:
                client = Client(socket)
                await client.next()
                await client.say()
                await client.send(CREATE)
                await omni.started.wait()
            while not omni.aborted:
                await asyncio.sleep(0.01)
        assert omni.aborted == [omni.requests[0].request_id]

    run(work())
