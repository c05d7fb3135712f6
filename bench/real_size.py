"""Checkpoints of real size without weights: folders of configs, for `--load-format dummy`.

The tokenizers are the tiny ones of `polymux.testing.tiny` (a real one is not needed to measure), the components' sizes
are those of the published models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polymux.testing.tiny import make

Config = dict[str, Any]

QWEN_25_VL_7B: Config = {
    "text_config": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "layer_types": ["full_attention"] * 28,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0},
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}  # fmt: skip
QWEN3_4B: Config = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "layer_types": ["full_attention"] * 36,
}  # fmt: skip

# By model: the tiny checkpoint it is made from, and the configs of its components.
MODELS: dict[str, tuple[str, dict[str, Config]]] = {
    "qwen-image": (
        "qwen-image",
        {
            "transformer": {
                "num_layers": 60, "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 3584,
                "axes_dims_rope": [16, 56, 56],
            },
            "text_encoder": QWEN_25_VL_7B,
            "vae": {"base_dim": 96, "num_res_blocks": 2},
        },
    ),
    # The text encoder stays tiny: its time is that of one forward, and the denoiser takes what it gives.
    "wan-14b": (
        "wan21-t2v",
        {
            "transformer": {
                "num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40,
                "freq_dim": 256, "in_channels": 16, "out_channels": 16,
            },
            "vae": {"base_dim": 96, "num_res_blocks": 2, "z_dim": 16},
        },
    ),
    "wan-tiny": ("wan21-t2v", {}),
    "qwen-tiny": ("qwen-image", {}),
    "z-image": (
        "z-image",
        {
            "transformer": {
                "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30,
                "cap_feat_dim": 2560, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512],
            },
            "text_encoder": QWEN3_4B,
            "vae": {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32},
        },
    ),
}  # fmt: skip


def make_model(name: str, folder: Path) -> Path:
    """Write the configs of model `name` into a folder below `folder`, and return that."""
    tiny, configs = MODELS[name]
    return make_changed(tiny, configs, folder)


def make_changed(tiny: str, configs: dict[str, Config], folder: Path) -> Path:
    """The tiny checkpoint without weights, and with these changes to the configs of its components."""
    path = make(tiny, folder)
    for weights in path.rglob("*.safetensors"):
        weights.unlink()
    for component, changes in configs.items():
        file = path / component / "config.json"
        file.write_text(json.dumps(_merged(json.loads(file.read_text()), changes), indent=2))
    return path


def _merged(old: Config, new: Config) -> Config:
    both = {
        k: _merged(old[k], v) if isinstance(v, dict) and isinstance(old.get(k), dict) else v for k, v in new.items()
    }
    return {**old, **both}
