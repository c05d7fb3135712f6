"""vLLM as far as it is used: the public names of whichever version is installed, and what they are called with.

A stage runs on it through these names alone; nothing of it is changed, and no version is asked for. What a version does
not know is said with the name that it lacks. Knows neither requests in flight nor events.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polymux.ar.sequence import Drawing
from polymux.engine.constraint import calls_form, json_form, structural_tag
from polymux.errors import ConfigError, InvalidRequestError
from polymux.families.chat import ChatCall
from polymux.families.tool_templates import WRITTEN, WrittenCall
from polymux.request import Request, SamplingParams
from polymux.tools import CallFormat

PACKAGE = "vllm"
# Fields of a request, as they are called here, by what vLLM calls them in its messages.
_FIELDS = {
    "max_tokens": "max_new_tokens",
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed")},
    **{f"{name}_penalty": f"{name}_penalty" for name in ("repetition", "frequency", "presence")},
}
_OF_FORMS = ("grammar", "schema", "structur")


@dataclass(frozen=True)
class Vllm:
    """The names, of the installed version."""

    version: str
    arguments: Any  # AsyncEngineArgs
    engine: Any  # AsyncLLMEngine
    sampling: Any  # SamplingParams
    structured: Any  # StructuredOutputsParams
    delta: Any  # RequestOutputKind.DELTA: each output has what is new
    tokens: Any  # TokensPrompt
    refusals: tuple[type[Exception], ...]  # what is raised over a request that cannot be

    @classmethod
    def installed(cls) -> Vllm:
        """Raises ConfigError if there is none, or one without these names."""
        if importlib.util.find_spec(PACKAGE) is None:
            what = "--decoding vllm needs the package vllm, which is not installed here: pip install vllm, in an "
            raise ConfigError(f"{what}environment of its own, since it brings a torch of one exact version",
                              param="decoding")  # fmt: skip
        try:
            from vllm import AsyncEngineArgs, AsyncLLMEngine, TokensPrompt, __version__
            from vllm import SamplingParams as Sampling
            from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        except ImportError as error:
            what = f"--decoding vllm: the installed vllm lacks what is needed of it, or cannot be imported: {error}"
            raise ConfigError(what, param="decoding") from None
        return cls(
            version=str(__version__),
            arguments=AsyncEngineArgs,
            engine=AsyncLLMEngine,
            sampling=Sampling,
            structured=StructuredOutputsParams,
            delta=RequestOutputKind.DELTA,
            tokens=TokensPrompt,
            refusals=(ValueError, *_client_errors()),
        )

    def start(self, arguments: Mapping[str, Any]) -> Any:
        """An engine with these arguments. For a thread whose event loop runs. Raises ConfigError."""
        known = {field.name for field in dataclasses.fields(self.arguments)}
        for name in arguments:
            if name not in known:
                raise ConfigError(f"{name}: the installed vllm {self.version} does not know it", param="decoding")
        try:
            return self.engine.from_engine_args(self.arguments(**arguments))
        except (TypeError, RuntimeError) + self.refusals as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            what = f"vllm {self.version} does not start with this model and these settings: {lines[0]}"
            raise ConfigError(f"{what} (its own log says more)", param="decoding") from None

    def prompt(self, call: ChatCall) -> Any:
        return self.tokens(prompt_token_ids=call.arguments["input_ids"][0].tolist())

    def how(
        self, request: Request, params: SamplingParams, call: ChatCall, drawing: Drawing, written: CallFormat
    ) -> Any:
        """Its parameters for a request. Raises InvalidRequestError for what they cannot be."""
        try:
            made = self.sampling(
                **_drawn(drawing),
                seed=drawing.seed,
                max_tokens=call.steps,
                detokenize=False,  # tokens become text here, as those of other engines do
                stop_token_ids=sorted(call.ends),
                structured_outputs=self._form(request, params, WRITTEN[written]),
                output_kind=self.delta,
            )
        except self.refusals as error:
            raise self.refused(error, request) from None
        if made.temperature != drawing.temperature:
            what = f"vllm {self.version} would take {made.temperature:g} in place of it"
            raise InvalidRequestError(f"temperature={drawing.temperature:g}: {what}", param="temperature")
        return made

    def refused(self, error: Exception, request: Request) -> InvalidRequestError:
        """What vLLM says to a request, with the field that it names, as that is called here."""
        text = str(error).strip() or type(error).__name__
        param = next((name for theirs, name in _FIELDS.items() if theirs in text.casefold()), None)
        if param is None and any(word in text.casefold() for word in _OF_FORMS):
            param = "tools" if request.tools is not None and request.tools.constrains else "json_schema"
        named = f"{param}: " if param is not None else ""
        return InvalidRequestError(f"{named}vllm {self.version} refuses the request: {text[:300]}", param=param)

    def _form(self, request: Request, params: SamplingParams, written: WrittenCall) -> Any:
        """What the answer must fit; None: it is free."""
        if request.tools is not None and request.tools.constrains:
            form = calls_form(request.tools, written, params.json_schema)
        elif params.json_schema is not None:
            form = json_form(params.json_schema)
        else:
            return None
        return self.structured(structural_tag=structural_tag(form))


def _drawn(drawing: Drawing) -> dict[str, Any]:
    return {
        "temperature": drawing.temperature,
        "top_k": drawing.top_k,
        "top_p": drawing.top_p,
        "min_p": drawing.min_p,
        "repetition_penalty": drawing.repetition_penalty,
        "frequency_penalty": drawing.frequency_penalty,
        "presence_penalty": drawing.presence_penalty,
    }


def _client_errors() -> Sequence[type[Exception]]:
    """Newer versions have a class of their own for what is the request's fault."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:
        return ()
    return (VLLMClientError,)
