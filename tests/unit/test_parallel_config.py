"""How many ranks there are, what goes together, and that the documentation says so."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from source_tree import ROOT

from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.parallel_config import DiffusionParallelConfig

# What is combined: a setting with what it cannot do without. The rows of the table, and its columns.
MODES: dict[str, dict[str, Any]] = {
    "`--cfg-parallel-size`": {"cfg_parallel_size": 2},
    "`--ulysses-degree`": {"ulysses_degree": 2},
    "`--ring-degree`": {"ring_degree": 2},
    "`--tensor-parallel-size`": {"tensor_parallel_size": 2},
    "`--use-hsdp`": {"use_hsdp": True},
    "`--vae-patch-parallel-size`": {"vae_patch_parallel_size": 2},
    "`--text-encoder-tp-size`": {"text_encoder_tp_size": 2},
}
OTHERS: dict[str, dict[str, Any]] = {
    "`--enable-cpu-offload`": {"enable_cpu_offload": True},
    "`--enable-layerwise-offload`": {"enable_layerwise_offload": True},
    "`--enable-distributed-layerwise-offload`": {"enable_distributed_layerwise_offload": True},
    "`--dlo-use-allgather`": {"enable_distributed_layerwise_offload": True, "dlo_use_allgather": True},
    "`--gpu-memory-limit-gib`": {"gpu_memory_limit_gib": 8.0},
    "`--lora-path`": {"lora_path": ("a.safetensors",)},
    "`--cache-backend`": {"cache_backend": "first_block"},
    "`--quantization`": {"quantization": "int8"},
    "`block_sparse`": {
        "diffusion_attention_config": {"default": {"backend": "TORCH_SDPA", "block_sparse": {"sparsity": 0.5}}}
    },
    "`--merge-decoding`": {"merge_decoding": True},
    "`--decoding generate`": {"decoding": "generate"},
    "`--decode-graphs compiled`": {"decode_graphs": "compiled"},
}
RAY = {"worker_backend": "ray"}
RANKS = {"cfg_parallel_size", "ulysses_degree", "ring_degree", "tensor_parallel_size"}


def together(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether some number of ranks does both."""
    both = one | other
    for ranks in [{}, {"cfg_parallel_size": 2}, {"ulysses_degree": 2}]:
        flat = ranks | both
        for name in {"vae_patch_parallel_size", "text_encoder_tp_size"} & flat.keys():
            flat[name] = 2 ** len(RANKS & flat.keys())
        try:
            if EngineConfig.from_flat(model="m", **flat).parallel.world_size > 1:
                return True
        except ConfigError:
            continue
    return False


def table() -> str:
    """As it stands in docs/parallel.md; `python tests/unit/test_parallel_config.py` prints it."""
    lines = [f"| | {' | '.join(MODES)} |", "|---" * (len(MODES) + 1) + "|"]
    for row, one in (MODES | OTHERS).items():
        cells = ["" if row == name else ("yes" if together(one, other) else "no") for name, other in MODES.items()]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_in_the_documentation_is_that_of_the_checks() -> None:
    assert table() in (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")


def test_the_ranks_are_the_product() -> None:
    assert DiffusionParallelConfig().world_size == 1
    config = DiffusionParallelConfig(cfg_parallel_size=2, ulysses_degree=2, ring_degree=2, tensor_parallel_size=3)
    assert config.world_size == 24
    sizes = "cfg_parallel_size 2 x ring_degree 2 x ulysses_degree 2 x tensor_parallel_size 3"
    assert config.describe() == f"24 ranks ({sizes})"


@pytest.mark.parametrize(
    ("flat", "param", "message"),
    [
        ({"use_hsdp": True}, "use_hsdp", "only with several ranks"),
        ({"hsdp_shard_size": 2, "cfg_parallel_size": 2}, "hsdp_shard_size", "only with --use-hsdp"),
        (
            {"hsdp_shard_size": 3, "cfg_parallel_size": 2, "use_hsdp": True},
            "hsdp_shard_size",
            "--hsdp-shard-size 3 x --hsdp-replicate-size 1 must be all ranks; there are 2 ranks",
        ),
        ({"vae_patch_parallel_size": 2}, "vae_patch_parallel_size", "allowed are 1 and all ranks; there are 1 rank"),
        ({"text_encoder_tp_size": 2, "cfg_parallel_size": 3}, "text_encoder_tp_size", "allowed are 1 and all ranks"),
        ({"ulysses_degree": 99999}, "ulysses_degree", "99999 ranks .*: at most 256 are allowed"),
        ({"cfg_parallel_size": 2, "cache_backend": "first_block"}, "cfg_parallel_size", "--cache-backend exclude"),
        ({"tensor_parallel_size": 2, "lora_path": ("a",)}, "tensor_parallel_size", "--lora-path exclude"),
        ({"tensor_parallel_size": 2, "decoding": "generate"}, "tensor_parallel_size", "--decoding exclude each other"),
        ({"tensor_parallel_size": 2, "decode_graphs": "compiled"}, "tensor_parallel_size", "--decode-graphs exclude"),
        ({"ray_address": "auto"}, "ray_address", "only with --worker-backend ray"),
        (RAY | {"ray_address": "ray://a:1"}, "ray_address", "allowed are auto and HOST:PORT"),
        (RAY | {"devices": ("cpu",), "data_parallel_size": 1}, "worker_backend", "Ray chooses the GPUs"),
        (RAY | {"device": "cuda:1"}, "device", "allowed are auto, cpu and cuda"),
        (
            RAY | {"split_stages": True, "stage_connector": "shared-memory"},
            "worker_backend",
            "--stage-connector exclude",
        ),
        (
            RAY | {"split_stages": True, "stage_connector": "tcp", "connector_host": "::1"},
            "connector_host",
            "address of its own host",
        ),
    ],
)
def test_what_cannot_be_is_refused(flat: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig.from_flat(model="m", **flat)
    assert caught.value.param == param


def test_as_one_argument() -> None:
    config = DiffusionParallelConfig(ulysses_degree=2)
    assert EngineConfig.from_flat(model="m", parallel_config=config).parallel == config
    with pytest.raises(ConfigError, match="beside parallel_config"):
        EngineConfig.from_flat(model="m", parallel_config=config, ulysses_degree=2)
    with pytest.raises(ConfigError, match="must be a DiffusionParallelConfig"):
        EngineConfig.from_flat(model="m", parallel_config={"ulysses_degree": 2})


def test_what_divides_denoisers() -> None:
    """Of these alone blocks are not compiled: text encoders in parts leave denoisers whole."""
    two: dict[str, Any] = {"cfg_parallel_size": 2}
    for whole in ({}, two, two | {"text_encoder_tp_size": 2}, two | {"vae_patch_parallel_size": 2}):
        assert not DiffusionParallelConfig(**whole).divides_denoisers
    divided: tuple[dict[str, Any], ...] = ({"ulysses_degree": 2}, {"ring_degree": 2}, {"tensor_parallel_size": 2})
    for knobs in (*divided, two | {"use_hsdp": True}):
        assert DiffusionParallelConfig(**knobs).divides_denoisers


def test_every_pair_is_allowed_or_refused_the_same_way_round() -> None:
    for one, other in itertools.combinations(MODES.values(), 2):
        assert together(one, other) == together(other, one)


if __name__ == "__main__":
    print(table())
