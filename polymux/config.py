"""Every knob, defined once.

A knob is a field of one of the frozen dataclasses below, or of those in the modules `*_config` beside this one;
`polymux.knobs` says how. The CLI's flags, `Omni`'s keyword arguments and the stage process's settings are all made from
these definitions. "auto" stays "auto" here: whoever resolves it makes a new value and keeps it to itself. This is also
the only module that reads the environment.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from polymux import step_caches
from polymux.attention import BACKENDS, AttentionConfig, AttentionSpec
from polymux.compilation_config import CompilationConfig
from polymux.decoding_config import DecodingConfig
from polymux.errors import ConfigError
from polymux.knobs import Checked, build, check_unchanged, conflict, flag_of, knob
from polymux.memory_config import MemoryConfig
from polymux.parallel_config import DiffusionParallelConfig, flattened
from polymux.profiler_config import ProfilerConfig
from polymux.quantization_config import QuantizationConfig
from polymux.server_config import AccessConfig, ServerConfig
from polymux.stage_config import ReplicaConfig, StageConfig, WorkerConfig, check_device
from polymux.step_caches import StepCacheSettings

DTYPES = ("auto", "bf16", "fp16", "fp32")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Checked):
    """Model: what to load, from where, and how"""

    model: str = knob(help="a folder, a hub id (OWNER/NAME), or 'demo' (the embedded model)")
    revision: str | None = knob(None, "branch, tag or commit on the hub")
    cache_dir: str | None = knob(None, "where hub downloads are kept (default: the hub's own cache)")
    dtype: str = knob("auto", "auto: bf16 on a GPU, fp32 on a CPU", choices=DTYPES)
    load_format: str = knob(
        "auto", "dummy: random weights from the configs alone, for benchmarks", choices=("auto", "dummy")
    )
    num_weight_load_threads: int = knob(4, "threads that read weight files", minimum=1, maximum=256)
    enable_multithread_weight_load: bool = knob(
        True, "read weight files with one thread", flag="--disable-multithread-weight-load"
    )
    model_class_name: str | None = knob(None, "pipeline class of diffusers to use in place of the checkpoint's own")
    diffusers_load_kwargs: dict[str, Any] = knob({}, "passed on to from_pretrained", metavar="JSON")
    diffusers_call_kwargs: dict[str, Any] = knob({}, "passed on to every pipeline call", metavar="JSON")
    frame_interpolation_model_path: str | None = knob(
        None, "weights of the network that puts frames between a video's frames: a file, a folder, or a hub id"
    )


@dataclass(frozen=True, kw_only=True)
class DeviceConfig(Checked):
    """Device: where the model runs"""

    device: str = knob("auto", "auto, cpu, cuda or cuda:N; auto:N is the N-th GPU, or the CPU if there is none")
    num_threads: int | None = knob(None, "CPU threads of the stage process (default: torch's own)", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device, "device")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Checked):
    """Scheduling: what runs together"""

    max_num_seqs: int = knob(8, "outputs in flight; 1 runs them one after the other, unmerged", minimum=1)
    max_batched_tokens: int = knob(
        8192, "latent tokens in one merged call; a call of half of that or more runs alone", minimum=1
    )
    merge_decoding: bool = knob(
        False, "run the next token of several requests as one, of models that write tokens; equal to within rounding"
    )
    max_queue: int = knob(256, "requests that may wait for a place in flight; more are refused with 429", minimum=0)


@dataclass(frozen=True, kw_only=True)
class LimitsConfig(Checked):
    """Limits: what a request may ask for"""

    max_inference_steps: int = knob(1000, "denoising steps of one request", minimum=1)
    max_num_outputs: int = knob(10, "outputs per prompt", minimum=1)
    max_generated_image_size: int = knob(7680 * 4320, "pixels of one generated picture or frame", minimum=1)
    max_num_frames: int = knob(1024, "frames of one generated video", minimum=1)
    max_audio_seconds: float = knob(
        600.0, "seconds of one generated sound; speech is as long as its text", minimum=0.01
    )
    max_prompt_length: int = knob(32768, "characters of a prompt", minimum=1)
    max_input_audio_seconds: float = knob(3600.0, "seconds of a sound that is to be written down", minimum=0.1)
    max_ref_audio_seconds: float = knob(30.0, "seconds of a recording of a voice to speak with", minimum=0.1)


@dataclass(frozen=True, kw_only=True)
class ProcessConfig(Checked):
    """Processes: starting, watching and stopping stages"""

    stage_init_timeout: float = knob(1800.0, "seconds a stage may take until it is ready", minimum=1)
    warmup: bool = knob(True, "make one small generation before reporting ready")
    stage_hang_timeout: float = knob(
        1800.0, "seconds a stage may give no sign of progress while it has requests, then it is killed; 0: any time",
        minimum=0,
    )  # fmt: skip
    restart_stages: bool = knob(False, "start a process again when it dies, in place of exiting with the last one")
    output_chunk_bytes: int = knob(
        8 * 2**20, "send frames and other arrays in parts of this size (at least one frame)", minimum=1
    )
    shutdown_grace: float = knob(30.0, "seconds that requests in flight get to finish on SIGTERM", minimum=0)


@dataclass(frozen=True, kw_only=True)
class LogConfig(Checked):
    """Log: what is said on stderr, in every process"""

    log_level: str = knob("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_format: str = knob("text", "json: one JSON object per line", choices=("text", "json"))


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Checked):
    """Adapters: LoRA files that act on every request, and how many others are kept"""

    lora_path: tuple[str, ...] = knob(
        (),
        "LoRA files or folders that act on every request; transformer_2=PATH for one of two denoisers",
        metavar="PATH",
    )
    lora_backend: str = knob(
        "peft", "distill: --lora-path is added to the weights at start, for good", choices=("peft", "distill")
    )
    lora_scale: float = knob(1.0, "strength of those in --lora-path", minimum=-100, maximum=100)
    max_loras: int = knob(8, "adapters of requests that are kept in memory beside those in use", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_scale != 1.0 and not self.lora_path:
            raise ConfigError("--lora-scale acts only with --lora-path", param="lora_scale")
        if self.distills and not self.lora_path:
            raise ConfigError("--lora-backend distill acts only with --lora-path", param="lora_backend")

    @property
    def distills(self) -> bool:
        """Whether adapters are added to the weights."""
        return self.lora_backend == "distill"


@dataclass(frozen=True, kw_only=True)
class AttentionChoiceConfig(Checked):
    """Attention: what the denoisers' attention runs on (docs/attention.md)"""

    diffusion_attention_backend: str | None = knob(
        None, "backend of all attention layers (default: that of diffusers)", choices=BACKENDS
    )
    diffusion_attention_config: dict[str, Any] | None = knob(
        None, "backends by role: default and per_role, each with a backend and block_sparse", metavar="JSON"
    )

    def __post_init__(self) -> None:
        if isinstance(self.diffusion_attention_config, AttentionConfig):  # as Python code gives it
            object.__setattr__(self, "diffusion_attention_config", msgspec.to_builtins(self.diffusion_attention_config))
        super().__post_init__()
        default = AttentionConfig.of(self.diffusion_attention_config).default
        if default is not None and self.diffusion_attention_backend is not None:
            reason = "both choose the default"
            raise conflict("diffusion_attention_backend", "diffusion_attention_config", reason)


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Checked):
    """Caches: what is not computed again"""

    prompt_cache_gib: float = knob(
        0.25, "host memory for results of text and image encoders, which answer equal calls; 0: none is kept", minimum=0
    )
    cache_backend: str = knob(
        "none", "how denoising steps are left out that resemble those before them", choices=("none", *step_caches.NAMES)
    )
    cache_config: dict[str, Any] | None = knob(None, "settings of that backend (docs/step_cache.md)", metavar="JSON")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_config is not None and self.cache_backend == "none":
            raise ConfigError("--cache-config acts only with --cache-backend", param="cache_config")
        _ = self.steps

    @property
    def prompt_bytes(self) -> int:
        return int(self.prompt_cache_gib * 2**30)

    @property
    def steps(self) -> StepCacheSettings | None:
        """Of the cache of denoising steps; None: there is none."""
        if self.cache_backend == "none":
            return None
        return step_caches.settings_of(self.cache_backend, self.cache_config or {})


