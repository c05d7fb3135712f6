"""POST /v1/chat/completions, for models that answer with text, and maybe with speech.

The half of the route alone: what a conversation asks for stands in `chat_text_request`, how the answer looks in
`chat_text_answer`. Whether the model can do what is asked is checked behind them.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator

from fastapi import Request
from fastapi.responses import Response

from polymux.errors import InvalidRequestError
from polymux.omni import Streamed
from polymux.prompts import OmniPrompt
from polymux.request import Capabilities, SamplingParams
from polymux.server.body import parse
from polymux.server.chat_text_answer import TextChatAnswer
from polymux.server.chat_text_protocol import TextChatRequest
from polymux.server.chat_text_request import TextWords, check_body, params_of, prompt_of
from polymux.server.generation import connected, generate, while_connected
from polymux.server.image_request import refusals_counted
from polymux.server.session import session_of
from polymux.server.sse import stream
from polymux.server.state import ServerState
from polymux.tool_reader import reader_of


async def answer_with_text(state: ServerState, request: Request) -> Response:
    """Leaving early cancels."""
    with refusals_counted(state):
        body = await parse(request, TextChatRequest)
        state.note(request, body.model, body.user)
        capabilities = await state.model()
        capabilities = capabilities.answers or capabilities
        words, params = TextWords(body), params_of(body)
        prompt = await _prompt(state, request, body, capabilities)
    spoken = None
    if body.modalities is not None and "audio" in body.modalities:
        spoken = "wav" if body.audio is None else body.audio.format
    reader = reader_of(capabilities.tool_calls, prompt["tools"].tools) if "tools" in prompt else None
    answer = TextChatAnswer(state.model_names[0], spoken, state.transcripts, reader)
    streaming, options = body.stream, body.stream_options
    del body  # it may hold large media
    if streaming:
        usage = options is not None and bool(options.include_usage)
        return await stream(answer.chunks(_events(state, request, prompt, params), words, usage), done=True)
    try:
        output = await generate(state.omni, request, prompt, params)
    except InvalidRequestError as error:
        raise words.of(error) from None
    return Response(await answer.complete(output), media_type="application/json")


async def _prompt(
    state: ServerState, request: Request, body: TextChatRequest, capabilities: Capabilities
) -> OmniPrompt:
    check_body(body, capabilities)
    return await connected(request, prompt_of(state, body, capabilities))


async def _events(
    state: ServerState, request: Request, prompt: OmniPrompt, params: SamplingParams
) -> AsyncGenerator[Streamed]:
    """Sent, or refused, when the first one is asked for."""
    engine_id = f"{request.state.request_id}-{uuid.uuid4().hex[:8]}"
    source = state.omni.stream(prompt, params, request_id=engine_id, **session_of(request))
    async with contextlib.aclosing(while_connected(request, source)) as events:
        async for event in events:
            yield event
