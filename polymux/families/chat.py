"""What a family of models of transformers declares that answer a conversation, with text and maybe with speech.

As for those that only make sound (`families.generate`), most of it is data. An adapter is what is left: how a
conversation becomes the arguments of the model's own `generate`, and what of the result is the sound. Text needs no
adapter: whoever runs the model watches the tokens as they are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.families.generate import Adapter, GenerateFamily, Parts
from polymux.families.tool_templates import with_calls
from polymux.media.audio import Sound
from polymux.media.wire import Array
from polymux.request import Message, Modality, SamplingParams
from polymux.sampling import generation_arguments
from polymux.tools import CallFormat, Tool

Tensors = Mapping[str, Any]  # of torch
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
WRITING = ("do_sample", "temperature", "top_k", "top_p", "min_p", *_PENALTIES, "stop", "max_new_tokens", "json_schema")


@dataclass(frozen=True, kw_only=True)
class Film:
    """Frames (frames, height, width, 3) of uint8; `fps` is None if nobody said."""

    frames: Array
    fps: float | None


@dataclass(frozen=True, kw_only=True)
class Question:
    """A conversation, and how to answer it. The media of each kind are in the order of their parts."""

    messages: Sequence[Message]
    params: SamplingParams
    tools: Sequence[Tool] = ()  # that the model is shown
    bare: bool = False  # it was a prompt, and not a conversation
    pictures: Sequence[Any] = ()  # PIL
    sounds: Sequence[Sound] = ()  # of one channel, at the model's rate
    films: Sequence[Film] = ()
    speaks: bool = False
    voice: str | None = None  # None: it does not speak
    longest_s: float = math.inf  # of its speech


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """What a model is called with. `steps`: the most tokens of text that it writes; `ends`: those that end it."""

    arguments: dict[str, Any]
    prompt_tokens: int
    steps: int
    ends: frozenset[int]
    constraint: Any = None  # what the text must fit as it is written; whoever runs the model knows its type
    speech_steps: int | None = None  # the most of the speech
    contents: Mapping[int, Sequence[bytes]] = field(default_factory=dict)  # digests of media, see `Read`


@dataclass(frozen=True, kw_only=True)
class Read:
    """A prompt with media, read up to the layers of the model that writes: tensors. `inputs` (tokens, size): what the
    first of them is given; `places` (tokens): where that is not the token's embedding. `positions`: (3, tokens).
    `deeper`: (tokens, size) for each of the first layers, added to their outputs at `deep_places` (all tokens).

    `ChatCall.contents` has digests of what the media hold, by the token that stands for one of their kind, in order."""

    inputs: Any
    places: Any
    positions: Any
    deep_places: Any = None
    deeper: Sequence[Any] = ()


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What looks on while text is written, as arguments of `generate`: objects of transformers. `ended` is to be called
    when the text is at its end and something else follows."""

    stopping_criteria: list[Any]
    logits_processor: list[Any] = field(default_factory=list)
    ended: Callable[[], None] = lambda: None

    def named(self, prefix: str = "") -> dict[str, Any]:
        given: dict[str, Any] = {f"{prefix}stopping_criteria": self.stopping_criteria}
        return given | ({f"{prefix}logits_processor": self.logits_processor} if self.logits_processor else {})


