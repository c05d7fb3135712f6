"""What is called of vLLM, and its stand-in in the tests, held to the real package. Only where that is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from source_tree import ROOT

from polymux.ar.sequence import Drawing
from polymux.config import EngineConfig
from polymux.engine.vllm_api import Vllm
from polymux.engine.vllm_settings import arguments
from polymux.errors import InvalidRequestError
from polymux.families.chat import ChatCall
from polymux.request import Request, SamplingParams
from polymux.tools import Tool, ToolUse

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
FAKE = ROOT / "tests" / "fake_vllm" / "vllm" / "__init__.py"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def real() -> Vllm:
    return Vllm.installed()


@pytest.fixture(scope="module")
def fake() -> Iterator[ModuleType]:
    """The stand-in, beside the real one."""
    spec = importlib.util.spec_from_file_location("fake_vllm", FAKE, submodule_search_locations=[str(FAKE.parent)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_vllm"] = module
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "fake_vllm"]:
        del sys.modules[name]


def how(real: Vllm, drawing: Drawing, use: ToolUse | None = None, **params: Any) -> Any:
    call = ChatCall(arguments={}, prompt_tokens=3, steps=9, ends=frozenset({7, 5}))
    request = Request(request_id="a", prompt="a", tools=use)
    return real.how(request, SamplingParams(**params), call, drawing)


def test_the_engine_takes_all_that_is_set(real: Vllm) -> None:
    flags: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "load_format": "dummy",
        "dtype": "bf16",
    }
    asked = arguments(EngineConfig.from_flat(model="m", decoding="vllm", **flags), Path("m"), "cuda")
    asked |= arguments(EngineConfig.from_flat(model="m", decoding="vllm", kv_cache_memory_bytes=9), Path("m"), "cuda")
    assert asked.keys() <= {field.name for field in dataclasses.fields(real.arguments)}
    inspect.signature(real.arguments).bind(**asked)
    inspect.signature(real.engine.from_engine_args).bind(object())


def test_what_is_called_of_the_engine_can_be(real: Vllm) -> None:
    for name, given in (
        ("generate", (real.tokens(prompt_token_ids=[1]), object(), "0")),
        ("abort", ("0",)),
        ("wake_up", ()),
        ("shutdown", ()),
    ):
        method = getattr(real.engine, name)
        inspect.signature(method).bind(None, *given)
        assert inspect.iscoroutinefunction(method) == (name in ("abort", "wake_up"))
    assert inspect.isasyncgenfunction(real.engine.generate)
    inspect.signature(real.engine.sleep).bind(None, level=1)
    assert isinstance(real.engine.errored, property)


def test_a_request_becomes_parameters(real: Vllm) -> None:
    drawing = Drawing(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, frequency_penalty=-1.0,
                      presence_penalty=2.0, seed=2**64 - 1)  # fmt: skip
    made = how(real, drawing)
    for field in dataclasses.fields(drawing):
        assert getattr(made, field.name) == getattr(drawing, field.name)
    assert (made.max_tokens, made.detokenize, sorted(made.stop_token_ids)) == (9, False, [5, 7])
    assert made.output_kind is real.delta and made.structured_outputs is None and made.n == 1
    assert how(real, Drawing()).temperature == 0


def test_forms_are_forms_to_vllm(real: Vllm) -> None:
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    for given in (
        {"json_schema": SCHEMA},
        {"use": ToolUse((Tool("f", None, SCHEMA),), choice="required")},
        {"use": ToolUse((Tool("f", None, SCHEMA, strict=True),))},
    ):
        made = how(real, Drawing(), **given)  # type: ignore[arg-type]
        validate_xgrammar_grammar(made)


@pytest.mark.parametrize("temperature", [3.0, 0.001])
def test_what_it_does_not_take_is_named(real: Vllm, temperature: float) -> None:
    with pytest.raises(InvalidRequestError) as error:
        how(real, Drawing(temperature=temperature))
    assert error.value.param == "temperature"


def test_the_stand_in_has_no_names_of_its_own(real: Vllm, fake: ModuleType) -> None:
    import vllm
    from vllm.sampling_params import SamplingParams as Sampling

    pairs = [(fake.AsyncEngineArgs, real.arguments), (fake.SamplingParams, Sampling)]
    pairs += [(fake.CompletionOutput, vllm.CompletionOutput), (fake.RequestOutput, vllm.RequestOutput)]
    for mine, theirs in pairs:
        assert {field.name for field in dataclasses.fields(mine)} <= set(inspect.signature(theirs).parameters)
    public = {name for name in vars(fake.AsyncLLMEngine) if not name.startswith("_")} - {"started"}
    assert public <= set(dir(real.engine))
    for name in public - {"started"}:
        own = list(inspect.signature(getattr(fake.AsyncLLMEngine, name)).parameters)
        assert own == list(inspect.signature(getattr(real.engine, name)).parameters)[: len(own)]
    assert {"errored", "model_config"} <= set(dir(real.engine)) | set(inspect.get_annotations(real.engine.__mro__[1]))
