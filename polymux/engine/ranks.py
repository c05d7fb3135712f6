"""The engine of one rank: its device, its place in the mesh, its model, and its part in the steps.

Imports torch: rank 0 starts the other processes before it imports this, so that all do so at the same time.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import torch
from diffusers.utils import logging as diffusers_logging
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # they are documented there
from transformers.utils import logging as transformers_logging

from polymux.config import DeviceConfig, EngineConfig
from polymux.diffusion.step_scheduler import StepScheduler
from polymux.engine.answering import load_divided
from polymux.engine.ar_company import Company
from polymux.engine.ar_engine import ArEngine
from polymux.engine.ar_executor import ArExecutor
from polymux.engine.ar_follower import ArFollower, ArRank
from polymux.engine.base import StageEngine
from polymux.engine.device import resolve_device
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.engine.executor import Executor
from polymux.engine.followers import Followers, GiveUp
from polymux.engine.led_scheduler import FollowScheduler, LeadScheduler
from polymux.engine.no_outputs import NoOutputs
from polymux.engine.rank_link import Link
from polymux.engine.rank_messages import Meet, ToRank
from polymux.engine.session_engine import prepare_device
from polymux.errors import PolymuxError
from polymux.families.divisible import check_ranks
from polymux.loading import model_class_in, resolve
from polymux.messages import Fatal
from polymux.parallel.mesh import Mesh, rank_device


def leading(config: EngineConfig, followers: Followers, give_up: GiveUp) -> StageEngine:
    """Rank 0 and, through it, all of them. Returns when all have their models. Raises CheckpointError, ConfigError."""
    name = model_class_in(resolve(config.model))
    if name is not None:
        check_ranks(config, name)
    own = _of_rank(config, 0)
    store = TCPStore(followers.host, 0, config.parallel.world_size, is_master=True, wait_for_workers=False)
    followers.tell(Meet(followers.host, store.port))
    if name is not None:
        return _leading_answers(own, store, followers)
    engine, mesh = _load(own, 0, store)
    inner = engine.scheduler
    assert isinstance(inner, StepScheduler) and engine.split is not None
    engine.split.give_up = give_up
    lead = LeadScheduler(inner, followers, mesh.degree("cfg"), engine.split.parts)
    engine.scheduler = lead
    followers.wait_until_up()
    return Executor(engine, lead, followers)


def _leading_answers(own: EngineConfig, store: Store, followers: Followers) -> ArExecutor:
    transformers_logging.set_verbosity_error()
    device = prepare_device(own)
    group = Mesh.join(own.parallel, 0, store, device).world
    engine = ArEngine(own, load_divided(own, device, group), device, company=Company.of(group, followers.tell))
    followers.wait_until_up()
    return ArExecutor(engine, followers)


def following(config: EngineConfig, rank: int, link: Link[ToRank]) -> DiffusionEngine:
    """Another rank. Raises CheckpointError, ConfigError."""
    own = _of_rank(config, rank)
    store = _meeting(config, link)
    engine, _ = _load(own, rank, store)
    if engine.split is not None:
        engine.split.give_up = partial(_leave, link)
    engine.scheduler = FollowScheduler(link)
    engine.outputs.close()
    engine.outputs = NoOutputs(config.process.output_chunk_bytes)
    return engine


def following_answers(config: EngineConfig, rank: int, link: Link[ToRank]) -> ArFollower:
    """Another rank of a language model. Raises CheckpointError, ConfigError."""
    own = _of_rank(config, rank)
    store = _meeting(config, link)
    transformers_logging.set_verbosity_error()
    device = prepare_device(own)
    return ArFollower(link, ArRank(own, device, Mesh.join(own.parallel, rank, store, device).world))


def _meeting(config: EngineConfig, link: Link[ToRank]) -> Store:
    """Where the ranks find each other, as rank 0 says."""
    meet = link.receive()
    if not isinstance(meet, Meet):
        raise TypeError(f"{type(meet).__name__} in place of Meet")
    return TCPStore(meet.host, meet.port, config.parallel.world_size, is_master=False)


def _leave(link: Link[ToRank], error: PolymuxError) -> None:
    """In any thread: end this process, with the reason."""
    link.send(Fatal(error.info()))
    os._exit(1)


def _load(config: EngineConfig, rank: int, store: Store) -> tuple[DiffusionEngine, Mesh]:
    for logging_of in (diffusers_logging, transformers_logging):
        logging_of.set_verbosity_error()
    mesh = Mesh.join(config.parallel, rank, store, resolve_device(config.device.device))
    return DiffusionEngine.load(config, mesh=mesh), mesh


def _of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """With a device of its own, or its share of the CPU. Raises ConfigError if there are not enough devices."""
    if config.workers.ray:
        return config  # it sees the devices that it was given, and no others
    device = rank_device(config.parallel, rank, config.device.device)
    threads = config.device.num_threads
    if device == "cpu" and threads is None:
        threads = max(1, torch.get_num_threads() // config.parallel.world_size)
    return replace(config, device=DeviceConfig(device=device, num_threads=threads))
