"""POST /v1/chat/completions. The route, and the half of it that is for models that make pictures.

What a conversation asks for stands in `chat_request`, how the answer looks in `chat_answer`. Whether the model can do
what is asked is checked behind them. The half for models that answer with text is `chat_text`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from polymux.errors import InvalidRequestError
from polymux.request import Capabilities
from polymux.server.body import parse
from polymux.server.chat_answer import ChatAnswer
from polymux.server.chat_fields import StreamOptions
from polymux.server.chat_protocol import ChatCompletion, ChatRequest
from polymux.server.chat_request import FIELD, SYSTEM_ARGUMENT, Asked, asked, check_modalities
from polymux.server.chat_text import answer_with_text
from polymux.server.chat_text_protocol import TextChatRequest, TextCompletion
from polymux.server.errors import responses
from polymux.server.generation import connected, events, generate
from polymux.server.image_answer import Encoding
from polymux.server.image_inputs import (
    Pictures,
    Sources,
    check_sources,
    client_words,
    load,
    output_size,
    prompt_of,
    sized,
)
from polymux.server.image_request import ImageJob, Words, asked_size, refusals_counted, sampling_params
from polymux.server.schemas import schema_of
from polymux.server.sse import STREAMED, stream
from polymux.server.state import ServerState

_BODIES = {"anyOf": [schema_of(TextChatRequest), schema_of(ChatRequest)]}
_SCHEMA = {"content": {"application/json": {"schema": _BODIES}}, "required": True}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        response_model=TextCompletion | ChatCompletion,
        responses=responses(400, 404, 413, 429, 500, 503) | STREAMED,
        openapi_extra={"requestBody": _SCHEMA},
    )
    async def create_chat_completion(request: Request) -> Response:
        """The next message of a conversation: text, and speech where it is asked for; or pictures, of models that make
        those. Leaving early cancels."""
        can = await _capabilities(state)
        if (can.answers or can).chats:
            return await answer_with_text(state, request)
        with refusals_counted(state):
            job, streaming = await _job(state, request)
        answer = ChatAnswer(state.model_names[0], job.encoding)
        if streaming is not None:
            all_events = events(state.omni, request, job.prompt, job.params)
            return await stream(answer.chunks(all_events, job.words, bool(streaming.include_usage)), done=True)
        try:
            output = await generate(state.omni, request, job.prompt, job.params)
        except InvalidRequestError as error:
            raise job.words.of(error) from None
        content = await asyncio.to_thread(answer.complete, output)
        return Response(content, media_type="application/json")

    return router


async def _capabilities(state: ServerState) -> Capabilities:
    """What the model can do. Raises NotReadyError only if that is not known yet."""
    with refusals_counted(state):
        return state.omni.capabilities or await state.model()


async def _job(state: ServerState, request: Request) -> tuple[ImageJob, StreamOptions | None]:
    """What to do, and how to stream if that is asked for. The body, which may hold large pictures, is let go."""
    body = await parse(request, ChatRequest)
    state.note(request, body.model, body.user)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options: only with stream = true", param="stream_options")
    capabilities = await state.model()
    if capabilities.modality != "image":
        what = f"the model neither answers nor makes pictures; it makes {capabilities.modality}"
        raise InvalidRequestError(what, param="model")
    check_modalities(body.modalities, capabilities.modality)
    encoding = Encoding.of(body, capabilities)
    words = Words(body, client_words(capabilities, FIELD) | {"prompt": FIELD})
    question = asked(body, capabilities)
    pictures, size = Pictures(()), asked_size(body.size)
    if question.pictures:
        try:
            pictures, size = await connected(request, _load(state, body, question, capabilities))
        except InvalidRequestError as error:
            raise words.of(question.located(error)) from None
    params = sampling_params(state, body, size, strength=body.strength)
    if question.system is not None:
        params = replace(params, extra_args=params.extra_args | {SYSTEM_ARGUMENT: question.system})
    job = ImageJob(prompt_of(question.text, pictures, capabilities), params, encoding, words)
    return job, (body.stream_options or StreamOptions()) if body.stream else None


async def _load(
    state: ServerState, body: ChatRequest, question: Asked, capabilities: Capabilities
) -> tuple[Pictures, tuple[int, int] | None]:
    """The pictures and the size to ask for."""
    sources = Sources(question.pictures, field=FIELD)
    check_sources(sources, capabilities)
    pictures = await load(state.media, sources, capabilities, state.config.media.max_input_image_size)
    size = output_size(body.size, pictures.pictures[0], capabilities)
    return await asyncio.to_thread(sized, pictures, size, capabilities, state.omni.config.limits)
