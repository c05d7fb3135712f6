"""What a family of models of transformers declares that make sound by their own `generate`, or by one forward.

Most of it is data, read by generic code. What is left is an adapter: how a text becomes the arguments of a call, and
what of the result is the sound. Adapters are given objects of transformers and import nothing of it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.families.base import NOTHING
from polymux.families.graph import Arrays, Graph
from polymux.media.sentences import pieces
from polymux.request import Bounds, Modality, SamplingParams
from polymux.sampling import generation_arguments

DRAWING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
SPEECH = ("voice", "speed")
REFERENCE = ("ref_audio", "ref_text")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A loaded model: objects of transformers. `beside` is the vocoder or codec that is no part of the model itself, or
    the part of it that is all a stage has; `voices` are arrays of speakers that came in files, by name."""

    model: Any
    processor: Any
    beside: Any = None
    voices: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A recording of a voice to speak with: float32 samples (samples,) at the model's rate, and what is said in it,
    which is empty for models that need not know."""

    samples: Any
    text: str


@dataclass(frozen=True, kw_only=True)
class Wish:
    """One piece of a request's text, and how to make sound of it."""

    text: str
    params: SamplingParams
    voice: str | None  # None: the model has none
    reference: Reference | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a model is called with. `steps`: the most steps that it takes, if it takes several. `ends`: it may end
    earlier by itself; one that does not has not come to its end."""

    arguments: dict[str, Any]
    steps: int | None = None
    ends: bool = True


@dataclass(frozen=True, kw_only=True)
class FrameShape:
    """How a decoder makes samples of frames: `hop` samples of each, which depend on so many frames before and after it
    as well. So a chunk that comes with these is decoded as in one go."""

    hop: int
    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """How a decoder makes samples that depend on nothing that comes later: by blocks of `block` frames, each decoded
    after the last `context` frames before it. The samples of a frame begin at `hop` times its number in what is decoded
    at once; the last ones may be missing until the next frame is there."""

    hop: int
    block: int
    context: int


@dataclass(frozen=True)
class WholeShape:
    """How a decoder makes samples that depend on all frames."""


DecoderShape = FrameShape | BlockShape | WholeShape


class Codec:
    """A codec as a processor knows it, which hands it sound in 32 bits, whatever its weights have."""

    def __init__(self, codec: Any) -> None:
        self._codec, self.config, self.device = codec, codec.config, codec.device

    def encode(self, input_values: Any) -> Any:
        return self._codec.encode(input_values.to(self._codec.dtype))

    def decode(self, *codes: Any, **how: Any) -> Any:
        return self._codec.decode(*codes, **how)


class Adapter:
    """Between a request and a model of one family. Without state; `parts` are a session's own in `run`."""

    def voices(self, parts: Parts) -> tuple[str, ...]:
        """At least one, of a model that speaks; the first is the one that speaks when none is named."""
        return ("default",)

    def languages(self, parts: Parts) -> tuple[str, ...]:
        """Those that a request may name."""
        return ()

    def sample_rate(self, parts: Parts) -> int:
        raise NotImplementedError

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        """The most new tokens that a request may ask for; None: it makes no tokens."""
        return None

    def speaker_marks(self) -> tuple[str, ...]:
        """What says in a text who speaks from there on."""
        return ()

    def embedding_size(self, parts: Parts) -> int | None:
        """Values of the vector that a request may give as a voice."""
        return None

    def deaf(self, parts: Parts) -> str | None:
        """Why a model like this, as it is loaded here, cannot speak with the voice of a recording, although its family
        can."""
        return None

    def without(self, parts: Parts) -> Mapping[str, str]:
        """Arguments of the family that a model like this does not take, and why."""
        return {}

    def warmed(self, parts: Parts, params: SamplingParams) -> SamplingParams:
        """What the first generation of a model like this is told, where the family's own would not do."""
        return params

    def check(self, parts: Parts) -> str | None:
        """What a checkpoint like this lacks here, if it lacks something."""
        return None

    def sample_text(self, parts: Parts) -> str:
        """Something short that it can say."""
        return "hello"

    def pieces(self, text: str, voice: str | None, longest: int) -> list[str]:
        """The text in parts that are spoken one after the other. `voice`: the one that the request names."""
        return pieces(text, longest)

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        """The arguments, before any work is done. Raises InvalidRequestError for a text that cannot be said."""
        raise NotImplementedError

    def run(self, parts: Parts, call: Call) -> Any:
        """Call the model; the sound as a tensor (samples), or (channels, samples)."""
        raise NotImplementedError

    def speak(self, parts: Parts, call: Call) -> Iterator[Any]:
        """What `run` returns, in parts that are heard as they come."""
        yield self.run(parts, call)

    def start(self, parts: Parts, call: Call) -> Any:
        """Of families that are framed: what is to be known before the first frame, as `engine.sentence.SpokenStart`."""
        raise NotImplementedError

    def writer(self, parts: Parts) -> Any:
        """Of families that are framed: what writes frames, as `ar.frames.FrameWriter`."""
        raise NotImplementedError

    def codec(self, parts: Parts) -> Any:
        """Of families that are framed: what makes sound of frames, as `engine.sentence` calls it."""
        return parts.beside

    def alone(self, parts: Parts) -> str | None:
        """Of families that are framed: why the sentences of a model like this cannot be written together."""
        return None

    # Of families that declare a graph: `run` in two stages.

    def write(self, parts: Parts, call: Call, emit: Callable[[Arrays], None]) -> None:
        """Call the model, and emit arrays as they are written: rows of all of them belong together."""
        raise NotImplementedError

    def frame_shape(self, parts: Parts) -> DecoderShape:
        """Of the decoder, which is `parts.beside`."""
        raise NotImplementedError

    def silence(self, parts: Parts) -> Arrays:
        """A few frames, to try the decoder with."""
        raise NotImplementedError

    def decode(self, parts: Parts, arrays: Arrays) -> Any:
        """Samples of frames, as a tensor like that of `run`. `arrays`: what the edge hands over, as tensors
        on the device, frames last."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GenerateFamily:
    """One family of models.

    models: class names in transformers, or in `polymux.models`; so are all classes below.
    tasks: what they are for, in the hub's words.
    adapter: see `Adapter`.
    speaks: text becomes speech, word for word, sentence by sentence; else the prompt describes the sound.
    longest: letters of a text that are spoken in one go.
    processor: the class in transformers that reads texts.
    assembled: what that is put together of, where it cannot be loaded by itself: (argument, class).
    beside: the part that makes the sound, where it is a model of its own: (class, folder of the checkpoint).
    voice_files: its voices are arrays in files.
    precise: it is small, and its sound is rough in 16 bits: what is left to us runs in 32.
    components: modules whose calls are captured, by path; none: the children of the model. What lies above them runs in
        the session, on a copy of its own, so that what it keeps of a request reaches no other.
    steps: modules whose calls are its steps, by path.
    decoders: parts that make sound of codes or spectra.
    arguments: the fields of SamplingParams that it honours, beside seed.
    unheard_because: why it cannot speak with the voice of a recording, if `arguments` has no ref_audio.
    extra: what extra_args may hold.
    bounds: what those of them may be that are not named after a field of SamplingParams.
    merge: as in `base.Family`, with --merge-decoding; mostly nothing, and `unmerged_because` says why.
    warmup: the parameters of the generation that is made before the first request.
    framed: the sentences of all requests can be written together, frame by frame; so many frames are heard at once.
        See `Adapter.start`. The first of its components writes, and the first of its decoders makes sound.
    graph: the stages that its models can be split into; see `Adapter` for what it does then.
    """

    name: str
    models: tuple[str, ...]
    tasks: tuple[str, ...]
    adapter: Adapter
    modality: Modality = "audio"
    speaks: bool = True
    longest: int = 300
    processor: str
    assembled: tuple[tuple[str, str], ...] = ()
    beside: tuple[str, str] | None = None
    voice_files: bool = False
    precise: bool = False
    components: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    decoders: tuple[str, ...] = ()
    arguments: tuple[str, ...] = SPEECH
    unheard_because: str = "its voices are its own"
    extra: tuple[str, ...] = ()
    bounds: dict[str, Bounds] = field(default_factory=dict)
    merge: frozenset[str] = NOTHING
    unmerged_because: str = "each request has a cache of its own, and merging them is not proven"
    warmup: SamplingParams = SamplingParams(seed=0)
    framed: int = 0
    graph: Graph | None = None


def told(wish: Wish) -> dict[str, Any]:
    """What the request says of how tokens are drawn, as arguments of `generate`."""
    return generation_arguments(wish.params) | wish.params.extra_args


def check_room(wish: Wish, count: int, steps: int, room: int) -> None:
    """Raises InvalidRequestError unless `count` tokens and so many new ones fit into the model."""
    if count + steps > room:
        param, what = ("prompt", "a sentence has") if wish.reference is None else ("ref_audio", "with it there are")
        more = f"{what} {count} tokens, and with {steps} new ones there are more than {room}"
        raise InvalidRequestError(f"{param}: {more}", param=param)


def no_control_tokens(tokenizer: Any, text: str, param: str = "prompt") -> None:
    """Raises InvalidRequestError for a text that would not be read as text."""
    for token in {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
        if token in text:
            raise InvalidRequestError(f"{param}: {token!r} is a control token of the model", param=param)


def known_signs(text: str, known: Any) -> None:
    """Raises InvalidRequestError if `text` has signs that must be spoken and are not `known(sign)`."""
    missing = sorted({sign for sign in text if unicodedata.category(sign)[0] in "LMNS" and not known(sign)})
    if missing:
        raise InvalidRequestError(f"prompt: the model has no sign for {_listed(missing)}", param="prompt")


def known_tokens(tokenizer: Any, text: str, ids: list[int]) -> None:
    """Raises InvalidRequestError if the tokenizer has put its unknown token for something in `text`."""
    if tokenizer.unk_token_id not in ids:
        return
    alone = {sign: tokenizer(sign, add_special_tokens=False).input_ids for sign in set(text) if not sign.isspace()}
    missing = sorted(sign for sign, made in alone.items() if tokenizer.unk_token_id in made)
    spoken = [sign for sign in missing if unicodedata.category(sign)[0] in "LMNS"]
    if spoken or not missing:
        what = _listed(spoken) if spoken else "some of it"
        raise InvalidRequestError(f"prompt: the model has no sign for {what}", param="prompt")


def _listed(signs: list[str]) -> str:
    shown = ", ".join(repr(sign) for sign in signs[:8])
    return shown if len(signs) <= 8 else f"{shown} and {len(signs) - 8} more"
