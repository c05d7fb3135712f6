"""Qwen-Omni in stages: what goes from the thinker to the talker, and how each of them runs without the others.

The model's own `generate` calls thinker, talker and decoder one after the other. Where the talker is alone it runs as
it is, with stand-ins in the places of the others: one that has thought already, and one that takes what is to be
decoded.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from polymux.errors import UnusableOutputError
from polymux.families.chat import ChatCall, Hooks, Tensors
from polymux.families.generate import Parts

_OTHERS = ("talker_", "token2wav_")  # prefixes of what is not for the thinker
_OF_ALL = ("speaker", "return_audio", "generation_mode")  # likewise
SEEN = ("input_features", "pixel_values", "pixel_values_videos")  # the talker only asks whether they are there
_OURS = ("sequences", "embeds", "hidden", "words", "word_embeds", "ends")
_HIDDEN = {"output_hidden_states": True, "return_dict_in_generate": True}
SHORTEST = 2  # tokens of an answer that is spoken
SMALL = (4, 3)  # tokens of a prompt and of an answer, to try the talker with


def think(parts: Parts, call: ChatCall, hooks: Hooks, layer: int, words: Sequence[int]) -> Tensors | None:
    """Call the thinker as the model's own `generate` does. `layer`: whose output the talker gets, beside embeddings;
    `words`: tokens whose embeddings it needs."""
    given = for_thinker(call)
    thinker, speaks = parts.model.thinker, call.speech_steps is not None
    more = _HIDDEN if speaks else {}
    made = thinker.generate(use_audio_in_video=False, **given, **hooks.named(), **more)
    if not speaks:
        return None
    known = (made.sequences, *(_in_one([step[depth] for step in made.hidden_states]) for depth in (0, layer)))
    return thoughts(thinker, call, words, known)


def thoughts(thinker: Any, call: ChatCall, words: Sequence[int], known: tuple[Any, Any, Any]) -> Tensors:
    """What the talker is told. `known`: the tokens (1, tokens), and what the first layer was given and the talker's
    layer made of all but the last one. Raises GenerationError where there are no words to speak."""
    (sequences, embeds, hidden), ids = known, call.arguments["input_ids"]
    _check_words(sequences, ids)
    embedding = thinker.get_input_embeddings()
    told = {name: value for name, value in call.arguments.items() if hasattr(value, "shape")}
    return {name: value[:0] if name.removeprefix("thinker_") in SEEN else value for name, value in told.items()} | {
        "sequences": sequences,
        "embeds": embeds,
        "hidden": hidden,
        "words": ids.new_tensor(list(words)),
        "word_embeds": embedding(embedding.weight.new_tensor(list(words)).long()),
        "ends": ids.new_tensor(sorted(call.ends)),
    }


def for_thinker(call: ChatCall) -> dict[str, Any]:
    """The arguments that are the thinker's, by its own names."""
    return {
        name.removeprefix("thinker_"): value
        for name, value in call.arguments.items()
        if name not in _OF_ALL and not name.startswith(_OTHERS)
    }


def watch_words(model: Any, ended: Callable[[], None]) -> None:
    """Have a session's own model tell when its text is at its end, and raise UnusableOutputError where it would have to
    speak no word; its own code fails there in ways that tell nothing. So for the others below."""
    write = model.thinker.generate

    @functools.wraps(write)
    def written(input_ids: Any, **given: Any) -> Any:
        made = write(input_ids=input_ids, **given)
        ended()
        _check_words(made.sequences, input_ids)
        return made

    model.thinker.generate = written


def refuse_no_codes(decoder: Any) -> None:
    """Of a decoder that gets all codes at once."""
    forward = decoder.forward

    @functools.wraps(forward)
    def decoded(code: Any, *args: Any, **kwargs: Any) -> Any:
        _check_count(code.shape[1])
        return forward(code, *args, **kwargs)

    decoder.forward = decoded


def refuse_no_frames(talker: Any) -> None:
    """Of a talker that tells frames beside its hidden states."""
    speak = talker.generate

    @functools.wraps(speak)
    def spoken(*args: Any, **given: Any) -> Any:
        made = speak(*args, **given)
        _check_count(sum(step[-1] is not None for step in made.hidden_states))
        return made

    talker.generate = spoken


def _check_words(sequences: Any, prompt: Any) -> None:
    if sequences.shape[1] - prompt.shape[1] < SHORTEST:
        raise UnusableOutputError(
            "the answer has no words that could be spoken: another seed may, or ask for text alone"
        )


def _check_count(codes: int) -> None:
    if not codes:
        raise UnusableOutputError("the voice had come to its end before it said anything: another seed may say more")


