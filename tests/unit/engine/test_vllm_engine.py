"""The engine of language models that vLLM runs: as the other one for them, seen from outside. vLLM is a stand-in."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from source_tree import ROOT

from polymux.config import EngineConfig
from polymux.engine.answering import load_answering
from polymux.engine.base import StageEngine
from polymux.engine.engines import engine_for
from polymux.engine.vllm_engine import VllmEngine
from polymux.engine.vllm_settings import _DEFAULTS, _chosen, arguments
from polymux.errors import ConfigError, InvalidRequestError, NotReadyError, StageDeadError
from polymux.orchestrator.plan import plan_of
from polymux.request import Event, Failed, Finished, Message, Part, Progress, Request, SamplingParams, TextPiece
from polymux.tools import Tool, ToolUse

BREAKS, DIES, TIRES = 13, 666, 404  # seeds, see the stand-in
Load = Callable[..., VllmEngine]


def names() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "vllm"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine sets is unset again."""
    for name in _DEFAULTS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in names():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(ROOT / "tests" / "fake_vllm")
    import vllm

    yield vllm
    for name in names():
        del sys.modules[name]


@pytest.fixture
def load(vllm: Any, tiny_checkpoint: Callable[..., Path]) -> Iterator[Load]:
    made: list[StageEngine] = []

    def engine(folder: Path | None = None, **flags: Any) -> VllmEngine:
        model = str(folder or tiny_checkpoint("qwen3-lm"))
        one = load_answering(EngineConfig.from_flat(model=model, decoding="vllm", **flags))
        assert isinstance(one, VllmEngine)
        made.append(one)
        return one

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


def answer(engine: StageEngine, **params: Any) -> Any:
    engine.add(request(**params))
    return ends(drive(engine))["a"]


GREEDY: list[dict[str, Any]] = [
    {"text": "hello there", "tokens": 30, "do_sample": False},
    {"text": "a cat", "tokens": 9, "do_sample": False, "repetition_penalty": 1.4},
    {"text": "a cat and a dog", "tokens": 12, "temperature": 0, "frequency_penalty": 1.0, "presence_penalty": 0.4},
    {"text": "a cat and a fox", "tokens": 25, "do_sample": False, "stop": ("e", "o")},
    {"text": "what is " * 4, "tokens": 1, "do_sample": False, "extra_args": {"enable_thinking": False}},
]


def test_it_answers_as_the_other_engine_does(load: Load, tiny_checkpoint: Callable[..., Path]) -> None:
    other = load_answering(EngineConfig.from_flat(model=str(tiny_checkpoint("qwen3-lm"))))
    engine = load()
    for made in (other, engine):
        for i, one in enumerate(GREEDY):
            made.add(request(str(i), **one))
    wanted, events = ends(drive(other)), drive(engine)
    got = ends(events)
    assert len(wanted) == len(got) == len(GREEDY)
    for name, end in wanted.items():
        mine = got[name]
        assert (mine.text, mine.finish_reason, mine.seeds) == (end.text, end.finish_reason, end.seeds)
        for count in ("prompt_tokens", "completion_tokens", "steps", "audio_tokens", "text_tokens"):
            assert getattr(mine.metrics, count) == getattr(end.metrics, count), count
        assert mine.metrics.denoise > 0 and mine.metrics.total >= mine.metrics.queue
        mine = [e for e in events if e.request_id == name]
        assert "".join(e.text for e in mine if isinstance(e, TextPiece)) == end.text and isinstance(mine[0], Progress)
    ours, theirs = engine.capabilities, other.capabilities
    for name in ("arguments", "extra", "bounds", "media", "makes", "chats", "parameters", "tool_calls"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.refused == theirs.refused | {"profile": "vllm tells none"}
    assert ours.context == 600 and engine.stats.steps == sum(end.metrics.steps for end in got.values())
    assert (engine.stats.running, engine.stats.waiting) == (0, 0)
    other.close()


def test_tokens_are_drawn_as_the_request_says(load: Load) -> None:
    engine = load()
    first = answer(engine, tokens=12, seed=None, temperature=1.5)
    again = answer(engine, tokens=12, seed=first.seeds[0], temperature=1.5)
    assert again.text == first.text != answer(engine, tokens=12, seed=2**64 - 1, temperature=1.5, top_k=30).text
    greedy = answer(engine, tokens=12, do_sample=False).text
    assert answer(engine, tokens=12, temperature=1.5, top_k=1).text == greedy
    assert answer(engine, tokens=12, temperature=1.5, min_p=1.0).text == greedy
    assert answer(engine, tokens=12, temperature=1.5, top_p=1e-6).text == greedy


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"temperature": 0.001}, "temperature"),
        ({"presence_penalty": -2.0}, "presence_penalty"),  # said only when it has begun
        ({"tokens": 599}, "max_new_tokens"),
        ({"text": "a cat and a dog " * 200}, "prompt"),
    ],
)
def test_what_vllm_does_not_take_is_refused(load: Load, params: dict[str, Any], param: str) -> None:
    engine = load()
    end = answer(engine, **params)
    assert (end.error.kind, end.error.param) == ("InvalidRequestError", param), end
    assert answer(engine, do_sample=False).text


