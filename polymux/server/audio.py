"""POST /v1/audio/generate: text in, and sound where the model takes some; a sound or a piece of music out, as a file.

Translates between the body's words and the sampling parameters, and encodes. Whether the model can do it is checked
behind it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import AliasChoices, Field

from polymux.errors import GenerationError, InvalidRequestError
from polymux.media.audio import MEDIA_TYPES, AudioFormat, clipped, encode_audio
from polymux.omni_output import OmniRequestOutput
from polymux.prompts import OmniPrompt, Params
from polymux.request import Capabilities, OmniDiffusionSamplingParams, SamplingParams
from polymux.server.body import parse
from polymux.server.errors import in_field_of, responses
from polymux.server.generation import generate
from polymux.server.image_request import refusals_counted
from polymux.server.media_inputs import load
from polymux.server.profile_answer import profile_header
from polymux.server.protocol import Adapters, Body, References
from polymux.server.schemas import schema_of
from polymux.server.state import ServerState


class AudioGenerationRequest(Body):
    """POST /v1/audio/generate. A field that is null counts as not given."""

    prompt: str = Field(validation_alias=AliasChoices("prompt", "input"), description="also: input")
    model: str | None = None
    seconds: float | None = Field(
        None,
        validation_alias=AliasChoices("seconds", "audio_length"),
        description="also: audio_length; left out: the model's own",
    )
    response_format: AudioFormat | None = Field(None, description="default wav; pcm: 16 bits, little-endian")
    seed: int | None = Field(None, description="left out: drawn, and told in the header x-seed")
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    sigmas: tuple[float, ...] | None = None
    timesteps: tuple[float, ...] | None = None
    max_sequence_length: int | None = Field(None, description="tokens of the prompt")
    max_new_tokens: int | None = Field(None, description="in place of seconds, for models that write tokens")
    temperature: float | None = Field(None, description="of the tokens that are drawn; 0: none are")
    top_k: int | None = None
    top_p: float | None = None
    media: dict[str, References] | None = Field(None, description="input sound, by the pipeline's argument for it")
    lora: Adapters = None
    extra_args: dict[str, Any] | None = Field(None, description="further arguments of the model's own pipeline")
    user: str | None = Field(None, max_length=256, description="appears in the server's log line")
    profile: bool | None = Field(None, description="tell in the header x-profile where the time went")


_SCHEMA = {"content": {"application/json": {"schema": schema_of(AudioGenerationRequest)}}, "required": True}
FILE: dict[str, Any] = {"description": "The file", "content": {kind: {} for kind in MEDIA_TYPES.values()}}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/audio/generate",
        response_class=Response,
        responses=responses(400, 404, 413, 429, 500, 503) | {200: FILE},
        openapi_extra={"requestBody": _SCHEMA},
    )
    async def create_audio(request: Request) -> Response:
        """A sound from a prompt. Leaving early cancels."""
        with refusals_counted(state):
            body = await parse(request, AudioGenerationRequest)
            state.note(request, body.model, body.user)
            can = await state.model_of("audio")
            params, prompt = _params(state, body, can), await _prompt(state, body, can)
        try:
            output = await generate(state.omni, request, prompt, params)
        except InvalidRequestError as error:
            raise _in_words_of(body, error) from None
        return await asyncio.to_thread(sound_answer, output, body.response_format or "wav")

    return router


_OF_TOKENS = ("max_new_tokens", "temperature", "top_k", "top_p")
_OF_DIFFUSION = (
    "num_inference_steps",
    "negative_prompt",
    "sigmas",
    "timesteps",
    "max_sequence_length",
    "lora",
)


def _params(state: ServerState, body: AudioGenerationRequest, can: Capabilities) -> Params:
    """In the words of the model: of diffusion, or of tokens. Raises InvalidRequestError for those of the other kind."""
    for name in _OF_DIFFUSION if can.samples else _OF_TOKENS:
        value = getattr(body, name)
        if value is not None and value is not False:
            what = "a model that writes tokens" if can.samples else "a diffusion model"
            raise InvalidRequestError(f"{name}: {what} does not take it", param=name)
    if can.samples:
        return SamplingParams(
            seconds=body.seconds,
            seed=body.seed,
            guidance_scale=body.guidance_scale,
            max_new_tokens=body.max_new_tokens,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            profile=bool(body.profile),
            extra_args=body.extra_args or {},
        )
    return OmniDiffusionSamplingParams(
        seconds=body.seconds,
        seed=body.seed,
        num_inference_steps=body.num_inference_steps,
        guidance_scale=body.guidance_scale,
        negative_prompt=body.negative_prompt,
        sigmas=body.sigmas,
        timesteps=body.timesteps,
        max_sequence_length=body.max_sequence_length,
        lora=state.adapters.chosen(body.lora or ()),
        profile=bool(body.profile),
        extra_args=body.extra_args or {},
    )


def sound_answer(output: OmniRequestOutput, format: AudioFormat) -> Response:
    """The file. Runs in a thread: encoding takes as long as many requests take to parse."""
    if not output.audio or output.sample_rate is None:
        raise GenerationError("the model does not say how many samples per second it made")
    samples = output.audio[0]
    channels, length = samples.shape if samples.ndim == 2 else (1, samples.shape[0])
    headers = {
        "x-sample-rate": str(output.sample_rate),
        "x-channels": str(channels),
        "x-duration": f"{length / output.sample_rate:.6f}",
        "x-clipped-samples": str(clipped(samples)),
    }
    if output.seeds[0] is not None:
        headers["x-seed"] = str(output.seeds[0])
    headers |= profile_header(output.profile)
    return Response(encode_audio(samples, output.sample_rate, format), media_type=MEDIA_TYPES[format], headers=headers)


async def _prompt(state: ServerState, body: AudioGenerationRequest, can: Capabilities) -> OmniPrompt:
    media = {
        name: await load(state, f"media.{name}", name, sources, can) for name, sources in (body.media or {}).items()
    }
    return {"prompt": body.prompt, "multi_modal_data": {**media}}


def _in_words_of(body: AudioGenerationRequest, error: InvalidRequestError) -> InvalidRequestError:
    """The same error, about the field that the client sent."""
    for field, names in (("media", body.media), ("extra_args", body.extra_args)):
        if error.param is not None and error.param in (names or {}):
            return type(error)(f"{field}.{error.message}", param=f"{field}.{error.param}")
    return in_field_of(type(body), error)
