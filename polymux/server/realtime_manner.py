"""How a realtime session answers: its settings, what a response changes of them, and what the engine is told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from polymux.config import LimitsConfig
from polymux.errors import InvalidRequestError
from polymux.request import Capabilities, SamplingParams
from polymux.sampling import check_sampling
from polymux.server.realtime_events import OutputView
from polymux.server.realtime_protocol import HowToAnswer, OutputFields

Where = Literal["session", "response"]  # the object whose fields said so
_FIELDS = {
    "voice": "audio.output.voice",
    "max_new_tokens": "max_output_tokens",
    "modalities": "output_modalities",
    "temperature": "temperature",
    "seed": "seed",
}


@dataclass(frozen=True)
class Manner:
    spoken: bool
    voice: str | None
    instructions: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)

    def changed(self, asked: HowToAnswer, output: OutputFields | None) -> Manner:
        """With what is given in place of what was."""
        made: dict[str, Any] = {}
        if asked.output_modalities is not None:
            made["spoken"] = "audio" in asked.output_modalities
        if asked.max_output_tokens is not None:
            made["max_tokens"] = None if asked.max_output_tokens == "inf" else asked.max_output_tokens
        if output is not None and output.voice is not None:
            made["voice"] = output.voice
        for name in ("instructions", "temperature", "seed", "extra_args"):
            if (value := getattr(asked, name)) is not None:
                made[name] = value
        return replace(self, **made)

    def check(self, can: Capabilities, limits: LimitsConfig, where: Where) -> None:
        """Raises InvalidRequestError, with the client's field."""
        if self.spoken and "audio" not in can.makes:
            name = f"{where}.output_modalities"
            raise InvalidRequestError(f"{name}=['audio']: the model makes {' and '.join(can.makes)}", param=name)
        if len(self.instructions) > limits.max_prompt_length:
            name, allowed = f"{where}.instructions", f"allowed are {limits.max_prompt_length} (--max-prompt-length)"
            raise InvalidRequestError(f"{name} has {len(self.instructions)} characters: {allowed}", param=name)
        try:
            check_sampling(replace(self.params, voice=self.voice), can, limits)
        except InvalidRequestError as error:
            raise in_words_of(where, error) from None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            voice=self.voice if self.spoken else None,
            seed=self.seed,
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            extra_args=self.extra_args,
        )

    @property
    def modalities(self) -> list[str]:
        return ["audio" if self.spoken else "text"]

    @property
    def most_tokens(self) -> int | Literal["inf"]:
        return "inf" if self.max_tokens is None else self.max_tokens

    @property
    def output(self) -> OutputView:
        return OutputView(voice=self.voice)


def in_words_of(where: Where, error: InvalidRequestError) -> InvalidRequestError:
    """The same error, about the field that the client sent."""
    said = error.param or ""
    name = _FIELDS.get(said, said if said.startswith("extra_args") else None)
    if name is None:
        return type(error)(error.message)  # of what is in the conversation, which has no field
    rest = error.message.removeprefix(said) if error.message.startswith(said) else f": {error.message}"
    return type(error)(f"{where}.{name}{rest}", param=f"{where}.{name}")
