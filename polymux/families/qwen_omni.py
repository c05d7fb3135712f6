"""Qwen-Omni: a thinker that reads, sees and hears, and writes; a talker that speaks what it writes; a decoder to sound.

The three are called in one go, by the model's own `generate`; or each in a stage of its own (`families.omni_parts`).
What each of them is told stands apart: the thinker's and the talker's arguments have prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from polymux.errors import InvalidRequestError
from polymux.families import omni_parts, omni_reading
from polymux.families.chat import (
    WRITING,
    ChatCall,
    ChatFamily,
    Hooks,
    Question,
    Tensors,
    check_known,
    check_marks,
    drawing,
    ends_of,
    room_for,
    templated,
)
from polymux.families.generate import BlockShape, DecoderShape, Parts, WholeShape
from polymux.families.graph import Arrays, Edge, Graph, HandOff, StageDeclaration, as_it_is
from polymux.families.omni_thinking import ThinkingAdapter
from polymux.media.film import at_rate
from polymux.media.image import flat
from polymux.request import Bounds, Modality, SamplingParams

SAMPLE_RATE = 24000
SHORTEST_S = 0.1  # of a sound: the encoder makes nothing of less
MEDIA = (("image", 32), ("video", 8), ("audio", 32))
_MOST = "talker_max_new_tokens"
_TEXT, _SPEECH = 1024, 4096  # steps, as their own default is
_THINKER = ("thinker.model.language_model", "thinker.model.visual", "thinker.model.audio_tower", "thinker.lm_head")


class OmniAdapter(ThinkingAdapter):
    """What both generations have in common."""

    def tokenizer(self, parts: Parts) -> Any:
        return parts.processor.tokenizer

    def sample_rate(self, parts: Parts) -> int:
        return SAMPLE_RATE

    def makes(self, parts: Parts) -> tuple[Modality, ...]:
        return ("text", "audio") if parts.model.has_talker else ("text",)

    def hears_at(self, parts: Parts) -> int | None:
        return int(parts.processor.feature_extractor.sampling_rate)

    def knows(self, parts: Parts, name: str) -> bool:
        return bool(parts.model.has_talker)  # they are all about its speech

    def context(self, parts: Parts) -> int | None:
        return int(parts.model.config.thinker_config.text_config.max_position_embeddings)

    def longest(self, parts: Parts, limit_s: float) -> int | None:
        return self.context(parts)

    def ask(self, parts: Parts, question: Question) -> ChatCall:
        self.check_question(parts, question)
        inputs = self._inputs(parts, question)
        check_known(parts.processor.tokenizer, inputs["input_ids"], parts.model.thinker)
        count = inputs["input_ids"].shape[1]
        settings = parts.model.thinker.generation_config
        ends = ends_of(settings.eos_token_id, parts.processor.tokenizer.eos_token_id)
        steps = room_for(count, self.context(parts), question.params, _TEXT)
        arguments = self.renamed(dict(inputs.to(parts.model.device, parts.model.dtype)))
        arguments |= {"thinker_max_new_tokens": steps, "thinker_eos_token_id": sorted(ends)}
        arguments |= drawing(question.params, "thinker_") | self.speech(parts, question)
        return ChatCall(
            arguments=arguments,
            prompt_tokens=count,
            steps=steps,
            ends=ends,
            speech_steps=arguments.get("talker_max_new_tokens") if question.speaks else None,
            contents=omni_reading.contents(parts, question),
        )

    def answer(self, parts: Parts, call: ChatCall, hooks: Hooks) -> Any:
        if call.speech_steps is not None:
            omni_parts.watch_words(parts.model, hooks.ended)
            self.refuse_silence(parts.model)
        made = parts.model.generate(**call.arguments, **hooks.named("thinker_"))
        return made[1].reshape(-1) if call.speech_steps is not None else None

    def think(self, parts: Parts, call: ChatCall, hooks: Hooks) -> Tensors | None:
        words = self.words(parts, call.arguments.get("speaker"))
        return omni_parts.think(parts, call, hooks, self.heard(parts), words)

    def check_question(self, parts: Parts, question: Question) -> None:
        """Raises InvalidRequestError for what the model cannot do."""
        if question.speaks and question.params.stop:
            what = "the voice would not end there; leave one of them out"
            raise InvalidRequestError(f"stop: cannot be combined with audio: {what}", param="stop")
        if question.speaks and question.params.max_new_tokens == 1:
            what = "must be 2 at least with audio: the voice begins with the second token"
            raise InvalidRequestError(f"max_new_tokens=1: {what}", param="max_new_tokens")
        extra = sorted(question.params.extra_args)
        if extra and not question.speaks:
            name = f"extra_args.{extra[0]}"
            raise InvalidRequestError(f"{name}: nothing is spoken: ask for audio too (modalities)", param=name)
        processor = parts.processor
        check_marks(question.messages, (processor.image_token, processor.audio_token, processor.video_token))
        rate = self.hears_at(parts) or 0
        for number, sound in enumerate(question.sounds, 1):
            if sound.samples.shape[1] < SHORTEST_S * rate:
                raise InvalidRequestError(f"audio: number {number} must last for {SHORTEST_S} s", param="audio")

    def renamed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the processor made, as `generate` wants it."""
        return inputs

    def speech(self, parts: Parts, question: Question) -> dict[str, Any]:
        """What is said of the speech, in arguments of `generate`."""
        raise NotImplementedError

    def samples_per_step(self, parts: Parts) -> int:
        """Of its speech."""
        raise NotImplementedError

    def speech_steps(self, parts: Parts, question: Question) -> int:
        """The most steps of its speech. Raises InvalidRequestError for more than the operator allows."""
        allowed = max(1, int(min(question.longest_s * SAMPLE_RATE / self.samples_per_step(parts), 2**31)))
        asked = question.params.extra_args.get(_MOST)
        if asked is not None and asked > allowed:
            what = f"allowed are {allowed}, which are {question.longest_s:g} s of sound (--max-audio-seconds)"
            raise InvalidRequestError(f"extra_args.{_MOST}={asked}: {what}", param=f"extra_args.{_MOST}")
        return min(_SPEECH, allowed) if asked is None else int(asked)

    def _inputs(self, parts: Parts, question: Question) -> Any:
        media: dict[str, Any] = {}
        if question.pictures:
            media["images"] = [flat(picture).convert("RGB") for picture in question.pictures]
        if question.sounds:
            media["audio"] = [sound.samples[0] for sound in question.sounds]
        if question.films:
            films = [at_rate(film.frames, film.fps, self.sees_at) for film in question.films]
            media |= {"videos": films, "fps": self.sees_at}
        try:
            text = parts.processor.apply_chat_template(
                templated(question.messages), add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise InvalidRequestError(
                f"messages: the model's template refuses them: {error}", param="messages"
            ) from None
        return parts.processor(text=text, return_tensors="pt", padding=True, **media)


class Omni25Adapter(OmniAdapter):
    sees_at = 2.0

    def voices(self, parts: Parts) -> tuple[str, ...]:
        return _default_first(parts.model.speaker_map, "Chelsie") if parts.model.has_talker else ()

    def complete(self, model: Any, folder: str) -> None:
        if model.has_talker:
            model.load_speakers(str(Path(folder) / "spk_dict.pt"))
            model.token2wav.float()  # it works in 32 bits only

    def check_question(self, parts: Parts, question: Question) -> None:
        super().check_question(parts, question)
        most = parts.processor.feature_extractor.n_samples
        for number, sound in enumerate(question.sounds, 1):
            if sound.samples.shape[1] > most:
                rate = parts.processor.feature_extractor.sampling_rate
                length = f"lasts {sound.samples.shape[1] / rate:.1f} s, and the model hears {most / rate:g}"
                raise InvalidRequestError(f"audio: number {number} {length}", param="audio")

    def renamed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # Without the prefix they go to the talker too, which refuses them.
        return {f"thinker_{name}" if name.startswith("pixel_values") else name: inputs[name] for name in inputs}

    def speech(self, parts: Parts, question: Question) -> dict[str, Any]:
        if not question.speaks:
            return {"generation_mode": "text"}
        talker = parts.model.talker
        ends = [talker.codec_pad_token, talker.codec_eos_token]
        config = parts.model.config
        codes, known = config.token2wav_config.dit_config.num_embeds, config.talker_config.vocab_size
        # What means no sound: its own `generate` would look it up among the sounds, and end the device's work.
        never = [[code] for code in range(codes, known) if code not in ends]
        given = {"speaker": question.voice, "talker_eos_token_id": ends, "talker_bad_words_ids": never}
        return given | question.params.extra_args | {_MOST: self.speech_steps(parts, question)}

    def samples_per_step(self, parts: Parts) -> int:
        mel = math.prod(parts.model.token2wav.code2wav_bigvgan_model.config.upsample_rates)
        return int(parts.model.token2wav.code2wav_dit_model.config.repeats * mel)

    def refuse_silence(self, model: Any) -> None:
        omni_parts.refuse_no_codes(model.token2wav)

    def heard(self, parts: Parts) -> int:
        return -1

    def words(self, parts: Parts, voice: str | None) -> tuple[int, ...]:
        if voice is None:
            return ()
        talker = parts.model.talker
        return int(parts.model.speaker_map[voice]["bos_token"]), talker.text_eos_token, talker.text_pad_token

    def talk(self, parts: Parts, question: Question, thoughts: Tensors, emit: Callable[[Tensors], None]) -> None:
        decoder = ("token2wav", omni_parts.WholeSpeech(emit))
        omni_parts.talk(parts, thoughts, 1, decoder, self.speech(parts, question))

    def empty_thoughts(self, parts: Parts) -> Tensors:
        like = next(parts.model.talker.parameters())
        words = self.words(parts, self.voices(parts)[0])
        return omni_parts.empty_thoughts(
            [0] * sum(omni_parts.SMALL), words, like, parts.model.talker.config.embedding_size
        )

    def frame_shape(self, parts: Parts) -> DecoderShape:
        return WholeShape()

    def silence(self, parts: Parts) -> Arrays:
        voice = parts.model.speaker_map[self.voices(parts)[0]]
        given = {"conditioning": voice["cond"].numpy(), "reference_mel": voice["ref_mel"].numpy()}
        return {"codes": np.zeros((1, 4), np.int64), **given}

    def decode(self, parts: Parts, arrays: Arrays) -> Any:
        how = {name: value.item() for name, value in arrays.items() if value.ndim == 0}
        given = {name: value for name, value in arrays.items() if value.ndim}
        if "num_steps" in how:
            how["num_steps"] = int(how["num_steps"])
        return parts.beside(given.pop("codes"), **given, **how).reshape(-1)


class Omni3Adapter(OmniAdapter):
    sees_at = 1.0

    def voices(self, parts: Parts) -> tuple[str, ...]:
        known = parts.model.config.talker_config.speaker_id if parts.model.has_talker else {}
        return _default_first(known, "ethan")

    def check_question(self, parts: Parts, question: Question) -> None:
        super().check_question(parts, question)
        if question.speaks and question.sounds and (question.pictures or question.films):
            what = "it cannot speak about sound and pictures in one conversation; ask for text alone"
            raise InvalidRequestError(f"modalities: {what}", param="modalities")

    def speech(self, parts: Parts, question: Question) -> dict[str, Any]:
        if not question.speaks:
            return {"return_audio": False}
        given = {"return_audio": True, "speaker": question.voice}
        return given | question.params.extra_args | {_MOST: self.speech_steps(parts, question)}

    def samples_per_step(self, parts: Parts) -> int:
        return int(parts.model.code2wav.total_upsample)

    def refuse_silence(self, model: Any) -> None:
        omni_parts.refuse_no_frames(model.talker)

    def heard(self, parts: Parts) -> int:
        return int(parts.model.config.talker_config.accept_hidden_layer)

    def words(self, parts: Parts, voice: str | None) -> tuple[int, ...]:
        config = parts.model.config
        return config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id

    def talk(self, parts: Parts, question: Question, thoughts: Tensors, emit: Callable[[Tensors], None]) -> None:
        self.refuse_silence(parts.model)
        decoder = ("code2wav", omni_parts.Frames(parts.model.talker, emit))
        omni_parts.talk(parts, thoughts, self.heard(parts), decoder, self.speech(parts, question))

    def empty_thoughts(self, parts: Parts) -> Tensors:
        config, like = parts.model.config, next(parts.model.talker.parameters())
        turns = [config.im_start_token_id, config.user_token_id, config.im_start_token_id, config.assistant_token_id]
        tokens = [*turns, *[config.im_start_token_id] * omni_parts.SMALL[1]]
        return omni_parts.empty_thoughts(
            tokens, self.words(parts, None), like, config.talker_config.thinker_hidden_size
        )

    def frame_shape(self, parts: Parts) -> DecoderShape:
        return BlockShape(hop=self.samples_per_step(parts), block=300, context=25)  # as its own `generate` has it

    def silence(self, parts: Parts) -> Arrays:
        return {"codes": np.zeros((parts.beside.config.num_quantizers, 4), np.int64)}

    def decode(self, parts: Parts, arrays: Arrays) -> Any:
        return parts.beside(arrays["codes"][None])[0].float()


def _default_first(names: Sequence[str] | dict[str, Any], default: str) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (name != default, name)))


