"""Stands for the package vLLM in tests: the public names that polymux uses, and nothing else of it.

Answers are those of transformers' `generate`, token by token. What is odd happens on demand: a seed of BREAKS fails an
answer after its second token, a seed of DIES ends the engine there, and a seed of TIRES has it give up the answer.
`tests/unit/engine/test_vllm_signatures.py` holds all of these names to the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypedDict

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .exceptions import VLLMClientError
from .sampling_params import SamplingParams

__version__ = "0.0.fake"
BREAKS, DIES, TIRES = 13, 666, 404
CONTEXT = 600  # tokens for which there is "room"


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


@dataclass
class AsyncEngineArgs:
    model: str = ""
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = False
    enable_sleep_mode: bool = False
    disable_log_stats: bool = False


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]
    finished: bool


class AsyncLLMEngine:
    started: list[AsyncEngineArgs] = []  # noqa: RUF012  # with what, in this process

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLMEngine:
        if engine_args.max_num_batched_tokens == 1:
            raise ValueError("max_num_batched_tokens of 1 is too small")
        return cls(engine_args)

    def __init__(self, engine_args: AsyncEngineArgs) -> None:
        self.started.append(engine_args)
        dtype = getattr(torch, engine_args.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(engine_args.model, dtype=dtype).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(engine_args.model)
        self.model_config = SimpleNamespace(max_model_len=min(CONTEXT, self._model.config.max_position_embeddings))
        self.errored = False
        self.asleep = 0
        self.running: set[str] = set()
        self.aborted: list[str] = []

    async def generate(
        self, prompt: TokensPrompt, sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        assert not self.asleep and sampling_params.output_kind.name == "DELTA" and not sampling_params.detokenize
        ids, how = list(prompt["prompt_token_ids"]), sampling_params
        if how.presence_penalty == -2:
            raise VLLMClientError("presence_penalty: -2 is more than this engine bears")
        begin = len(ids)
        chooses = how.chooser(self._tokenizer, self._model.config.vocab_size)
        self.running.add(request_id)
        try:
            while True:
                count = len(ids) - begin + 1
                ids.append(await asyncio.to_thread(chooses, self._model, ids, begin))
                ends = ids[-1] in how.stop_token_ids
                why = "stop" if ends else "length" if count == how.max_tokens else None
                if count == 2:
                    why = self._odd(how.seed) or why
                yield RequestOutput(request_id, [CompletionOutput(0, "", ids[-1:], why)], why is not None)
                if why is not None:
                    return
        finally:
            self.running.discard(request_id)

    def _odd(self, seed: int | None) -> str | None:
        if seed == DIES:
            self.errored = True
        if seed in (BREAKS, DIES):
            raise RuntimeError("broken")
        return "abort" if seed == TIRES else None

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def sleep(self, level: int = 1) -> None:
        self.asleep = level

    async def wake_up(self) -> None:
        self.asleep = 0

    def shutdown(self) -> None:
        self._model = None
