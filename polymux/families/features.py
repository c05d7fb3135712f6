"""What of polymux a pipeline can have beside making outputs, and which pipelines have what.

`features.json` is what is found in each pipeline's tiny checkpoint, as `polymux.diffusion.features` looks it up:
`python -m polymux.testing.features` makes it, and tests/parity/test_offload.py holds it against what is found.
"""

from __future__ import annotations

import functools
import json
from importlib import resources

FEATURES: dict[str, str] = {  # by name, in the order in which they are shown: what it is, and what asks for it
    "batching": "calls of the denoiser of different requests run as one",
    "guidance": "the calls that a step makes for guidance run as one",
    "previews": "pictures on the way: `partial_images`",
    "streamed_decode": "frames leave while others are decoded",
    "lora": "adapters per request: `lora`, `--lora-path`",
    "first_block": "`--cache-backend first_block`",
    "mag_cache": "`--cache-backend mag_cache`",
    "tea_cache": "`--cache-backend tea_cache`",
    "taylorseer": "`--cache-backend taylorseer`",
    "pab": "`--cache-backend pab`",
    "cache_dit": "`--cache-backend cache_dit`",
    "attention": "`--diffusion-attention-backend`",
    "block_sparse": "`block_sparse` in `--diffusion-attention-config`",
    "compile": "compiled blocks: `--enforce-eager`, `--compilation-config`",
    "tiling": "`--vae-use-tiling`",
    "slicing": "`--vae-use-slicing`",
    "offload": "`--enable-cpu-offload`",
    "layerwise_offload": "`--enable-layerwise-offload`, `--enable-distributed-layerwise-offload`, the runtime cache",
    "quantization": "`--quantization`",
    "gguf": "`--gguf-file`",
}


@functools.cache
def features_by_pipeline() -> dict[str, tuple[str, ...]]:
    """By class name, the names of what the pipeline can have."""
    found = json.loads((resources.files("polymux.families") / "features.json").read_text(encoding="utf-8"))
    return {pipeline: tuple(features) for pipeline, features in found.items()}
