"""What a family of models of transformers declares that write down what is said in a sound.

Like a family that speaks (`families.generate`), with a sound in place of a text, and a transcript in place of a sound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.families.generate import Adapter, Call, GenerateFamily, Parts
from polymux.request import Modality, SamplingParams, Segment

TOKENS_A_SECOND = 16  # of the quickest speech, in the tokens of the language that has the most
_TOKENS_MORE = 32


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A sound, float32 samples (samples,) at the model's rate; what was said before it; and how to write."""

    samples: Any
    before: str | None
    params: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """`language`: as the model heard it, if it tells."""

    text: str
    segments: list[Segment]
    language: str | None
    tokens: int  # that it wrote


class HearingAdapter(Adapter):
    """Between a sound and a model of one family."""

    def hears_at(self, parts: Parts) -> int:
        """Samples per second."""
        raise NotImplementedError

    def timestamps(self, parts: Parts) -> bool:
        """Whether there are segments, which say when they were said."""
        return False

    def prepare_heard(self, parts: Parts, heard: Heard) -> Call:
        """The arguments, before any work is done. Raises InvalidRequestError for what it cannot hear."""
        raise NotImplementedError

    def transcribe(self, parts: Parts, call: Call) -> Transcript:
        """Call the model."""
        raise NotImplementedError


def check_length(heard: Heard, rate: int, most: float) -> None:
    """Raises InvalidRequestError for a sound that is longer than so many seconds."""
    seconds = len(heard.samples) / rate
    if seconds > most:
        what = f"{seconds:.2f} s: a model like this hears at most {most:.1f} s in one go"
        raise InvalidRequestError(f"audio: {what}", param="audio")


def most_tokens(heard: Heard, rate: int) -> int:
    """More than anybody says in it: a model that writes more repeats itself."""
    return math.ceil(len(heard.samples) / rate * TOKENS_A_SECOND) + _TOKENS_MORE


@dataclass(frozen=True, kw_only=True)
class HearingFamily(GenerateFamily):
    """One family of such models. `adapter` is a HearingAdapter.

    prompted: they can be told what was said before, or how its words are written.
    """

    adapter: HearingAdapter
    modality: Modality = "text"
    speaks: bool = False
    prompted: bool = True
