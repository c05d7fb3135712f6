"""Answers over HTTP, for real: text and speech in OpenAI's shape, streams, media, seeds, clients that leave.

OpenAI's client, the command and Python say the same. Tiny models answer.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import subprocess
import sys
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from server_process import MODEL, START_S, Server, error_of, serving, until

from polymux import Omni, SamplingParams
from polymux.config import stage_environment
from polymux.media.audio import encode_audio
from polymux.media.video import encode_video
from polymux.testing.tiny.inputs import picture, tone

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 30, "temperature": 1.5, "seed": 6}
VOICE = {"talker_max_new_tokens": 8, "talker_do_sample": False, "token2wav_num_steps": 2}
WRITES = 'polymux:component_batch_size_bucket{component="thinker",'
SPOKEN: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "Ethan", "format": "wav"},
    "extra_args": VOICE,
    "max_tokens": 6,
}


@pytest.fixture(scope="module")
def writer(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_checkpoint("qwen3-lm"), tmp_path_factory.mktemp("writer"), "--max-num-seqs", "4") as running:
        yield running


def ask(server: Server, **fields: Any) -> httpx.Response:
    return server.http.post(URL, json=BODY | fields)


def message(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    made: dict[str, Any] = choice["message"]
    return made


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def deltas(all_chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in all_chunks for choice in chunk["choices"]]


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]


def url_of(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()


def sees() -> dict[str, Any]:
    file = io.BytesIO()
    picture(56, 56).save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": url_of(file.getvalue())}}


def hears(seconds: float = 0.5) -> dict[str, Any]:
    data = base64.b64encode(encode_audio(tone(seconds, 24000), 24000, "mp3")).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "mp3"}}


def watches() -> dict[str, Any]:
    file = io.BytesIO()
    encode_video(np.random.default_rng(0).integers(0, 255, (10, 56, 56, 3), dtype=np.uint8), 5, file)
    return {"type": "video_url", "video_url": {"url": url_of(file.getvalue())}}


def test_an_answer(writer: Server) -> None:
    answer = ask(writer).json()
    assert answer["object"] == "chat.completion" and answer["model"] == MODEL and answer["seed"] == 6
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["message"]["role"]) == (0, "length", "assistant")
    usage = answer["usage"]
    assert usage["completion_tokens"] == 30 and usage["prompt_tokens"] > 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 30
    assert usage["completion_tokens_details"] == {"audio_tokens": 0, "text_tokens": 30}
    text = choice["message"]["content"]
    stopped = ask(writer, stop=text[8:12]).json()["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["message"]["content"] == text[: text.index(text[8:12])]


def test_where_the_time_went(writer: Server) -> None:
    answer = ask(writer, profile=True)
    profile = answer.json()["profile"]
    assert answer.status_code == 200 and profile["components"] and profile["total"] >= profile["computing"] > 0
    assert "profile" not in ask(writer).json()
    streamed = ask(writer, profile=True, stream=True)
    assert streamed.status_code == 400 and error_of(streamed)["param"] == "profile"


def test_a_stream_is_the_whole(writer: Server) -> None:
    whole = message(ask(writer))["content"]
    made = chunks(ask(writer, stream=True, stream_options={"include_usage": True}))
    told = deltas(made)
    assert told[0] == {"role": "assistant", "content": ""} and told[-1] == {}
    pieces = [delta["content"] for delta in told[1:-1]]
    assert "".join(pieces) == whole and len(pieces) > 3
    assert len({chunk["id"] for chunk in made}) == 1
    assert [c["finish_reason"] for chunk in made for c in chunk["choices"]] == [None] * (len(told) - 1) + ["length"]
    assert made[-1]["choices"] == [] and made[-1]["usage"] == ask(writer).json()["usage"]
    assert all(chunk["usage"] is None for chunk in made[:-1])


def test_seeds_in_company(writer: Server) -> None:
    wanted = message(ask(writer))["content"]
    drawn = ask(writer, seed=None).json()
    assert message(ask(writer, seed=drawn["seed"]))["content"] == drawn["choices"][0]["message"]["content"]
    fields = [{}, {"seed": 3}, {"temperature": 0}, {"max_tokens": 3}] * 3
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda one: message(ask(writer, **one))["content"], fields))
    assert [answer == wanted for answer in answers] == [True, False, False, False] * 3


def test_turns(writer: Server) -> None:
    turns = [{"role": "developer", "content": "be brief"}, *HELLO, {"role": "assistant", "content": "yes?"}, *HELLO]
    first = ask(writer, messages=turns).json()
    parted = [one | {"content": [{"type": "text", "text": one["content"]}]} for one in turns]
    parted[2] |= {"refusal": None, "annotations": [], "reasoning_content": "hm"}
    again = ask(writer, messages=parted, temperature=1.5).json()
    assert again["choices"] == first["choices"] and first["usage"]["prompt_tokens"] > 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"), ({"messages": user(sees())}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "a" * 40_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "cat " * 5000}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls.0.function"),
        ({"messages": [*HELLO, {"role": "assistant", "audio": {"id": "audio_x"}}, *HELLO]}, "messages.1.audio.id"),
        ({"modalities": ["text", "audio"]}, "modalities"), ({"audio": {"voice": "x"}}, "audio"), ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"temperature": 0, "top_p": 0.5}, "top_p"), ({"max_tokens": 0}, "max_tokens"), ({"stop": [""]}, "stop"),
        ({"max_tokens": 10**6}, "max_tokens"), ({"max_tokens": None, "max_completion_tokens": 10**6},
        "max_completion_tokens"), ({"max_completion_tokens": 5}, "max_tokens"), ({"seed": -1}, "seed"),
        ({"frequency_penalty": 3}, "frequency_penalty"), ({"presence_penalty": "x"}, "presence_penalty"),
        ({"tools": [{}]}, "tools.0.type"), ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"logprobs": True}, "logprobs"), ({"logit_bias": {"1": 1}}, "logit_bias"), ({"size": "64x64"}, "size"),
        ({"extra_args": {"x": 1}}, "extra_args.x"), ({"stream_options": {}}, "stream_options"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_refused(writer: Server, fields: dict[str, Any], param: str, stream: bool) -> None:
    before = writer.outcomes()["refused"]
    answer = ask(writer, **({} if "stream_options" in fields else {"stream": stream}) | fields)
    assert answer.status_code == 400 and error_of(answer)["param"] == param, answer.text
    assert writer.outcomes()["refused"] == before + 1


def test_other_routes_and_models(writer: Server) -> None:
    assert ask(writer, model="other").status_code == 404
    for route, body in (
        ("/v1/images/generations", {"prompt": "a"}),
        ("/v1/audio/speech", {"input": "a"}),
        ("/v1/audio/generate", {"prompt": "a"}),
    ):
        assert error_of(writer.http.post(route, json=body))["param"] == "model"
    (model,) = writer.http.get("/v1/models").json()["data"]
    can = model["capabilities"]
    assert (can["makes"], can["chats"], can["context"], can["media"]) == (["text"], True, 4096, {})
    assert {"stop", "max_new_tokens", "frequency_penalty"} <= set(can["fields"]) and "voice" not in can["fields"]


def test_a_client_that_leaves(writer: Server) -> None:
    before = writer.outcomes()["aborted"]
    long = BODY | {"max_tokens": 3000, "temperature": 1.0, "stream": True}
    for _ in range(4):
        with (
            contextlib.suppress(httpx.HTTPError),
            writer.http.stream("POST", URL, json=long) as answer,
        ):
            assert answer.status_code == 200 and next(answer.iter_raw())
    until(lambda: writer.running() == writer.waiting() == 0)
    assert writer.outcomes()["aborted"] == before + 4
    assert ask(writer).status_code == 200


def test_openai_client(writer: Server) -> None:
    wanted = message(ask(writer))["content"]
    asked: dict[str, Any] = {name: BODY[name] for name in ("model", "messages", "max_tokens", "temperature", "seed")}
    with openai.OpenAI(base_url=f"{writer.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].message.content == wanted and whole.usage is not None
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        *told, last = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == wanted
        assert told[-1].choices[0].finish_reason == "length" and last.usage == whole.usage
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**asked, n=3)
        assert error.value.param == "n"


def test_a_form_and_calls(writer: Server) -> None:
    """By OpenAI's own client, of a model that would write anything."""
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    named: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    words: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 150, "seed": 1}
    with openai.OpenAI(base_url=f"{writer.url}/v1", api_key="none") as client:
        formed = client.chat.completions.create(**words, response_format=named).choices[0]
        called = client.chat.completions.create(
            **words, tools=tools, tool_choice="required", parallel_tool_calls=False
        ).choices[0]
    assert formed.finish_reason == "stop" and json.loads(formed.message.content or "")["n"] in (1, 2)
    (call,) = called.message.tool_calls or []
    assert called.finish_reason == "tool_calls" and called.message.content is None
    assert call.type == "function" and json.loads(call.function.arguments)["n"] in (1, 2)


