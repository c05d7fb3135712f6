"""The generation that a stage makes before it reports ready: small, but through everything a request goes through."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from PIL import Image

from polymux.engine.base import StageEngine
from polymux.errors import PolymuxError, from_info
from polymux.families.base import Family
from polymux.media.wire import to_wire
from polymux.parcel import Chunk
from polymux.request import Capabilities, Failed, Media, OmniDiffusionSamplingParams, OutputChunk, Request, SoundPiece

if TYPE_CHECKING:
    from polymux.diffusion.pipeline_call import CallShape  # diffusers, which not every engine needs

log = logging.getLogger(__name__)

SIDE = 256  # pixels; large enough for every size rule met so far
STEPS = 2


def warmup_requests(capabilities: Capabilities, family: Family, shape: CallShape) -> list[Request]:
    """What to try until one succeeds. Of a pipeline that no family declares nobody knows which media it needs."""
    needed = _needed_media(capabilities, family)
    every = list(capabilities.media)
    choices = [needed] if family.pipelines or needed == every else [every, needed]
    return [_request(capabilities, family, shape, media) for media in choices]


def _request(capabilities: Capabilities, family: Family, shape: CallShape, media: list[str]) -> Request:
    """A request with every argument that the pipeline cannot do without, and the family's own warm-up values."""
    side = -(-SIDE // capabilities.size_multiple) * capabilities.size_multiple
    values: dict[str, object] = {}
    if shape.takes("num_inference_steps"):
        values["num_inference_steps"] = STEPS
    if shape.takes("height") and shape.takes("width"):
        values |= {"height": side, "width": side}
    if shape.takes("num_frames"):
        values["num_frames"] = capabilities.frames_multiple + 1
    extra: dict[str, object] = {}
    for name, value in family.warmup:
        target = values if name in OmniDiffusionSamplingParams.__dataclass_fields__ else extra
        target[name] = value
    return Request(
        request_id="warm-up",
        prompt="a photo of a cat" if shape.takes("prompt") else None,
        media={name: [_medium(name, side, capabilities.sample_rate)] for name in media},
        params=OmniDiffusionSamplingParams(**values, seed=0, extra_args=extra),  # type: ignore[arg-type]
    )


def _needed_media(capabilities: Capabilities, family: Family) -> list[str]:
    declared = {name for name, _ in family.media}
    return [n for n in capabilities.media if n in declared or n in capabilities.required]


def _medium(name: str, side: int, sample_rate: int | None) -> Media:
    if name == "video":
        return to_wire(np.zeros((5, side, side, 3), dtype=np.uint8))
    if "audio" in name:
        return to_wire(np.zeros((2, 4096), dtype=np.float32), sample_rate=sample_rate)
    mode = "L" if "mask" in name else "RGB"
    return to_wire(
        Image.fromarray(np.full((side, side) if mode == "L" else (side, side, 3), 127, dtype=np.uint8), mode)
    )


def run_first_that_works(engine: StageEngine, requests: Sequence[Request]) -> Request:
    """Run the requests one after the other, until one does not fail: that one. Raises what the first one raised."""
    problems = []
    for request in requests:
        try:
            _run(engine, request)
            return request
        except PolymuxError as problem:
            problems.append(problem)
    raise problems[0]


def run_merged(engine: StageEngine, request: Request) -> None:
    """Run two at once, with one prompt and then with two of different lengths, so that code for merged calls and for
    their masks is compiled before anybody waits for it. What fails is only logged: it works alone."""
    for prompt in dict.fromkeys([request.prompt, request.prompt and f"{request.prompt} at sea"]):
        other = msgspec.structs.replace(request, request_id="warm-up 2", prompt=prompt)
        try:
            _run(engine, request, other)
        except PolymuxError as problem:
            log.warning("two warm-up generations at once failed: %s", problem)


def _run(engine: StageEngine, *requests: Request) -> None:
    problems = []
    for request in requests:
        engine.add(request)
    while engine.busy:
        for event in engine.step():
            if isinstance(event, Failed):
                problems.append(from_info(event.error))
            if isinstance(event, (OutputChunk, SoundPiece, Chunk)):
                engine.taken(event.request_id)
    if problems:
        raise problems[0]
