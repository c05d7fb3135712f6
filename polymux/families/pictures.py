"""What a family of models of transformers declares that write pictures token by token, and answer conversations too.

As for those that answer (`families.chat`), most of it is data. An adapter is what is left: how a prompt becomes the
arguments of the model's own `generate`, and how what that has written becomes a picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from polymux.errors import InvalidRequestError
from polymux.families.chat import ChatAdapter, ChatFamily, Question, templated
from polymux.families.generate import Parts
from polymux.media.image import flat
from polymux.request import Modality, SamplingParams

DRAWN = ("do_sample", "temperature", "top_k", "top_p")  # how the tokens of a picture are chosen, in extra_args
MOST_GUIDANCE = 100


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """How large a checkpoint's pictures are. `multiple`: of width and height; None: there is one size only."""

    width: int
    height: int
    multiple: int | None = None


@dataclass(frozen=True, kw_only=True)
class PictureWish:
    """One picture. None leaves a value to the checkpoint."""

    prompt: str
    width: int
    height: int
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    drawing: Mapping[str, Any] = field(default_factory=dict)  # of DRAWN

    @property
    def drawn(self) -> dict[str, Any]:
        """How tokens are chosen, as arguments of `generate`: by chance, unless the request says otherwise. The
        likeliest ones make no picture to speak of, and one for all seeds."""
        return {"do_sample": True} | dict(self.drawing)


@dataclass(frozen=True, kw_only=True)
class PictureCall:
    """What a model is called with. `steps`: the calls of its language model until the picture is there; `rows`,
    `columns`: of the tokens that are the picture."""

    arguments: dict[str, Any]
    steps: int
    rows: int
    columns: int
    prompt_tokens: int


class PictureAdapter(ChatAdapter):
    """Between a request and a model of one family. Without state; `parts` are a session's own in `draw`."""

    def tokenizer(self, parts: Parts) -> Any:
        return parts.processor.tokenizer

    def context(self, parts: Parts) -> int | None:
        return int(parts.model.config.text_config.max_position_embeddings)

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        return self.context(parts)

    def canvas(self, parts: Parts) -> Canvas:
        raise NotImplementedError

    def smallest(self, parts: Parts) -> tuple[int, int]:
        """Width and height of a picture that is made only to see that it works."""
        canvas = self.canvas(parts)
        side = None if canvas.multiple is None else 4 * canvas.multiple
        return (canvas.width, canvas.height) if side is None else (side, side)

    def answers(self, parts: Parts) -> bool:
        """Whether the checkpoint says how a conversation is written."""
        return getattr(parts.processor, "chat_template", None) is not None

    def plan(self, parts: Parts, wish: PictureWish) -> PictureCall:
        """The arguments, before any work is done. Raises InvalidRequestError. For a thread beside the engine's."""
        raise NotImplementedError

    def draw(self, parts: Parts, call: PictureCall) -> Any:
        """Call the model; the picture as a tensor (height, width, channels), 0 to 1."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PictureFamily(ChatFamily):
    """One family of models. What `arguments` says is of its answers.

    picture_arguments: what its pictures can be told beside prompt, seed and number; with height and width if it makes
        several sizes.
    pictures_merged: what `decoders_merged` says is true of pictures, too.
    warmup: of its answers.
    """

    adapter: PictureAdapter
    modality: Modality = "image"
    pictures_merged: bool = False
    picture_arguments: tuple[str, ...] = ("guidance_scale",)
    warmup: SamplingParams = SamplingParams(seed=0, max_new_tokens=2)


def check_guidance(scale: float | None, low: float, why: str) -> None:
    """Raises InvalidRequestError unless a scale is one that the model can draw with."""
    if scale is not None and not low <= scale <= MOST_GUIDANCE:
        what = f"must be a number from {low:g} to {MOST_GUIDANCE}: {why}"
        raise InvalidRequestError(f"guidance_scale={scale}: {what}", param="guidance_scale")


def pixels_of(made: Any, processor: Any) -> Any:
    """What an autoencoder has decoded (channels, height, width), without the statistics that the pictures were
    brought to for it: (height, width, channels), 0 to 1."""
    made = made.float()
    mean, std = (made.new_tensor(values)[:, None, None] for values in (processor.image_mean, processor.image_std))
    return (made * std + mean).clamp(0, 1).permute(1, 2, 0)


def conversed(parts: Parts, question: Question, **settings: Any) -> Any:
    """A conversation as the processor reads it. Raises InvalidRequestError if the template refuses it."""
    pictures = [flat(picture).convert("RGB") for picture in question.pictures]
    try:
        text = parts.processor.apply_chat_template(parted(question), add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise InvalidRequestError(f"messages: the model's template refuses them: {error}", param="messages") from None
    return parts.processor(text=text, images=pictures or None, return_tensors="pt", **settings)


def parted(question: Question) -> list[dict[str, Any]]:
    """For templates that know lists of parts alone."""
    return [
        one | {"content": [{"type": "text", "text": one["content"]}]} if isinstance(one["content"], str) else one
        for one in templated(question.messages)
    ]


def check_room(prompt_tokens: int, tokens: int, context: int | None, param: str = "prompt") -> None:
    """Raises InvalidRequestError unless a prompt and a picture fit into what the model can look at."""
    if context is not None and prompt_tokens + tokens > context:
        what = f"has {prompt_tokens} tokens, and with the {tokens} of the picture there are more than {context}"
        raise InvalidRequestError(f"{param}: the prompt {what}", param=param)
