"""POST /v1/images/generations: OpenAI's request in, pictures out.

The routes alone: what a body means stands in `image_request`, what an answer holds in `image_answer`. Whether the model
can do it is checked behind them.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from polymux.errors import InvalidRequestError
from polymux.server.body import parse
from polymux.server.errors import responses
from polymux.server.generation import generate
from polymux.server.image_answer import Encoding, answer
from polymux.server.image_request import ImageJob, Words, admit, refusals_counted, sampling_params
from polymux.server.protocol import ImageGenerationRequest, ImagesResponse
from polymux.server.state import ServerState

_SCHEMA = {"content": {"application/json": {"schema": ImageGenerationRequest.model_json_schema()}}, "required": True}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/images/generations",
        response_model=ImagesResponse,
        responses=responses(400, 404, 413, 429, 500, 503),
        openapi_extra={"requestBody": _SCHEMA},
    )
    async def create_image(request: Request) -> Response:
        """Pictures from a prompt. Leaving early cancels."""
        with refusals_counted(state):
            body = await parse(request, ImageGenerationRequest)
            await admit(state, request, body)
            job = ImageJob(body.prompt, sampling_params(body), Encoding.of(body), Words(body))
        return await respond(state, request, job)

    return router


async def respond(state: ServerState, request: Request, job: ImageJob) -> Response:
    """Generate, and answer when all pictures are there."""
    try:
        output = await generate(state.omni, request, job.prompt, job.params)
    except InvalidRequestError as error:
        raise job.words.of(error) from None
    content = await asyncio.to_thread(answer, output, job.encoding)
    return Response(content, media_type="application/json")
