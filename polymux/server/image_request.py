"""From the body of a request for pictures to a prompt and sampling parameters, and errors back into its words.

For every route that makes pictures. Knows OpenAI's names (n, size, image) and the engine's; whether the model can do
what is asked is checked behind it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from fastapi import Request

from polymux.errors import InvalidRequestError, PolymuxError, RequestAbortedError
from polymux.prompts import Prompt
from polymux.request import Capabilities, OmniDiffusionSamplingParams
from polymux.server.errors import in_field_of
from polymux.server.image_answer import Encoding
from polymux.server.protocol import ImageEditFields, ImageFields, ImageGenerationRequest, SamplingFields
from polymux.server.state import ServerState

StreamKind = Literal["image_generation", "image_edit"]


class Words:
    """How the client said what the engine calls otherwise. Keeps nothing else of the body, which may be large."""

    def __init__(self, body: SamplingFields, media: Mapping[str, str]) -> None:
        """`media`: the pipeline's argument -> the client's field."""
        self._body = type(body)
        self._size = body.size
        self._extra_args = frozenset(body.extra_args or {})
        self._media = media

    def of(self, error: InvalidRequestError) -> InvalidRequestError:
        """The same error, about the field that the client sent."""
        match error.param:
            case "height" | "width" | "size":
                name = "size, left out" if self._size is None else f"size={self._size!r}"
                return type(error)(f"{name}: {error.message.removeprefix('size: ')}", param="size")
            case "num_outputs_per_prompt":
                return _renamed(error, error.param, "n")
            case str() as name if name in self._media:
                return _renamed(error, name, self._media[name])
            case str() as name if name in self._extra_args:
                return _renamed(error, name, f"extra_args.{name}")
        return in_field_of(self._body, error)


@dataclass(frozen=True)
class Streaming:
    """How the answer comes in pieces."""

    kind: StreamKind
    partial_images: int
    progress: bool

    @classmethod
    def of(cls, body: ImageGenerationRequest | ImageEditFields) -> Self | None:
        """None for an answer in one piece. Raises InvalidRequestError for a choice that would have no effect."""
        if not body.stream:
            for name, value in (("partial_images", body.partial_images), ("stream_progress", body.stream_progress)):
                if value:
                    raise InvalidRequestError(f'{name}={value}: needs "stream": true', param=name)
            return None
        if body.profile:
            raise InvalidRequestError("profile=true: a stream has none; leave stream out", param="profile")
        if body.response_format == "url":
            why = 'a stream holds the pictures themselves; leave it out, or set it to "b64_json"'
            raise InvalidRequestError(f"response_format='url': {why}", param="response_format")
        kind: StreamKind = "image_edit" if isinstance(body, ImageEditFields) else "image_generation"
        return cls(kind, body.partial_images or 0, bool(body.stream_progress))


@dataclass(frozen=True)
class ImageJob:
    """A request for pictures, ready for the engine, with what it takes to answer it."""

    prompt: Prompt
    params: OmniDiffusionSamplingParams
    encoding: Encoding
    words: Words
    as_url: bool = False
    streaming: Streaming | None = None


def asked_size(size: str | None) -> tuple[int, int] | None:
    """Width and height; None if the client leaves them open."""
    if size in (None, "auto"):
        return None
    width, height = size.split("x")
    return int(width), int(height)


def sampling_params(
    state: ServerState, body: SamplingFields, size: tuple[int, int] | None, *, strength: float | None = None
) -> OmniDiffusionSamplingParams:
    """The engine's parameters. `size`: the body's, or what has become of it (`image_inputs.sized`).

    Raises InvalidRequestError for an adapter that clients may not use.
    """
    return OmniDiffusionSamplingParams(
        width=None if size is None else size[0],
        height=None if size is None else size[1],
        num_outputs_per_prompt=1 if body.n is None else body.n,
        seed=body.seed,
        num_inference_steps=body.num_inference_steps,
        guidance_scale=body.guidance_scale,
        guidance_scale_2=body.guidance_scale_2,
        true_cfg_scale=body.true_cfg_scale,
        strength=strength,
        negative_prompt=body.negative_prompt,
        sigmas=body.sigmas,
        timesteps=body.timesteps,
        max_sequence_length=body.max_sequence_length,
        lora=state.adapters.chosen(body.lora or ()),
        profile=isinstance(body, ImageFields) and bool(body.profile),
        extra_args=body.extra_args or {},
    )


@contextlib.contextmanager
def refusals_counted(state: ServerState) -> Iterator[None]:
    """Counts a request that ends inside. All that get further are counted behind the generator."""
    try:
        yield
    except RequestAbortedError:
        state.omni.metrics.count("aborted")
        raise
    except PolymuxError:
        state.omni.metrics.count("refused")
        raise


async def admit(state: ServerState, request: Request, body: ImageFields) -> Capabilities:
    """What the model can do. Raises if it is not this model, not ready, or makes no pictures."""
    state.note(request, body.model, body.user)
    return await state.model_of("image")


def _renamed(error: InvalidRequestError, name: str, word: str) -> InvalidRequestError:
    message = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", lambda _: word, error.message, count=1)
    return type(error)(message, param=word)
