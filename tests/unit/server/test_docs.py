"""docs/server.md names everything that there is, and nothing else."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from fake_omni import FakeOmni

from polymux.cli.flags import flag_of
from polymux.config import EngineConfig
from polymux.errors import PolymuxError
from polymux.knobs import groups_of
from polymux.sampling import FIELDS as SAMPLING_FIELDS
from polymux.server import (
    audio,
    chat,
    errors,
    files,
    health,
    images,
    lora,
    models,
    playground,
    profile,
    realtime,
    sleep,
    speech,
    speech_batch,
    speech_socket,
    transcriptions,
    videos,
    voices,
)
from polymux.server.audio import AudioGenerationRequest
from polymux.server.chat_protocol import ChatRequest
from polymux.server.chat_text_protocol import TextChatRequest
from polymux.server.protocol import (
    EncodingFields,
    ImageEditFields,
    ImageEditRequest,
    ImageGenerationRequest,
    ImageVariationFields,
    SamplingFields,
)
from polymux.server.speech_protocol import SpeechRequest
from polymux.server.state import ServerState
from polymux.server.video_protocol import VideoRequest
from polymux.server.video_store import Status
from polymux.server_config import AccessConfig, FilesConfig, HttpConfig, MediaConfig, ServerConfig, VideoConfig

TEXT = (Path(__file__).parents[3] / "docs" / "server.md").read_text()
CODE = set(re.findall(r"`([^`\n]+)`", TEXT))


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(title: str) -> set[str]:
    rows = [line.split("|")[1] for line in section(title).splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`{]+)[^`]*`", row)}


def test_fields() -> None:
    generations = set(ImageGenerationRequest.model_fields)
    assert first_cells("POST /v1/images/generations") == generations
    assert first_cells("POST /v1/images/edits") == set(ImageEditRequest.model_fields) - generations
    edits = set(ImageEditFields.model_fields)
    assert set(ImageVariationFields.model_fields) == edits - {"prompt", "partial_images", "stream_progress"}


def test_fields_of_a_chat() -> None:
    title = "POST /v1/chat/completions"
    shared = {*SamplingFields.model_fields, *EncodingFields.model_fields, "model", "user"}
    assert first_cells(title) == set(ChatRequest.model_fields) - shared
    assert shared <= set(re.findall(r"`(\w+)`", section(title)))


def test_fields_of_sound() -> None:
    named = first_cells("POST /v1/audio/generate")
    fields = {name for name in named if not name.startswith("x-")} - {"input", "audio_length"}
    assert fields == set(AudioGenerationRequest.model_fields)


def test_fields_of_speech() -> None:
    text = (Path(__file__).parents[3] / "docs" / "speech.md").read_text()
    tables = text.split("\n## What a request may say\n")[1].split("\n## POST /v1/audio/speech/batch\n")[0]
    rows = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    writing = {"min_p", "frequency_penalty", "presence_penalty", "stop", "json_schema"}  # of models that answer
    speaking = {*SpeechRequest.model_fields, *SAMPLING_FIELDS, "seed", "extra_args"} - {"user"} - writing
    assert named - {"speaker"} == speaking


def test_fields_of_answers() -> None:
    text = (Path(__file__).parents[3] / "docs" / "chat.md").read_text()
    table = text.split("\n## POST /v1/chat/completions\n")[1].split("\n### Messages\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == set(TextChatRequest.model_fields)


def test_videos() -> None:
    text = (Path(__file__).parents[3] / "docs" / "video.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    cells = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    routes = {name for name in first_cells("Routes") if "/v1/videos" in name and not name.startswith("HEAD")}
    flags = {flag_of(f) for f in dataclasses.fields(VideoConfig)}
    assert cells - {"status"} == routes | flags | {*VideoRequest.model_fields} | {*get_args(Status)}


def test_flags_of_the_server() -> None:
    assert first_cells("Flags") == {flag_of(f) for f in dataclasses.fields(ServerConfig) if f.metadata}
    assert first_cells("Access") == {flag_of(f) for f in dataclasses.fields(AccessConfig)}
    assert first_cells("Connections") == {flag_of(f) for f in dataclasses.fields(HttpConfig)}
    assert first_cells("Media") == {flag_of(f) for f in dataclasses.fields(MediaConfig)}
    assert first_cells("URLs of pictures") == {flag_of(f) for f in dataclasses.fields(FilesConfig)}


def test_every_flag_that_is_named_exists() -> None:
    groups = (*groups_of(EngineConfig).values(), ServerConfig, *groups_of(ServerConfig).values())
    flags = {flag_of(f) for group in groups for f in dataclasses.fields(group) if f.metadata}
    assert {word for code in CODE for word in re.findall(r"--[a-z-]+", code)} <= flags | {"--help"}


def test_routes() -> None:
    state = ServerState(FakeOmni(), ServerConfig())
    sounding = (audio, speech, speech_batch, speech_socket, transcriptions, voices)
    modules = (images, files, chat, videos, *sounding, realtime, lora, models, sleep, profile, health, playground)
    routes: list[Any] = [route for module in modules for route in module.routes(state).routes]
    routes = [route for route in routes if not route.path.startswith("/playground/")]
    found = {f"{method} {r.path}" for r in routes for method in getattr(r, "methods", ("WS",))}
    documented = {
        name.replace("models/NAME", "models/{name:path}").replace("/ID", "/{video_id}")
        for name in first_cells("Routes")
    }
    assert {name.replace("/NAME", "/{name}") for name in documented} == found | {"GET /openapi.json"}


def test_error_codes() -> None:
    named = {word for word in re.findall(r"`([a-z_]+)`", section("Errors")) if "_" in word}
    never_in_an_answer = {
        "invalid_config",
        "invalid_checkpoint",
        "request_aborted",
        "cache_unusable",
        "pinned_memory_lost",
    }
    ours = {cls.code for cls in subclasses(PolymuxError)} - never_in_an_answer
    assert named - {"x_request_id"} == ours | set(errors._HTTP_CODES.values())


def subclasses(cls: type[PolymuxError]) -> set[type[PolymuxError]]:
    return {cls}.union(*(subclasses(sub) for sub in cls.__subclasses__()))


@pytest.mark.parametrize("status", sorted({cls.status for cls in subclasses(PolymuxError)} - {499}))
def test_statuses(status: int) -> None:
    assert f"| {status} |" in section("Errors")
