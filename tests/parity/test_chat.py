"""Every tiny model that answers: through the engine, alone and with neighbours that ask otherwise, its tokens and its
voice are those of transformers' own `generate`.

fp32 on a CPU. Calls are interleaved and not merged, so the same operations run in the same order: no difference at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image

from polymux.config import EngineConfig
from polymux.engine.chat_engine import ChatEngine
from polymux.families import all_generate_families
from polymux.families.chat import ChatFamily
from polymux.families.pictures import PictureFamily
from polymux.media.wire import to_wire
from polymux.omni_output import samples_of
from polymux.request import Event, Failed, Finished, Message, Part, Request, SamplingParams, SoundPiece, TextPiece
from polymux.testing.tiny.inputs import have_torchvision, picture, tone

Ids = torch.Tensor
Wave = np.ndarray[Any, Any]
Answer = tuple[Ids, torch.Tensor | None]  # the new tokens, and the voice
FILM = np.random.default_rng(0).integers(0, 255, (4, 56, 56, 3), dtype=np.uint8)
SEED = 5


@dataclass(frozen=True)
class Ask:
    """A conversation in transformers' own form, and how to answer it."""

    name: str
    messages: list[dict[str, Any]]
    speaks: bool = False
    params: dict[str, Any] = field(default_factory=dict)


def said(role: str, *content: str | dict[str, Any]) -> dict[str, Any]:
    parts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    return {"role": role, "content": parts if len(parts) > 1 or not isinstance(content[0], str) else content[0]}


SEES = {"type": "image", "image": picture(56, 56)}
SEES_ELSE = {"type": "image", "image": picture(56, 56, seed=8)}
HEARS = {"type": "audio", "audio": tone(0.5, 16000)}
WATCHES = {"type": "video", "video": FILM}
GREEDY = {"max_new_tokens": 6, "do_sample": False}
VOICE = {"talker_max_new_tokens": 8, "talker_do_sample": False}
TURNS = [said("system", "be brief"), said("user", "a cat"), said("assistant", "a dog"), said("user", "and the fox?")]

TEXTS = (
    Ask("greedy", [said("user", "hello there")], params={"max_new_tokens": 12, "do_sample": False}),
    Ask("turns", TURNS, params={"max_new_tokens": 9, "temperature": 0.7, "top_k": 20}),
    Ask("penalties", [said("user", "x")], params={"max_new_tokens": 16, "repetition_penalty": 1.3, "do_sample": True}),
    Ask("min_p", [said("user", "a fox")], params={"max_new_tokens": 5, "min_p": 0.05, "top_p": 0.9}),
)
OMNI = (
    Ask("sees", [said("user", SEES, "what is it?")], True, GREEDY | {"extra_args": VOICE}),
    Ask("hears", [said("user", HEARS, "what is it?")], params={"max_new_tokens": 4, "temperature": 0.8}),
    Ask("watches", [said("system", "be brief"), said("user", WATCHES, "what?")], params=GREEDY),
    Ask("all", [said("user", SEES, "and"), said("assistant", "a cat"), said("user", HEARS, SEES_ELSE, "now?")],
        params={"max_new_tokens": 7, "temperature": 1.0, "top_p": 0.9}),
    Ask("speaks", [said("user", "say hello")], True,
        {"max_new_tokens": 5, "temperature": 0.9, "voice": None,
         "extra_args": {"talker_max_new_tokens": 6, "talker_do_sample": False}}),
)  # fmt: skip


