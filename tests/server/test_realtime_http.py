"""WS /v1/realtime for real: OpenAI's own client talks with a tiny model that hears and speaks, in three processes."""

from __future__ import annotations

import base64
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.resources.realtime.realtime import RealtimeConnection
from server_process import MODEL, Server, alive, error_of, serving, shared_memory, until

from polymux.testing.tiny.inputs import have_torchvision, tone

RATE = 24000
SHORT = {"talker_max_new_tokens": 8, "talker_do_sample": False, "token2wav_num_steps": 2}
# It writes thousands of words by these seeds, so that whoever interrupts or leaves is always there before its end.
LONG: dict[str, Any] = {"max_output_tokens": 3000, "extra_args": SHORT | {"talker_max_new_tokens": 4000}}


@pytest.fixture(scope="module")
def omni(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not have_torchvision():
        pytest.skip("its processor needs torchvision")
    flags = ("--max-num-seqs", "4", "--split-stages", "--restart-stages")
    shared = shared_memory()
    with serving(tiny_checkpoint("qwen25-omni"), tmp_path_factory.mktemp("realtime"), *flags) as running:
        yield running
        stages = running.stages()
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        until(lambda: not any(map(alive, stages)))
    assert shared_memory() <= shared


@contextmanager
def session(server: Server, **fields: Any) -> Iterator[RealtimeConnection]:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    with client, client.realtime.connect(model=MODEL) as connection:
        assert connection.recv().type == "session.created"
        update(connection, **{"max_output_tokens": 6, "seed": 6, "temperature": 1.0} | fields)
        yield connection


def update(connection: RealtimeConnection, **fields: Any) -> None:
    made: Any = {"type": "realtime"} | fields
    connection.session.update(session=made)
    events = heard(connection, "session.updated")
    assert not [event for event in events if event.type == "error"], events


def heard(connection: RealtimeConnection, kind: str) -> list[Any]:
    """The events up to the next of a kind."""
    events: list[Any] = [connection.recv()]
    while events[-1].type != kind:
        assert events[-1].type != "error", events[-1]
        events.append(connection.recv())
    return events


def say(connection: RealtimeConnection, text: str) -> None:
    connection.conversation.item.create(
        item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    )


def append(connection: RealtimeConnection, seconds: float, loud: bool = True) -> None:
    samples = (tone(seconds, RATE).reshape(-1) if loud else np.zeros(int(seconds * RATE))) * 20000
    connection.input_audio_buffer.append(audio=base64.b64encode(samples.astype("<i2").tobytes()).decode())


def sound_of(events: list[Any]) -> bytes:
    return b"".join(base64.b64decode(event.delta) for event in events if event.type == "response.output_audio.delta")


def text_of(events: list[Any], kind: str) -> str:
    return "".join(event.delta for event in events if event.type == f"response.{kind}.delta")


def test_text_and_sound(omni: Server) -> None:
    with session(omni, output_modalities=["text"], audio={"input": {"turn_detection": None}}) as connection:
        say(connection, "hello")
        connection.response.create()
        events = heard(connection, "response.done")
        done = events[-1].response
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "seed": 6}
        answer = omni.http.post("/v1/chat/completions", json=asked | {"temperature": 1.0}).json()
        written = answer["choices"][0]["message"]["content"]
        assert text_of(events, "output_text") == done.output[0].content[0].text == written
        assert (done.usage.input_tokens, done.usage.output_tokens) == (answer["usage"]["prompt_tokens"], 6)
        assert (done.status, done.status_details.reason) == ("incomplete", "max_output_tokens")

        update(connection, output_modalities=["audio"], extra_args=SHORT, audio={"output": {"voice": "Ethan"}})
        append(connection, 0.25)
        append(connection, 0.25)
        connection.input_audio_buffer.commit()
        connection.response.create()
        events = heard(connection, "response.done")
        done = events[-1].response
        assert len(sound_of(events)) > 2 * RATE // 20
        assert text_of(events, "output_audio_transcript") == done.output[0].content[0].transcript
        assert done.usage.output_token_details.audio_tokens > 0


