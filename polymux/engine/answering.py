"""Which engine answers: the one whose answers go on together, or the one in which each is a loop of its own."""

from __future__ import annotations

import importlib.util
import logging
import shutil

import torch

from polymux.ar.network import refusal
from polymux.config import EngineConfig
from polymux.engine.ar_engine import ArEngine
from polymux.engine.ar_speak_engine import ArSpeakEngine
from polymux.engine.ar_think_engine import ArThinkEngine
from polymux.engine.base import StageEngine
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.generate_model import GenerateModel
from polymux.engine.session_engine import prepare_device
from polymux.engine.think_engine import ThinkEngine
from polymux.errors import ConfigError
from polymux.families.chat import ChatFamily
from polymux.knobs import check_unchanged

log = logging.getLogger(__name__)


def load_answering(config: EngineConfig) -> StageEngine:
    """Load the model, and what it answers with. Raises CheckpointError, ConfigError."""
    return _load(config, ArSpeakEngine, ChatEngine)


def load_thinking(config: EngineConfig) -> StageEngine:
    """The same for a stage whose answers others speak."""
    return _load(config, ArThinkEngine, ThinkEngine)


def _load(config: EngineConfig, speaking: type[ArEngine], apart: type[ChatEngine]) -> StageEngine:
    device = prepare_device(config)
    model = GenerateModel.load(config, device)
    settings = config.decoding
    if settings.decoding == "generate":
        others = [name for name in vars(settings) if name != "decoding"]
        check_unchanged(settings, "acts only without --decoding generate", others)
        return apart(config, model, device)
    why = unpaged(config, model)
    if why is None:
        assert isinstance(model.family, ChatFamily)
        together = speaking if model.family.adapter.layer(model.parts) is not None else ArEngine
        return together(config, model, device)
    check_unchanged(settings, f"cannot act on this model: {why}")
    log.info("each answer has a loop of its own: %s", why)
    return apart(config, model, device)


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
    adapter = model.family.adapter
    return lacking(model.parts.model.device) or refusal(adapter.writer(model.parts)) or adapter.unpaged(model.parts)


def lacking(device: torch.device) -> str | None:
    """What this machine has not that steps on a GPU are made with."""
    if device.type != "cuda":
        return None
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    compilers = ("cc", "gcc", "clang")
    return None if any(map(shutil.which, compilers)) else f"there is no C compiler ({', '.join(compilers)})"