def drawn(params: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The same in transformers' words: to name how tokens are drawn is to ask that they are."""
    given = {name: value for name, value in params.items() if name not in ("extra_args", "voice")}
    given.setdefault("do_sample", True)
    return {prefix + name: value for name, value in given.items()}


def media_of(messages: Sequence[dict[str, Any]], kind: str) -> list[Any]:
    parts = [part for one in messages if isinstance(one["content"], list) for part in one["content"]]
    return [part[kind] for part in parts if part["type"] == kind]


def language(path: Path) -> Callable[[Ask], Answer]:
    model, tok = T.AutoModelForCausalLM.from_pretrained(path), T.AutoTokenizer.from_pretrained(path)

    def answer(ask: Ask) -> Answer:
        inputs = tok.apply_chat_template(
            ask.messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        torch.manual_seed(SEED)
        return model.generate(**inputs, **drawn(ask.params))[0, inputs["input_ids"].shape[1] :], None

    return answer


def omni(path: Path, model: Any, processor: Any, fps: float, spoken: dict[str, Any], mute: dict[str, Any]) -> Any:
    def answer(ask: Ask) -> Answer:
        chat = processor.apply_chat_template(ask.messages, add_generation_prompt=True, tokenize=False)
        media: dict[str, Any] = {
            name: found
            for name, kind in (("images", "image"), ("audio", "audio"), ("videos", "video"))
            if (found := media_of(ask.messages, kind))
        }
        inputs = dict(processor(text=chat, return_tensors="pt", padding=True, fps=fps, **media))
        for name in ("pixel_values", "pixel_values_videos"):
            if name in inputs:
                inputs[f"thinker_{name}"] = inputs.pop(name)
        extra = ask.params.get("extra_args", {})
        count, end = inputs["input_ids"].shape[1], processor.tokenizer.eos_token_id
        how = (spoken | extra if ask.speaks else mute) | drawn(ask.params, "thinker_")
        torch.manual_seed(SEED)
        made = model.generate(**inputs, thinker_eos_token_id=end, **how)
        ids, voice = made if isinstance(made, tuple) else (made, None)
        return ids[0, count:], None if voice is None else voice.reshape(1, -1)

    return answer


def omni25(path: Path) -> Callable[[Ask], Answer]:
    # The plain loading: the class's own one says nothing of what is missing.
    model = T.Qwen2_5OmniForConditionalGeneration.from_pretrained(path)
    spoken = {"speaker": "Chelsie", "talker_eos_token_id": [64, 66]}
    return omni(path, model, T.Qwen2_5OmniProcessor.from_pretrained(path), 2.0, spoken, {"generation_mode": "text"})


def omni3(path: Path) -> Callable[[Ask], Answer]:
    model = T.Qwen3OmniMoeForConditionalGeneration.from_pretrained(path)
    spoken = {"return_audio": True, "speaker": "ethan"}
    return omni(path, model, T.Qwen3OmniMoeProcessor.from_pretrained(path), 1.0, spoken, {"return_audio": False})


CASES = {
    "qwen3-lm": (language, TEXTS, "Qwen3ForCausalLM"),
    "qwen25-omni": (omni25, OMNI, "Qwen2_5OmniForConditionalGeneration"),
    "qwen3-omni-moe": (omni3, OMNI, "Qwen3OmniMoeForConditionalGeneration"),
}


def request_for(ask: Ask, name: str, seed: int = SEED) -> Request:
    messages, media = [], {"image": [], "audio": [], "video": []}  # type: ignore[var-annotated]
    for one in ask.messages:
        content = [{"type": "text", "text": one["content"]}] if isinstance(one["content"], str) else one["content"]
        messages.append(Message(one["role"], [Part(part["type"], part.get("text", "")) for part in content]))
        for part in content:
            if part["type"] != "text":
                media[part["type"]].append(wire(part[part["type"]]))
    return Request(
        request_id=name,
        messages=messages,
        media={kind: items for kind, items in media.items() if items},
        modalities=("text", "audio") if ask.speaks else (),
        sampling=SamplingParams(**ask.params | {"seed": seed}),
    )


def wire(value: Any) -> Any:
    if isinstance(value, Image.Image) or value.ndim == 4:
        return to_wire(value)
    return to_wire(value[np.newaxis], sample_rate=16000)


@dataclass
class Got:
    text: str = ""
    wave: list[Wave] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    end: Event | None = None


def drive(engine: ChatEngine) -> dict[str, Got]:
    got: dict[str, Got] = {}
    while engine.busy:
        for event in engine.step():
            mine = got.setdefault(event.request_id, Got())
            if isinstance(event, TextPiece):
                mine.text += event.text
                mine.order.append("text")
            elif isinstance(event, SoundPiece):
                mine.wave.append(samples_of(event))
                mine.order.append("sound")
                engine.taken(event.request_id)
            elif isinstance(event, (Finished, Failed)):
                mine.end = event
    return got


def check(got: Got, wanted: Answer, tokenizer: Any, tolerance: float = 0.0) -> None:
    assert isinstance(got.end, Finished), got.end
    ids, voice = wanted
    assert got.text == got.end.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert got.end.metrics.completion_tokens == len(ids)
    assert (voice is None) == (not got.wave)
    if voice is not None:
        assert np.allclose(np.concatenate(got.wave, axis=1), voice.numpy(), rtol=0, atol=tolerance)
        assert got.order == sorted(got.order, reverse=True) and got.end.sample_rate == 24000


def test_every_family_is_here() -> None:
    every = [f for f in all_generate_families() if isinstance(f, ChatFamily) and not isinstance(f, PictureFamily)]
    declared = {name for f in every for name in f.models}
    assert {name for _, _, name in CASES.values()} == declared


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_answers_are_those_of_transformers(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    if "omni" in name and not have_torchvision():
        pytest.skip("its processor needs torchvision")
    path = tiny_checkpoint(name)
    load, asks, _ = CASES[name]
    answer = load(path)
    wanted = {ask.name: answer(ask) for ask in asks}
    tokenizer = T.AutoTokenizer.from_pretrained(path)
    engine = ChatEngine.load(EngineConfig.from_flat(model=str(path), max_num_seqs=8))
    try:
        engine.add(request_for(asks[0], "alone"))
        check(drive(engine)["alone"], wanted[asks[0].name], tokenizer)
        for ask in asks:
            engine.add(request_for(ask, ask.name))
        for i, ask in enumerate(asks):  # the same again, otherwise
            engine.add(request_for(ask, f"other-{i}", seed=6 + i))
        got = drive(engine)
        for ask in asks:
            check(got[ask.name], wanted[ask.name], tokenizer)
        assert all(got[f"other-{i}"].end is not None for i in range(len(asks)))
    finally:
        engine.close()
    again = answer(asks[0])
    assert torch.equal(again[0], wanted[asks[0].name][0])


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_merged_steps_choose_the_same_tokens(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """With steps of different requests run as one: the same tokens, and the same voice to within rounding."""
    if "omni" in name and not have_torchvision():
        pytest.skip("its processor needs torchvision")
    path = tiny_checkpoint(name)
    load, asks, _ = CASES[name]
    answer, tokenizer = load(path), T.AutoTokenizer.from_pretrained(path)
    engine = ChatEngine.load(EngineConfig.from_flat(model=str(path), max_num_seqs=16, merge_decoding=True))
    try:
        for ask in asks:
            for i in range(2):
                engine.add(request_for(ask, f"{ask.name}-{i}"))
        wait(job.preparing for job in engine.jobs.values())  # so that they are under way together
        got = drive(engine)
        for ask in asks:
            wanted = answer(ask)
            for i in range(2):
                check(got[f"{ask.name}-{i}"], wanted, tokenizer, tolerance=1e-4)
        stats = engine.stats
        for path_of in engine.family.decoders_merged:
            decoder = path_of.removesuffix(".forward")
            assert stats.merged[decoder] > 1.2 * stats.calls[decoder]
        assert engine.runner.unmergeable == set()
    finally:
        engine.close()
