"""POST /v1/audio/speech against a generator that computes nothing: what goes out when, and how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from fake_omni import CAPABILITIES, FakeOmni, client
from live_server import listening

from polymux.errors import GenerationError, InvalidRequestError, StageDeadError
from polymux.omni_output import OmniRequestOutput
from polymux.prompts import Params, Prompt, request_of
from polymux.request import ArrayData, OutputChunk, Progress, Request, RequestMetrics, SoundPiece
from polymux.sampling import FIELDS

URL = "/v1/audio/speech"
BODY: dict[str, Any] = {"input": "one. two. three.", "response_format": "pcm", "seed": 3}
SPEAKS = msgspec.structs.replace(
    CAPABILITIES,
    modality="audio",
    samples=True,
    arguments=("prompt", *FIELDS),
    voices=("anna", "ben"),
    languages=("en",),
    sample_rate=8000,
)
SENTENCE = np.linspace(-0.5, 0.5, 800, dtype=np.float32)[np.newaxis]


class SpeakingOmni(FakeOmni):
    """Three sentences, the last of which waits for `hold`; then it fails, if it is to, with `fails_with`."""

    def __init__(self, **engine_args: Any) -> None:
        super().__init__(**engine_args)
        self.capabilities = SPEAKS
        self.fails_at = 2  # sentences that come before it fails

    async def stream(  # type: ignore[override]
        self, prompt: Prompt, sampling_params: Params, *, request_id: str | None = None, session_id: str | None = None
    ) -> AsyncGenerator[Progress | OutputChunk | SoundPiece | OmniRequestOutput]:
        assert request_id is not None
        request = request_of(prompt, sampling_params, request_id)
        await self._admit(request)
        self.requests.append(request)
        try:
            for i in range(3):
                if i == 2:
                    self.started.set()
                    await self.hold.wait()
                if self.fails_with is not None and i == self.fails_at:
                    raise self.fails_with
                piece = ArrayData("float32", SENTENCE.shape, SENTENCE.tobytes(), 8000)
                yield SoundPiece(request_id, i, piece)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise
        yield self._output(request)

    def _output(self, request: Request) -> OmniRequestOutput:
        assert request.sampling is not None
        return OmniRequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            modality="audio",
            audio=[np.concatenate([SENTENCE] * 3, axis=1)],
            sample_rate=8000,
            seeds=[request.sampling.seed],
            metrics=RequestMetrics(steps=5, text_tokens=9),
        )


WHOLE = (np.concatenate([SENTENCE] * 3, axis=1)[0].astype(np.float64) * 32767).round().astype("<i2").tobytes()


def http_to(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")


async def _post(omni: FakeOmni, **body: Any) -> httpx.Response:
    async with listening(omni) as port, http_to(port) as http:
        return await http.post(URL, json={k: v for k, v in (BODY | body).items() if v is not ...})


def post(omni: FakeOmni | None = None, **body: Any) -> httpx.Response:
    return asyncio.run(_post(omni or SpeakingOmni(), **body))


def test_the_first_sentence_is_out_before_the_last_is_made() -> None:
    async def read() -> tuple[bytes, bytes]:
        omni = SpeakingOmni()
        omni.hold.clear()
        async with (
            listening(omni) as port,
            http_to(port) as http,
            http.stream("POST", URL, json=BODY | {"stream": True}) as answer,
        ):
            raw, early = answer.aiter_raw(), b""
            while len(early) < 2 * 1600:
                early += await anext(raw)
            assert answer.headers["x-seed"] == "3" and answer.headers["x-sample-rate"] == "8000"
            omni.hold.set()
            return early, early + b"".join([part async for part in raw])

    early, whole = asyncio.run(read())
    assert early == WHOLE[:3200] and whole == WHOLE


@pytest.mark.parametrize("error", [GenerationError("it broke"), StageDeadError("gone")])
def test_what_fails_in_the_middle_is_not_taken_for_the_whole(error: GenerationError) -> None:
    omni = SpeakingOmni()
    omni.fails_with = error
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        post(omni, stream=True)
    events = post(omni, stream_format="sse").text.split("\n\n")
    last = json.loads(events[-2].split("data: ")[1])
    assert last["type"] == "error" and last["error"]["code"] == error.code
    assert sum("speech.audio.delta" in event for event in events) == 2


@pytest.mark.parametrize("how", [{"stream": True}, {"stream_format": "sse"}])
@pytest.mark.parametrize(
    ("error", "status"), [(GenerationError("it broke"), 500), (InvalidRequestError("prompt: no", param="prompt"), 400)]
)
def test_what_fails_before_the_first_sentence_is_an_error_answer(how: Any, error: GenerationError, status: int) -> None:
    omni = SpeakingOmni()
    omni.fails_with, omni.fails_at = error, 0
    answer = post(omni, **how)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == ("input" if status == 400 else None)


def test_who_leaves_cancels() -> None:
    async def leave() -> list[str]:
        omni = SpeakingOmni()
        omni.hold.clear()
        async with listening(omni) as port, http_to(port) as http:
            async with http.stream("POST", URL, json=BODY | {"stream": True}) as answer:
                await anext(answer.aiter_raw())
                await omni.started.wait()
            for _ in range(200):
                if omni.aborted:
                    break
                await asyncio.sleep(0.02)
            return omni.aborted

    assert len(asyncio.run(leave())) == 1


def test_everything_reaches_the_generator() -> None:
    omni = SpeakingOmni()
    fields = {
        "voice": "ben", "language": "en", "instructions": "softly", "speed": 2, "max_new_tokens": 7,
        "do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "repetition_penalty": 1.5, "guidance_scale": 2,
    }  # fmt: skip
    assert post(omni, **fields, stream=True).status_code == 200
    (request,) = omni.requests
    assert request.prompt == BODY["input"] and request.sampling is not None
    assert {name: getattr(request.sampling, name) for name in fields} == fields and request.sampling.seed == 3
    assert post(omni, voice=..., speaker={"id": "anna"}, stream=True).status_code == 200
    assert omni.requests[1].sampling is not None and omni.requests[1].sampling.voice == "anna"


def test_a_drawn_seed_is_told_before_the_sound() -> None:
    omni = SpeakingOmni()
    told = post(omni, seed=None, stream=True).headers["x-seed"]
    assert omni.requests[0].sampling is not None and told == str(omni.requests[0].sampling.seed)


def test_usage() -> None:
    events = post(stream_format="sse").text.split("\n\n")
    done = json.loads(events[-2].split("data: ")[1])
    usage = {"input_tokens": 9, "output_tokens": 5, "total_tokens": 14}
    assert done == {"type": "speech.audio.done", "usage": usage, "seed": 3}


def test_a_model_that_is_not_there_or_does_not_speak() -> None:
    loading = SpeakingOmni()
    loading.status = "loading"
    assert post(loading).status_code == post(loading, stream=True).status_code == 503
    answer = post(FakeOmni())
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"
    assert "it makes image" in answer.json()["error"]["message"]


def test_a_stream_has_the_seed_that_the_operator_says() -> None:
    async def ask() -> None:
        omni = SpeakingOmni()
        omni.capabilities = msgspec.structs.replace(SPEAKS, defaults={"seed": 9})
        omni.hold.set()
        async with client(omni) as http:
            for seed, told in ((None, "9"), (3, "3")):
                answer = await http.post(URL, json=BODY | {"seed": seed, "stream": True})
                assert answer.status_code == 200 and answer.headers["x-seed"] == told
        assert [request.sampling.seed for request in omni.requests if request.sampling] == [9, 3]

    asyncio.run(ask())
