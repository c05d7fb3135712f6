"""Uploaded voices of a model whose voices are vectors, and the folder that they are kept in. Nothing computes."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_omni import client
from test_speech_route import SPEAKS, SpeakingOmni

from polymux.errors import InvalidRequestError, StorageFullError, VoiceNotFoundError
from polymux.server.recording import speech_params
from polymux.server.speech_protocol import SpeechRequest
from polymux.server.voice_store import VoiceRecord, Voices
from polymux.server_config import VoiceConfig

VOICES, SPEECH = "/v1/audio/voices", "/v1/audio/speech"
VECTOR = [i / 10 for i in range(8)]


def takes_vectors() -> SpeakingOmni:
    omni = SpeakingOmni()
    omni.capabilities = msgspec.structs.replace(SPEAKS, embedding_size=8, refused={"ref_audio": "a vector is needed"})
    return omni


async def upload(http: Any, **fields: str) -> Any:
    form = {"name": "cleo", "consent": "written"} | fields
    return await http.post(VOICES, files={name: (None, value) for name, value in form.items()})


def test_a_vector_is_uploaded_and_speaks(tmp_path: Path) -> None:
    asyncio.run(_speak(tmp_path))


async def _speak(tmp_path: Path) -> None:
    omni = takes_vectors()
    async with client(omni, voice_store=str(tmp_path)) as http:
        made = await upload(http, speaker_embedding=json.dumps(VECTOR))
        assert made.status_code == 200, made.text
        assert made.json()["voice"]["embedding_dim"] == 8 and made.json()["voice"]["seconds"] is None
        listed = (await http.get(VOICES)).json()
        assert listed["voices"] == ["anna", "ben", "cleo"] and len(listed["uploaded_voices"]) == 1
        body = {"input": "one. two.", "response_format": "pcm", "stream": True}
        assert (await http.post(SPEECH, json=body | {"voice": "cleo"})).status_code == 200
        assert (await http.post(SPEECH, json=body | {"speaker_embedding": VECTOR})).status_code == 200
        first, second = (request.sampling for request in omni.requests)
        assert first is not None and second is not None and first.voice is None
        assert np.allclose(first.speaker_embedding or (), VECTOR) and second.speaker_embedding == tuple(VECTOR)
        refused = await http.post(SPEECH, json=body | {"voice": "cleo", "speaker_embedding": VECTOR})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "speaker_embedding"
        omni.capabilities = SPEAKS  # another model, with the same folder
        listed = (await http.get(VOICES)).json()
        assert listed["voices"] == ["anna", "ben"] and len(listed["uploaded_voices"]) == 1
        other = await http.post(SPEECH, json=body | {"voice": "cleo"})
        assert other.status_code == 400 and other.json()["error"]["param"] == "voice"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speaker_embedding": "[1.0]"}, "speaker_embedding"), ({"speaker_embedding": "x"}, "speaker_embedding"),
        ({"speaker_embedding": json.dumps([1e300] * 8)}, "speaker_embedding"),
        ({"speaker_embedding": json.dumps(["1"] * 8)}, "speaker_embedding.0"), ({}, "audio_sample"),
        ({"speaker_embedding": json.dumps(VECTOR), "ref_text": "hello"}, "ref_text"),
        ({"audio_sample": "data:audio/wav;base64,AAAA"}, "audio_sample"),
        ({"speaker_embedding": json.dumps(VECTOR), "name": "anna"}, "name"),
    ],
)  # fmt: skip
def test_a_wrong_vector_is_refused(fields: dict[str, str], param: str, tmp_path: Path) -> None:
    async def ask() -> Any:
        async with client(takes_vectors(), voice_store=str(tmp_path)) as http:
            return await upload(http, **fields)

    answer = asyncio.run(ask())
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert not list(tmp_path.glob("*.safetensors"))


def record(name: str) -> VoiceRecord:
    return VoiceRecord(name=name, consent="yes", created_at=1, sample_rate=8000, seconds=0.1)


def test_the_last_place_is_given_once(tmp_path: Path) -> None:
    """Also when two servers share the folder, and ask at the same time."""
    stores = [Voices(VoiceConfig(max_uploaded_voices=3), tmp_path) for _ in range(2)]
    outcomes: list[str] = []

    def add(store: Voices, name: str) -> None:
        try:
            store.add(record(name), np.ones((1, 800), np.float32))
            outcomes.append("kept")
        except StorageFullError:
            outcomes.append("full")
        except InvalidRequestError:
            outcomes.append("taken")

    names = ["a", "b", "c", "d"]
    threads = [threading.Thread(target=add, args=(store, name)) for store in stores for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("kept") == 3 and len(stores[0].all()) == 3
    kept = stores[0].all()[0].name
    loaded, values = stores[1].get(kept)
    assert loaded.sample_rate == 8000 and np.array_equal(values, np.ones((1, 800), np.float32))
    stores[1].delete(kept)
    with pytest.raises(VoiceNotFoundError):
        stores[0].get(kept)


def test_without_a_folder_voices_end_with_the_server() -> None:
    store = Voices(VoiceConfig(), None)
    assert store.all() == [] and not store.has("a")
    store.add(record("a"), np.ones((1, 800), np.float32))
    folder = store.open()
    assert store.has("a") and folder.is_dir()
    store.close()
    assert not folder.exists()


def test_a_voice_that_goes_while_a_request_is_read() -> None:
    class Going(Voices):
        def has(self, name: str) -> bool:
            return True

    class State:
        voices = Going(VoiceConfig(), None)

    State.voices.open()
    with pytest.raises(VoiceNotFoundError, match="voice='a': it has just been deleted") as caught:
        asyncio.run(speech_params(State(), SpeechRequest(input="b", voice="a"), SPEAKS))  # type: ignore[arg-type]
    assert caught.value.param == "voice"
    State.voices.close()