def test_what_is_no_text_is_refused_at_once(load: Load) -> None:
    engine = load()
    for wrong in (
        Request(request_id="a", messages=[Message("user", [Part("image"), Part("text", "what?")])]),
        Request(request_id="a", prompt="hello", modalities=("text", "audio")),
        Request(request_id="a", prompt="hello", sampling=SamplingParams(voice="one")),
    ):
        with pytest.raises(InvalidRequestError):
            engine.add(wrong)
    assert not engine.busy


def test_an_abort_reaches_vllm_and_nobody_else(load: Load) -> None:
    engine = load()
    wanted = answer(engine, do_sample=False).text
    engine.add(request("long", tokens=200, do_sample=False))
    engine.add(request("a", do_sample=False))
    engine.add(request("queued", do_sample=False))
    engine.abort("queued")
    told = 0
    events: list[Event] = []
    while told < 3:
        events += engine.step()
        told = sum(isinstance(e, (Progress, TextPiece)) and e.request_id == "long" for e in events)
    engine.abort("long")
    engine.abort("long")
    events += drive(engine)
    got = ends(events)
    assert [got[name].error.kind for name in ("long", "queued")] == ["RequestAbortedError"] * 2
    assert got["a"].text == wanted
    assert not engine._engine.running and len(engine._engine.aborted) == 1 and not engine.busy
    assert answer(engine, tokens=100, do_sample=False, stop=(wanted[1],)).finish_reason == "stop"
    assert not engine._engine.running and len(engine._engine.aborted) == 2 and not engine.busy


def test_whose_fault_a_form_is(load: Load) -> None:
    hosted, error = load()._hosted.vllm, ValueError("Failed to transform the schema into a grammar")
    use = ToolUse((Tool("f", None, {"type": "object"}),), choice="required")
    assert hosted.refused(error, request()).param == "json_schema"
    assert hosted.refused(error, Request(request_id="a", prompt="a", tools=use)).param == "tools"
    assert hosted.refused(ValueError("no"), request()).param is None


