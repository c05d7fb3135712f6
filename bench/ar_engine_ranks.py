"""Answers that go on together, on one GPU against several: tokens per second of a divided language model.

    python bench/ar_engine_ranks.py [--ranks 1 2] [--streams 1 8 32] [--tokens 128] [--graphs plain off] [--tiny]

A Qwen3 decoder of the given size (default: that of 8 B) with random weights is written to a folder of its own and
served as users do, its stage in processes of its own, once for each number of ranks and each of --graphs. "decode" is
the rate of the last half of the tokens: two runs that differ in their length alone. "vs" is that rate over the one of
one rank: as many as there are ranks is all that they can give. "same" is in how many of the streams the text of so many
ranks begins as that of one does: in 16 bits an answer may take another turn. A row that fails is reported, and left
out. --tiny: a small model in fp32, on a CPU too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers as T
from ar_engine import DTYPES, SMALL, prompt_of
from report import Table, save

from polymux import Omni, SamplingParams
from polymux.testing.tiny.tokenizers import qwen_tokenizer

COLUMNS = ("ranks", "graphs", "streams", "tokens/s", "decode tokens/s", "vs", "same", "ready")
BEGIN = 40  # characters that are compared
SIZES = {
    "hidden": 4096,
    "intermediate": 12288,
    "layers": 36,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "vocabulary": 151936,
}


def make(folder: Path, args: argparse.Namespace) -> int:
    """A checkpoint; its parameters."""
    config = T.Qwen3Config(
        vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim, max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = T.AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype])
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer = qwen_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    count = sum(p.numel() for p in model.parameters())
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return count


def run(omni: Omni, prompts: list[str], tokens: int) -> tuple[float, list[str]]:
    """Seconds, and the texts."""
    start = time.perf_counter()
    made = omni.generate(prompts, SamplingParams(max_new_tokens=tokens, do_sample=False, seed=0))
    took = time.perf_counter() - start
    for one in made:
        if one.error is not None:
            raise RuntimeError(one.error.message)
    return took, [one.text or "" for one in made]


def serve(folder: Path, ranks: int, graphs: str, args: argparse.Namespace) -> Omni:
    flags: dict[str, Any] = {"decode_graphs": graphs, "max_num_seqs": max(args.streams), "dtype": args.dtype}
    flags |= {"enable_prefix_caching": False, "max_prompt_length": 10**6, "stage_init_timeout": 240.0}
    if torch.cuda.is_available():
        flags["kv_cache_memory_bytes"] = args.cache_bytes
    return Omni(str(folder), tensor_parallel_size=ranks, **flags)


def measure(folder: Path, ranks: int, graphs: str, args: argparse.Namespace, table: Table) -> None:
    """All numbers of streams, with so many ranks."""
    start = time.perf_counter()
    with serve(folder, ranks, graphs, args) as omni:
        ready = time.perf_counter() - start
        for count in args.streams:
            prompts = [prompt_of(i, args.prompt) for i in range(count)]
            run(omni, prompts, 4)  # warms
            half = min(run(omni, prompts, args.tokens // 2)[0] for _ in range(args.rounds))
            whole, texts = min(run(omni, prompts, args.tokens) for _ in range(args.rounds))
            rate = count * (args.tokens - args.tokens // 2) / (whole - half)
            FIRST.setdefault((graphs, count), (rate, texts))
            alone, wanted = FIRST[graphs, count]
            same = sum(a[:BEGIN] == b[:BEGIN] for a, b in zip(texts, wanted, strict=True))
            table.add(**{
                "ranks": ranks, "graphs": graphs, "streams": count, "tokens/s": count * args.tokens / whole,
                "decode_tokens/s": rate, "vs": rate / alone, "same": f"{same}/{count}", "ready": ready,
            })  # fmt: skip


FIRST: dict[tuple[str, int], tuple[float, list[str]]] = {}  # of the first number of ranks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="the first is what others are compared to")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128, help="words of a prompt")
    parser.add_argument("--graphs", nargs="+", default=["plain"], help="plain, off")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--cache-bytes", type=int, default=8 * 2**30, help="of each rank")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(SMALL, streams=[1, 4], tokens=16, prompt=12, graphs=["auto"], rounds=1, dtype="fp32")
    return args


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{make(folder, args) / 1e9:.2f} B parameters in {args.dtype}, {args.prompt} words, {args.tokens} tokens")
        table = Table("A language model on several ranks", COLUMNS)
        for graphs in args.graphs:
            for ranks in args.ranks:
                try:
                    measure(folder, ranks, graphs, args, table)
                except Exception:
                    print(f"\n{ranks} ranks ({graphs}) failed:\n{traceback.format_exc()}", flush=True)
                save("ar_engine_ranks.json", [table], torch=torch.__version__)


if __name__ == "__main__":
    main()
