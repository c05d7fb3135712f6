"""Tokens per second of answers that go on together, beside transformers' own batches and the memory's bandwidth.

    python bench/ar_engine.py [--streams 1 8 32 64] [--tokens 128] [--check] [--prompt 128] [--tiny] [--profile]

A Qwen3 decoder of the given size (default: that of 1.7 B) with random weights, made on the spot, answers prompts
greedily. "engine" is the engine, once for each of --graphs; "generate_batch" is transformers' continuous batching,
"generate" its `generate` of all prompts in one padded batch. Tokens/s are those of whole answers, prompts included;
"decode" are those after every stream has its first token. The floor is the rate at which one stream could go on if a
token cost nothing but one reading of the weights and of the keys and values, at the bandwidth that is measured here.
"same" is how many of the first tokens are those of `generate`, of all streams: in 16 bits an answer may take another
turn. A row that fails prints why, and the next one follows. --profile prints what the kernels of a step take.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as T
from report import Clock, Table, save

from polymux.config import EngineConfig
from polymux.engine.ar_engine import ArEngine
from polymux.engine.device import resolve_device
from polymux.engine.generate_model import GenerateModel
from polymux.families.generate import Parts
from polymux.families.language import LANGUAGE
from polymux.request import Failed, Request, SamplingParams
from polymux.testing.tiny.tokenizers import qwen_tokenizer

FIRST = 16  # tokens that are compared
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SMALL = {"layers": 2, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocabulary": 1024}
WORDS = ["a", "cat", "and", "the", "dog", "of", "fox", "she", "he", "it", "was", "not", "but", "with", "for", "that"]


@dataclass
class Made:
    """What a way of answering has made of all prompts."""

    seconds: float
    tokens: list[list[int]] = field(repr=False)
    decode_seconds: float = 0.0

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def decode_rate(self) -> float:
        return sum(len(one) - 1 for one in self.tokens) / self.decode_seconds if self.decode_seconds else 0.0


def config_of(args: argparse.Namespace) -> Any:
    context = 1 << (args.prompt + args.tokens + 128 - 1).bit_length()
    return T.Qwen3Config(
        vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim, max_position_embeddings=context, tie_word_embeddings=True, eos_token_id=None,
    )  # fmt: skip


def model_of(args: argparse.Namespace, device: torch.device) -> Any:
    """The same weights each time."""
    torch.manual_seed(0)
    with torch.device(device):
        model = T.AutoModelForCausalLM.from_config(config_of(args), dtype=DTYPES[args.dtype]).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt_of(index: int, words: int) -> str:
    source = torch.Generator().manual_seed(index)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (words,), generator=source).tolist())


class Engine:
    """The engine of a stage, without a process around it."""

    def __init__(self, args: argparse.Namespace, device: torch.device, graphs: str) -> None:
        tokenizer = qwen_tokenizer()
        tokenizer.eos_token = None
        model = GenerateModel.of(LANGUAGE, Parts(model=model_of(args, device), processor=tokenizer), device)
        config = EngineConfig.from_flat(
            model="bench", max_num_seqs=max(args.streams), decode_graphs=graphs, enable_prefix_caching=False,
            max_prompt_length=10**6, **({} if device.type == "cpu" else {"kv_cache_memory_bytes": args.cache_bytes}),
        )  # fmt: skip
        self.device, self.engine = device, ArEngine(config, model, device)

    def prepare(self) -> float:
        """Compile and capture; the seconds."""
        start = time.perf_counter()
        self.engine.warm_up()
        return time.perf_counter() - start

    def answer(self, prompts: list[str], tokens: int, profiler: Any = None) -> tuple[Made, list[list[int]]]:
        """And the tokens of the prompts."""
        params = SamplingParams(max_new_tokens=tokens, do_sample=False, seed=0)
        for i, prompt in enumerate(prompts):
            self.engine.add(Request(request_id=str(i), prompt=prompt, sampling=params))
        jobs = list(self.engine._jobs.values())
        for job in jobs:
            job.preparing.result()
        start = time.perf_counter()
        first = 0.0
        while self.engine.busy:
            for event in self.engine.step():
                if isinstance(event, Failed):
                    raise RuntimeError(event.error.message)
            if not first and all(job.writer.tokens for job in jobs):
                first = time.perf_counter()
            if profiler is not None:
                profiler.step()
        end = time.perf_counter()
        sequences = [job.sequence for job in jobs if job.sequence is not None]
        made = [one.tokens[one.prompt :] for one in sequences]
        return Made(end - start, made, end - first), [one.tokens[: one.prompt] for one in sequences]


class Transformers:
    """Transformers' own ways, with a model of its own."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.model = args, device, model_of(args, device)

    def forget(self) -> None:
        """What continuous batching keeps between calls is made for as many requests as the first one had."""
        self.model.destroy_cached_continuous_batching_manager()

    def generate(self, prompts: list[list[int]], tokens: int) -> Made:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts], device=self.device)
        start = time.perf_counter()
        made = self.model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=0, eos_token_id=None
        )[:, longest:].tolist()
        return Made(time.perf_counter() - start, made)

    def batch(self, prompts: list[list[int]], tokens: int) -> Made:
        settings = T.GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0)
        config = T.ContinuousBatchingConfig(max_memory_percent=self.args.cb_memory)
        start = time.perf_counter()
        made = self.model.generate_batch(
            inputs=prompts, generation_config=settings, continuous_batching_config=config, persistent_manager=True
        )
        took = time.perf_counter() - start
        order = sorted(made.values(), key=lambda one: int(one.request_id.rpartition("_")[2]))
        return Made(took, [list(one.generated_tokens) for one in order])


def bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes per second of memory that is read, or read and written: the larger one."""
    clock = Clock(device)
    one = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    other = torch.empty_like(one)
    copied = min(clock.seconds(lambda: other.copy_(one), 5) for _ in range(3))
    read = min(clock.seconds(lambda: one.sum(), 5) for _ in range(3))
    return max(2 * nbytes / copied, nbytes / read)


def floor_of(args: argparse.Namespace, model: Any, rate: float) -> float:
    """Tokens per second of one stream."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    kept = 2 * args.layers * args.kv_heads * args.head_dim * DTYPES[args.dtype].itemsize
    return rate / (weights + kept * (args.prompt + args.tokens / 2))


def same(made: Made, wanted: Made | None) -> str:
    if wanted is None:
        return ""
    pairs = [(a, b) for one, other in zip(made.tokens, wanted.tokens, strict=True)
             for a, b in zip(one[:FIRST], other[:FIRST], strict=True)]  # fmt: skip
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"


def attempt(what: str, work: Callable[[], Any]) -> Any:
    """What it returns, or None, with the whole story, if it fails."""
    try:
        return work()
    except Exception:
        print(f"\n{what} failed:\n{traceback.format_exc()}", flush=True)
        return None


def profile(engine: Engine, prompts: list[str], tokens: int) -> None:
    cuda = engine.device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    schedule = torch.profiler.schedule(wait=8, warmup=2, active=16)
    with torch.profiler.profile(activities=kinds, schedule=schedule) as profiler:
        engine.answer(prompts, tokens, profiler)
    by = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    print(
        f"\n16 steps of {len(prompts)} streams\n", profiler.key_averages().table(sort_by=by, row_limit=24), flush=True
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128, help="words of a prompt")
    parser.add_argument(
        "--graphs", nargs="*", default=["compiled", "plain"], help="compiled, plain, off; auto: the default"
    )
    parser.add_argument("--others", nargs="*", default=["generate", "generate_batch"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--cache-bytes", type=int, default=16 * 2**30)
    parser.add_argument("--cb-memory", type=float, default=0.3, help="share of the free memory for generate_batch")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare tokens with those of generate in fp32, first")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    for name, value in (("layers", 28), ("hidden", 2048), ("intermediate", 6144), ("heads", 16), ("kv-heads", 8),
                        ("head-dim", 128), ("vocabulary", 151936)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(SMALL, streams=[1, 4], tokens=16, prompt=12, graphs=["auto"], rounds=1, dtype="fp32")
    return args


def engines_of(args: argparse.Namespace, device: torch.device) -> dict[str, Engine]:
    """Those that can be made, ready."""
    engines: dict[str, Engine] = {}
    for graphs in args.graphs:
        engine = attempt(f"the engine ({graphs})", lambda g=graphs: Engine(args, device, g))  # type: ignore[misc]
        took = engine and attempt(f"the warm-up ({graphs})", engine.prepare)
        if took is not None:
            print(f"engine ({graphs}): ready after {took:.1f} s", flush=True)
            engines[graphs] = engine
    return engines


def compare(table: Table, ways: dict[str, Callable[[], Made]], count: int, rounds: int, floor: float) -> None:
    """All ways for so many streams."""
    wanted: Made | None = None
    for name, way in ways.items():
        done: list[Made] = []
        for _ in range(rounds + 1):
            one = attempt(f"{name}, {count} streams", way)
            if one is None:  # it would fail again
                break
            done.append(one)
        done = done[1:]  # the first one warms
        if not done:
            continue
        best: Made = min(done, key=lambda one: one.seconds)
        wanted = wanted or (best if name == "generate" else None)
        decoded = max(one.decode_rate for one in done)
        table.add(**{
            "streams": count, "way": name, "tokens/s": best.rate, "decode_tokens/s": decoded or "",
            "of_the_floor": (decoded or best.rate) / floor,
            "same": attempt("the comparison", lambda b=best, w=wanted: same(b, w)),  # type: ignore[misc]
        })  # fmt: skip


def check(args: argparse.Namespace, device: torch.device) -> None:
    """A small model in fp32: all tokens must be those of `generate`."""
    args = argparse.Namespace(**vars(args) | SMALL | {"streams": [6], "tokens": FIRST, "dtype": "fp32"})
    prompts = [prompt_of(i, 5 + 17 * i) for i in range(6)]
    theirs = Transformers(args, device)

    def compared(graphs: str) -> None:
        made, ids = Engine(args, device, graphs).answer(prompts, FIRST)
        print(f"fp32, engine ({graphs}): {same(made, theirs.generate(ids, FIRST))} tokens are the same", flush=True)

    for graphs in args.graphs:
        attempt(f"the check ({graphs})", lambda g=graphs: compared(g))  # type: ignore[misc]


@torch.no_grad()
def main() -> None:
    args = arguments()
    device = resolve_device("auto")
    if args.check:
        attempt("the check", lambda: check(args, device))
    rate = bandwidth(device, 2**24 if args.tiny else 2**32)
    theirs = Transformers(args, device)
    floor = floor_of(args, theirs.model, rate)
    size = sum(p.numel() for p in theirs.model.parameters())
    print(f"{size / 1e9:.2f} B parameters in {args.dtype}; {rate / 1e12:.2f} TB/s: {floor:.0f} tokens/s at batch 1")
    engines = engines_of(args, device)
    table = Table(
        "Answers that go on together", ("streams", "way", "tokens/s", "decode tokens/s", "of the floor", "same")
    )
    prompts = [prompt_of(i, args.prompt) for i in range(max(args.streams))]
    ids: list[list[int]] = []
    for engine in [*engines.values()][:1]:
        ids = attempt("the prompts", lambda e=engine: e.answer(prompts, 1)[1]) or []  # type: ignore[misc]
    for n in args.streams:
        ways: dict[str, Callable[[], Made]] = {}
        if ids and "generate" in args.others:
            ways["generate"] = lambda n=n: theirs.generate(ids[:n], args.tokens)  # type: ignore[misc]
        for graphs, engine in engines.items():
            ways[f"engine ({graphs})"] = lambda n=n, e=engine: e.answer(prompts[:n], args.tokens)[0]  # type: ignore[misc]
        if ids and "generate_batch" in args.others:
            ways["generate_batch"] = lambda n=n: theirs.batch(ids[:n], args.tokens)  # type: ignore[misc]
        theirs.forget()
        compare(table, ways, n, args.rounds, floor)
        save("ar_engine.json", [table], device=str(device), torch=torch.__version__, bandwidth=rate, floor=floor)
    if args.profile:
        for graphs, engine in engines.items():
            for n in (1, max(args.streams)):
                attempt(f"the profile ({graphs})", lambda e=engine, n=n: profile(e, prompts[:n], args.tokens))  # type: ignore[misc]


if __name__ == "__main__":
    main()
