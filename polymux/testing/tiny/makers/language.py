"""A plain language model."""

from __future__ import annotations

from pathlib import Path

import transformers as T

from polymux.testing.tiny.encoders import qwen3_config
from polymux.testing.tiny.inputs import PROMPT
from polymux.testing.tiny.registry import Ctx, Saveable, Tensors, runner, tiny
from polymux.testing.tiny.tokenizers import TOOLS_CHATML, qwen_tokenizer
from polymux.testing.tiny.weights import filled


@tiny("qwen3-lm", "transformers")
def qwen3_lm(ctx: Ctx) -> list[Saveable]:
    tok = qwen_tokenizer(chat_template=TOOLS_CHATML)
    return [filled(ctx, T.Qwen3ForCausalLM(qwen3_config(tok))), tok]


@runner("qwen3-lm")
def run_qwen3_lm(path: Path, ctx: Ctx) -> Tensors:
    tok = T.AutoTokenizer.from_pretrained(path)
    model = T.AutoModelForCausalLM.from_pretrained(path, dtype=ctx.dtype)
    ids = tok(PROMPT, return_tensors="pt").input_ids
    return {"ids": model.generate(ids, do_sample=False, max_new_tokens=16, eos_token_id=None)}
