"""POST /v1/chat/completions: what a conversation means to a model that makes pictures, and how it answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from conversations import (
    URL,
    able,
    ask,
    assistant,
    data_url,
    decoded,
    editor,
    error_of,
    events_of,
    picture,
    post,
    request_for,
    text,
    user,
    widths,
)
from fake_omni import CAPABILITIES, FakeOmni, client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polymux.errors import GenerationError, QueueFullError
from polymux.request import Request


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("messages", [], "[]: must not be empty"),
        ("stop", ["x"], '["x"]: must be empty'),
        ("metadata", {"a": "b"}, '{"a": "b"}: must be empty'),
        ("user", "x" * 257, "'xxxxxxxxxxxx...xxxxxxxxxxxxx': must have at most 256 characters"),
    ],
)
def test_a_wrong_length_is_told_in_words_of_http(field: str, value: Any, why: str) -> None:
    error = error_of(ask(user("a"), **{field: value}) if field != "messages" else ask(*value))
    assert (error["param"], error["message"]) == (field, f"{field}={why}")


def test_a_prompt_that_is_wrong_is_said_of_the_messages() -> None:
    omni = FakeOmni(max_prompt_length=100)
    error = error_of(ask(user("a" * 60), user("b" * 60), omni=omni))
    assert error["param"] == "messages"
    assert error["message"].startswith("messages has 121 characters")


def test_the_answer_is_openais() -> None:
    omni = FakeOmni()
    answer = ask(user("a cat"), omni=omni, n=2, size="64x32", model="fake/model").json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "fake/model")
    assert answer["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for i, choice in enumerate(answer["choices"]):
        assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "stop")
        (part,) = choice["message"]["content"]
        assert (part["type"], part["size"], part["seed"]) == ("image_url", "64x32", 1 + i)
        assert decoded(part).size == (64, 32)
    assert omni.requests[0].prompt == "a cat"


def test_every_output_is_a_choice_and_may_have_several_pictures() -> None:
    omni = FakeOmni()
    omni.images = 3
    choices = ask(user("layers"), omni=omni, n=2).json()["choices"]
    assert [[part["index"] for part in c["message"]["content"]] for c in choices] == [[0, 1, 2]] * 2
    assert {part["seed"] for c in choices for part in c["message"]["content"]} == {None}


def test_sampling_fields_are_those_of_the_other_routes() -> None:
    fields = {"num_inference_steps": 3, "guidance_scale": 2.5, "negative_prompt": "b", "extra_args": {"eta": 0.5}}
    params = request_for(user("a"), size="32x48", **fields).params
    assert (params.width, params.height, params.num_inference_steps, params.guidance_scale) == (32, 48, 3, 2.5)
    assert params.extra_args == {"eta": 0.5}
    jpeg = ask(user("a"), output_format="jpeg", output_compression=10).json()["choices"][0]["message"]["content"][0]
    assert decoded(jpeg).format == "JPEG"


def test_parts_of_text_are_lines_of_the_prompt() -> None:
    assert request_for(user(text("a"), text("b"))).prompt == "a\nb"


def test_what_was_said_since_the_last_answer_is_the_prompt() -> None:
    request = request_for(user("old"), assistant("an answer"), user("a cat"), user(text("in the rain")))
    assert request.prompt == "a cat\nin the rain"


def test_a_conversation_goes_on_with_what_this_server_answered() -> None:
    """The messages of an answer come back as they were, whole or put together from a stream."""
    whole = ask(user("a cat")).json()["choices"][0]["message"]
    chunks = events_of(ask(user("a cat"), stream=True))[:-1]
    images = [i for c in chunks for choice in c["choices"] for i in choice["delta"].get("images", [])]
    for answer in (whole, assistant("", images=images)):
        assert request_for(user("a cat"), answer, user("a dog")).prompt == "a dog"
        edited = request_for(user("a cat"), answer, user("make it blue"), omni=editor())
        assert (edited.prompt, widths(edited)) == ("make it blue", [32])


@pytest.mark.parametrize(
    "extra",
    [{"refusal": None, "annotations": []}, {"tool_calls": [{"id": 1}]}, {"reasoning_content": "hm"}, {"name": "x"}],
)
def test_answers_of_other_models_are_history_too(extra: dict[str, Any]) -> None:
    assert request_for(user("a"), assistant(None, **extra), user("b")).prompt == "b"


def test_an_edit_model_gets_the_pictures_of_the_users_last_words() -> None:
    history = (user(text("old"), picture(data_url(64))), assistant([picture(data_url(48))]))
    request = request_for(*history, user(text("new"), picture(data_url(80)), picture(data_url(96))), omni=editor(2))
    assert (request.prompt, widths(request)) == ("new", [80, 96])


@pytest.mark.parametrize("needed", [True, False])
def test_a_model_that_takes_pictures_goes_on_with_the_latest(needed: bool) -> None:
    history = (user(text("old"), picture(data_url(64))), assistant([picture(data_url(48))]))
    assert widths(request_for(*history, user("new"), omni=editor(needed=needed))) == [48]
    assert widths(request_for(history[0], assistant("none"), user("new"), omni=editor(needed=needed))) == [64]


def test_a_model_that_needs_no_picture_does_without() -> None:
    assert widths(request_for(user("old"), assistant("none"), user("new"), omni=editor(needed=False))) == []
    assert widths(request_for(user(text("a"), picture(data_url(32))), omni=editor(needed=False))) == [32]


def test_the_size_of_an_edit_is_the_pictures() -> None:
    params = request_for(user(text("a"), picture(data_url(70, 40))), omni=editor()).params
    assert (params.width, params.height) == (64, 32)
    params = request_for(user(text("a"), picture(data_url(70, 40))), omni=editor(), size="32x32").params
    assert (params.width, params.height) == (32, 32)


def test_system_messages_go_where_a_pipeline_takes_them() -> None:
    omni = able(arguments=(*CAPABILITIES.arguments, "system_prompt"))
    messages = ({"role": "system", "content": "S"}, user("a"), {"role": "developer", "content": [text("D")]})
    request = request_for(*messages, omni=omni)
    assert (request.prompt, request.params.extra_args) == ("a", {"system_prompt": "S\nD"})
    error = error_of(ask(*messages, omni=omni, extra_args={"system_prompt": "x"}))
    assert error["param"] == "messages.0"


def test_system_messages_that_would_have_no_effect_are_refused() -> None:
    error = error_of(ask(user("a"), {"role": "system", "content": "You paint in oil."}))
    assert error["param"] == "messages.1"
    assert request_for({"role": "system", "content": ""}, user("a")).prompt == "a"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([assistant("a")], "messages"),
        ([user("a"), assistant("b")], "messages"),
        ([user("")], "messages"),
        ([user(" \n")], "messages"),
        ([user(picture(data_url(32)))], "messages"),
        ([user(text("a"), picture(data_url(32)))], "messages.0.content.1"),  # the model takes none
        ([user()], "messages.0.content"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 3}], "messages.0.content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages.0.content"),
        ([user("a") | {"extra": 1}], "messages.0.extra"),
        ([user("a"), {"role": "tool", "content": "x"}], "messages.1"),
        ([{"content": "a"}], "messages.0"),
        (["a"], "messages.0"),
        ([user(text("a"), "b")], "messages.0.content.1"),
        ([user(text("a"), {"type": "input_audio", "input_audio": {}})], "messages.0.content.1"),
        ([user({"type": "text", "text": 1})], "messages.0.content.0.text"),
        ([user({"type": "text", "text": "a", "x": 1})], "messages.0.content.0.x"),
        ([user(text("a"), {"type": "image_url", "image_url": data_url(8)})], "messages.0.content.1.image_url"),
        ([user(text("a"), {"type": "image_url", "image_url": {"url": "x", "detail": "high"}})],
         "messages.0.content.1.image_url.detail"),
        ([{"role": "system", "content": [picture("x")]}, user("a")], "messages.0.content.0.type"),
    ],
)  # fmt: skip
def test_messages_that_mean_nothing(messages: list[Any], param: str) -> None:
    omni = FakeOmni()
    error = error_of(ask(*messages, omni=omni))
    assert error["param"] == param
    assert "~" not in error["message"] and "tuple" not in error["message"]
    assert omni.requests == []


@pytest.mark.parametrize(
    ("pictures", "param"),
    [
        ([], "messages"),
        ([data_url(32), data_url(32)], "messages"),
        (["data:image/png;base64,AAAA"], "messages.0.content.1"),
        (["http://127.0.0.1:9/"], "messages.0.content.1"),
        (["/etc/passwd"], "messages.0.content.1"),
    ],
)
def test_pictures_that_cannot_be_edited(pictures: list[str], param: str) -> None:
    omni = editor()
    error = error_of(ask(user(text("a"), *map(picture, pictures)), omni=omni))
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert omni.requests == []


def test_the_error_names_the_picture() -> None:
    parts = [picture(data_url(32)), text("a"), picture("data:,x")]
    assert error_of(ask(user("b"), user(*parts), omni=editor(2)))["param"] == "messages.1.content.2"


@pytest.mark.parametrize("modalities", [None, ["image"], ["text", "image"], ["image", "text"]])
def test_modalities_of_the_model(modalities: Any) -> None:
    request_for(user("a"), modalities=modalities)


@pytest.mark.parametrize("modalities", [[], ["text"], ["audio"], ["image", "audio"], ["text", "video"], "image", [1]])
def test_modalities_that_the_model_cannot_make(modalities: Any) -> None:
    assert error_of(ask(user("a"), modalities=modalities))["param"].startswith("modalities")


NEUTRAL: dict[str, Any] = {
    "max_tokens": 10, "max_completion_tokens": 1, "temperature": 1, "top_p": 1.0, "frequency_penalty": 0,
    "presence_penalty": 0.0, "logit_bias": {}, "logprobs": False, "top_logprobs": 0, "stop": [],
    "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "parallel_tool_calls": True,
    "functions": [], "function_call": "auto", "reasoning_effort": "none", "metadata": {}, "store": False,
    "service_tier": "auto", "audio": None, "prediction": None, "stream": False,
}  # fmt: skip
MEANT: dict[str, Any] = {
    "max_tokens": 0, "max_completion_tokens": -1, "temperature": 0.2, "top_p": 0.9, "frequency_penalty": 0.1,
    "presence_penalty": -1, "logit_bias": {"1": 1}, "logprobs": True, "top_logprobs": 3, "stop": ["x"],
    "response_format": {"type": "json_object"}, "tools": [{"type": "function"}], "tool_choice": "required",
    "parallel_tool_calls": "x", "functions": [{}], "function_call": {"name": "x"}, "reasoning_effort": "high",
    "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "audio": {"voice": "x"}, "prediction": {"type": "x"},
    "stream": "yes",
}  # fmt: skip


def test_fields_about_text_may_hold_what_changes_nothing() -> None:
    request_for(user("a"), **NEUTRAL)
    request_for(user("a"), **dict.fromkeys(NEUTRAL))


@pytest.mark.parametrize("name", MEANT)
def test_fields_about_text_are_refused_if_they_mean_something(name: str) -> None:
    assert str(error_of(ask(user("a"), **{name: MEANT[name]}))["param"]).split(".")[0] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"unknown": 1}, "unknown"),
        ({"~text": 1}, "~text"),
        ({"size": "65x64"}, "size"),
        ({"size": "x"}, "size"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"true_cfg_scale": 1.0}, "true_cfg_scale"),
        ({"strength": 0.5}, "strength"),
        ({"output_compression": 50}, "output_compression"),
        ({"extra_args": {"nope": 1}}, "extra_args.nope"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_a_400_before_any_stream(fields: dict[str, Any], param: str, stream: bool) -> None:
    if stream and "stream_options" in fields:
        fields = {"stream_options": {"include_obfuscation": True}}
        param = "stream_options.include_obfuscation"
    omni = FakeOmni()
    assert error_of(ask(user("a"), omni=omni, stream=stream, **fields))["param"] == param
    assert omni.requests == []
    sample = {"model_name": "fake/model", "outcome": "refused"}
    assert omni.metrics.registry.get_sample_value("polymux:requests_total", sample) == 1


def test_another_model_and_a_model_of_another_kind() -> None:
    assert error_of(ask(user("a"), model="other"), 404)["code"] == "model_not_found"
    for modality in ("video", "audio", "text"):  # text: of what it hears
        error = error_of(ask(user("a"), omni=able(modality=modality)))
        assert error["param"] == "model"
        assert error["message"] == f"the model neither answers nor makes pictures; it makes {modality}"
    omni = FakeOmni()
    omni.status = "loading"
    assert error_of(ask(user("a"), omni=omni), 503)["code"] == "not_ready"


def test_a_stream_has_openais_chunks() -> None:
    *chunks, done = events_of(ask(user("a"), stream=True, n=2, size="64x32"))
    assert done == "[DONE]"
    assert len({(c["id"], c["object"], c["created"], c["model"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert [c["choices"][0]["index"] for c in chunks] == [0, 0, 0, 1, 1, 1]
    for first, middle, last in (chunks[:3], chunks[3:]):
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        (part,) = middle["choices"][0]["delta"]["images"]
        assert decoded(part).size == (64, 32)
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert all(c["usage"] is None for c in chunks)


def test_a_stream_ends_with_the_usage_if_it_is_asked_for() -> None:
    *_, last, done = events_of(ask(user("a"), stream=True, stream_options={"include_usage": True}))
    assert (last["choices"], last["usage"]["total_tokens"], done) == ([], 0, "[DONE]")


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_stream_starts_is_an_answer(stream: bool) -> None:
    class Full(FakeOmni):
        async def _admit(self, request: Request) -> None:
            raise QueueFullError("full")

    response = ask(user("a"), omni=Full(), stream=stream)
    assert error_of(response, 429)["code"] == "queue_full"
    assert "retry-after" in response.headers


def test_an_error_later_is_the_last_event() -> None:
    omni = FakeOmni()
    omni.fails_with = GenerationError("no")
    first, last = events_of(ask(user("a"), omni=omni, stream=True))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["error"]["code"] == "generation_failed"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PARTS = st.one_of(PLAIN, st.just(text("a")), st.fixed_dictionaries({"type": st.just("image_url"), "image_url": PLAIN}))
MESSAGES = st.one_of(
    PLAIN,
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", 1]), "content": PLAIN | st.lists(PARTS)},
        optional={"name": PLAIN, "images": PLAIN | st.lists(PARTS)},
    ),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(PLAIN | st.lists(MESSAGES, max_size=4), st.booleans())
def test_whatever_the_messages_are_it_is_no_server_error(messages: Any, edits: bool) -> None:
    body = json.dumps({"messages": messages}).encode()

    async def send() -> httpx.Response:
        async with client(editor() if edits else FakeOmni()) as http:
            return await http.post(URL, content=body, headers={"content-type": "application/json"})

    assert asyncio.run(send()).status_code in (200, 400)


def test_the_limits_of_media_hold() -> None:
    body = {"messages": [user(text("a"), picture(data_url(32)))]}
    response = post(body, editor(), max_input_image_size=100)
    assert "allowed are 100" in error_of(response)["message"]
