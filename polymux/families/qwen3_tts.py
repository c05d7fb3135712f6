"""Qwen3-TTS: a talker writes frames of codes, and a codec makes sound of them while it writes.

Checkpoints are of three types: voices by name, voices by description (`instructions`), and the voice of a recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polymux.errors import InvalidRequestError
from polymux.families.generate import (
    DRAWING,
    REFERENCE,
    SPEECH,
    Adapter,
    Call,
    GenerateFamily,
    Parts,
    Wish,
    no_control_tokens,
    told,
)
from polymux.media.sentences import length
from polymux.request import Bounds, SamplingParams

NAMED, DESIGNED, HEARD = "custom_voice", "voice_design", "base"  # types of checkpoints
AUTO = "auto"
CHUNK = 4  # frames that are heard at once: a third of a second
_FEWEST = 2  # first codes: the last one is not heard
# What the package for these checkpoints takes where neither a request nor the checkpoint says anything.
_USUAL = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05}
_MOST = 2048
_OTHERS = "subtalker_"  # before the names of settings for the codes of a frame but the first
_OTHERS_DRAWN = "subtalker_dosample"
_ROLE, _END = "<|im_start|>assistant\n", "<|im_end|>\n"
_ROLE_TOKENS, _END_TOKENS = 3, 2


class Qwen3TTSAdapter(Adapter):
    def voices(self, parts: Parts) -> tuple[str, ...]:
        return tuple(_talker(parts)["spk_id"]) if _type(parts) == NAMED else ("default",)

    def languages(self, parts: Parts) -> tuple[str, ...]:
        known = _talker(parts).get("codec_language_id") or {}
        return (AUTO, *(name for name in known if "dialect" not in name))

    def sample_rate(self, parts: Parts) -> int:
        return int(parts.beside.config.output_sample_rate)

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        return int(_talker(parts)["max_position_embeddings"]) // 2

    def embedding_size(self, parts: Parts) -> int | None:
        return int(_talker(parts)["hidden_size"]) if _type(parts) == HEARD else None

    def deaf(self, parts: Parts) -> str | None:
        if _type(parts) == HEARD:
            return None
        return f"it is a {_type(parts)} checkpoint; those of type base speak with the voice of a recording"

    def without(self, parts: Parts) -> Mapping[str, str]:
        kind = _type(parts)
        lacks = {} if kind == HEARD else {"speaker_embedding": f"checkpoints of type {kind} take none"}
        if kind == HEARD:
            lacks["instructions"] = "checkpoints of type base take none"
        elif kind == NAMED and str(parts.model.config.tts_model_size) in ("0b6", "0.6b"):
            lacks["instructions"] = "checkpoints of this size take none"
        return lacks

    def check(self, parts: Parts) -> str | None:
        known = (NAMED, DESIGNED, HEARD)
        if _type(parts) not in known:
            return f"tts_model_type={_type(parts)!r} is none of {', '.join(known)}"
        groups, layers = _talker(parts)["num_code_groups"], parts.beside.config.decoder_config["num_quantizers"]
        return None if groups == layers else f"the talker writes {groups} codes a frame, and its codec takes {layers}"

    def warmed(self, parts: Parts, params: SamplingParams) -> SamplingParams:
        if _type(parts) != HEARD:
            return params
        return SamplingParams(
            seed=0, max_new_tokens=params.max_new_tokens, speaker_embedding=(0.0,) * (self.embedding_size(parts) or 0)
        )

    def pieces(self, text: str, voice: str | None, longest: int) -> list[str]:
        """As many sentences in one go as fit: a voice that is described is one voice for so long only."""
        made: list[str] = []
        for piece in super().pieces(text, voice, longest):
            if made and length(made[-1]) + length(piece) < longest:
                made[-1] = f"{made[-1]} {piece}"
            else:
                made.append(piece)
        return made

    def prepare(self, parts: Parts, wish: Wish) -> Call:
        self._check_voice(parts, wish)
        tokens = _Tokens(parts.processor)
        role, text = tokens.said(wish.text, "prompt")
        instructions = wish.params.instructions
        how = tokens.told(instructions) if instructions else []
        script = {
            "role": role,
            "text": text,
            "instructions": how,
            "speaker": _talker(parts)["spk_id"][wish.voice] if _type(parts) == NAMED else None,
            "language": _language(parts, wish),
        }
        voice: dict[str, Any] = {}
        if wish.reference is not None:
            _, words = tokens.said(wish.reference.text, "ref_text")
            voice = {"recording": wish.reference.samples, "words": words}
        elif wish.params.speaker_embedding is not None:
            voice = {"vector": wish.params.speaker_embedding}
        count = len(how) + len(role) + len(text) + len(voice.get("words", ()))
        steps = self._steps(parts, wish, count)
        return Call(
            arguments={
                "attention_mask": parts.model.ones(count),  # which is how the tokens of a text are counted
                "script": script,
                "voice": voice,
                "drawing": _drawing(parts, wish) | {"most": steps},
            },
            steps=steps,
            ends=wish.params.max_new_tokens is None,
        )

    def speak(self, parts: Parts, call: Call) -> Iterator[Any]:
        yield from parts.model.sound(parts.beside, self.start(parts, call), CHUNK)

    def start(self, parts: Parts, call: Call) -> Any:
        given = call.arguments
        return parts.model.start(parts.beside, given["script"], given["voice"], given["drawing"])

    def writer(self, parts: Parts) -> Any:
        return parts.model.talker

    def _check_voice(self, parts: Parts, wish: Wish) -> None:
        vector = wish.params.speaker_embedding
        if wish.reference is not None and vector is not None:
            raise InvalidRequestError("speaker_embedding: cannot be combined with ref_audio", param="speaker_embedding")
        if _type(parts) == HEARD and wish.reference is None and vector is None:
            what = "a checkpoint of type base speaks with the voice of a recording, or of a speaker_embedding"
            raise InvalidRequestError(f"ref_audio is missing: {what}", param="ref_audio")

    def _steps(self, parts: Parts, wish: Wish, count: int) -> int:
        """The most first codes."""
        asked, room = wish.params.max_new_tokens, int(_talker(parts)["max_position_embeddings"]) - 16 - count
        if wish.reference is not None:
            room -= -(-len(wish.reference.samples) // parts.beside.hop)
        default = int(parts.model.defaults.get("max_new_tokens", _MOST))
        steps = min(default, self.longest(parts, 0) or default) if asked is None else asked
        if steps < _FEWEST:
            raise InvalidRequestError(f"max_new_tokens={steps}: must be {_FEWEST} at least", param="max_new_tokens")
        if steps > room:
            param = "prompt" if wish.reference is None else "ref_audio"
            what = f"it leaves room for {max(room, 0)} new tokens, and {steps} are wanted (max_new_tokens)"
            raise InvalidRequestError(f"{param}: {what}", param=param)
        return steps


class _Tokens:
    """Texts as the talker reads them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def said(self, text: str, param: str) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens of who speaks, and of what is said. Raises InvalidRequestError."""
        no_control_tokens(self._tokenizer, text, param)
        ids = self._tokenizer(f"{_ROLE}{text}{_END}").input_ids
        return ids[:_ROLE_TOKENS], ids[_ROLE_TOKENS:-_END_TOKENS]

    def told(self, instructions: str) -> Sequence[int]:
        no_control_tokens(self._tokenizer, instructions, "instructions")
        ids: Sequence[int] = self._tokenizer(f"<|im_start|>user\n{instructions}{_END}").input_ids
        return ids


def _type(parts: Parts) -> str:
    return str(parts.model.config.tts_model_type)


def _talker(parts: Parts) -> dict[str, Any]:
    values: dict[str, Any] = parts.model.config.talker_config
    return values


def _language(parts: Parts, wish: Wish) -> int | None:
    """Its code. A voice that speaks a dialect does so unless another language is named."""
    talker, language = _talker(parts), wish.params.language or AUTO
    dialect = (talker.get("spk_is_dialect") or {}).get(wish.voice)
    if dialect and language in (AUTO, "chinese"):
        language = dialect
    return None if language == AUTO else int(talker["codec_language_id"][language])


def _drawing(parts: Parts, wish: Wish) -> dict[str, Any]:
    """Settings of the first code of each frame, and of the others. What a request says of the first ones holds for the
    others too, unless it says more."""
    given, defaults = told(wish), parts.model.defaults
    first = {name: given.get(name, defaults.get(name, value)) for name, value in _USUAL.items()}
    others = {}
    for name in ("do_sample", "temperature", "top_k", "top_p"):
        further = _OTHERS_DRAWN if name == "do_sample" else _OTHERS + name
        others[name] = given.get(further, given.get(name, defaults.get(further, _USUAL[name])))
    for name in ("temperature", "top_k", "top_p"):
        if _OTHERS + name in given and not others["do_sample"]:
            what = f"extra_args.{_OTHERS}{name}"
            raise InvalidRequestError(f"{what}: has no effect without {_OTHERS_DRAWN}", param=what)
    return {"first": first, "others": others}


QWEN3_TTS = GenerateFamily(
    name="qwen3-tts",
    models=("Qwen3TTSForConditionalGeneration",),
    tasks=("text-to-speech",),
    adapter=Qwen3TTSAdapter(),
    longest=600,
    processor="Qwen2Tokenizer",
    beside=("Qwen3TTSTokenizerV2Model", "speech_tokenizer"),
    components=("talker",),
    steps=("talker.forward",),
    decoders=("speech_tokenizer",),
    arguments=(*SPEECH, *REFERENCE, "speaker_embedding", "language", "instructions", *DRAWING, "max_new_tokens"),
    extra=(_OTHERS_DRAWN, "subtalker_temperature", "subtalker_top_k", "subtalker_top_p"),
    bounds={_OTHERS_DRAWN: Bounds(kind="flag")},
    framed=CHUNK,
    unmerged_because="with `--decoding generate` they are not",
    warmup=SamplingParams(seed=0, max_new_tokens=2 * CHUNK + 1),
)

FAMILIES = (QWEN3_TTS,)
