"""The routes below /v1/images/: OpenAI's requests in, pictures out.

The routes alone: what a body means stands in `image_request` and `image_inputs`, what an answer holds in
`image_answer`. Whether the model can do what is asked is checked behind them.
"""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from polymux.errors import InvalidRequestError
from polymux.server.body import parse
from polymux.server.errors import responses
from polymux.server.files import url_of
from polymux.server.forms import MEDIA_TYPE, is_form, parse_form
from polymux.server.generation import connected, generate
from polymux.server.image_answer import Encoding, by_url, encoded, inline
from polymux.server.image_inputs import (
    Sources,
    check_no_picture_needed,
    check_sources,
    client_words,
    load,
    output_size,
    prompt_of,
    sized,
)
from polymux.server.image_request import (
    ImageJob,
    Streaming,
    Words,
    admit,
    asked_size,
    refusals_counted,
    sampling_params,
)
from polymux.server.image_stream import image_events
from polymux.server.protocol import (
    ImageEditFields,
    ImageEditRequest,
    ImageGenerationRequest,
    ImagesResponse,
    ImageVariationFields,
)
from polymux.server.schemas import schema_of
from polymux.server.sse import STREAMED, stream
from polymux.server.state import ServerState

_ERRORS = responses(400, 404, 413, 429, 500, 503)
_UPLOAD = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}


def _json(model: type[BaseModel]) -> dict[str, object]:
    return {"application/json": {"schema": schema_of(model)}}


def _form(model: type[BaseModel], *uploads: str) -> dict[str, object]:
    schema = schema_of(model)
    schema["properties"] = dict.fromkeys(uploads, _UPLOAD) | schema["properties"]
    schema["required"] = ["image", *schema.get("required", [])]
    return {MEDIA_TYPE: {"schema": schema}}


def _body(*content: dict[str, object]) -> dict[str, object]:
    return {
        "requestBody": {"content": {key: value for part in content for key, value in part.items()}, "required": True}
    }


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(responses=_ERRORS)

    @router.post(
        "/v1/images/generations",
        response_model=ImagesResponse,
        responses=STREAMED,
        openapi_extra=_body(_json(ImageGenerationRequest)),
    )
    async def create_image(request: Request) -> Response:
        """Pictures from a prompt. Leaving early cancels."""
        with refusals_counted(state):
            body = await parse(request, ImageGenerationRequest)
            capabilities = await admit(state, request, body)
            check_no_picture_needed(capabilities)
            encoding, words = Encoding.of(body, capabilities), Words(body, client_words(capabilities))
            job = ImageJob(
                body.prompt,
                sampling_params(state, body, asked_size(body.size)),
                encoding,
                words,
                body.response_format == "url",
                Streaming.of(body),
            )
        return await respond(state, request, job)

    @router.post(
        "/v1/images/edits",
        response_model=ImagesResponse,
        responses=STREAMED,
        openapi_extra=_body(_form(ImageEditFields, "image", "mask"), _json(ImageEditRequest)),
    )
    async def edit_image(request: Request) -> Response:
        """Pictures from pictures and a prompt, as a form with uploads or as JSON with URLs. Leaving early cancels."""
        with refusals_counted(state):
            job = await edit_job(state, request, *await _edit(request))
        return await respond(state, request, job)

    @router.post(
        "/v1/images/variations",
        response_model=ImagesResponse,
        openapi_extra=_body(_form(ImageVariationFields, "image")),
    )
    async def vary_image(request: Request) -> Response:
        """Pictures like a picture, where the model can do that without a prompt. Leaving early cancels."""
        with refusals_counted(state):
            job = await edit_job(state, request, *await _variation(request))
        return await respond(state, request, job)

    return router


async def _edit(request: Request) -> tuple[ImageEditFields, Sources]:
    if is_form(request):
        fields, files = await parse_form(request, ImageEditFields, ("image", "mask"))
        if len(files["mask"]) > 1:
            raise InvalidRequestError("mask is given more than once", param="mask")
        return fields, Sources(files["image"], next(iter(files["mask"]), None))
    body = await parse(request, ImageEditRequest, or_form=True)
    if body.image is not None and body.images is not None:
        raise InvalidRequestError("images: cannot be combined with image", param="images")
    field = "image" if body.images is None else "images"
    return body, Sources(body.image or body.images or (), body.mask, field)


async def _variation(request: Request) -> tuple[ImageVariationFields, Sources]:
    fields, files = await parse_form(request, ImageVariationFields, ("image",))
    return fields, Sources(files["image"])


async def edit_job(
    state: ServerState, request: Request, body: ImageEditFields | ImageVariationFields, sources: Sources
) -> ImageJob:
    """What to do for a request that brings pictures. Fetches and decodes them. Raises PolymuxError.

    What was uploaded is not needed after that: callers keep no reference to it.
    """
    capabilities = await admit(state, request, body)
    if isinstance(body, ImageVariationFields) and not capabilities.variations:
        raise InvalidRequestError("the model makes no variations of a picture; see /v1/images/edits", param="model")
    streaming = Streaming.of(body) if isinstance(body, ImageEditFields) else None
    check_sources(sources, capabilities)
    encoding, words = Encoding.of(body, capabilities), Words(body, client_words(capabilities, sources.field))
    loading = load(state.media, sources, capabilities, state.config.media.max_input_image_size)
    pictures = await connected(request, loading)
    try:
        size = output_size(body.size, pictures.pictures[0], capabilities)
        pictures, size = await asyncio.to_thread(sized, pictures, size, capabilities, state.omni.config.limits)
    except InvalidRequestError as error:
        raise words.of(error) from None
    params = sampling_params(state, body, size, strength=body.strength)
    text = body.prompt if isinstance(body, ImageEditFields) else ""
    prompt = prompt_of(text, pictures, capabilities)
    return ImageJob(prompt, params, encoding, words, body.response_format == "url", streaming)


async def respond(state: ServerState, request: Request, job: ImageJob) -> Response:
    """Generate, and answer when all pictures are there, or piece by piece."""
    if job.streaming is not None:
        return await stream(image_events(state, request, job, job.streaming))
    try:
        output = await generate(state.omni, request, job.prompt, job.params)
    except InvalidRequestError as error:
        raise job.words.of(error) from None
    if job.as_url:
        pictures = await asyncio.to_thread(encoded, output, job.encoding)
        names = state.image_files.add(pictures)
        files = state.config.files
        urls = [url_of(name, request, files.public_url) for name in names]
        content = by_url(pictures, output, urls, int(time.time() + files.image_url_ttl))
    else:
        content = await asyncio.to_thread(lambda: inline(encoded(output, job.encoding), output))
    return Response(content, media_type="application/json")
