"""POST /v1/images/generations: OpenAI's request in, pictures out.

Translates between OpenAI's words (n, size) and the sampling parameters, and encodes. Whether the model can do it is
checked behind it.
"""

from __future__ import annotations

import asyncio
import base64
import time

from fastapi import APIRouter, Request
from fastapi.responses import Response
from PIL import Image

from polymux.errors import InvalidRequestError, PolymuxError
from polymux.media.image import ImageFormat, encode
from polymux.omni_output import OmniRequestOutput
from polymux.request import OmniDiffusionSamplingParams
from polymux.server.body import parse
from polymux.server.errors import responses
from polymux.server.generation import generate
from polymux.server.protocol import GeneratedImage, ImageGenerationRequest, ImagesResponse
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
        try:
            body = await parse(request, ImageGenerationRequest)
            if body.user is not None:
                request.state.user = body.user
            state.check_model(body.model)
            if body.output_compression is not None and body.output_format not in ("jpeg", "webp"):
                raise _png_compression(body)
            _check_makes_images(state)
        except PolymuxError:
            state.omni.metrics.count("refused")  # all that pass here are counted behind it
            raise
        try:
            output = await generate(state.omni, request, body.prompt, _params(body))
        except InvalidRequestError as error:
            raise _in_words_of(body, error) from None
        content = await asyncio.to_thread(_answer, output, body.output_format or "png", body.output_compression)
        return Response(content, media_type="application/json")

    return router


def _params(body: ImageGenerationRequest) -> OmniDiffusionSamplingParams:
    width, height = (None, None) if body.size in (None, "auto") else map(int, body.size.split("x"))
    return OmniDiffusionSamplingParams(
        height=height,
        width=width,
        num_outputs_per_prompt=1 if body.n is None else body.n,
        seed=body.seed,
        num_inference_steps=body.num_inference_steps,
        guidance_scale=body.guidance_scale,
        guidance_scale_2=body.guidance_scale_2,
        true_cfg_scale=body.true_cfg_scale,
        negative_prompt=body.negative_prompt,
        sigmas=body.sigmas,
        timesteps=body.timesteps,
        max_sequence_length=body.max_sequence_length,
        extra_args=body.extra_args or {},
    )


def _answer(output: OmniRequestOutput, format: ImageFormat, quality: int | None) -> bytes:
    """The answer's bytes. Runs in a thread: encoding takes as long as many requests take to parse."""
    images = [image for image in output.images if isinstance(image, Image.Image)]
    seeds = output.seeds if len(output.seeds) == len(images) else [None] * len(images)
    data = [
        GeneratedImage(b64_json=base64.b64encode(encode(image, format, quality)).decode(), seed=seed)
        for image, seed in zip(images, seeds, strict=True)
    ]
    answer = ImagesResponse(
        created=int(time.time()),
        data=data,
        output_format=format,
        size=f"{images[0].width}x{images[0].height}",
        seed=output.seeds[0],
    )
    return answer.model_dump_json().encode()


def _in_words_of(body: ImageGenerationRequest, error: InvalidRequestError) -> InvalidRequestError:
    """The same error, about the field that the client sent."""
    if error.param in ("height", "width", "size"):
        return type(error)(f"size={body.size!r}: {error.message}", param="size")
    if error.param == "num_outputs_per_prompt":
        return type(error)(error.message.replace("num_outputs_per_prompt", "n", 1), param="n")
    return error


def _png_compression(body: ImageGenerationRequest) -> InvalidRequestError:
    why = 'png takes none; set output_format to "jpeg" or "webp"'
    return InvalidRequestError(f"output_compression={body.output_compression}: {why}", param="output_compression")


def _check_makes_images(state: ServerState) -> None:
    capabilities = state.omni.capabilities
    if capabilities is not None and capabilities.modality != "image":
        raise InvalidRequestError(f"the model makes {capabilities.modality}, not pictures", param="model")
