"""Which engine answers: the one whose answers go on together, or the one in which each is a loop of its own."""

from __future__ import annotations

import importlib.util
import shutil

import torch
import torch.distributed as dist

from polymux.ar.network import refusal
from polymux.config import EngineConfig
from polymux.engine.ar_engine import ArEngine
from polymux.engine.base import StageEngine
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.generate_model import GenerateModel
from polymux.engine.session_engine import prepare_device
from polymux.errors import ConfigError
from polymux.families.chat import ChatFamily
from polymux.families.divisible import DIVIDES
from polymux.knobs import check_unchanged


def load_divided(config: EngineConfig, device: torch.device, group: dist.ProcessGroup) -> GenerateModel:
    """This rank's part of a model whose answers go on together. Raises CheckpointError, ConfigError."""
    model = GenerateModel.load(config, device, group)
    why = unpaged(config, model)
    if why is not None:
        raise ConfigError(f"{config.parallel.describe()}: this model runs on one rank: {why}", param=DIVIDES)
    return model


def load_answering(config: EngineConfig) -> StageEngine:
    """Load the model, and what it answers with. Raises CheckpointError, ConfigError."""
    device = prepare_device(config)
    model = GenerateModel.load(config, device)
    settings = config.decoding
    if settings.decoding == "generate":
        others = [name for name in vars(settings) if name != "decoding"]
        check_unchanged(settings, "acts only without --decoding generate", others)
        return ChatEngine(config, model, device)
    why = unpaged(config, model)
    if why is None:
        return ArEngine(config, model, device)
    check_unchanged(settings, f"cannot act on this model: {why}")
    return ChatEngine(config, model, device)


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