def test_speech(omni_server: Server) -> None:
    answer = ask(omni_server, **SPOKEN).json()
    said = answer["choices"][0]["message"]
    assert said["content"] == said["audio"]["transcript"] and said["audio"]["expires_at"] > answer["created"]
    with wave.open(io.BytesIO(base64.b64decode(said["audio"]["data"]))) as file:
        assert (file.getframerate(), file.getnchannels()) == (24000, 1) and file.getnframes() > 1000
        samples = file.readframes(file.getnframes())
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"audio_tokens": 8, "text_tokens": 6} and answer["usage"]["completion_tokens"] == 14
    asked = SPOKEN | {"audio": {"voice": {"id": "Ethan"}, "format": "pcm16"}, "stream": True}
    told = deltas(chunks(ask(omni_server, **asked)))
    audio = [delta["audio"] for delta in told if "audio" in delta]
    assert b"".join(base64.b64decode(one["data"]) for one in audio if "data" in one) == samples
    assert "".join(one.get("transcript", "") for one in audio) == said["content"]
    assert "".join(delta.get("content", "") for delta in told) == said["content"]
    order = ["data" in one for one in audio if "data" in one or "transcript" in one]
    assert order == sorted(order) and "expires_at" in audio[-1] and len({one["id"] for one in audio}) == 1
    other = message(ask(omni_server, **SPOKEN | {"audio": {"voice": "Chelsie", "format": "flac"}}))
    assert base64.b64decode(other["audio"]["data"])[:4] == b"fLaC"
    by_id = [*HELLO, {"role": "assistant", "audio": {"id": audio[0]["id"]}}, *HELLO]
    by_text = [*HELLO, {"role": "assistant", "content": said["content"]}, *HELLO]
    assert message(ask(omni_server, messages=by_id)) == message(ask(omni_server, messages=by_text))


