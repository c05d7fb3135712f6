"""The engine of language models: as the one in which each answer is a loop of its own, seen from outside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from polymux.config import EngineConfig
from polymux.engine.answering import load_answering
from polymux.engine.ar_engine import ArEngine
from polymux.engine.base import StageEngine
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.generate_model import GenerateModel
from polymux.errors import ConfigError, NotReadyError
from polymux.request import Event, Failed, Finished, Progress, Request, SamplingParams, TextPiece

Load = Callable[..., ArEngine]


@pytest.fixture
def load(tiny_checkpoint: Callable[..., Path]) -> Iterator[Load]:
    made: list[ArEngine] = []

    def engine(ahead: bool = False, folder: Path | None = None, **flags: Any) -> ArEngine:
        config = EngineConfig.from_flat(model=str(folder or tiny_checkpoint("qwen3-lm")), **flags)
        device = torch.device("cpu")
        made.append(ArEngine(config, GenerateModel.load(config, device), device, ahead))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def request(name: str = "a", text: str = "hello", tokens: int | None = 8, **params: Any) -> Request:
    params.setdefault("seed", 6)
    return Request(request_id=name, prompt=text, sampling=SamplingParams(max_new_tokens=tokens, **params))


def drive(engine: StageEngine) -> list[Event]:
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    return events


def ends(events: list[Event]) -> dict[str, Any]:
    return {e.request_id: e for e in events if isinstance(e, (Finished, Failed))}


def answer(engine: StageEngine, **params: Any) -> Finished:
    engine.add(request(**params))
    end = ends(drive(engine))["a"]
    assert isinstance(end, Finished), end
    return end


def refusal(engine: StageEngine, **params: Any) -> tuple[str, str | None]:
    engine.add(request(**params))
    end = ends(drive(engine))["a"]
    assert isinstance(end, Failed), end
    return end.error.kind, end.error.param


GREEDY: list[dict[str, Any]] = [
    {"text": "hello there", "tokens": 30, "do_sample": False},
    {"text": "a cat", "tokens": 9, "do_sample": False, "repetition_penalty": 1.4},
    {"text": "a cat and a dog", "tokens": 12, "temperature": 0, "frequency_penalty": 1.0, "presence_penalty": 0.4},
    {"text": "a cat and a fox", "tokens": 25, "do_sample": False, "stop": ("e", "o")},
    {"text": "what is " * 12, "tokens": 1, "do_sample": False, "extra_args": {"enable_thinking": False}},
]


def test_it_answers_as_the_loop_of_each_does(load: Load, tiny_checkpoint: Callable[..., Path]) -> None:
    other = ChatEngine.load(EngineConfig.from_flat(model=str(tiny_checkpoint("qwen3-lm"))))
    for ahead in (False, True):
        engine = load(ahead, max_num_batched_tokens=40)
        for made in (other, engine):
            for i, one in enumerate(GREEDY):
                made.add(request(str(i), **one))
        wanted, got = ends(drive(other)), ends(drive(engine))
        assert len(wanted) == len(got) == len(GREEDY)
        for name, end in wanted.items():
            mine = got[name]
            assert (mine.text, mine.finish_reason, mine.seeds) == (end.text, end.finish_reason, end.seeds)
            for count in ("prompt_tokens", "completion_tokens", "steps", "audio_tokens", "text_tokens"):
                assert getattr(mine.metrics, count) == getattr(end.metrics, count), count
            assert mine.metrics.denoise > 0 and mine.metrics.total >= mine.metrics.queue
    ours, theirs = engine.capabilities, other.capabilities
    for name in ("arguments", "extra", "bounds", "media", "makes", "chats", "parameters", "max_new_tokens", "refused"):
        assert getattr(ours, name) == getattr(theirs, name)
    other.close()


def test_the_pieces_are_the_text(load: Load) -> None:
    engine = load()
    engine.add(request(temperature=1.5, tokens=30))
    events = drive(engine)
    pieces = [e.text for e in events if isinstance(e, TextPiece)]
    end = events[-1]
    assert isinstance(events[0], Progress) and isinstance(end, Finished)
    assert "".join(pieces) == end.text and len(pieces) > 2 and end.outputs == [[]] and end.seeds == [6]
    assert end.finish_reason == "length" and end.metrics.completion_tokens == 30


def test_seeds(load: Load) -> None:
    engine = load()
    first = answer(engine, tokens=12, seed=None, temperature=1.5)
    again = answer(engine, tokens=12, seed=first.seeds[0], temperature=1.5)
    assert again.text == first.text != answer(engine, tokens=12, seed=2, temperature=1.5).text
    assert answer(engine, tokens=12, seed=2**64 - 1, temperature=1.5).finish_reason


@pytest.mark.parametrize("ahead", [False, True])
def test_abort_at_any_time_ends_it_and_nobody_else(load: Load, ahead: bool) -> None:
    engine = load(ahead, max_num_seqs=2, max_num_batched_tokens=16)
    wanted = answer(engine, tokens=20, temperature=1.2).text
    for steps in (0, 1, 2, 5):
        for name, tokens in (("a", 20), ("goes", 200), ("waits", 200)):
            engine.add(request(name, tokens=tokens, temperature=1.2))
        if steps:
            wait(job.preparing for job in engine._jobs.values())
        for _ in range(steps):
            engine.step()
        assert engine.stats.running + engine.stats.waiting == 3
        engine.abort("goes")
        engine.abort("waits")
        got = ends(drive(engine))
        assert isinstance(got["a"], Finished) and got["a"].text == wanted
        assert all(isinstance(got[n], Failed) and got[n].error.kind == "RequestAbortedError" for n in ("goes", "waits"))
        assert (engine.stats.running, engine.stats.waiting, engine.stats.kv_blocks_used) == (0, 0, 0)


def test_room(load: Load) -> None:
    """A conversation and its answer fit in what the model looks at, and in the cache."""
    engine = load()
    context = engine.capabilities.context
    assert context == engine._model.parts.model.config.max_position_embeddings  # type: ignore[union-attr]
    assert refusal(engine, text="cat " * context, tokens=None) == ("InvalidRequestError", "prompt")
    assert refusal(engine, tokens=context) == ("InvalidRequestError", "max_new_tokens")
    block = engine._network.shape.token_bytes * 16  # type: ignore[union-attr]
    small = load(kv_cache_memory_bytes=4 * block)
    assert small.capabilities.context == 64 and small.stats.kv_blocks == 4
    assert refusal(small, text="cat " * 80) == ("InvalidRequestError", "prompt")
    assert refusal(small, tokens=60) == ("InvalidRequestError", "max_new_tokens")
    full = answer(small, tokens=None, do_sample=False)
    assert full.metrics.prompt_tokens + full.metrics.completion_tokens <= 64
    names = [str(i) for i in range(4)]
    for name in names:
        small.add(request(name, tokens=24, do_sample=False))
    texts = {name: end.text for name, end in ends(drive(small)).items()}
    assert set(texts.values()) == {answer(engine, tokens=24, do_sample=False).text}
    assert small.stats.preemptions > 0
    with pytest.raises(ConfigError, match=f"a block of 16 tokens takes {block}"):
        load(kv_cache_memory_bytes=block - 1)


def test_beginnings_are_found(load: Load) -> None:
    engine = load()
    engine.warm_up()
    assert not engine.busy and not engine.stats.cache_queries
    for _ in range(2):
        answer(engine, text="a cat and a dog " * 8)
    stats = engine.stats
    assert 0 < stats.cache_hits["prefix_cache"] < stats.cache_queries["prefix_cache"]
    without = load(enable_prefix_caching=False)
    for _ in range(2):
        answer(without, text="a cat and a dog " * 8)
    assert not without.stats.cache_queries


def test_a_failure_ends_those_in_the_step(load: Load) -> None:
    engine = load()
    wanted = answer(engine, do_sample=False).text
    head = engine._model.parts.model.lm_head  # type: ignore[union-attr]

    def fails(*_: Any) -> None:
        raise ValueError("broken")

    hook = head.register_forward_hook(fails)
    engine.add(request("a"))
    engine.add(request("b"))
    got = ends(drive(engine))
    assert {end.error.kind for end in got.values()} == {"GenerationError"}
    hook.remove()
    assert answer(engine, do_sample=False).text == wanted and engine.stats.kv_blocks_used == 0


def test_a_token_that_cannot_be_read_ends_its_request_alone(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    wanted = answer(engine, do_sample=False).text
    for name in ("a", "b"):
        engine.add(request(name, do_sample=False))

    def fails(token: int) -> None:
        raise ValueError("no such token")

    monkeypatch.setattr(engine._jobs["a"].writer, "write", fails)
    got = ends(drive(engine))
    assert (got["a"].error.kind, got["b"].text) == ("GenerationError", wanted)
    assert engine.stats.kv_blocks_used == 0


def test_sleeping_changes_nothing(load: Load) -> None:
    engine = load()
    wanted = answer(engine, temperature=1.2).text
    steps = engine.stats.steps
    for level in (1, 2):
        assert engine.sleep(level) >= 0
        assert engine.stats.kv_blocks == 0 and engine.stats.steps >= steps
        with pytest.raises(NotReadyError):
            engine.add(request())
        engine.wake_up()
        assert answer(engine, temperature=1.2).text == wanted


def test_which_engine_answers(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoint("qwen3-lm")

    def kind(folder: Path = model, **flags: Any) -> str:
        engine = load_answering(EngineConfig.from_flat(model=str(folder), **flags))
        engine.close()
        return type(engine).__name__

    assert kind() == kind(decoding="paged") == "ArEngine"
    assert kind(decoding="generate") == kind(merge_decoding=True) == "ChatEngine"
    odd = Path(shutil.copytree(model, tmp_path / "odd"))
    settings = json.loads((odd / "generation_config.json").read_text())
    (odd / "generation_config.json").write_text(json.dumps(settings | {"no_repeat_ngram_size": 3}))
    assert kind(odd) == "ChatEngine"
    for flags, name in (
        ({"decoding": "paged", "folder": odd}, "decoding"),
        ({"block_size": 32, "folder": odd}, "block_size"),
        ({"decoding": "generate", "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"decoding": "paged", "merge_decoding": True}, "merge_decoding"),
        ({"decode_graphs": "plain"}, "decode_graphs"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization"),
        ({"block_size": 24}, "block_size"),
        ({"kv_cache_memory_bytes": 2**20, "gpu_memory_utilization": 0.5}, "kv_cache_memory_bytes"),
    ):
        with pytest.raises(ConfigError) as error:
            kind(**flags)  # type: ignore[arg-type]
        assert error.value.param == name


def test_prompts_that_the_model_cannot_begin_with(
    load: Load, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """One of no token at all would wait for ever; one of a token without an embedding would fail whoever is beside."""
    folder = Path(shutil.copytree(tiny_checkpoint("qwen3-lm"), tmp_path / "odd"))
    for template in folder.glob("*.jinja"):
        template.unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokens = json.loads((folder / "tokenizer.json").read_text())
    tokens["normalizer"] = {"type": "Replace", "pattern": {"String": "~"}, "content": ""}
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    last = max(one["id"] for one in tokens["added_tokens"])
    tokens["added_tokens"] += [
        {"id": last + i, "content": f"[more{i}]", **more} for i in range(1, 6)
    ]  # the model: 2 more
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    engine = load(folder=folder)
    for text in ("~", "hello [more5]"):
        assert refusal(engine, text=text) == ("InvalidRequestError", "prompt")
    assert answer(engine, text="~hello").metrics.prompt_tokens > 0
