"""Which engine answers or speaks: requests go on together in it, or each in a loop of its own; or it is vLLM."""

from __future__ import annotations

import importlib.util
import shutil

import torch

from polymux.ar.network import refusal
from polymux.config import EngineConfig
from polymux.decoding_config import DecodingConfig
from polymux.engine.ar_engine import ArEngine
from polymux.engine.base import StageEngine
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.frame_engine import FrameEngine
from polymux.engine.generate_engine import GenerateEngine
from polymux.engine.generate_model import GenerateModel
from polymux.engine.session_engine import prepare_device
from polymux.errors import ConfigError
from polymux.families.chat import ChatFamily
from polymux.knobs import check_unchanged


def load_answering(config: EngineConfig) -> StageEngine:
    """Load the model, and what it answers with. Raises CheckpointError, ConfigError."""
    if config.decoding.elsewhere:
        from polymux.engine.vllm_engine import VllmEngine

        return VllmEngine.load(config)
    device = prepare_device(config)
    model = GenerateModel.load(config, device)
    settings = config.decoding
    if settings.decoding == "generate":
        _check_apart(settings)
        return ChatEngine(config, model, device)
    why = unpaged(config, model)
    if why is None:
        return ArEngine(config, model, device)
    check_unchanged(settings, f"cannot act on this model: {why}")
    return ChatEngine(config, model, device)


def load_speaking(config: EngineConfig) -> StageEngine:
    """The same for models that speak. Raises CheckpointError, ConfigError."""
    if config.decoding.elsewhere:
        raise ConfigError("decoding='vllm': runs language models, and this one speaks", param="decoding")
    device = prepare_device(config)
    model = GenerateModel.load(config, device)
    settings, family = config.decoding, model.family
    if family.framed and settings.decoding != "generate":
        unused = ("max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill")
        check_unchanged(settings, f"acts only on language models, and {family.name} is none", unused)
        why = lacking(device) or family.adapter.alone(model.parts)
        if why is None:
            return FrameEngine(config, model, device)
        check_unchanged(settings, f"cannot act on this model: {why}")
    elif family.framed:
        _check_apart(settings)
    return GenerateEngine(config, model, device)


def _check_apart(settings: DecodingConfig) -> None:
    others = [name for name in vars(settings) if name != "decoding"]
    check_unchanged(settings, "acts only without --decoding generate", others)


def unpaged(config: EngineConfig, model: GenerateModel) -> str | None:
    """Why its answers do not go on together, if they do not."""
    name = type(model.parts.model).__name__
    if not isinstance(model.family, ChatFamily) or name not in model.family.paged:
        return f"for {name} nothing proves that its tokens stay the same"
    if config.scheduler.merge_decoding:
        if config.decoding.decoding == "paged":
            what = "--merge-decoding and --decoding paged exclude each other: both say how answers run together"
            raise ConfigError(what, param="merge_decoding")
        return "--merge-decoding says how its steps run together"
    return lacking(model.parts.model.device) or refusal(model.parts.model)


def lacking(device: torch.device) -> str | None:
    """What this machine has not that steps on a GPU are made with."""
    if device.type != "cuda":
        return None
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    compilers = ("cc", "gcc", "clang")
    return None if any(map(shutil.which, compilers)) else f"there is no C compiler ({', '.join(compilers)})"