@dataclass(frozen=True, kw_only=True)
class SpeechConfig(Checked):
    """Speech: what some models that speak need beside their checkpoint (docs/speech.md)"""

    vocoder: str | None = knob(
        None, "folder or hub id of the vocoder or codec (default: in the checkpoint's own folder)", metavar="MODEL"
    )
    voice_path: str | None = knob(
        None, "folder of voices, a file NAME.npy with a vector for each (default: voices/ in the checkpoint)",
        metavar="DIR",
    )  # fmt: skip

    def check_unused(self) -> None:
        """Raise ConfigError if one is set: the model is not one that speaks."""
        for f in dataclasses.fields(self):
            if getattr(self, f.name) is not None:
                raise ConfigError(f"{flag_of(f.name)} acts only on models that speak", param=f.name)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All that a stage process needs to know."""

    model: ModelConfig
    device: DeviceConfig = field(default_factory=DeviceConfig)
    replicas: ReplicaConfig = field(default_factory=ReplicaConfig)
    stages: StageConfig = field(default_factory=StageConfig)
    workers: WorkerConfig = field(default_factory=WorkerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    attention: AttentionChoiceConfig = field(default_factory=AttentionChoiceConfig)
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    caches: CacheConfig = field(default_factory=CacheConfig)
    speech: SpeechConfig = field(default_factory=SpeechConfig)
    parallel: DiffusionParallelConfig = field(default_factory=DiffusionParallelConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    log: LogConfig = field(default_factory=LogConfig)
    stage: int = 0  # which of the stages a process is for; not a knob

    def __post_init__(self) -> None:
        if self.replicas.devices and self.device.device != "auto":
            raise conflict("device", "devices", "both say where the model runs")
        if self.workers.ray:
            self._check_ray()
        memory = self.memory
        sparse = AttentionConfig.of(self.attention.diffusion_attention_config).is_sparse
        others = vars(memory) | vars(self.caches) | vars(self.adapters) | vars(self.quantization) | vars(self.scheduler)
        self.parallel.check_beside(others | self.decoding.alone | {"diffusion_attention_config": sparse})
        if memory.dlo_use_allgather and self.parallel.world_size == 1:
            what = "--dlo-use-allgather: one rank has nobody to gather from; it needs --cfg-parallel-size, "
            raise ConfigError(f"{what}--ulysses-degree or --ring-degree", param="dlo_use_allgather")
        self.quantization.check_files(
            {
                "dlo_enable_runtime_cache": memory.dlo_enable_runtime_cache,
                "load_format dummy": self.model.load_format == "dummy",
            }
        )
        if self.adapters.distills and self.quantization.choice:
            asked = next(f.name for f in dataclasses.fields(self.quantization) if getattr(self.quantization, f.name))
            raise conflict("lora_backend", asked, "nothing can be added to weights that are packed")
        if self.adapters.distills and memory.dlo_enable_runtime_cache:
            raise conflict("lora_backend", "dlo_enable_runtime_cache", "the cache keeps the checkpoint's own weights")
        if self.caches.steps is not None:
            for name in memory.STRATEGIES[1:]:  # these may stream the blocks that the cache leaves out
                if getattr(memory, name) not in (False, None):
                    raise conflict("cache_backend", name, "blocks that are skipped cannot be streamed")

    @property
    def gathers_blocks(self) -> bool:
        """Whether each rank keeps a part of the blocks that are streamed, and a block is put together from all."""
        memory = self.memory
        apart = memory.dlo_use_allgather is False or memory.dlo_enable_runtime_cache
        return memory.enable_distributed_layerwise_offload and self.parallel.world_size > 1 and not apart

    def _check_ray(self) -> None:
        if self.replicas.devices:
            raise conflict("worker_backend", "devices", "Ray chooses the GPUs")
        if self.device.device not in ("auto", "cpu", "cuda"):
            what = f"device={self.device.device!r}: with --worker-backend ray allowed are auto, cpu and cuda"
            raise ConfigError(f"{what}; Ray chooses the GPUs", param="device")
        if self.stages.stage_connector == "shared-memory":
            raise conflict("worker_backend", "stage_connector", "processes on several hosts share no memory; use tcp")
        if self.stages.stage_connector == "tcp":
            check_unchanged(self.stages, "has each process use the address of its own host", ("connector_host",))

    @classmethod
    def from_flat(cls, **values: Any) -> EngineConfig:
        """From keyword arguments as `Omni(...)` takes them. Raises ConfigError on an unknown or impossible one."""
        return build(cls, flattened(values))


def hub_offline() -> bool:
    """Whether the user asked for no network access to the hub."""
    return any(
        os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def attention_choice(config: AttentionChoiceConfig) -> tuple[AttentionConfig, str]:
    """What was chosen for attention, and where. The environment counts least. Raises ConfigError."""
    chosen, source = AttentionConfig.of(config.diffusion_attention_config), "--diffusion-attention-config"
    if chosen.default is not None:
        return chosen, source
    name = config.diffusion_attention_backend
    if name is not None:
        source = f"{source} and --diffusion-attention-backend" if chosen.per_role else "--diffusion-attention-backend"
    else:
        name = os.environ.get(_ATTENTION) or None
        if name is not None and name not in BACKENDS:
            raise ConfigError(f"{_ATTENTION}={name!r}: allowed are {', '.join(BACKENDS)}", param=_ATTENTION)
        if name is not None:
            source = f"{source} and {_ATTENTION}" if chosen.per_role else _ATTENTION
    default = None if name is None else AttentionSpec(name)  # type: ignore[arg-type]  # one of BACKENDS
    return AttentionConfig(default=default, per_role=chosen.per_role), source


def runtime_cache_dir(chosen: str | None = None) -> Path:
    """Where the runtime cache is: the folder that was chosen, or one in the user's cache folder."""
    if chosen is not None:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polymux" / "runtime"


