"""The pictures that come with a request: into which of the pipeline's arguments they go, and what becomes of them.

Knows what pipelines call their arguments, through the capabilities of the loaded one; knows no particular pipeline, and
not how a picture is fetched or decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL import Image, ImageOps

from polymux.config import LimitsConfig
from polymux.errors import InvalidRequestError
from polymux.media.image import flat
from polymux.media.source import MediaLoader
from polymux.prompts import OmniPrompt
from polymux.request import Capabilities, OmniDiffusionSamplingParams
from polymux.server.image_request import asked_size
from polymux.validation import check_size

PICTURES = ("image", "images", "input_images", "reference_images")  # what pipelines call them; the first that there is
MASKS = ("mask_image", "mask")


@dataclass(frozen=True)
class Sources:
    """What a client sent: uploads, or URLs. `field` is where its pictures were, for errors."""

    pictures: Sequence[str | bytes]
    mask: str | bytes | None = None
    field: str = "image"


@dataclass(frozen=True)
class Pictures:
    """What the pipeline gets: pictures, upright, and a mask that is white where the picture is to change."""

    pictures: Sequence[Image.Image]
    mask: Image.Image | None = None


def picture_argument(capabilities: Capabilities) -> str | None:
    """The pipeline's argument that takes a client's pictures, if there is one."""
    return next((name for name in PICTURES if name in capabilities.media), None)


def mask_argument(capabilities: Capabilities) -> str | None:
    """The pipeline's argument that takes a mask, if there is one."""
    return next((name for name in MASKS if name in capabilities.media), None)


def client_words(capabilities: Capabilities, field: str = "image") -> dict[str, str]:
    """What the client calls the pipeline's media arguments, for `image_request.Words`."""
    names = {picture_argument(capabilities): field, mask_argument(capabilities): "mask"}
    return {name: word for name, word in names.items() if name is not None}


def check_no_picture_needed(capabilities: Capabilities) -> None:
    """Raises InvalidRequestError if the model does nothing without a picture."""
    if picture_argument(capabilities) in capabilities.required:
        raise InvalidRequestError("image is missing: the model edits pictures; see /v1/images/edits", param="image")


def check_sources(sources: Sources, capabilities: Capabilities) -> None:
    """Raises InvalidRequestError if the model does not take what was sent. Before anything is fetched or decoded."""
    name, count = picture_argument(capabilities), len(sources.pictures)
    if name is None:
        others = ", ".join(capabilities.media)
        why = (
            f"the model takes none to start from, only {others}"
            if others
            else "the model makes pictures from text alone"
        )
        raise InvalidRequestError(f"{sources.field}: {why}", param=sources.field)
    if count == 0:
        raise InvalidRequestError(f"{sources.field} is missing: a picture to start from", param=sources.field)
    if count > capabilities.media[name]:
        allowed = f"the model takes {capabilities.media[name]}"
        raise InvalidRequestError(f"{sources.field}: {count} pictures are given, {allowed}", param=sources.field)
    if sources.mask is not None and mask_argument(capabilities) is None:
        raise InvalidRequestError("mask: the model takes none", param="mask")


async def load(media: MediaLoader, sources: Sources, capabilities: Capabilities, max_pixels: int) -> Pictures:
    """Fetch and decode. `max_pixels`: of all pictures together. Raises InvalidRequestError, with the client's field."""
    loaded: list[Image.Image] = []
    left = max_pixels
    for i, source in enumerate(sources.pictures):
        param = sources.field if len(sources.pictures) == 1 else f"{sources.field}.{i}"
        picture = await media.image(source, param=param)
        left -= picture.width * picture.height
        if left < 0:
            allowed = f"allowed are {max_pixels} (--max-input-image-size)"
            raise InvalidRequestError(f"{sources.field}: too many pixels in all: {allowed}", param=sources.field)
        loaded.append(picture)
    mask = None if sources.mask is None else await media.image(sources.mask, param="mask")
    prepared = _prepared(Pictures(loaded, mask), capabilities)
    for picture in prepared.pictures:  # without alpha they are others than those that were loaded
        media.held.add(picture)
    return prepared


def _prepared(given: Pictures, capabilities: Capabilities) -> Pictures:
    """With a mask where the model needs one, and with alpha only where the model knows it."""
    first, mask = given.pictures[0], given.mask
    if mask is not None:
        if mask.size != first.size:
            sizes = f"{mask.width}x{mask.height}, and the picture {first.width}x{first.height}"
            raise InvalidRequestError(f"mask: has {sizes}: must be as large", param="mask")
        mask = _transparent(mask) or mask.convert("L")
    elif mask_argument(capabilities) in capabilities.required:
        mask = _transparent(first)
        if mask is None:
            why = "the model needs one, or transparent parts in the picture"
            raise InvalidRequestError(f"mask is missing: {why}", param="mask")
    if capabilities.alpha:
        return replace(given, mask=mask)
    return Pictures([flat(picture) for picture in given.pictures], mask)


def _transparent(picture: Image.Image) -> Image.Image | None:
    """Where a picture is transparent, in white; None if it is nowhere. That is how OpenAI's masks say it."""
    if picture.mode != "RGBA":
        return None
    alpha = picture.getchannel("A")
    return None if alpha.getextrema() == (255, 255) else ImageOps.invert(alpha)


def output_size(size: str | None, picture: Image.Image, capabilities: Capabilities) -> tuple[int, int] | None:
    """Width and height to ask for: those of `size`, or with "auto" or none the picture's, rounded down to what the
    model makes. None if the model decides by itself."""
    asked = asked_size(size)
    if asked is not None:
        return asked
    if not capabilities.picture_sized and not {"height", "width"} <= {*capabilities.arguments}:
        return None
    step = capabilities.size_multiple
    return max(picture.width // step, 1) * step, max(picture.height // step, 1) * step


def sized(
    given: Pictures, size: tuple[int, int] | None, capabilities: Capabilities, limits: LimitsConfig
) -> tuple[Pictures, tuple[int, int] | None]:
    """The pictures and the size for the pipeline's call. Where the picture decides, it is brought to the size, and cut
    at two sides if the proportions differ. Raises InvalidRequestError."""
    if size is None or not capabilities.picture_sized:
        return given, size
    check_size(OmniDiffusionSamplingParams(width=size[0], height=size[1]), capabilities, limits)
    mask = None if given.mask is None else ImageOps.fit(given.mask, size, Image.Resampling.NEAREST)
    fitted = [p if p.size == size else ImageOps.fit(p, size, Image.Resampling.LANCZOS) for p in given.pictures]
    return Pictures(fitted, mask), None


def prompt_of(text: str | None, given: Pictures, capabilities: Capabilities) -> OmniPrompt:
    """The prompt, with the media under the names of the pipeline's arguments. A prompt that must name its pictures, and
    names none, begins with all of them."""
    media: dict[str, Sequence[Image.Image]] = {}
    if given.pictures:
        name = picture_argument(capabilities)
        assert name is not None  # check_sources has looked
        media[name] = list(given.pictures)
    if given.mask is not None:
        name = mask_argument(capabilities)
        assert name is not None
        media[name] = [given.mask]
    prompt: OmniPrompt = {"multi_modal_data": {**media}}
    if text is not None:
        prompt["prompt"] = _marked(text, len(given.pictures), capabilities.picture_mark)
    return prompt


def _marked(text: str, pictures: int, mark: str | None) -> str:
    """The text with the pictures named in it, where that is needed and the client has named none."""
    if mark is None or mark.format(1) in text:
        return text
    return " ".join([*(mark.format(i + 1) for i in range(pictures)), text])