_TALKER_DRAWING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
_TALKER = tuple(f"talker_{name}" for name in (*_TALKER_DRAWING, "max_new_tokens"))
_STEPS = ("thinker.model.language_model.forward", "talker.model.forward")
_HEADS = ("thinker.model.language_model.embed_tokens", "thinker.lm_head", "talker.codec_head")
_SHARED: dict[str, Any] = {
    "tasks": ("any-to-any",),
    "steps": _STEPS,
    "speech_steps": ("talker.model.forward",),
    "arguments": (*WRITING, "voice"),
    "takes": MEDIA,
    "decoders_merged": _STEPS,
    "unmerged_because": "with `--decoding generate`, each answer has a loop and a cache of its own; speech has anyway",
    "heads_merged": tuple(f"{name}.forward" for name in _HEADS),
}


def _graph(decoder: str, hand_off: HandOff, draws: bool) -> Graph:
    """`draws`: the decoder begins with noise. A frame is 80 ms of sound where the decoder makes sound of frames."""
    return Graph(
        first=4,
        stages=(
            StageDeclaration(name="thinker", does="think", part="thinker"),
            StageDeclaration(name="talker", does="talk", part="talker"),
            StageDeclaration(name=decoder, does="decode", part=decoder),
        ),
        edges=(
            Edge(source=0, target=1, hand_off=as_it_is, random=True),
            Edge(source=1, target=2, hand_off=hand_off, random=draws),
        ),
    )