def use_compile_cache(chosen: str | None = None) -> Path:
    """Have torch keep what it compiles in the folder that was chosen, or else where its own variable says, or else in
    the user's cache folder. Holds for the whole process."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polymux" / "compile"
    folder = Path(chosen or os.environ.get(_COMPILE_CACHE) or base).expanduser().absolute()
    os.environ.update({_COMPILE_CACHE: str(folder)})
    return folder


def data_dir(config: ServerConfig, chosen: str | None, what: str) -> Path | None:
    """Where this server keeps its videos or voices: the folder that was chosen, or one for this address in the user's
    data folder. None if the port is chosen anew at every start, so that no later server is the same one."""
    if chosen is not None:
        return Path(chosen).expanduser()
    if config.port == 0:
        return None
    base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "polymux" / what / re.sub(r"[^A-Za-z0-9._-]", "_", f"{config.host}-{config.port}")


def stage_environment() -> dict[str, str]:
    """The environment of a stage process: this one's without the keys, with the same places to import from."""
    environment = {name: value for name, value in os.environ.items() if name != _API_KEY}
    return environment | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def rank_environment() -> dict[str, str]:
    """What processes on other hosts are to have of this one's environment: what the libraries go by."""
    names = ("HF_", "TRANSFORMERS_", "NCCL_", "GLOO_", "TORCH_", "DIFFUSERS_", _ATTENTION)
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


def adopt(environment: Mapping[str, str]) -> None:
    """Have this process's environment say so, too."""
    os.environ.update(environment)


def api_keys(config: AccessConfig) -> tuple[str, ...]:
    """All keys: given, in the file, in the environment; none if none was asked for. Raises ConfigError."""
    sources = {"api_key": ",".join(config.api_key) if config.api_key else None}
    if config.api_key_file is not None:
        sources["api_key_file"] = ",".join(_lines(config.api_key_file))
    sources[_API_KEY] = os.environ.get(_API_KEY)
    keys: list[str] = []
    for name, text in sources.items():
        found = [] if text is None else text.split(",")
        if not all(re.fullmatch(r"[!-~]+", key) for key in found):
            raise ConfigError(
                f"{name}: an API key is one or more printable ASCII characters without spaces", param=name
            )
        keys += found
    return tuple(keys)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path!r} cannot be read: {error}", param="api_key_file") from None


_API_KEY = "POLYMUX_API_KEY"
_COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # of torch
_ATTENTION = "DIFFUSION_ATTENTION_BACKEND"
