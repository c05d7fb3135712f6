"""Tokens per second of many answers at once: steps of one token merged, interleaved, and transformers' own batch.

    python bench/decode_merging.py [--requests 8] [--tokens 32] [--layers 8] [--hidden 1024]

A language model of the given size with random weights answers prompts of different lengths. "alone" is transformers'
own `generate`, one request after the other; "batch" is its `generate` of all prompts in one padded batch, which ends
with the longest; "interleaved" and "merged" are the engine without and with --merge-decoding. They take turns, and the
numbers are of the best round of each. "same tokens" compares merged with alone: floats are added in another order, so
a draw between two tokens may end otherwise.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T
from report import Table, save

from polymux.config import EngineConfig
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.device import resolve_device
from polymux.loading import auto_dtype
from polymux.request import Failed, Finished, Request, SamplingParams
from polymux.testing.tiny.encoders import qwen3_config
from polymux.testing.tiny.tokenizers import qwen_tokenizer


def make(folder: Path, layers: int, hidden: int, dtype: torch.dtype) -> int:
    """A checkpoint; the number of its parameters."""
    tokenizer = qwen_tokenizer()
    config = qwen3_config(tokenizer, layers)
    config.update({
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_attention_heads": hidden // 64, "head_dim": 64,
        "num_key_value_heads": max(1, hidden // 128), "layer_types": ["full_attention"] * layers,
    })  # fmt: skip
    torch.manual_seed(0)
    model = T.Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def answers(engine: ChatEngine, prompts: list[str], tokens: int) -> dict[str, str]:
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens=tokens, do_sample=False, seed=0)
        engine.add(Request(request_id=str(i), prompt=prompt, sampling=params))
    texts: dict[str, str] = {}
    while engine.busy:
        for event in engine.step():
            if isinstance(event, Failed):
                raise RuntimeError(event.error.message)
            if isinstance(event, Finished):
                texts[event.request_id] = event.text or ""
    return texts


def seconds(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    start = time.perf_counter()
    made = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, made


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    device = resolve_device("auto")
    prompts = [" ".join(["fox"] * (4 + 7 * i)) for i in range(args.requests)]
    best: dict[str, float] = {}
    texts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = make(folder, args.layers, args.hidden, auto_dtype("auto", device))
        engines = {
            kind: ChatEngine.load(
                EngineConfig.from_flat(model=name, max_num_seqs=args.requests, merge_decoding=kind == "merged")
            )
            for kind in ("interleaved", "merged")
        }
        model = T.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
        tokenizer = T.AutoTokenizer.from_pretrained(folder, padding_side="left")

    def generate(several: list[str]) -> list[str]:
        said = [[{"role": "user", "content": prompt}] for prompt in several]
        inputs = tokenizer.apply_chat_template(
            said, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
        ).to(device)
        made = model.generate(**inputs, do_sample=False, max_new_tokens=args.tokens)
        return list(tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    works: dict[str, Callable[[], Any]] = {
        "alone": lambda: [generate([prompt])[0] for prompt in prompts],
        "batch": lambda: generate(prompts),
        **{kind: lambda e=engine: answers(e, prompts, args.tokens) for kind, engine in engines.items()},  # type: ignore[misc]
    }
    for kind, work in works.items():
        work()  # warm
        for _ in range(args.rounds):
            took, texts[kind] = seconds(work, device)
            best[kind] = min(took, best.get(kind, float("inf")))
    same = sum(texts["merged"][str(i)] == text for i, text in enumerate(texts["alone"]))
    for engine in engines.values():
        engine.close()
    made = args.requests * args.tokens
    kinds = ("alone", "interleaved", "merged", "batch")
    table = Table(
        "Merged decoding",
        ("requests", "parameters", *(f"{kind} tokens/s" for kind in kinds), "merged / interleaved", "same tokens"),
    )
    rates = {f"{kind}_tokens/s": made / best[kind] for kind in kinds}
    rates["merged_/_interleaved"] = best["interleaved"] / best["merged"]
    table.add(requests=args.requests, parameters=f"{size / 1e6:.0f} M", same_tokens=f"{same}/{args.requests}", **rates)
    save("decode_merging.json", [table], device=str(device), torch=torch.__version__)


if __name__ == "__main__":
    main()