def test_a_model_that_answers_reads_nothing_out(omni_server: Server) -> None:
    assert error_of(omni_server.http.post("/v1/audio/speech", json={"input": "a"}))["param"] == "model"
    voices = omni_server.http.get("/v1/audio/voices").json()
    assert voices == {"voices": ["Chelsie", "Ethan"], "default": "Chelsie", "languages": [], "uploaded_voices": []}


def test_media(omni_server: Server) -> None:
    texts = {}
    for name, parts in {"none": (), "sees": (sees(),), "hears": (hears(),), "watches": (watches(),),
                        "all": (sees(), hears(), watches())}.items():  # fmt: skip
        answer = ask(omni_server, messages=user(*parts), max_tokens=4, temperature=0).json()
        texts[name] = answer["usage"]["prompt_tokens"]
    assert len(set(texts.values())) == 5 and texts["all"] > max(texts[name] for name in texts if name != "all")
    bad = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    for parts, param in (
        ((sees(), bad), "messages.0.content.1"),
        ((hears(0.05),), "messages.0.content.0"),
        ((sees(), hears(31)), "messages.0.content.1"),
        ((hears(0.05), hears()), "messages"),
        ((sees(),) * 33, "messages"),
        (({"type": "video_url", "video_url": {"url": sees()["image_url"]["url"]}},), "messages.0.content.0"),
    ):
        answer = ask(omni_server, messages=user(*parts))
        assert answer.status_code == 400 and error_of(answer)["param"] == param, answer.text
    for fields, param in (
        ({"audio": {"voice": "bob"}}, "audio.voice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"stop": "a"}, "stop"),
        ({"messages": [{"role": "user", "content": "<|IMAGE|>"}]}, "messages"),
    ):
        assert error_of(ask(omni_server, **SPOKEN | fields))["param"] == param


def test_media_in_company(omni_server: Server) -> None:
    """Streamed at the same time, in one batch, each answer is what it is alone; and so is one that is spoken."""
    (model,) = omni_server.http.get("/v1/models").json()["data"]
    assert model["capabilities"]["merges"]
    how = {"max_tokens": 12, "temperature": 0, "stream": True}
    asked: list[dict[str, Any]] = [
        how | {"messages": user(*parts)}
        for parts in ((sees(),), (hears(),), (), (watches(),), (sees(), hears()), (hears(0.7), sees()))
    ]
    asked += [SPOKEN | how | {"messages": user(sees())}, SPOKEN | how]
    alone = [told(omni_server, one) for one in asked]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda one: told(omni_server, one), asked * 2)) == alone * 2
    assert len({text for text, _ in alone}) > 3 and [sound > 0 for _, sound in alone] == [False] * 6 + [True] * 2
    lines = omni_server.http.get("/metrics").text.splitlines()
    written = [line for line in lines if line.startswith(WRITES) and 'phase="denoise"' in line]
    batches = {line.split('le="')[1].split('"')[0]: float(line.split()[-1]) for line in written}
    assert batches["+Inf"] > batches["1.0"] > 0


