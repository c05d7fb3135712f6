"""Whisper: windows of half a minute, one after the other, as its own `generate` does with long sounds."""

from __future__ import annotations

from typing import Any

from polymux.errors import InvalidRequestError, UnusableOutputError
from polymux.families.generate import Call, Parts
from polymux.families.hearing import Heard, HearingAdapter, HearingFamily, Transcript
from polymux.request import SamplingParams, Segment

_STUCK = 3  # times that a window may end where it began


class WhisperAdapter(HearingAdapter):
    def hears_at(self, parts: Parts) -> int:
        return int(parts.processor.feature_extractor.sampling_rate)

    def timestamps(self, parts: Parts) -> bool:
        return hasattr(parts.model.generation_config, "no_timestamps_token_id")

    def languages(self, parts: Parts) -> tuple[str, ...]:
        how = parts.model.generation_config
        return tuple(sorted(_code(token) for token in how.lang_to_id)) if _is_multilingual(parts) else ("en",)

    def check(self, parts: Parts) -> str | None:
        how = parts.model.generation_config
        if _is_multilingual(parts) and not hasattr(how, "lang_to_id"):
            return "its generation_config.json says nothing of languages: that of an older version of it does not work"
        return None

    def prepare_heard(self, parts: Parts, heard: Heard) -> Call:
        arguments: dict[str, Any] = {"samples": heard.samples}
        if heard.before is not None:
            arguments["prompt_ids"] = self._prompt(parts, heard.before)
        if _is_multilingual(parts):
            arguments |= {"language": heard.params.language, "task": "transcribe"}
        if heard.params.temperature is not None:
            arguments["temperature"] = float(heard.params.temperature)
        window = parts.processor.feature_extractor.n_samples
        if len(heard.samples) > window and not self.timestamps(parts):
            most = window / self.hears_at(parts)
            raise InvalidRequestError(
                f"audio: longer than {most:g} s: the checkpoint knows no timestamps", param="audio"
            )
        return Call(arguments=arguments)

    def _prompt(self, parts: Parts, text: str) -> Any:
        tokenizer = parts.processor.tokenizer
        for token in {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
            if token in text:
                raise InvalidRequestError(f"prompt: {token!r} is a control token of the model", param="prompt")
        ids = parts.processor.get_prompt_ids(text, return_tensors="pt")
        most = parts.model.config.max_target_positions // 2 - 1
        if len(ids) > most:
            raise InvalidRequestError(f"prompt: it has {len(ids)} tokens: allowed are {most}", param="prompt")
        return ids.to(parts.model.device)

    def transcribe(self, parts: Parts, call: Call) -> Transcript:
        arguments = dict(call.arguments)
        timestamps, samples = self.timestamps(parts), arguments.pop("samples")
        inputs = self._features(parts, samples)
        made = parts.model.generate(
            **inputs,
            **arguments,
            return_timestamps=timestamps,
            return_segments=True,
            monitor_progress=_Progress().check,
        )
        found = made["segments"][0]
        seconds = len(samples) / self.hears_at(parts)
        segments = [_segment(parts, one, seconds) for one in found]
        text = "".join(segment.text for segment in segments).strip()
        return Transcript(
            text=text,
            segments=[s for s in segments if s.text.strip()],
            language=self._language(parts, found, call.arguments.get("language")),
            tokens=sum(len(s.tokens) for s in segments),
        )

    def _features(self, parts: Parts, samples: Any) -> dict[str, Any]:
        """Of a short sound, as it was trained: filled up with silence to a window."""
        extractor, model = parts.processor.feature_extractor, parts.model
        long = {"truncation": False, "padding": "longest", "return_attention_mask": True}
        how = long if len(samples) > extractor.n_samples else {}
        inputs = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt", **how).to(model.device)
        return {**inputs, "input_features": inputs["input_features"].to(model.dtype)}

    def _language(self, parts: Parts, found: list[Any], asked: str | None) -> str | None:
        if asked is not None or not _is_multilingual(parts):
            return asked or "en"
        codes = {index: _code(token) for token, index in parts.model.generation_config.lang_to_id.items()}
        for one in found:
            sequence = one["result"]["sequences"] if isinstance(one["result"], dict) else one["result"]
            for token in sequence[: one["idxs"][0]].tolist():
                if token in codes:
                    return codes[token]
        return None


class _Progress:
    """Looks at where each window begins: a model that finds nothing said again and again would go on for ever."""

    def __init__(self) -> None:
        self._seek, self._times = -1, 0

    def check(self, progress: Any) -> None:
        seek = int(progress[0][0])
        self._times = self._times + 1 if seek == self._seek else 0
        self._seek = seek
        if self._times >= _STUCK:
            raise UnusableOutputError("the model does not come to an end of what is said")


def _segment(parts: Parts, found: Any, seconds: float) -> Segment:
    tokens = found["tokens"].tolist()
    text = parts.processor.tokenizer.decode(tokens, skip_special_tokens=True)
    start, end = (min(round(float(found[name]), 3), seconds) for name in ("start", "end"))
    return Segment(start=start, end=max(start, end), text=text, tokens=tokens)


def _is_multilingual(parts: Parts) -> bool:
    return bool(getattr(parts.model.generation_config, "is_multilingual", True))


def _code(token: str) -> str:
    return token.removeprefix("<|").removesuffix("|>")


WHISPER = HearingFamily(
    name="whisper",
    models=("WhisperForConditionalGeneration",),
    tasks=("automatic-speech-recognition",),
    adapter=WhisperAdapter(),
    processor="WhisperProcessor",
    steps=("model.forward",),
    arguments=("language", "temperature"),
    warmup=SamplingParams(seed=0),
)

FAMILIES = (WHISPER,)