class ChatAdapter(Adapter):
    """Between a conversation and a model of one family. Without state; `parts` are a session's own in `answer`."""

    def tokenizer(self, parts: Parts) -> Any:
        raise NotImplementedError

    def check(self, parts: Parts) -> str | None:
        return None if self.tokenizer(parts).is_fast else "its tokenizer is not one of the library tokenizers"

    def voices(self, parts: Parts) -> tuple[str, ...]:
        return ()

    def sample_rate(self, parts: Parts) -> int:
        """Of its speech."""
        return 0

    def makes(self, parts: Parts) -> tuple[Modality, ...]:
        return ("text",)

    def hears_at(self, parts: Parts) -> int | None:
        """Samples per second of the sound that it takes."""
        return None

    def knows(self, parts: Parts, name: str) -> bool:
        """Whether this further argument, one of its family's, means something to this checkpoint."""
        return True

    def takes_tools(self, parts: Parts) -> bool:
        """Whether this checkpoint's template shows tools to the model."""
        return False

    def tool_calls(self, parts: Parts) -> CallFormat | None:
        """How this checkpoint writes calls of tools; None if its template takes none, or in a way that is not known."""
        return None

    def complete(self, model: Any, folder: str) -> None:
        """What belongs to a loaded model beside its weights. Raises what reading it raises."""

    def context(self, parts: Parts) -> int | None:
        """Tokens of a conversation and its answer together, where that is known."""
        raise NotImplementedError

    def ask(self, parts: Parts, question: Question) -> ChatCall:
        """The arguments, before any work is done. Raises InvalidRequestError. For a thread beside the engine's."""
        raise NotImplementedError

    def answer(self, parts: Parts, call: ChatCall, hooks: Hooks) -> Any:
        """Call the model; the sound of the answer as a tensor of samples, None if it does not speak."""
        raise NotImplementedError

    # Of families whose answers go on together: what is called for them, in parts.

    prefix = ""  # of what the arguments say to the model that writes

    def writer(self, parts: Parts) -> Any:
        """The model that writes the text."""
        return parts.model

    def unpaged(self, parts: Parts) -> str | None:
        """Why a prompt of this checkpoint cannot be read for that, if it cannot."""
        return None

    def read(self, parts: Parts, call: ChatCall) -> tuple[ChatCall, Read | None]:
        """Read the media, if there are any; and the call without what is needed for that alone."""
        return call, None

    def layer(self, parts: Parts) -> int | None:
        """Whose output is handed on to be spoken: an index into `hidden_states`. None: nothing is spoken."""
        return None

    def thoughts(self, parts: Parts, call: ChatCall, sequences: Any, embeds: Any, hidden: Any) -> Tensors:
        """What has to be known to speak these tokens (1, tokens). All of them but the last one were computed: what the
        first layer was given, and what came of `layer` (1, tokens, size)."""
        raise NotImplementedError

    def speak_thoughts(self, parts: Parts, call: ChatCall, thoughts: Tensors) -> Any:
        """Call the rest of the model; the sound as a tensor of samples. `parts` are a session's own."""
        raise NotImplementedError

    # Of families that declare a graph: `answer` in stages, the last of which decodes.

    def think(self, parts: Parts, call: ChatCall, hooks: Hooks) -> Tensors | None:
        """Write the text; what has to be known to speak it, None if it is not to be spoken."""
        raise NotImplementedError

    def talk(self, parts: Parts, question: Question, thoughts: Tensors, emit: Callable[[Tensors], None]) -> None:
        """Speak, up to what is to be decoded, and emit that as it is written: rows of all tensors belong together.
        `question`: as far as it says how to speak."""
        raise NotImplementedError

    def speech_steps(self, parts: Parts, question: Question) -> int:
        """The most steps of its speech. Raises InvalidRequestError for more than the operator allows."""
        raise NotImplementedError

    def empty_thoughts(self, parts: Parts) -> Tensors:
        """Something to try `talk` with."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ChatFamily(GenerateFamily):
    """One family of models that answer.

    takes: kinds of media in a conversation: (kind, how many items at most).
    sees_at: frames per second of the video that the model is shown.
    speech_steps: modules whose calls are the steps of its speech, by path.
    decoders_merged: modules of which a step of one token may run for several requests at once, by path, where that is
        asked for; for the classes in `models`, of which it is proven.
    heads_merged: the same for modules before and after them, which know one row per token and no more.
    paged: classes, among others, whose answers go on together over a paged cache (docs/ar_engine.md): those of which a
        parity test shows that the tokens are the same.
    plain_loading: its class has a loading of its own, which cannot tell what was missing: the library's plain one loads
        it, and `ChatAdapter.complete` does the rest.
    """

    adapter: ChatAdapter
    modality: Modality = "text"
    speaks: bool = False
    arguments: tuple[str, ...] = WRITING
    takes: tuple[tuple[str, int], ...] = ()
    sees_at: float | None = None
    speech_steps: tuple[str, ...] = ()
    decoders_merged: tuple[str, ...] = ()
    heads_merged: tuple[str, ...] = ()
    paged: tuple[str, ...] = ()
    plain_loading: bool = False
    unmerged_because: str = "a step runs for several requests at once only where `--merge-decoding` asks for it"


def drawing(params: SamplingParams, prefix: str = "") -> dict[str, Any]:
    """What a request says of how tokens are drawn, as arguments of `generate`."""
    given = generation_arguments(params)
    given.pop("max_new_tokens", None)
    return {prefix + name: value for name, value in given.items()}


def room_for(prompt_tokens: int, context: int | None, params: SamplingParams, default: int | None) -> int:
    """The most tokens that the answer may have. Raises InvalidRequestError if there is no room for them."""
    left = None if context is None else context - prompt_tokens
    if left is not None and left < 1:
        what = f"the conversation has {prompt_tokens} tokens, and the model takes {context} with its answer"
        raise InvalidRequestError(f"prompt: {what}", param="prompt")
    asked = params.max_new_tokens
    if asked is None:
        return min(one for one in (left, default, 2**31) if one is not None)
    if left is not None and asked > left:
        what = f"after the {prompt_tokens} tokens of the conversation there is room for {left}"
        raise InvalidRequestError(f"max_new_tokens={asked}: {what}", param="max_new_tokens")
    return asked


def ends_of(*settings: Any) -> frozenset[int]:
    """The first setting that names tokens which end an answer: one, or several."""
    for value in settings:
        if value is not None:
            return frozenset(value) if isinstance(value, (list, tuple)) else frozenset({int(value)})
    return frozenset()


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """For a template that knows texts alone: the parts of a message are lines."""
    return [
        with_calls(one, {"role": one.role, "content": "\n".join(part.text for part in one.parts)}) for one in messages
    ]


def templated(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """For a template that knows parts. A message of one text is that text."""
    return [{"role": one.role, "content": _content(one)} for one in messages]


def _content(message: Message) -> Any:
    if len(message.parts) == 1 and message.parts[0].kind == "text":
        return message.parts[0].text
    return [
        {"type": "text", "text": part.text} if part.kind == "text" else {"type": part.kind} for part in message.parts
    ]


def check_marks(messages: Sequence[Message], marks: Sequence[str]) -> None:
    """Raises InvalidRequestError if a text holds what stands for a medium: there would be a place without one."""
    for message in messages:
        for part in message.parts:
            for mark in marks:
                if mark in part.text:
                    raise InvalidRequestError(f"prompt: {mark!r} stands for a medium, and is no text", param="prompt")


def check_known(tokenizer: Any, ids: Any, model: Any) -> None:
    """Raises InvalidRequestError for tokens that the model cannot begin with, which it would fail at."""
    if not ids.numel():
        raise InvalidRequestError("prompt: the model's tokenizer makes no token of it", param="prompt")
    most = model.get_input_embeddings().num_embeddings
    if int(ids.max()) >= most:
        unknown = tokenizer.decode([int(ids.max())])
        what = f"the tokenizer knows {unknown!r}, and the model, which has {most} tokens, does not"
        raise InvalidRequestError(f"prompt: {what}", param="prompt")