def _in_one(steps: Sequence[Any]) -> Any:
    """(1, tokens, size) of the steps one after the other."""
    whole = steps[0].new_empty(1, sum(step.shape[1] for step in steps), steps[0].shape[2])
    at = 0
    for step in steps:
        whole[:, at : at + step.shape[1]] = step
        at += step.shape[1]
    return whole


def talk(
    parts: Parts, thoughts: Tensors, depth: int, decoder: tuple[str, object] | None, speech: dict[str, Any]
) -> Any:
    """Run the model's own `generate` with a thinker that has thought already. `depth`: where among the outputs of its
    layers the talker looks; `decoder`: what stands in its place, by name, if it is not there. `parts` are a session's
    own."""
    model, thinker = parts.model, ("thinker", Thought(thoughts, depth))
    for child, other in (thinker,) if decoder is None else (thinker, decoder):
        delattr(model, child)  # a module's place takes nothing else
        setattr(model, child, other)
    told = {name: value for name, value in thoughts.items() if name not in _OURS}
    return model.generate(**told, thinker_eos_token_id=thoughts["ends"].tolist(), **speech)


@dataclass(frozen=True)
class Answered:
    """What a thinker's `generate` returns, as far as it is asked for."""

    sequences: Any
    hidden_states: tuple[tuple[Any, ...], ...]


class Thought:
    """A thinker that has thought already."""

    def __init__(self, thoughts: Tensors, depth: int) -> None:
        self._thoughts, self._depth = thoughts, depth
        self.device = thoughts["sequences"].device
        self.generation_config = SimpleNamespace(eos_token_id=None)  # it is told what ends an answer

    def generate(self, **arguments: Any) -> Answered:
        embeds, hidden = self._thoughts["embeds"], self._thoughts["hidden"]
        begin, between = self._thoughts["input_ids"].shape[1], (None,) * (self._depth - 1)
        bounds = [0, *range(begin, embeds.shape[1] + 1)]
        steps = [(embeds[:, a:b], *between, hidden[:, a:b]) for a, b in itertools.pairwise(bounds)]
        return Answered(self._thoughts["sequences"], tuple(steps))

    def get_input_embeddings(self) -> Callable[[Any], Any]:
        return self._embed

    def _embed(self, ids: Any) -> Any:
        places = {word: i for i, word in enumerate(self._thoughts["words"].tolist())}
        found = self._thoughts["word_embeds"][[places[word] for word in ids.reshape(-1).tolist()]]
        return found.reshape(*ids.shape, -1)


class WholeSpeech:
    """In the place of a decoder that is called once: emits what it is to decode."""

    dtype = None

    def __init__(self, emit: Callable[[Tensors], None]) -> None:
        self._emit = emit

    def float(self) -> None:
        """It has no weights."""

    def __call__(self, codes: Any, *, conditioning: Any, reference_mel: Any, **how: Any) -> Any:
        _check_count(codes.shape[1])
        number = conditioning.double().new_tensor
        told = {name: number(value) for name, value in how.items() if type(value) in (int, float)}
        self._emit({"codes": codes, "conditioning": conditioning, "reference_mel": reference_mel} | told)
        return codes


class Frames:
    """In the place of a decoder that decodes frames: they are emitted as the talker comes to know them."""

    def __init__(self, talker: Any, emit: Callable[[Tensors], None]) -> None:
        """`talker`: a session's own."""
        self._emit, self._count = emit, 0
        forward = talker.forward

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if (codes := kwargs.get("residual_codes")) is not None:  # of the frame before
                self._count += 1
                emit({"codes": codes})
            return forward(*args, **kwargs)

        talker.forward = watched

    def chunked_decode(self, codes: Any, **how: Any) -> Any:
        """`codes`: (1, codebooks, frames), all of them."""
        if codes.shape[2] > self._count:
            self._emit({"codes": codes[0, :, self._count :].T})
        return codes


def frames_of(kept: Any, chunk: Any, last: bool) -> Any:
    """Rows are frames; a decoder takes them last."""
    return {"codes": chunk["codes"].T}, {}


def empty_thoughts(tokens: Sequence[int], words: Sequence[int], like: Any, size: int) -> Tensors:
    """Of a conversation of these tokens, the last of which are its answer. `like`: a tensor as the talker has them."""
    ids = like.new_zeros(1, len(tokens)).long()
    ids[0] = ids.new_tensor(list(tokens))
    prompt = ids[:, : len(tokens) - SMALL[1]]
    known = like.new_zeros(1, len(tokens) - 1, size)
    return {
        "input_ids": prompt,
        "attention_mask": prompt * 0 + 1,
        "sequences": ids,
        "embeds": known,
        "hidden": known,
        "words": ids.new_tensor(list(words)),
        "word_embeds": like.new_zeros(len(words), size),
        "ends": ids.new_tensor([]),
    }
