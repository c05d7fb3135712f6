"""Conversations: refused for every wrong field; what passes arrives as it is, from Python's dicts to the other side."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from polymux.config import LimitsConfig
from polymux.conversation import conversation_of
from polymux.errors import InvalidRequestError
from polymux.messages import Add, frame, to_stage
from polymux.prompts import request_of
from polymux.request import Capabilities, ImageData, Message, Part, Request, SamplingParams
from polymux.sampling import FIELDS
from polymux.validation import validate

LIMITS = LimitsConfig(max_prompt_length=30)
ANSWERS = Capabilities(
    family="test",
    pipeline="TestModel",
    modality="text",
    arguments=("prompt", *FIELDS),
    required=("prompt",),
    media={"image": 2, "audio": 1, "video": 1},
    samples=True,
    voices=("anna",),
    chats=True,
    makes=("text", "audio"),
)
TEXT_ALONE = msgspec.structs.replace(ANSWERS, media={}, makes=("text",))
PICTURE, SOUND = Image.new("RGB", (2, 1)), np.zeros(4, np.float32)
FILM = np.zeros((2, 1, 1, 3), np.uint8)


def user(*parts: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": list(parts) if parts[:1] != ("",) and not isinstance(parts[0], str) else parts[0],
    }


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def show(kind: str, medium: Any) -> dict[str, Any]:
    return {"type": kind, kind: medium}


def request(*messages: Any, capabilities: Capabilities = ANSWERS, sampling: Any = None, **prompt: Any) -> Request:
    made = request_of({"messages": list(messages), **prompt}, SamplingParams(**sampling or {}), "r")  # type: ignore[typeddict-item]
    validate(made, capabilities, LIMITS)
    arrived = to_stage.decode(frame(Add(made))[4:])
    assert isinstance(arrived, Add) and arrived.request == made
    return made


def test_media_are_in_the_order_of_their_parts() -> None:
    other = Image.new("RGB", (4, 1))
    made = request(
        {"role": "system", "content": "s"},
        user(show("image", PICTURE), text("a"), show("audio", (SOUND, 16000))),
        {"role": "assistant", "content": [text("b")]},
        user(show("video", (FILM, 12.5)), show("image", other), text("c")),
        modalities=["text", "audio"],
        sampling={"voice": "anna", "stop": ("x",), "frequency_penalty": -2.0, "min_p": 0.1},
    )
    assert [[part.kind for part in one.parts] for one in made.messages] == [
        ["text"], ["image", "text", "audio"], ["text"], ["video", "image", "text"],
    ]  # fmt: skip
    assert [one.role for one in made.messages] == ["system", "user", "assistant", "user"]
    assert [item.width for item in made.media["image"] if isinstance(item, ImageData)] == [2, 4]
    (sound,), (film,) = made.media["audio"], made.media["video"]
    assert (sound.shape, sound.sample_rate, film.fps, made.modalities) == ((1, 4), 16000, 12.5, ("text", "audio"))  # type: ignore[union-attr]


def test_a_bare_prompt_is_what_a_user_says_with_its_media_before_it() -> None:
    made = request_of({"prompt": "a", "multi_modal_data": {"audio": (SOUND, 8), "image": PICTURE}}, None, "r")
    validate(made, ANSWERS, LIMITS)
    assert conversation_of(made) == [Message("user", [Part("image"), Part("audio"), Part("text", "a")])]


@pytest.mark.parametrize(
    ("messages", "more", "param"),
    [
        ([], {}, "messages"),
        (["hello"], {}, "messages.0"),
        ([{"role": "tool", "content": "a"}], {}, "messages.0"),
        ([{"role": "user"}], {}, "messages.0"),
        ([{"role": "user", "content": "a", "x": 1}], {}, "messages.0"),
        ([user("")], {}, "messages"),
        ([user(text("  "))], {}, "messages"),
        ([{"role": "user", "content": []}], {}, "messages"),
        ([user("a"), {"role": "assistant", "content": "b"}], {}, "messages"),
        ([user("a" * 20), user("a" * 20)], {}, "messages"),
        ([user("\ud800")], {}, "messages"),
        ([user({"type": "file", "file": 1})], {}, "messages.0.content.0"),
        ([user({"type": "image", "image": PICTURE, "detail": 1})], {}, "messages.0.content.0"),
        ([user(show("image", 3))], {}, "image"),
        ([user(show("image", FILM))], {}, "image"),
        ([user(*[show("image", PICTURE)] * 3)], {}, "image"),
        ([user(show("audio", SOUND[:0]))], {}, "audio"),
        ([user(show("audio", np.zeros((3, 4), np.float32)))], {}, "audio"),
        ([user(show("audio", np.zeros((1, 4), np.int64)))], {}, "audio"),
        ([user(show("video", FILM.astype(np.float32)))], {}, "video"),
        ([user(show("video", (FILM, 5000)))], {}, "video"),
        ([user("a")], {"prompt": "b"}, "prompt"),
        ([user("a")], {"multi_modal_data": {"image": PICTURE}}, "multi_modal_data"),
        ([user("a")], {"modalities": ["audio"]}, "modalities"),
        ([user("a")], {"modalities": ["text", "image"]}, "modalities"),
        ([user("a")], {"modalities": "text"}, "modalities"),
        ([user("a")], {"modalities": [1]}, "modalities"),
        ([user("a")], {"sampling": {"voice": "anna"}}, "voice"),
        ([user("a")], {"sampling": {"voice": "ben"}, "modalities": ["text", "audio"]}, "voice"),
        ([user("a")], {"sampling": {"stop": ("",)}}, "stop"),
        ([user("a")], {"sampling": {"stop": ("a",) * 17}}, "stop"),
        ([user("a")], {"sampling": {"stop": "a" * 300}}, "stop"),
        ([user("a")], {"sampling": {"presence_penalty": 3}}, "presence_penalty"),
        ([user("a")], {"sampling": {"temperature": 0, "min_p": 0.1}}, "min_p"),
    ],
)
def test_refused(messages: list[Any], more: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        request(*messages, **more)
    assert error.value.param == param


def test_what_the_model_does_not_take_is_refused() -> None:
    for kind, medium in (("image", PICTURE), ("audio", SOUND), ("video", FILM)):
        with pytest.raises(InvalidRequestError, match="it takes text alone") as error:
            request(user(show(kind, medium), text("a")), capabilities=TEXT_ALONE)
        assert error.value.param == kind
    with pytest.raises(InvalidRequestError, match="the model makes text"):
        request(user("a"), capabilities=TEXT_ALONE, modalities=["text", "audio"])


def test_other_models_hold_no_conversations() -> None:
    for capabilities in (
        msgspec.structs.replace(ANSWERS, chats=False),
        msgspec.structs.replace(ANSWERS, chats=False, samples=False),
    ):
        with pytest.raises(InvalidRequestError, match="does not answer conversations") as error:
            request(user("a"), capabilities=capabilities)
        assert error.value.param == "messages"
        with pytest.raises(InvalidRequestError) as error:
            validate(Request(request_id="r", prompt="a", modalities=("text",)), capabilities, LIMITS)
        assert error.value.param == "modalities"
