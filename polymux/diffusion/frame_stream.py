"""Frames that leave while they are decoded, so that a long video never exists as floats.

Some autoencoders decode a video in a loop over its latent frames, each from what a cache holds of those before it. Run
inside the session, that loop needs nothing but calls of the autoencoder's decoder, which the engine runs like any
others; and what each one returns can leave at once. So the code that decodes is the autoencoder's own, with two changes
on a copy of it: the decoder's frames are handed on, and the loop collects stand-ins of no size in place of them. The
same code, with a single latent frame and the decoder's answer known, makes of that answer what it would have made of it
as a part of all. The copy also keeps the cache to the session.

Which families' frames may leave like this is declared by them. Knows neither requests nor where frames go.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch

from polymux.diffusion.call import Tap
from polymux.errors import GenerationError


class FrameSink(Protocol):
    """Takes the frames of one video, in order."""

    def put(self, frames: torch.Tensor, start: int, count: int) -> None:
        """(frames, 3, height, width), values of 0 to 1: those from `start` on, of `count`."""
        ...


class FrameTap(Tap):
    """Of a session whose frames may leave while they are decoded: they do if they are more than `least` bytes."""

    def __init__(self, frames_multiple: int, least: int, begin: Callable[[], FrameSink]) -> None:
        self._frames_multiple, self._least, self._begin = frames_multiple, least, begin
        self._sink: FrameSink | None = None
        self._sent = 0

    def attach(self, pipeline: Any) -> None:
        # Not the pipeline itself: it would be held by its own part, in a circle with all that its scheduler keeps.
        vae, processor, scale = pipeline.vae, pipeline.video_processor, pipeline.vae_scale_factor_spatial
        whole = vae.decode
        own = copy.copy(vae)

        def decode(z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            count = (z.shape[2] - 1) * self._frames_multiple + 1
            small = count * 3 * z.shape[3] * z.shape[4] * scale**2 <= self._least
            if small or vae.use_tiling or len(z) != 1:
                return whole(z, *args, **kwargs)
            self._sink = self._begin()
            result = type(vae).decode(self._looping(vae, processor, z, count), z, *args, **kwargs)
            if self._sent != count:
                raise GenerationError(f"{self._sent} frames were decoded, and not {count}")
            return result

        own.__dict__["decode"] = decode
        pipeline.__dict__["vae"] = own

    def _looping(self, vae: Any, processor: Any, z: torch.Tensor, count: int) -> Any:
        """An autoencoder whose decoder hands its frames on, and returns them without height and width."""

        def decoder(*args: Any, **kwargs: Any) -> Any:
            made = vae.decoder(*args, **kwargs)
            frames = made[0] if isinstance(made, tuple) else made
            self._send(processor.postprocess_video(_finished(vae, z, made), output_type="pt")[0], count)
            nothing = frames[..., :0, :0]
            return (nothing, *made[1:]) if isinstance(made, tuple) else nothing

        return _with_decoder(vae, decoder)

    def _send(self, frames: torch.Tensor, count: int) -> None:
        assert self._sink is not None
        self._sink.put(frames, self._sent, count)
        self._sent += len(frames)


def _finished(vae: Any, z: torch.Tensor, made: Any) -> torch.Tensor:
    """What the autoencoder makes of what its decoder made."""
    result: torch.Tensor = type(vae).decode(_with_decoder(vae, lambda *_, **__: made), z[:, :, :1])[0]
    return result


def _with_decoder(vae: Any, decoder: Callable[..., Any]) -> Any:
    """A copy with the same weights, and what it keeps of its own."""
    own = copy.copy(vae)
    own.__dict__["_modules"] = vae._modules | {"decoder": decoder}
    return own
