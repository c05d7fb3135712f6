"""Pictures per minute of a model that writes them token by token: alone, interleaved, and with merged steps.

    python bench/picture_tokens.py [--pictures 4] [--size 96] [--tiny]

Emu3 with the language model of the published checkpoints (8 billion parameters) and a small autoencoder, with random
weights, in 16 bits on a GPU; with --tiny a tiny one. "alone" is transformers' own `generate` and decoder, one picture
after the other; "interleaved" and "merged" are the engine without and with --merge-decoding, all pictures at once. Each
token takes two calls of the language model: there is guidance. "same pixels" compares with alone: merged steps add
floats in another order, so a draw between two tokens may end otherwise.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as T
from report import Table, save

from polymux.config import EngineConfig
from polymux.engine.device import resolve_device
from polymux.engine.generate_model import GenerateModel
from polymux.engine.picture_engine import PictureEngine
from polymux.families.emu3 import EMU3
from polymux.families.generate import Parts
from polymux.families.pictures import PictureWish
from polymux.loading import auto_dtype
from polymux.media.wire import from_wire
from polymux.request import Failed, Finished, OmniDiffusionSamplingParams, Request
from polymux.testing.tiny import make

PUBLISHED = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 184622,
}  # fmt: skip
PROMPT = "a photo of a cat on a red chair"


def parts_of(device: torch.device, dtype: torch.dtype, tiny: bool) -> Parts:
    with tempfile.TemporaryDirectory() as name:
        folder = make("emu3", Path(name))
        processor = T.AutoProcessor.from_pretrained(folder)
        if tiny:
            return Parts(model=T.Emu3ForConditionalGeneration.from_pretrained(folder).to(device), processor=processor)
        config = T.Emu3Config.from_pretrained(folder)
        settings = T.GenerationConfig.from_pretrained(folder)
    config.text_config.update(PUBLISHED)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with device:
        model = T.Emu3ForConditionalGeneration(config).eval()
    torch.set_default_dtype(torch.float32)
    model.generation_config = settings
    return Parts(model=model, processor=processor)


def alone(parts: Parts, size: int, count: int) -> list[Any]:
    made = []
    for seed in range(count):
        call = EMU3.adapter.plan(parts, PictureWish(prompt=PROMPT, width=size, height=size))
        torch.manual_seed(seed)
        made.append(EMU3.adapter.draw(parts, call).cpu().numpy())
    return made


def together(engine: PictureEngine, size: int, count: int) -> list[Any]:
    for seed in range(count):
        params = OmniDiffusionSamplingParams(width=size, height=size, seed=seed, output_type="np")
        engine.add(Request(request_id=str(seed), prompt=PROMPT, params=params))
    made: dict[int, Any] = {}
    while engine.busy:
        for event in engine.step():
            if isinstance(event, Failed):
                raise RuntimeError(event.error.message)
            if isinstance(event, Finished):
                made[int(event.request_id)] = np.asarray(from_wire(event.outputs[0][0]))
    return [made[seed] for seed in range(count)]


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    made = work()  # its pixels are on the host
    return time.perf_counter() - start, made


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=int, default=4)
    parser.add_argument("--size", type=int, default=96, help="pixels, a multiple of 8")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = resolve_device("auto")
    parts = parts_of(device, auto_dtype("auto", device), args.tiny)
    parameters = sum(p.numel() for p in parts.model.parameters())
    alone(parts, 16, 1)  # warm
    took: dict[str, float] = {}
    made: dict[str, list[Any]] = {}
    took["alone"], made["alone"] = seconds(lambda: alone(parts, args.size, args.pictures))
    for kind in ("interleaved", "merged"):
        config = EngineConfig.from_flat(model="emu3", max_num_seqs=args.pictures, merge_decoding=kind == "merged")
        engine = PictureEngine(config, GenerateModel.of(EMU3, parts, device), device)
        together(engine, 16, args.pictures)
        took[kind], made[kind] = seconds(lambda one=engine: together(one, args.size, args.pictures))  # type: ignore[misc]
        engine.close()
    rates = {f"{kind}_pictures/min": 60 * args.pictures / one for kind, one in took.items()}
    rates["merged_/_interleaved"] = took["interleaved"] / took["merged"]
    same = {
        f"{kind}_same_pixels": f"{sum(map(close, made[kind], made['alone']))}/{args.pictures}"
        for kind in ("interleaved", "merged")
    }
    shown = ("pictures", "size", "parameters", *(n.replace("_", " ") for n in (*rates, *same)))
    table = Table("Pictures, token by token", shown)
    table.add(pictures=args.pictures, size=args.size, parameters=f"{parameters / 1e6:.0f} M", **rates, **same)
    save("picture_tokens.json", [table], device=str(device), torch=torch.__version__)


def close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=0, atol=1e-3))


if __name__ == "__main__":
    main()
