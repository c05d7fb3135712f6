"""A request for a video as it leaves the words of HTTP: what the engine gets, and what the file is to be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from polymux.errors import InvalidRequestError
from polymux.media.video_track import VideoFormat
from polymux.prompts import OmniPrompt
from polymux.request import OmniDiffusionSamplingParams
from polymux.server.errors import in_field_of
from polymux.server.video_protocol import VideoFields
from polymux.spelling import shown


@dataclass(frozen=True, kw_only=True)
class VideoWish:
    """A request for a video, ready for the engine, and what its file is to be."""

    prompt: OmniPrompt
    params: OmniDiffusionSamplingParams
    fps: float
    format: VideoFormat
    seed: int
    words: Words
    width: int | None
    height: int | None
    num_frames: int | None


@dataclass(frozen=True)
class Words:
    """How the client said what the engine calls otherwise."""

    body: VideoFields
    media: Mapping[str, str] = field(default_factory=dict)  # the pipeline's argument -> the client's field

    def of(self, error: InvalidRequestError) -> InvalidRequestError:
        """The same error, about the field that the client sent."""
        body = self.body
        match error.param:
            case "height" | "width" | "size" if body.size is not None:
                return type(error)(f"size={shown(body.size)}: {error.message}", param="size")
            case "num_frames" if body.seconds is not None:
                return type(error)(f"seconds={shown(body.seconds)}: {error.message}", param="seconds")
            case str() as name if name in self.media:
                message = re.sub(rf"^{re.escape(name)}\b", self.media[name], error.message)
                return type(error)(message, param=self.media[name])
            case str() as name if name in (body.extra_args or {}):
                return type(error)(f"extra_args.{error.message}", param=f"extra_args.{name}")
        return in_field_of(type(body), error)