QWEN25_OMNI = ChatFamily(
    name="qwen2.5-omni",
    models=("Qwen2_5OmniForConditionalGeneration",),
    paged=("Qwen2_5OmniForConditionalGeneration",),
    adapter=Omni25Adapter(),
    processor="Qwen2_5OmniProcessor",
    plain_loading=True,
    components=(*_THINKER, "talker.model", "talker.codec_head", "token2wav.code2wav_dit_model",
                "token2wav.code2wav_bigvgan_model"),
    decoders=("token2wav.code2wav_dit_model", "token2wav.code2wav_bigvgan_model"),
    sees_at=Omni25Adapter.sees_at,
    extra=(*_TALKER, "token2wav_num_steps", "token2wav_guidance_scale", "token2wav_sway_coefficient"),
    bounds={
        "token2wav_num_steps": Bounds(2, 1000, "integer"),
        "token2wav_guidance_scale": Bounds(0, 100),
        "token2wav_sway_coefficient": Bounds(-1, 1.75),  # beyond, time would run backwards
    },
    warmup=SamplingParams(seed=0, max_new_tokens=2),
    graph=_graph("token2wav", as_it_is, draws=True),
    **_SHARED,
)  # fmt: skip

QWEN3_OMNI = ChatFamily(
    name="qwen3-omni",
    models=("Qwen3OmniMoeForConditionalGeneration",),
    paged=("Qwen3OmniMoeForConditionalGeneration",),
    adapter=Omni3Adapter(),
    processor="Qwen3OmniMoeProcessor",
    components=(*_THINKER, "talker.model", "talker.codec_head", "talker.code_predictor.model", "code2wav"),
    decoders=("code2wav",),
    sees_at=Omni3Adapter.sees_at,
    extra=_TALKER,
    warmup=SamplingParams(seed=0, max_new_tokens=2),
    graph=_graph("code2wav", omni_parts.frames_of, draws=False),
    **_SHARED,
)

FAMILIES = (QWEN25_OMNI, QWEN3_OMNI)