def told(server: Server, asked: dict[str, Any]) -> tuple[str, int]:
    """The text, and how much sound came after it."""
    made = deltas(chunks(ask(server, **asked)))
    sounds = [delta["audio"].get("data", "") for delta in made if "audio" in delta]
    return "".join(delta.get("content", "") for delta in made), len("".join(sounds))


def test_a_client_that_leaves_while_it_speaks(omni_server: Server) -> None:
    before = omni_server.outcomes()["aborted"]
    long = BODY | SPOKEN | {"stream": True, "extra_args": {"talker_max_new_tokens": 3000, "talker_temperature": 0.1}}
    with contextlib.suppress(httpx.HTTPError), omni_server.http.stream("POST", URL, json=long) as answer:
        for line in answer.iter_lines():
            if "transcript" in line:
                break
    until(lambda: omni_server.running() == omni_server.waiting() == 0)
    assert omni_server.outcomes()["aborted"] == before + 1 and ask(omni_server).status_code == 200


def test_the_command(writer: Server, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    words = ["--max-new-tokens", "30", "--temperature", "1.5", "--seed", "6"]
    command = [sys.executable, "-m", "polymux.cli", "generate", "--model", str(tiny_checkpoint("qwen3-lm"))]
    done = subprocess.run(
        [*command, "--prompt", "hello", *words],
        capture_output=True, text=True, cwd=tmp_path, env=stage_environment(), timeout=START_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, message(ask(writer))["content"] + "\n"), done.stderr
    assert done.stderr.endswith("seed: 6\n") and not list(tmp_path.iterdir())


def test_python(writer: Server, tiny_checkpoint: Callable[..., Path]) -> None:
    wanted = message(ask(writer))["content"]
    params = SamplingParams(max_new_tokens=30, temperature=1.5, seed=6)
    with Omni(model=tiny_checkpoint("qwen3-lm")) as omni:
        assert omni.capabilities is not None and omni.capabilities.chats
        plain, turns, bad = omni.generate(
            ["hello", {"messages": HELLO}, {"messages": HELLO, "modalities": ["text", "audio"]}], params
        )
    assert plain.text == turns.text == [wanted] and plain.finish_reason == ["length"] and plain.modality == "text"
    assert bad.error is not None and bad.error.param == "modalities" and bad.text == []
