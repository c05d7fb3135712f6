"""Which engine a checkpoint needs, on one rank or on several. Imports torch only when one is made."""

from __future__ import annotations

from collections.abc import Callable

from polymux.config import EngineConfig
from polymux.engine.base import StageEngine
from polymux.engine.followers import Followers, GiveUp, start_ranks
from polymux.knobs import check_unchanged


def engine_for(config: EngineConfig) -> StageEngine:
    """The engine of the kind that the checkpoint needs."""
    from diffusers.utils import logging as diffusers_logging  # torch: only here, in the process that computes
    from transformers.utils import logging as transformers_logging

    from polymux.engine.answering import load_answering
    from polymux.engine.decode_engine import DecodeEngine
    from polymux.engine.diffusion_engine import DiffusionEngine
    from polymux.engine.generate_engine import GenerateEngine
    from polymux.engine.hearing_engine import HearingEngine
    from polymux.engine.picture_engine import PictureEngine
    from polymux.engine.talk_engine import TalkEngine
    from polymux.engine.think_engine import ThinkEngine
    from polymux.engine.write_engine import WriteEngine
    from polymux.families import generate_family_of
    from polymux.families.chat import ChatFamily
    from polymux.families.graph import Does
    from polymux.families.hearing import HearingFamily
    from polymux.families.pictures import PictureFamily
    from polymux.loading import model_class_in, resolve

    for logging_of in (diffusers_logging, transformers_logging):
        logging_of.set_verbosity_error()  # the libraries repeat their warnings at every request
    name = model_class_in(resolve(config.model))
    if name is not None:
        family = generate_family_of(name)
        if config.stages.split_stages and family is not None and family.graph is not None:
            loaders: dict[Does, Callable[[EngineConfig], StageEngine]] = {
                "write": WriteEngine.load,
                "think": ThinkEngine.load,
                "talk": TalkEngine.load,
                "decode": DecodeEngine.load,
            }
            return loaders[family.graph.stages[config.stage].does](config)
        if isinstance(family, PictureFamily):
            return PictureEngine.load(config)
        if isinstance(family, ChatFamily):
            return load_answering(config)
        engine = HearingEngine if isinstance(family, HearingFamily) else GenerateEngine
        return engine.load(config)
    config.speech.check_unused()
    check_unchanged(config.scheduler, "acts only on models of transformers", ("merge_decoding",))
    check_unchanged(config.decoding, "acts only on language models")
    return DiffusionEngine.load(config)


def ranks_for(config: EngineConfig, give_up: GiveUp) -> StageEngine:
    """The engine on several ranks."""
    # Before this process is busy with importing what they import, too.
    followers = Followers(config, start_ranks(config), give_up)

    from polymux.engine.ranks import leading  # torch

    return leading(config, followers, give_up)
