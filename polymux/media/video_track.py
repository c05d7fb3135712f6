"""The track of pictures in a video file: from RGB frames to what the encoder of each format takes.

Knows the encoders, their pixel formats and options; what a caller may ask for is `polymux.media.video`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import av
import numpy as np
from av.container import OutputContainer
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation, VideoReformatter
from av.video.stream import VideoStream

VideoFormat = Literal["mp4", "webm", "gif", "webp"]
Frame = np.ndarray[Any, np.dtype[np.uint8]]  # (height, width, 3), RGB

THREADS = max(1, min(4, os.cpu_count() or 1))  # of one encoder


@dataclass(frozen=True)
class Encoder:
    """An encoder and how it is asked. `quality`: its option for constant quality, and what we give by default."""

    codec: Any  # one of the names that av knows
    pixels: str
    options: dict[str, str] = field(default_factory=dict)
    quality: tuple[str, int] | None = None

    @property
    def halves_colour(self) -> bool:
        """Whether it takes one colour for four pixels, in BT.709."""
        return self.pixels == "yuv420p"


ENCODERS: dict[VideoFormat, Encoder] = {
    "mp4": Encoder("libx264", "yuv420p", {"preset": "medium"}, ("crf", 18)),
    "webm": Encoder("libvpx-vp9", "yuv420p", {"b": "0", "row-mt": "1", "cpu-used": "4"}, ("crf", 24)),
    "gif": Encoder("gif", "pal8"),
    "webp": Encoder("libwebp_anim", "bgra", {"loop": "0"}, ("quality", 90)),
}
LOSSLESS: dict[VideoFormat, Encoder] = {
    "mp4": Encoder("libx264rgb", "bgr0", {"preset": "medium", "qp": "0"}),
    "webm": Encoder("libvpx-vp9", "gbrp", {"lossless": "1", "row-mt": "1", "cpu-used": "4"}),
    "webp": Encoder("libwebp_anim", "bgra", {"loop": "0", "lossless": "1"}),
}


class VideoTrack:
    """Frames are added one by one and shown for 1/fps seconds each."""

    def __init__(self, container: OutputContainer, encoder: Encoder, size: tuple[int, int], fps: Fraction) -> None:
        """`size`: (width, height) of the frames that will be added."""
        self.frames = 0  # that were added
        self._container, self._encoder, self._time_base = container, encoder, 1 / fps
        # Pixel pairs share their colour: an odd last column or row is doubled.
        self._padding = [(0, n % 2 if encoder.halves_colour else 0) for n in reversed(size)] + [(0, 0)]
        self.width, self.height = size[0] + self._padding[1][1], size[1] + self._padding[0][1]
        self._stream: VideoStream = container.add_stream(encoder.codec, rate=fps, options=encoder.options)
        self._stream.width, self._stream.height = self.width, self.height
        self._stream.pix_fmt = encoder.pixels
        context = self._stream.codec_context
        context.time_base, context.thread_count = self._time_base, THREADS
        if encoder.halves_colour:
            context.color_range, context.colorspace = ColorRange.MPEG, Colorspace.ITU709
            context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        self._palettes = _Palettes(size, self._time_base) if encoder.pixels == "pal8" else None
        self._reformatter = VideoReformatter()

    def add(self, pixels: Frame) -> None:
        if any(after for _, after in self._padding):
            pixels = np.pad(pixels, self._padding, mode="edge")
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
        frame.pts, frame.time_base = self.frames, self._time_base
        self.frames += 1
        for ready in self._converted(frame):
            self._container.mux(self._stream.encode(ready))

    def finish(self) -> None:
        """Write out what the encoder still holds."""
        for ready in self._palettes.rest() if self._palettes is not None else ():
            self._container.mux(self._stream.encode(ready))
        self._container.mux(self._stream.encode(None))

    def _converted(self, frame: av.VideoFrame) -> Iterator[av.VideoFrame]:
        if self._palettes is not None:
            yield from self._palettes.of(frame)
        elif self._encoder.halves_colour:
            yield self._reformatter.reformat(
                frame,
                format=self._encoder.pixels,
                src_color_range=ColorRange.JPEG,
                dst_color_range=ColorRange.MPEG,
                dst_colorspace=Colorspace.ITU709,
                interpolation=Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT,
                threads=1,
            )
        else:
            yield self._reformatter.reformat(frame, format=self._encoder.pixels, threads=1)


class _Palettes:
    """RGB frames to frames of 256 colours, each with the palette that fits it."""

    def __init__(self, size: tuple[int, int], time_base: Fraction) -> None:
        self._graph = graph = av.filter.Graph()
        graph.threads = 1
        pixels = av.VideoFormat("rgb24")
        source = graph.add_buffer(width=size[0], height=size[1], format=pixels, time_base=time_base)
        split, sink = graph.add("split"), graph.add("buffersink")
        generate = graph.add("palettegen", "stats_mode=single:reserve_transparent=0")
        use = graph.add("paletteuse", "new=1:dither=sierra2_4a")
        source.link_to(split)
        split.link_to(generate, 0, 0)
        split.link_to(use, 1, 0)
        generate.link_to(use, 0, 1)
        use.link_to(sink)
        graph.configure()

    def of(self, frame: av.VideoFrame | None) -> Iterator[av.VideoFrame]:
        """What is ready after this frame."""
        self._graph.vpush(frame)
        while True:
            try:
                yield self._graph.vpull()
            except (av.BlockingIOError, av.EOFError):
                return

    def rest(self) -> Iterator[av.VideoFrame]:
        return self.of(None)