def test_turns_and_who_interrupts(omni: Server) -> None:
    detection = {"type": "server_vad", "silence_duration_ms": 200}
    before = omni.outcomes()["aborted"]
    with session(omni, **LONG, audio={"input": {"turn_detection": detection}}) as connection:
        append(connection, 0.4)
        append(connection, 0.4, loud=False)
        started = heard(connection, "input_audio_buffer.speech_started")[-1]
        events = heard(connection, "response.output_audio_transcript.delta")
        assert events[0].type == "input_audio_buffer.speech_stopped" and events[1].item_id == started.item_id
        append(connection, 0.4)
        events += heard(connection, "response.done")
        done = events[-1].response
        assert (done.status, done.status_details.reason) == ("cancelled", "turn_detected")
        assert done.output[0].content[0].transcript == text_of(events, "output_audio_transcript") != ""
        until(lambda: omni.outcomes()["aborted"] == before + 1 and omni.running() == 0, 60)

        update(connection, extra_args=SHORT, max_output_tokens=6, seed=5)  # the turn goes on meanwhile, and is answered
        append(connection, 0.4, loud=False)
        events = heard(connection, "response.done")
        assert events[-1].response.status in ("completed", "incomplete") and sound_of(events)


def test_what_is_wrong_and_who_leaves(omni: Server) -> None:
    before = omni.outcomes()["aborted"]
    with session(omni, **LONG, seed=5) as connection:
        connection.send({"type": "response.create", "event_id": "mine", "response": {"input": []}})
        error: Any = connection.recv()
        assert (error.type, error.error.param, error.error.event_id) == ("error", "response.input", "mine")
        connection.send_raw("{")
        assert connection.recv().type == "error"
        connection.response.create()  # there is nothing to answer
        assert connection.recv().type == "error"
        say(connection, "hello")
        connection.response.create()
        heard(connection, "response.output_audio_transcript.delta")
    until(lambda: omni.outcomes()["aborted"] == before + 1 and omni.running() == 0, 60)


def chat(server: Server, **fields: Any) -> httpx.Response:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "seed": 3, "temperature": 1.0}
    return server.http.post("/v1/chat/completions", json=asked | fields)


def test_only_what_is_spoken_goes_through_all_stages(omni: Server) -> None:
    edges = [f'polymux:transfer_chunk_bytes_count{{from_stage="{i}",to_stage="{i + 1}"}}' for i in range(2)]
    before = omni.metrics()
    spoken = chat(omni, max_tokens=6, modalities=["text", "audio"], extra_args=SHORT).json()
    usage = spoken["usage"]["completion_tokens_details"]
    assert usage == {"audio_tokens": 8, "text_tokens": 6} and spoken["choices"][0]["message"]["audio"]["data"]
    mute = chat(omni, max_tokens=6).json()
    assert mute["choices"][0]["message"]["content"] == spoken["choices"][0]["message"]["content"]
    after = omni.metrics()
    assert [after[edge] - before[edge] for edge in edges] == [1, 1]
    for name, count in (("first_token", 2), ("first_audio", 1)):
        name = f"polymux:time_to_{name}_seconds_count"
        assert after[name] - before[name] == count


def test_the_death_of_the_talker_is_felt_by_whom_it_speaks_for(omni: Server) -> None:
    _, talker, _ = sorted(omni.stages(), key=lambda process: process.create_time())
    edge = 'polymux:transfer_chunk_bytes_count{from_stage="0",to_stage="1"}'
    with ThreadPoolExecutor(2) as pool:
        before = omni.metrics()[edge]
        how = {"modalities": ["text", "audio"], "extra_args": {"talker_max_new_tokens": 4000}}
        spoken = pool.submit(chat, omni, max_tokens=6, **how)
        until(lambda: omni.metrics()[edge] == before + 1)
        mute = pool.submit(chat, omni, max_tokens=300)
        until(lambda: omni.running() == 2)
        talker.kill()
        answer = spoken.result(10)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "stage_dead")
        assert mute.result(60).status_code == 200  # it has no business there
