"""Which engine a checkpoint needs, on one rank or on several. Imports torch only when one is made."""

from __future__ import annotations

from collections.abc import Callable

from polymux.config import EngineConfig
from polymux.engine.base import StageEngine
from polymux.engine.followers import Followers, GiveUp, start_ranks
from polymux.families import generate_family_of
from polymux.families.chat import ChatFamily
from polymux.families.graph import Does
from polymux.families.hearing import HearingFamily
from polymux.families.pictures import PictureFamily
from polymux.families.settings import check_settings
from polymux.importing import keep_imported, many_imports

LoadEngine = Callable[[EngineConfig], StageEngine]


def engine_for(config: EngineConfig) -> StageEngine:
    """The engine of the kind that the checkpoint needs."""
    with many_imports():  # torch: only here, in the process that computes
        from transformers.utils import logging as transformers_logging

        from polymux.loading.layout import model_class_in
        from polymux.loading.source import resolve

    transformers_logging.set_verbosity_error()  # the libraries repeat their warnings at every request
    name = model_class_in(resolve(config.model))
    with many_imports():
        load = _diffusion() if name is None else _of_transformers(config, name)
    keep_imported()
    if name is None:
        check_settings(config, None)
    return load(config)


def _diffusion() -> LoadEngine:
    from diffusers.utils import logging as diffusers_logging

    from polymux.engine.diffusion_engine import DiffusionEngine

    diffusers_logging.set_verbosity_error()
    return DiffusionEngine.load


def _of_transformers(config: EngineConfig, name: str) -> LoadEngine:
    """What loads a model of this class. No diffusers: importing it would take as long as all the rest."""
    family = generate_family_of(name)
    if config.stages.split_stages and family is not None and family.graph is not None:
        return _of_stage(family.graph.stages[config.stage].does)
    if isinstance(family, PictureFamily):
        from polymux.engine.picture_engine import PictureEngine

        return PictureEngine.load
    if isinstance(family, ChatFamily):
        from polymux.engine.answering import load_answering

        return load_answering
    if isinstance(family, HearingFamily):
        from polymux.engine.hearing_engine import HearingEngine

        return HearingEngine.load
    from polymux.engine.answering import load_speaking

    return load_speaking


def _of_stage(does: Does) -> LoadEngine:
    from polymux.engine.answering import load_thinking
    from polymux.engine.decode_engine import DecodeEngine
    from polymux.engine.talk_engine import TalkEngine
    from polymux.engine.write_engine import WriteEngine

    loaders: dict[Does, LoadEngine] = {
        "write": WriteEngine.load,
        "think": load_thinking,
        "talk": TalkEngine.load,
        "decode": DecodeEngine.load,
    }
    return loaders[does]


def ranks_for(config: EngineConfig, give_up: GiveUp) -> StageEngine:
    """The engine on several ranks."""
    # Before this process is busy with importing what they import, too.
    followers = Followers(config, start_ranks(config), give_up)

    with many_imports():
        from polymux.engine.ranks import leading  # torch

    keep_imported()
    return leading(config, followers, give_up)
