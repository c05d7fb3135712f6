"""Video, sound and pictures that a request brings or names, for the arguments that the loaded pipeline has for them.

Knows which kind of file an argument takes, by its name; routes know how their clients call it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from polymux.config import LimitsConfig
from polymux.errors import InvalidRequestError
from polymux.media.audio import Sound, resample
from polymux.media.decode import MediaLimits, decode_audio, decode_video
from polymux.media.wire import Array
from polymux.prompts import Medium
from polymux.request import Capabilities
from polymux.server.state import ServerState

MAX_MEDIA_SECONDS = 3600.0  # of one input; what it may take in memory is limited beside it


async def load(
    state: ServerState, field: str, argument: str, sources: Sequence[str | bytes], capabilities: Capabilities
) -> list[Medium]:
    """Fetch and decode, for `argument` of the pipeline. Raises InvalidRequestError, with the client's `field`."""
    if argument not in capabilities.media:
        raise not_taken(field, argument, capabilities)
    if len(sources) > capabilities.media[argument]:
        allowed = f"the model takes {capabilities.media[argument]}"
        raise InvalidRequestError(f"{field}: {len(sources)} are given, {allowed}", param=field)
    return [await _load_one(state, field, argument, source, capabilities) for source in sources]


def not_taken(field: str, argument: str, capabilities: Capabilities) -> InvalidRequestError:
    """For a medium that the pipeline, or this checkpoint, has no use for."""
    if argument in capabilities.refused:
        return InvalidRequestError(f"{field}: {capabilities.refused[argument]}", param=field)
    takes = f"it takes {', '.join(capabilities.media)}" if capabilities.media else "it works from text alone"
    return InvalidRequestError(f"{field}: the model takes none; {takes}", param=field)


async def _load_one(
    state: ServerState, field: str, name: str, source: str | bytes, capabilities: Capabilities
) -> Medium:
    limit = state.config.media.max_media_bytes
    data = await state.media.fetch(source, param=field, max_bytes=limit) if isinstance(source, str) else source
    if "video" in name or "audio" in name or ("mask" in name and _is_video(data)):
        limits = _limits(state.omni.config.limits, limit)
        medium = await asyncio.to_thread(_decoded, data, "audio" in name, limits, field, capabilities)
        state.media.held.add_array(medium[0] if isinstance(medium, tuple) else medium)
        return medium
    return await state.media.image(data, param=field)


def _decoded(
    data: bytes, sound: bool, limits: MediaLimits, param: str, capabilities: Capabilities
) -> Array | tuple[Array, int]:
    """In a thread."""
    if not sound:
        return decode_video(data, limits, param=param).frames
    heard = decode_audio(data, limits, param=param)
    rate = capabilities.sample_rate
    if rate is not None and heard.sample_rate != rate:
        return resample(Sound(*heard), rate), rate
    return heard.samples, heard.sample_rate


def _limits(limits: LimitsConfig, file_bytes: int) -> MediaLimits:
    return MediaLimits(
        file_bytes=file_bytes,
        pixels=limits.max_generated_image_size,
        frames=limits.max_num_frames,
        seconds=MAX_MEDIA_SECONDS,
    )


def _is_video(data: bytes) -> bool:
    """Whether a file that may be a picture is a video: MP4, WebM or AVI."""
    return data[4:8] == b"ftyp" or data[:4] == b"\x1aE\xdf\xa3" or data[8:12] == b"AVI "
