"""Answers of models that see: tokens per second, and the wait for the first one, on each way of writing them.

    python bench/omni_answers.py [--model qwen25-omni qwen3-omni-moe] [--streams 1 8 32] [--tokens 64] [--tiny]

A thinker of the given size (default: that of Qwen2.5-Omni-7B; of Qwen3-Omni its experts) with random weights, made on
the spot, answers conversations of a picture and some words greedily; each stream has a picture of its own. "paged" is
the engine whose answers go on together, with and without graphs; "generate" the one in which each is a loop, and
"merged" that one with --merge-decoding. Tokens/s are those of whole answers, prompts and pictures included; "first" is
the mean wait for the first token. "same" is how many of the first tokens are those of "generate", of all streams: in 16
bits an answer may take another turn. A row that fails prints why, and the next one follows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers as T
from report import Table, save

from polymux.config import EngineConfig
from polymux.engine.ar_engine import ArEngine
from polymux.engine.base import StageEngine
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.device import resolve_device
from polymux.engine.generate_model import GenerateModel
from polymux.families import generate_family_of
from polymux.families.generate import Parts
from polymux.media.wire import to_wire
from polymux.request import Failed, Finished, Message, Part, Request, SamplingParams, TextPiece
from polymux.testing.tiny.driver import make
from polymux.testing.tiny.inputs import picture

FIRST = 12  # tokens that are compared
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES: dict[str, dict[str, Any]] = {
    "qwen25-omni": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "qwen3-omni-moe": {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 152064,
    },
}  # fmt: skip
SECTIONS = {"qwen25-omni": [16, 24, 24], "qwen3-omni-moe": [24, 20, 20]}
SIGHT = {"depth": 24, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}


@dataclass
class Made:
    seconds: float
    first: float  # mean wait
    texts: list[list[int]] = field(repr=False)

    @property
    def rate(self) -> float:
        return sum(map(len, self.texts)) / self.seconds


def parts_of(args: argparse.Namespace, name: str, device: torch.device) -> Parts:
    """The tiny checkpoint's words and processor, and a model of the given size: the same weights each time."""
    with tempfile.TemporaryDirectory() as folder:
        path = make(name, Path(folder))
        config, processor = T.AutoConfig.from_pretrained(path), T.AutoProcessor.from_pretrained(path)
    thinker = config.thinker_config
    if not args.tiny:
        for key, value in SIZES[name].items():
            setattr(thinker.text_config, key, value)
        thinker.text_config.rope_parameters["mrope_section"] = SECTIONS[name]
        for key, value in SIGHT.items():
            setattr(thinker.vision_config, key, value)
        thinker.vision_config.out_hidden_size = thinker.audio_config.output_dim = thinker.text_config.hidden_size
        thinker.text_config.layer_types = ["full_attention"] * thinker.text_config.num_hidden_layers
    config.enable_audio_output = False
    patch = thinker.vision_config.patch_size
    processor.image_processor = T.Qwen2VLImageProcessor(patch_size=patch, min_pixels=4 * patch**2, max_pixels=10**7)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(T, config.architectures[0])._from_config(config, dtype=DTYPES[args.dtype]).eval()
    if not hasattr(model, "talker"):  # without one, `generate` asks for what it would say all the same
        model.talker, model.speaker_map = SimpleNamespace(codec_pad_token=0), {"Chelsie": {}}
    return Parts(model=model, processor=processor)


def engine_of(args: argparse.Namespace, name: str, device: torch.device, way: str) -> StageEngine:
    kind, _, graphs = way.partition("-")
    parts = parts_of(args, name, device)
    family = generate_family_of(type(parts.model).__name__)
    assert family is not None
    config = EngineConfig.from_flat(
        model="bench", max_num_seqs=max(args.streams), merge_decoding=kind == "merged", max_prompt_length=10**6,
        **({"decode_graphs": graphs} if graphs else {}),
        **({"enable_prefix_caching": False} if kind == "paged" else {}),  # the rounds ask the same
        **({"kv_cache_memory_bytes": args.cache_bytes} if kind == "paged" and device.type == "cuda" else {}),
    )  # fmt: skip
    with torch.no_grad():
        engine = (ArEngine if kind == "paged" else ChatEngine)(config, GenerateModel.of(family, parts, device), device)
        engine.warm_up()
    return engine


