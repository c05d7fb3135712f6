"""Which engine answers or speaks: requests go on together in it, or each in a loop of its own; or it is vLLM."""

from __future__ import annotations

import importlib.util
import logging
import shutil

import torch
import torch.distributed as dist

from polymux.ar.network import refusal
from polymux.config import EngineConfig
from polymux.decoding_config import DecodingConfig
from polymux.engine.ar_engine import ArEngine
from polymux.engine.ar_speak_engine import ArSpeakEngine
from polymux.engine.ar_think_engine import ArThinkEngine
from polymux.engine.base import StageEngine
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.frame_engine import FrameEngine
from polymux.engine.generate_engine import GenerateEngine
from polymux.engine.generate_model import GenerateModel
from polymux.engine.session_engine import prepare_device
from polymux.engine.think_engine import ThinkEngine
from polymux.errors import ConfigError
from polymux.families.chat import ChatFamily
from polymux.families.divisible import DIVIDES
from polymux.knobs import check_unchanged

log = logging.getLogger(__name__)


def load_divided(config: EngineConfig, device: torch.device, group: dist.ProcessGroup) -> GenerateModel:
    """This rank's part of a model whose answers go on together. Raises CheckpointError, ConfigError."""
    model = GenerateModel.load(config, device, group)
    why = unpaged(config, model)
    if why is not None:
        raise ConfigError(f"{config.parallel.describe()}: this model runs on one rank: {why}", param=DIVIDES)
    return model


def load_answering(config: EngineConfig) -> StageEngine:
    """Load the model, and what it answers with. Raises CheckpointError, ConfigError."""
    return _load(config, ArSpeakEngine, ChatEngine)


def load_thinking(config: EngineConfig) -> StageEngine:
    """The same for a stage whose answers others speak."""
    return _load(config, ArThinkEngine, ThinkEngine)


def _load(config: EngineConfig, speaking: type[ArEngine], apart: type[ChatEngine]) -> StageEngine:
    if config.decoding.elsewhere:
        from polymux.engine.vllm_engine import VllmEngine

        return VllmEngine.load(config)
    device = prepare_device(config)
    model = GenerateModel.load(config, device)
    settings = config.decoding
    if settings.decoding == "generate":
        _check_apart(settings)
        return apart(config, model, device)
    why = unpaged(config, model)
    if why is None:
        assert isinstance(model.family, ChatFamily)
        together = speaking if model.family.adapter.layer(model.parts) is not None else ArEngine
        return together(config, model, device)
    check_unchanged(settings, f"cannot act on this model: {why}", _paged(settings))
    log.info("each answer has a loop of its own: %s", why)
    return apart(config, model, device)


def load_speaking(config: EngineConfig) -> StageEngine:
    """The same for models that speak. Raises CheckpointError, ConfigError."""
    device = prepare_device(config)
    model = GenerateModel.load(config, device)
    settings, family = config.decoding, model.family
    if family.framed and settings.decoding != "generate":
        why = lacking(device) or family.adapter.alone(model.parts)
        if why is None:
            return FrameEngine(config, model, device)
        check_unchanged(settings, f"cannot act on this model: {why}")
    elif family.framed:
        _check_apart(settings)
    return GenerateEngine(config, model, device)


def _check_apart(settings: DecodingConfig) -> None:
    check_unchanged(settings, "acts only without --decoding generate", [n for n in _paged(settings) if n != "decoding"])


def _paged(settings: DecodingConfig) -> list[str]:
    """What is of answers that go on together."""
    return [name for name in vars(settings) if name != "tool_call_parser"]


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
