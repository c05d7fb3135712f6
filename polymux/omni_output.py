"""What a generation gives to Python: pictures as PIL, video and sound as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from polymux.errors import PolymuxError
from polymux.media.wire import Array, from_wire
from polymux.profile import Profile
from polymux.request import (
    Finished,
    FinishReason,
    Modality,
    OutputChunk,
    Preview,
    Request,
    RequestMetrics,
    Segment,
    SoundPiece,
)


@dataclass(kw_only=True)
class OmniRequestOutput:
    """The answer to one prompt. Lists have one entry per output (layered models: per layer), in order.

    `images`: PIL, or float arrays (height, width, channels) in 0..1 with output_type="np". `videos`: uint8 arrays
    (frames, height, width, 3), floats in 0..1 with "np". `audio`: float arrays (channels, samples). `text`: of models
    that write, and `finish_reason` says how it ended: "stop", or "length" for want of room. `segments` and `language`:
    of a transcript. `latents`: arrays, with "latent", in place of the others. `seeds` gives each output again; None
    where no single seed made it. `profile` says where the time went, if that was asked for. `error` is set in place of
    all output if the request failed.
    """

    request_id: str
    prompt: str | None
    modality: Modality | None = None
    images: list[Image.Image | Array] = field(default_factory=list)
    videos: list[Array] = field(default_factory=list)
    audio: list[Array] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish_reason: list[FinishReason] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    language: str | None = None
    latents: list[Array] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)
    fps: float | None = None
    sample_rate: int | None = None
    metrics: RequestMetrics = RequestMetrics()
    profile: Profile | None = None
    error: PolymuxError | None = None


@dataclass(kw_only=True)
class OmniPreview:
    """What the model expects an output to become, as of one of its steps. `index` says which output of the request."""

    request_id: str
    index: int
    step: int
    images: list[Image.Image]


def preview_of(preview: Preview) -> OmniPreview:
    images = [image for medium in preview.media if isinstance(image := from_wire(medium), Image.Image)]
    return OmniPreview(request_id=preview.request_id, index=preview.index, step=preview.step, images=images)


class ChunkCollector:
    """Puts arrays together that come in chunks. Each is allocated once, and is complete when the last one is in."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, int], Array] = {}  # by output and medium
        self._sound: list[Array] = []

    def add_sound(self, piece: SoundPiece) -> None:
        """Pieces of sound come without gaps, and make one array."""
        self._sound.append(samples_of(piece))

    def add(self, chunk: OutputChunk) -> None:
        rows = rows_of(chunk)
        key = (chunk.output, chunk.medium)
        if key not in self._arrays:
            self._arrays[key] = np.empty(chunk.shape, rows.dtype)
        self._arrays[key][chunk.start : chunk.start + len(rows)] = rows

    def media_of(self, output: int) -> list[Array]:
        """The arrays of one output, in order."""
        sound = [np.concatenate(self._sound, axis=1)] if self._sound and output == 0 else []
        return [*(self._arrays[key] for key in sorted(self._arrays) if key[0] == output), *sound]


def rows_of(chunk: OutputChunk) -> Array:
    """The rows as an array, which is not to be written to: it has no memory of its own."""
    return np.frombuffer(chunk.rows.data, chunk.rows.dtype).reshape(chunk.rows.shape)


def samples_of(piece: SoundPiece) -> Array:
    """The samples (channels, samples), which are not to be written to: they have no memory of their own."""
    return np.frombuffer(piece.samples.data, piece.samples.dtype).reshape(piece.samples.shape)


def output_of(request: Request, finished: Finished, chunks: ChunkCollector | None = None) -> OmniRequestOutput:
    """Sort what a stage sent by what it is."""
    output = OmniRequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        modality=finished.modality,
        seeds=list(finished.seeds),
        fps=finished.fps,
        sample_rate=finished.sample_rate,
        metrics=finished.metrics,
        profile=finished.profile,
    )
    if finished.text is not None and finished.finish_reason is not None:
        output.text, output.finish_reason = [finished.text], [finished.finish_reason]
        output.segments, output.language = list(finished.segments), finished.language
    for index, media in enumerate(finished.outputs):
        values = [from_wire(item) for item in media]
        if chunks is not None:
            values += chunks.media_of(index)
        if request.params.output_type == "latent":
            output.latents += [np.asarray(value) for value in values]
        elif finished.modality == "image":
            output.images += values
        elif finished.modality == "video":
            _add_video(output, values)
        else:
            output.audio += [np.asarray(value) for value in values]
    return output


def _add_video(output: OmniRequestOutput, values: list[Image.Image | Array]) -> None:
    """One video: an array of frames or a list of pictures, and its sound if it has one."""
    frames = [np.asarray(value) for value in values if isinstance(value, Image.Image)]
    if frames:
        output.videos.append(np.stack(frames))
    for value in values:
        if isinstance(value, np.ndarray):
            (output.videos if value.ndim == 4 else output.audio).append(value)
