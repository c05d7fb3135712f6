"""Which steps may run as one, and what becomes of those that may not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

from polymux.config import EngineConfig
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.decode_merging import IMPLEMENTATION, SharedLayer
from polymux.errors import ConfigError
from polymux.request import Event, Failed, Finished, Request, SamplingParams
from polymux.testing.tiny.tokenizers import llama_tokenizer, size_of


@pytest.fixture
def engine(tiny_checkpoint: Callable[..., Path]) -> Any:
    made = ChatEngine.load(EngineConfig.from_flat(model=str(tiny_checkpoint("qwen3-lm")), merge_decoding=True))
    yield made
    made.close()


def add(engine: ChatEngine, name: str, prompt: str, tokens: int, **params: Any) -> None:
    sampling = SamplingParams(**{"max_new_tokens": tokens, "do_sample": False, "seed": 1} | params)
    engine.add(Request(request_id=name, prompt=prompt, sampling=sampling))


def drive(engine: ChatEngine) -> dict[str, Event]:
    ends: dict[str, Event] = {}
    while engine.busy:
        ends |= {e.request_id: e for e in engine.step() if isinstance(e, (Finished, Failed))}
    return ends


def text(end: Event) -> str | None:
    assert isinstance(end, Finished), end
    return end.text


def test_prompts_and_answers_of_different_lengths(engine: ChatEngine) -> None:
    assert engine.capabilities.merges
    alone = {}
    for i in range(4):
        add(engine, str(i), "a cat " * (i + 1), 4 + 3 * i)
        alone |= drive(engine)
    before = engine.stats
    assert before.merged == before.calls
    for i in range(4):
        add(engine, str(i), "a cat " * (i + 1), 4 + 3 * i)
    wait(job.preparing for job in engine.jobs.values())  # so that they are under way together
    together = drive(engine)
    assert {n: text(e) for n, e in together.items()} == {n: text(e) for n, e in alone.items()}
    runs, answered = (now["model"] - then["model"] for now, then in (
        (engine.stats.calls, before.calls), (engine.stats.merged, before.merged)))  # fmt: skip
    assert answered == 4 + 7 + 10 + 13 and runs == 4 + 12  # prompts alone; then as many steps as the longest has
    assert engine.loaded.parts.model.config._attn_implementation == "sdpa" != IMPLEMENTATION


def test_a_step_that_fails_in_company_ends_alone_whom_it_concerns(engine: ChatEngine) -> None:
    add(engine, "a", "a cat", 8)
    wanted = text(drive(engine)["a"])
    component = next(c for c in engine.loaded.components if c.name == "model")
    entry = component.entries["forward"]

    def failing(*args: Any, **kwargs: Any) -> Any:
        made = entry.original(*args, **kwargs)  # so every cache has grown when it fails
        if isinstance(kwargs["cache"].layers[0], SharedLayer):
            raise RuntimeError("together")
        return made

    component.entries["forward"] = type(entry)(entry.owner, "forward", failing, entry.signature, entry.own)
    for name in ("a", "b"):
        add(engine, name, "a cat", 8)
    assert {text(end) for end in drive(engine).values()} == {wanted}
    assert engine.runner.unmergeable == {"model"}


def test_others_are_refused(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    tokenizer = llama_tokenizer()
    config = T.LlamaConfig(vocab_size=size_of(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                           num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    torch.manual_seed(0)
    T.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for model in (tmp_path, tiny_checkpoint("vits")):
        with pytest.raises(ConfigError) as error:
            ChatEngine.load(EngineConfig.from_flat(model=str(model), merge_decoding=True))
        assert error.value.param == "merge_decoding"
