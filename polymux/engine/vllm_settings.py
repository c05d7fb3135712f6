"""From the settings of a stage to arguments of vLLM's engine. What means nothing there is refused.

Knows settings and where GPUs are; nothing of requests.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from polymux.config import EngineConfig, adopt, stage_environment
from polymux.decoding_config import SHARE_OF_THE_GPU
from polymux.errors import ConfigError
from polymux.knobs import Checked, check_unchanged

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEFAULTS = {  # of vLLM's own variables, where nobody has set them
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # not forked: the stage's process has threads
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # as all logs; what is written to stdout is an answer
    "VLLM_NO_USAGE_STATS": "1",  # it would report itself to its makers
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_TAKEN = {  # of each group, what acts on such a stage, or on all stages alike
    "model": ("model", "revision", "cache_dir", "dtype", "load_format"),
    "device": ("device",),
    "scheduler": ("max_num_seqs", "max_queue"),
    "memory": (),
    "adapters": (),
    "attention": (),
    "compilation": ("enforce_eager",),
    "quantization": (),
    "caches": (),
    "speech": (),
    "parallel": ("tensor_parallel_size",),
    "profiler": (),
}
_OWN = (  # settings of decoding that are vLLM's too, under the same names
    "max_num_batched_tokens",
    "block_size",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
)


def check(config: EngineConfig) -> None:
    """Raises ConfigError for a setting that would be ignored."""
    why = "does not act with --decoding vllm"
    for name, taken in _TAKEN.items():
        group: Checked = getattr(config, name)
        fields = dataclasses.fields(group)  # type: ignore[arg-type]  # all groups are dataclasses
        check_unchanged(group, why, [field.name for field in fields if field.name not in taken])
    check_unchanged(config.decoding, f"{why}, which has --enforce-eager", ("decode_graphs",))


def claim(config: EngineConfig) -> str:
    """Have vLLM's processes see the GPUs that are this stage's; gives the kind of its device. To be called before
    anything is asked of CUDA. Raises ConfigError if they are not there."""
    name, count = config.device.device, config.parallel.tensor_parallel_size
    environment = stage_environment()
    chosen = _chosen(name, count, environment.get(_VISIBLE))
    unset = {name: value for name, value in _DEFAULTS.items() if name not in environment}
    adopt(unset if chosen is None else unset | {_VISIBLE: chosen})
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if not name.startswith(("auto", kind)):
        there = "it would run on a GPU: there is one" if kind == "cuda" else "there is no GPU"
        raise ConfigError(f"device={name!r}: with --decoding vllm vllm chooses the kind of device, and {there}",
                          param="device")  # fmt: skip
    return kind


def _chosen(name: str, count: int, visible: str | None) -> str | None:
    """The GPUs from the named one on, as the variable names them; None: the first ones, which need not be named."""
    first = int(name.partition(":")[2] or 0)
    if not first:
        return None
    names = visible.split(",") if visible else [str(index) for index in range(first + count)]
    if len(names) < first + count:
        what = f"{_VISIBLE} names {len(names)} GPUs, and {first + count} are needed"
        raise ConfigError(f"device={name!r}: {what}", param="device")
    return ",".join(names[first : first + count])


def arguments(config: EngineConfig, folder: Path, kind: str) -> dict[str, Any]:
    """For vLLM's engine. What nobody has set stays vLLM's own choice, but for what is promised of these settings."""
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bf16" if kind == "cuda" else "fp32"
    made: dict[str, Any] = {
        "model": str(folder),
        "dtype": _DTYPES[dtype],
        "load_format": config.model.load_format,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_model_len": -1,  # the checkpoint's own, or as much as there is room for
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "enable_sleep_mode": kind == "cuda",
        "disable_log_stats": True,
    }
    made |= {name: value for name in _OWN if (value := getattr(config.decoding, name)) is not None}
    if kind == "cuda" and "kv_cache_memory_bytes" not in made:
        made.setdefault("gpu_memory_utilization", SHARE_OF_THE_GPU)
    if config.compilation.enforce_eager is not None:
        made["enforce_eager"] = config.compilation.enforce_eager
    return made