def test_what_fails_after_the_end_of_an_answer_is_only_logged(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    text = answer(engine, do_sample=False).text

    async def fails(name: str) -> None:
        raise RuntimeError("no such request")

    monkeypatch.setattr(engine._engine, "abort", fails)
    end = answer(engine, do_sample=False, stop=(text[1],))
    assert end.finish_reason == "stop" and not engine.busy
    assert answer(engine, do_sample=False).text == text


def test_failures(load: Load) -> None:
    engine = load()
    for seed in (BREAKS, TIRES):
        engine.add(request("good", do_sample=False))
        engine.add(request("bad", seed=seed))
        got = ends(drive(engine))
        assert got["bad"].error.kind == "GenerationError" and got["good"].text
    engine.add(request("good", do_sample=False))
    engine.add(request("bad", seed=DIES))
    with pytest.raises(StageDeadError, match="broken"):
        drive(engine)


def test_sleeping_changes_nothing(load: Load, vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    wanted = answer(engine, temperature=1.2).text
    with pytest.raises(ConfigError) as error:
        engine.sleep(1)  # vLLM has no sleep on a CPU
    assert error.value.param == "level"
    monkeypatch.setitem(engine._hosted.arguments, "enable_sleep_mode", True)
    count = len(vllm.AsyncLLMEngine.started)
    for level, starts in ((1, count), (2, count + 1)):
        before = engine._engine
        assert engine.sleep(level) == 0
        assert before.asleep == (level == 1)
        with pytest.raises(NotReadyError):
            engine.add(request())
        engine.wake_up()
        assert answer(engine, temperature=1.2).text == wanted and len(vllm.AsyncLLMEngine.started) == starts
    engine.warm_up()
    assert not engine.busy


def test_what_sleep_gives_back_is_what_the_gpus_have_less(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(tensor_parallel_size=2)
    monkeypatch.setattr(engine, "_hosted", dataclasses.replace(engine._hosted, kind="cuda"))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: (100 if engine._engine else 30) + gpu)
    assert engine.sleep(2) == 2 * 70


def test_settings_become_vllms(
    load: Load, vllm: Any, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "block_size": 32,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "gpu_memory_utilization": 0.5,
        "tensor_parallel_size": 2,
        "enforce_eager": True,
    }
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    load(**flags, dtype="bf16")
    assert {name: os.environ[name] for name in _DEFAULTS} == _DEFAULTS | {"VLLM_NO_USAGE_STATS": "0"}
    assert vars(vllm.AsyncLLMEngine.started[-1]) == vars(vllm.AsyncEngineArgs()) | flags | {
        "model": str(tiny_checkpoint("qwen3-lm").resolve()),
        "dtype": "bfloat16",
        "max_model_len": -1,
        "disable_log_stats": True,
    }

    def made(kind: str, **flags: Any) -> dict[str, Any]:
        return arguments(EngineConfig.from_flat(model="m", decoding="vllm", **flags), Path("m"), kind)

    on_gpu = made("cuda")
    assert (on_gpu["dtype"], on_gpu["gpu_memory_utilization"], on_gpu["enable_sleep_mode"]) == ("bfloat16", 0.9, True)
    assert "gpu_memory_utilization" not in made("cuda", kv_cache_memory_bytes=2**20)
    assert "gpu_memory_utilization" not in made("cpu") and made("cpu")["dtype"] == "float32"


@pytest.mark.parametrize(
    ("name", "count", "visible", "chosen"),
    [
        ("auto", 2, None, None),
        ("cuda:0", 2, "4,5,6", None),
        ("cuda:2", 2, None, "2,3"),
        ("auto:1", 2, "4,5,GPU-6", "5,GPU-6"),
    ],
)
def test_which_gpus_vllm_sees(name: str, count: int, visible: str | None, chosen: str | None) -> None:
    assert _chosen(name, count, visible) == chosen


def test_too_few_gpus() -> None:
    with pytest.raises(ConfigError) as error:
        _chosen("cuda:1", 2, "0,1")
    assert error.value.param == "device"


@pytest.mark.parametrize(
    ("flags", "param"),
    [
        ({"enable_cpu_offload": True}, "enable_cpu_offload"),
        ({"lora_path": ("x",)}, "lora_path"),
        ({"decode_graphs": "off"}, "decode_graphs"),
        ({"merge_decoding": True}, "merge_decoding"),
        ({"cfg_parallel_size": 2}, "cfg_parallel_size"),
        ({"quantization": "fp8"}, "quantization"),
        ({"compilation_config": {"backend": "eager"}}, "compilation_config"),
        ({"num_threads": 2}, "num_threads"),
        ({"vocoder": "x"}, "vocoder"),
        ({"diffusers_load_kwargs": {"disable_mmap": True}}, "diffusers_load_kwargs"),
        ({"prompt_cache_gib": 1.0}, "prompt_cache_gib"),
        ({"profiler_config": {"profiler": "torch", "torch_profiler_dir": "x"}}, "profiler_config"),
        ({"device": "cuda:0"}, "device"),
        ({"max_num_batched_tokens": 1}, "decoding"),  # vLLM's own refusal
        ({"model": "qwen25-omni"}, "decoding"),
        ({"model": "odd"}, "decoding"),
        ({"model": "vits"}, "decoding"),
        ({"model": "demo"}, "decoding"),
    ],
)
def test_what_cannot_act_is_refused(
    vllm: Any, tiny_checkpoint: Callable[..., Path], tmp_path: Path, flags: dict[str, Any], param: str
) -> None:
    def folder(name: str) -> str:
        if name == "odd":
            shutil.copytree(tiny_checkpoint("qwen3-lm"), tmp_path / name)
            settings = json.loads((tmp_path / name / "generation_config.json").read_text())
            (tmp_path / name / "generation_config.json").write_text(json.dumps(settings | {"no_repeat_ngram_size": 3}))
            return str(tmp_path / name)
        return name if name == "demo" else str(tiny_checkpoint(name))

    flags = flags | {"model": folder(flags.get("model", "qwen3-lm")), "decoding": "vllm"}
    with pytest.raises(ConfigError) as error:
        engine_for(EngineConfig.from_flat(**flags))
    assert error.value.param == param
    if param not in ("decoding", "device"):
        assert "--decoding vllm" in error.value.message


def test_what_is_said_where_there_is_none(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name, found=None: None)
    config = EngineConfig.from_flat(model=str(tiny_checkpoint("qwen3-lm")), decoding="vllm")
    with pytest.raises(ConfigError, match="pip install vllm") as error:
        VllmEngine.load(config)
    assert error.value.param == "decoding"


def test_versions_that_know_less(
    vllm: Any, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.from_flat(model=str(tiny_checkpoint("qwen3-lm")), decoding="vllm")
    known = [(f.name, f.type, f) for f in dataclasses.fields(vllm.AsyncEngineArgs) if f.name != "enable_sleep_mode"]
    monkeypatch.setattr(vllm, "AsyncEngineArgs", dataclasses.make_dataclass("Fewer", known))
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        VllmEngine.load(config)
    monkeypatch.delattr(vllm, "TokensPrompt")
    with pytest.raises(ConfigError, match="TokensPrompt"):
        VllmEngine.load(config)


def test_vllm_is_not_for_ray() -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(EngineConfig.from_flat(model="m", decoding="vllm", worker_backend="ray"))
    assert error.value.param == "decoding"