def request(args: argparse.Namespace, index: int) -> Request:
    return Request(
        request_id=str(index),
        messages=[Message("user", [Part("image", ""), Part("text", "a cat and the dog " * (1 + index % 3))])],
        media={"image": [to_wire(picture(args.side, args.side, seed=index))]},
        sampling=SamplingParams(max_new_tokens=args.tokens, do_sample=False, seed=0),
    )


def answer(args: argparse.Namespace, engine: StageEngine, count: int) -> Made:
    asked = [request(args, i) for i in range(count)]
    start = time.perf_counter()
    for one in asked:
        engine.add(one)
    jobs: dict[str, Any] = dict(engine._jobs if isinstance(engine, ArEngine) else engine.jobs)  # type: ignore[attr-defined]
    first: dict[str, float] = {}
    while engine.busy:
        for event in engine.step():
            if isinstance(event, Failed):
                raise RuntimeError(event.error.message)
            if isinstance(event, (TextPiece, Finished)):
                first.setdefault(event.request_id, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    return Made(seconds, sum(first.values()) / count, [list(jobs[str(i)].writer.tokens) for i in range(count)])


def same(made: Made, wanted: Made | None) -> str:
    if wanted is None:
        return ""
    pairs = [(a, b) for one, other in zip(made.texts, wanted.texts, strict=True)
             for a, b in zip(one[:FIRST], other[:FIRST], strict=False)]  # fmt: skip
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"


def attempt(what: str, work: Callable[[], Any]) -> Any:
    """What it returns, or None, with the whole story, if it fails."""
    try:
        return work()
    except Exception:
        print(f"\n{what} failed:\n{traceback.format_exc()}", flush=True)
        return None


def measure(args: argparse.Namespace, name: str, device: torch.device, table: Table) -> None:
    """One model, one way after the other: each has weights of its own, which are gone before the next one's come."""
    wanted: dict[int, Made] = {}
    for way in args.ways:
        start = time.perf_counter()
        engine = attempt(f"{name}, {way}", lambda w=way: engine_of(args, name, device, w))  # type: ignore[misc]
        if engine is None:
            continue
        print(f"{name}, {way}: ready after {time.perf_counter() - start:.1f} s", flush=True)
        for count in args.streams:
            runs = [attempt(f"{name}, {way}, {count} streams", lambda e=engine, n=count: answer(args, e, n))  # type: ignore[misc]
                    for _ in range(args.rounds + 1)][1:]  # fmt: skip
            done = [one for one in runs if one is not None]
            if not done:
                continue
            best: Made = min(done, key=lambda one: one.seconds)
            if way == "generate":
                wanted[count] = best
            table.add(model=name, streams=count, way=way, **{
                "tokens/s": best.rate, "first": best.first, "same": same(best, wanted.get(count)),
            })  # fmt: skip
            save("omni_answers.json", [table], device=str(device), torch=torch.__version__)
        engine.close()
        del engine
        if device.type == "cuda":
            torch.cuda.empty_cache()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=SIZES, default=["qwen25-omni"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ways", nargs="+", default=["generate", "merged", "paged-plain", "paged-off"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--side", type=int, default=448, help="of a picture, in pixels")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--cache-bytes", type=int, default=16 * 2**30)
    parser.add_argument("--tiny", action="store_true", help="the tiny model, for a CPU")
    args = parser.parse_args()
    if args.tiny:
        ways = ["generate", "merged", "paged"]
        vars(args).update(streams=[1, 4], tokens=16, side=112, rounds=1, dtype="fp32", ways=ways)
    return args


def main() -> None:
    args, device = arguments(), resolve_device("auto")
    table = Table("Answers about pictures", ("model", "streams", "way", "tokens/s", "first", "same"))
    for name in args.model:
        measure(args, name, device, table)


if __name__ == "__main__":
    main()
