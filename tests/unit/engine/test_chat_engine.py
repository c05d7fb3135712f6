"""The engine for models that answer: many at once, each on its own, text as it is written and speech after it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T

from polymux.config import EngineConfig
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.writing import Writer
from polymux.errors import InvalidRequestError, NotReadyError
from polymux.media.wire import to_wire
from polymux.request import (
    Event,
    Failed,
    Finished,
    Message,
    Part,
    Progress,
    Request,
    SamplingParams,
    SoundPiece,
    TextPiece,
)
from polymux.testing.tiny.inputs import have_torchvision, picture, tone
from polymux.testing.tiny.tokenizers import llama_tokenizer, size_of

Load = Callable[..., ChatEngine]
SEED = 6  # of a text with several words
VOICE = {"talker_max_new_tokens": 4, "talker_do_sample": False}


@pytest.fixture
def load(tiny_checkpoint: Callable[..., Path]) -> Iterator[Load]:
    made: list[ChatEngine] = []

    def engine(model: str | Path = "qwen3-lm", **flags: Any) -> ChatEngine:
        if "omni" in str(model) and not have_torchvision():
            pytest.skip("its processor needs torchvision")
        folder = model if isinstance(model, Path) else tiny_checkpoint(model)
        made.append(ChatEngine.load(EngineConfig.from_flat(model=str(folder), **flags)))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def request(name: str = "a", text: str = "hello", tokens: int | None = 8, **params: Any) -> Request:
    fields = {name: params.pop(name) for name in ("messages", "media", "modalities") if name in params}
    prompt = None if "messages" in fields else text
    sampling = SamplingParams(**{"seed": SEED, "max_new_tokens": tokens} | params)
    return Request(request_id=name, prompt=prompt, sampling=sampling, **fields)


def drive(engine: ChatEngine) -> list[Event]:
    events: list[Event] = []
    while engine.busy:
        for event in engine.step():
            events.append(event)
            if isinstance(event, SoundPiece):
                engine.taken(event.request_id)
    return events


def ends(events: list[Event]) -> dict[str, Event]:
    return {e.request_id: e for e in events if isinstance(e, (Finished, Failed))}


def answer(engine: ChatEngine, **params: Any) -> Finished:
    engine.add(request(**params))
    end = ends(drive(engine))["a"]
    assert isinstance(end, Finished), end
    return end


def refusal(engine: ChatEngine, **params: Any) -> tuple[str, str | None]:
    engine.add(request(**params))
    end = ends(drive(engine))["a"]
    assert isinstance(end, Failed), end
    return end.error.kind, end.error.param


def test_the_pieces_are_the_text(load: Load) -> None:
    engine = load()
    engine.add(request(temperature=1.5, tokens=30))
    events = drive(engine)
    pieces = [e.text for e in events if isinstance(e, TextPiece)]
    (end,) = ends(events).values()
    assert isinstance(end, Finished) and events[-1] is end
    assert "".join(pieces) == end.text and len(pieces) > 2 and end.outputs == [[]] and end.seeds == [SEED]
    assert end.finish_reason == "length" and end.metrics.completion_tokens == 30 == end.metrics.steps
    assert end.metrics.prompt_tokens == len(_template(engine, "hello")) and end.sample_rate is None


def _template(engine: ChatEngine, text: str) -> list[int]:
    said = [{"role": "user", "content": text}]
    ids: list[int] = engine.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True).input_ids
    return ids


def test_how_it_ends(load: Load) -> None:
    engine = load()
    whole = answer(engine, tokens=30, temperature=1.5).text or ""
    words = whole.split()
    stop = next(word for word in words if word != words[0])[1:]
    stopped = answer(engine, tokens=30, temperature=1.5, stop=("nowhere", stop))
    assert stopped.finish_reason == "stop" and stopped.text == whole[: whole.index(stop)]
    assert 2 < stopped.metrics.completion_tokens < 30
    likely = engine.loaded.parts.model.generation_config.eos_token_id
    bias = engine.loaded.parts.model.lm_head
    hook = bias.register_forward_hook(lambda module, args, out: out.index_fill(-1, torch.tensor([likely]), 1e4))
    try:
        ended = answer(engine, tokens=30)
        last = answer(engine, tokens=1)  # the last token that there is room for is the one that ends it
    finally:
        hook.remove()
    for end in (ended, last):
        assert (end.text, end.finish_reason, end.metrics.completion_tokens) == ("", "stop", 1)


def test_penalties_act(load: Load) -> None:
    engine = load()
    plain = answer(engine, tokens=12, do_sample=False)
    for name in ("frequency_penalty", "presence_penalty"):
        assert answer(engine, tokens=12, do_sample=False, **{name: 2.0}).text != plain.text
        assert answer(engine, tokens=12, do_sample=False, **{name: 0.0}).text == plain.text


def test_a_seed_is_drawn_and_told(load: Load) -> None:
    engine = load()
    first = answer(engine, tokens=12, seed=None, temperature=1.5)
    again = answer(engine, tokens=12, seed=first.seeds[0], temperature=1.5)
    assert again.text == first.text != answer(engine, tokens=12, seed=2, temperature=1.5).text


def test_requests_take_turns(load: Load) -> None:
    engine = load()
    engine.add(request("long", tokens=60))
    while not engine.jobs["long"].opened:
        engine.step()
    engine.add(request("short", tokens=2))
    assert list(ends(drive(engine))) == ["short", "long"]


def test_abort_at_any_time_ends_it_and_nobody_else(load: Load) -> None:
    engine = load(max_num_seqs=2)
    wanted = answer(engine, tokens=20, temperature=1.2).text
    for steps in (0, 1, 5):
        for name, tokens in (("a", 20), ("goes", 2000), ("waits", 2000)):
            engine.add(request(name, tokens=tokens, temperature=1.2))
        for _ in range(steps):
            engine.step()
        engine.abort("goes")
        engine.abort("waits")
        got = ends(drive(engine))
        assert isinstance(got["a"], Finished) and got["a"].text == wanted
        assert all(isinstance(e := got[n], Failed) and e.error.kind == "RequestAbortedError" for n in ("goes", "waits"))
        assert not engine.scheduler.waiting and not engine.jobs


def test_room(load: Load) -> None:
    """The conversation and its answer are no longer than the model can look at."""
    engine = load()
    context = engine.capabilities.context
    assert context == engine.loaded.parts.model.config.max_position_embeddings
    assert refusal(engine, text="cat " * context, tokens=None) == ("InvalidRequestError", "prompt")
    assert refusal(engine, tokens=context) == ("InvalidRequestError", "max_new_tokens")


def test_what_a_template_is_told(load: Load, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    engine = load()
    assert engine.capabilities.extra == ("enable_thinking",)
    plain = answer(engine).metrics.prompt_tokens
    assert answer(engine, extra_args={"enable_thinking": True}).metrics.prompt_tokens == plain
    assert answer(engine, extra_args={"enable_thinking": False}).metrics.prompt_tokens > plain
    folder = Path(shutil.copytree(tiny_checkpoint("qwen3-lm"), tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(InvalidRequestError, match="there are none"):
        load(folder).add(request(extra_args={"enable_thinking": True}))


def test_nothing_is_told_of_a_request_before_the_model_has_taken_it(load: Load) -> None:
    engine = load()
    engine._said_at -= 60  # it has been silent for long
    engine.add(request(text="cat " * 5000))
    (only,) = drive(engine)
    assert isinstance(only, Failed)


def test_a_template_that_refuses(load: Load, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("qwen3-lm"), tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    assert refusal(load(folder)) == ("InvalidRequestError", "messages")


def test_without_a_template_a_prompt_goes_on(load: Load, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("qwen3-lm"), tmp_path / "model"))
    (folder / "chat_template.jinja").unlink()
    engine = load(folder)
    model, tokenizer = T.AutoModelForCausalLM.from_pretrained(folder), T.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("a photo of", return_tensors="pt").input_ids
    wanted = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
    assert answer(engine, text="a photo of", do_sample=False).text == tokenizer.decode(wanted)
    messages = [Message("user", [Part("text", "a")])]
    assert refusal(engine, messages=messages) == ("InvalidRequestError", "messages")


@pytest.mark.parametrize("cls", ["LlamaForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM"])
def test_language_models_that_nothing_declares(cls: str, load: Load, tmp_path: Path) -> None:
    tokenizer, made = llama_tokenizer(), getattr(T, cls)
    small = {"vocab_size": size_of(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
             "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(0)
    model = made(made.config_class(**small)).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("a cat", return_tensors="pt").input_ids
    wanted = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
    writer = Writer(tokenizer)
    for count in range(1, len(wanted) + 1):
        writer(wanted[None, :count], None)
    writer.end()
    got = answer(load(tmp_path), text="a cat", do_sample=False)
    assert got.text == writer.text and got.metrics.steps == len(wanted)


def test_sleeping_changes_nothing(load: Load) -> None:
    engine = load()
    wanted = answer(engine, temperature=1.2).text
    for level in (1, 2):
        assert engine.sleep(level) >= 0
        with pytest.raises(NotReadyError):
            engine.add(request())
        engine.wake_up()
        assert answer(engine, temperature=1.2).text == wanted


def test_the_warm_up_leaves_nothing(load: Load) -> None:
    engine = load()
    engine.warm_up()
    assert not engine.busy and engine.stats.running == 0


def test_speech(load: Load) -> None:
    engine = load("qwen25-omni", output_chunk_bytes=1024)
    can = engine.capabilities
    assert (can.makes, can.voices, can.sample_rate) == (("text", "audio"), ("Chelsie", "Ethan"), 24000)
    assert (can.media, can.hears_at, can.sees_at) == ({"image": 32, "video": 8, "audio": 32}, 16000, 2.0)
    spoken = {"modalities": ("text", "audio"), "extra_args": VOICE | {"token2wav_num_steps": 2}, "tokens": 4}
    engine.add(request(**spoken))
    engine.add(request("other", voice="Ethan", **spoken))
    events = drive(engine)
    end = ends(events)["a"]
    assert isinstance(end, Finished) and end.sample_rate == 24000 and end.metrics.audio_tokens == 4
    pieces = [np.frombuffer(e.samples.data, "f4") for e in events if isinstance(e, SoundPiece) and e.request_id == "a"]
    assert len(pieces) > 4 and end.sound_seconds == sum(map(len, pieces)) / 24000
    assert end.finish_reason == "length"  # of the voice, which was cut
    kinds = [type(e) for e in events if e.request_id == "a" and isinstance(e, (TextPiece, SoundPiece))]
    assert kinds == sorted(kinds, key=lambda kind: kind is SoundPiece)
    assert [e for e in events if isinstance(e, Progress) and e.phase == "decode"]
    thinker = engine.loaded.parts.model.thinker.model
    assert thinker.rope_deltas is None is engine.loaded.parts.model.talker.rope_deltas  # each request had its own
    quiet = answer(engine, tokens=4)
    assert quiet.text == end.text and quiet.sample_rate is None and quiet.metrics.audio_tokens == 0


def test_all_of_the_text_is_told_before_it_is_spoken(load: Load) -> None:
    """Also what makes no whole character: it does not wait for the voice."""
    engine = load("qwen3-omni-moe")
    for seed in range(8):
        drawn = {"tokens": 3, "seed": seed, "temperature": 1.0}
        engine.add(request(str(seed), modalities=("text", "audio"), extra_args=VOICE, **drawn))
    jobs, broken = dict(engine.jobs), 0
    while engine.busy:
        for event in engine.step():
            if isinstance(event, TextPiece):
                broken += event.text.endswith("\ufffd")
                assert jobs[event.request_id].speech.done <= 1  # its first call may have been in the same step
            elif isinstance(event, SoundPiece):
                engine.taken(event.request_id)
    assert broken  # of some, the text ended within a character


def test_aborted_while_it_speaks(load: Load) -> None:
    engine = load("qwen3-omni-moe")
    engine.add(request("goes", tokens=3, modalities=("text", "audio"), extra_args={"talker_max_new_tokens": 500}))
    while engine.jobs["goes"].speech.done < 3:
        engine.step()
    engine.abort("goes")
    assert isinstance(ends(drive(engine))["goes"], Failed)
    assert not engine.scheduler.waiting and not engine.jobs


def shown(engine: ChatEngine, *parts: tuple[str, Any], **params: Any) -> tuple[str, str | None]:
    """The refusal of a question with these media."""
    media: dict[str, list[Any]] = {}
    for kind, medium in parts:
        media.setdefault(kind, []).append(medium)
    said = [Part(kind) for kind, _ in parts] + [Part("text", params.pop("text", "what?"))]  # type: ignore[arg-type]
    return refusal(engine, messages=[Message("user", said)], media=media, tokens=2, **params)


def test_what_only_the_model_can_refuse(load: Load) -> None:
    engine = load("qwen3-omni-moe")
    seen, heard = ("image", to_wire(picture(56, 56))), ("audio", to_wire(tone(0.5, 8000)[np.newaxis], sample_rate=8000))
    speaks = {"modalities": ("text", "audio"), "extra_args": VOICE}
    assert shown(engine, seen, heard, **speaks) == ("InvalidRequestError", "modalities")
    assert shown(engine, seen, text="<|image_pad|>") == ("InvalidRequestError", "prompt")
    blip = to_wire(tone(0.05, 16000)[np.newaxis], sample_rate=16000)
    assert shown(engine, heard, ("audio", blip)) == ("InvalidRequestError", "audio")
    assert shown(engine, heard, extra_args=VOICE) == ("InvalidRequestError", "extra_args.talker_do_sample")
    assert shown(engine, heard, **speaks, stop=("a",)) == ("InvalidRequestError", "stop")
    assert refusal(engine, tokens=1, modalities=("text", "audio")) == ("InvalidRequestError", "max_new_tokens")
    assert refusal(load("qwen25-omni"), **_long_sound()) == ("InvalidRequestError", "audio")


def _long_sound() -> dict[str, Any]:
    sound = to_wire(np.zeros((1, 31 * 1000), np.float32), sample_rate=1000)  # of the 30 seconds that it hears
    return {"messages": [Message("user", [Part("audio"), Part("text", "what?")])], "media": {"audio": [sound]}}


def test_sound_in_any_form_is_what_the_model_hears(load: Load) -> None:
    """Two channels become one, and another rate the model's; a sound without a rate has the model's."""
    engine = load("qwen3-omni-moe")
    samples = tone(0.5, 16000)[np.newaxis]

    def heard(sound: Any) -> str | None:
        said = [Message("user", [Part("audio"), Part("text", "what?")])]
        return answer(engine, messages=said, media={"audio": [sound]}).text

    plain = heard(to_wire(samples, sample_rate=16000))
    assert plain == heard(to_wire(samples)) == heard(to_wire(np.repeat(samples, 2, axis=0), sample_rate=16000))


def test_speech_is_no_longer_than_is_allowed(load: Load) -> None:
    engine = load("qwen25-omni", max_audio_seconds=0.1)  # of 480 samples, 50 a second
    spoken: dict[str, Any] = {"modalities": ("text", "audio"), "tokens": 3}
    made = answer(engine, extra_args={"talker_do_sample": False, "talker_repetition_penalty": 1.0}, **spoken)
    assert made.metrics.audio_tokens == 5 and made.sound_seconds <= 0.1 and made.finish_reason == "length"
    assert refusal(engine, extra_args={"talker_max_new_tokens": 6}, **spoken) == (
        "InvalidRequestError",
        "extra_args.talker_max_new_tokens",
    )
