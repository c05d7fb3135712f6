"""A rank of a language model that is not rank 0: its part of the model, its cache, and the steps that it is told.

Knows no requests: which tokens there are, rank 0 says, and which ones come.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from polymux.ar.network import Network
from polymux.ar.orders import Prepare, Step
from polymux.ar.ranks import Accord, FollowingRunner
from polymux.config import EngineConfig
from polymux.engine.answering import load_divided
from polymux.engine.ar_state import cache_of, graphs_of
from polymux.engine.generate_model import GenerateModel
from polymux.engine.rank_link import Link
from polymux.engine.rank_messages import Answer, ToRank, Up
from polymux.errors import OutOfMemoryError, PolymuxError
from polymux.families.chat import ChatFamily
from polymux.memory.measure import release, used_bytes
from polymux.messages import Sleep, Stop, WakeUp


class ArRank:
    """What is on this rank's device. Sleeps and wakes with rank 0's engine, in the same order of what all do."""

    def __init__(self, config: EngineConfig, device: torch.device, group: dist.ProcessGroup) -> None:
        self._config, self._device, self._group = config, device, group
        self._accord = Accord(group)
        self._runner: FollowingRunner | None = None
        self._handle: int | None = None
        self._model: GenerateModel | None = None
        self._network: Network | None = None
        self._load()
        self._open()

    def prepare(self) -> None:
        assert self._runner is not None
        self._runner.prepare()

    @torch.no_grad()
    def run(self, step: Step) -> None:
        assert self._runner is not None
        self._runner.run(step)

    def sleep(self, level: int) -> int:
        assert self._model is not None
        before = used_bytes(self._device)
        self._runner = None
        if level == 1:
            self._model.sleep()
        else:
            self._model.close()
            self._model = self._network = None
        release(self._device)
        return max(before - used_bytes(self._device), 0)

    def wake_up(self) -> None:
        try:
            self._accord.all(self._load if self._model is None else self._move_back)
            self._open()
        except torch.OutOfMemoryError as error:
            release(self._device)
            raise OutOfMemoryError(f"there is no room to wake up: {error}") from None

    def close(self) -> None:
        if self._model is not None:
            self._model.close()

    def _load(self) -> None:
        self._model = load_divided(self._config, self._device, self._group)
        for component in self._model.components:
            component.detach()
        self._network = Network(self._model.parts.model, ranks=self._group.size())

    def _move_back(self) -> None:
        assert self._model is not None
        self._model.wake(self._device)

    @torch.no_grad()
    def _open(self) -> None:
        assert self._model is not None and self._network is not None
        family = self._model.family
        assert isinstance(family, ChatFamily)
        context = family.adapter.context(self._model.parts)
        cache = cache_of(self._config, self._network, self._handle, context, self._accord)
        graphs = graphs_of(self._config.decoding, self._device, self._config.parallel.tensor_parallel_size)
        self._runner, self._handle = FollowingRunner(self._network, cache, graphs, self._group), cache.handle


class ArFollower:
    """The loop between the line to rank 0 and what is here. Implements `follower.Rank`."""

    def __init__(self, link: Link[ToRank], rank: ArRank) -> None:
        self._link, self._rank = link, rank

    def run(self) -> None:
        """Until told to stop. Raises what makes it impossible to go on. The line stays open."""
        self._link.send(Up())
        self._link.watch()
        while not isinstance(message := self._link.receive(), Stop):
            self._take(message)
        self._rank.close()

    def _take(self, message: ToRank) -> None:
        match message:
            case Step():
                self._rank.run(message)
            case Prepare():
                self._rank.prepare()
            case Sleep(level):
                self._link.send(_answer(lambda: self._rank.sleep(level)))
            case WakeUp():
                self._link.send(_answer(self._rank.wake_up))
            case _:
                raise TypeError(f"{type(message).__name__} out of its turn")


def _answer(work: Callable[[], int | None]) -> Answer:
    try:
        return Answer(work() or 0)
    except PolymuxError as error:
        return Answer(0, error.info())
