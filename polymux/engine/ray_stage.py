"""A stage whose ranks are actors of Ray, seen from the process that the API process has started for it.

This process computes nothing. It asks Ray for room, has the actors started, and passes on what the API process and rank
0 say to each other; when it ends, however that happens, Ray ends the actors. Knows no engine and no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

from polymux.config import EngineConfig, rank_environment
from polymux.engine.channel import Channel
from polymux.engine.gathering import come
from polymux.errors import ConfigError, StageDeadError
from polymux.messages import LENGTH, Fatal, Start, frame
from polymux.version import VERSION

log = logging.getLogger(__name__)

REACH_S = 5.0  # to connect to the cluster
ROOM_S = 30.0  # for what the cluster has, but others use: a replica that has died may hold it for a moment
LAST_WORD_S = 2.0  # for rank 0 to say itself what has happened


class RayStage:
    """Start it, and be its voice."""

    def __init__(self, channel: Channel, config: EngineConfig) -> None:
        self._channel, self._config = channel, config
        self._over = threading.Event()

    def run(self) -> None:
        """Until rank 0 has ended. Raises ConfigError, StageDeadError."""
        ray = _ray()
        _connect(ray, self._config)
        device, group = _room(ray, self._config)
        actors = _actors(ray, self._config, device, group)
        try:
            places = ray.get([actor.arrived.remote() for actor in actors])
            for place in places:
                if place.version != VERSION:
                    raise ConfigError(f"polymux {place.version} is installed on {place.host}, and {VERSION} here")
            names = [place.name for place in places]
            log.info("ranks: %s", "; ".join(f"{number} is {name}" for number, name in enumerate(names)))
            address, secret = ray.get(actors[0].listen.remote())
            works = [actors[0].lead.remote(names[1:])]
            works += [actor.follow.remote(address, secret, rank) for rank, actor in enumerate(actors[1:], 1)]
            watch = threading.Thread(target=self._watch, args=(ray, works, names), name="ranks", daemon=True)
            rank_0 = come(address, secret, 0)
            start = Start(replace(self._config, device=replace(self._config.device, device=device)))
            rank_0.sendall(frame(start))
            watch.start()
            self._pass_on(rank_0)
            if _result(ray, works[0]) != 0:
                raise StageDeadError(f"rank 0 ({names[0]}) is gone")
        except ray.exceptions.RayError as error:
            raise StageDeadError(f"Ray could not start the ranks: {_line(error)}") from None
        finally:
            self._over.set()
            for actor in actors:
                ray.kill(actor)
            ray.util.remove_placement_group(group)

    def _pass_on(self, rank_0: socket.socket) -> None:
        """Returns when rank 0 says no more."""
        threading.Thread(target=self._pass_down, args=(rank_0,), name="to rank 0", daemon=True).start()
        for data in _frames(rank_0):
            self._channel.send_frame(data)

    def _pass_down(self, rank_0: socket.socket) -> None:
        while (message := self._channel.receive(block=True)) is not None:
            with contextlib.suppress(OSError):  # the other direction tells
                rank_0.sendall(frame(message))

    def _watch(self, ray: Any, works: list[Any], names: list[str]) -> None:
        """End this stage when a rank has, if nobody else does: rank 0, which would, may hang."""
        ended, _ = ray.wait(works, num_returns=1)
        if not self._over.wait(LAST_WORD_S):
            rank = works.index(ended[0])
            if rank or _result(ray, ended[0]) != 0:
                self._give_up(StageDeadError(f"rank {rank} ({names[rank]}) is gone"))

    def _give_up(self, error: StageDeadError) -> NoReturn:
        log.error("%s; all ranks of this stage are ended", error)
        self._channel.send(Fatal(error.info()))
        self._channel.close()
        os._exit(1)


def _ray() -> Any:
    try:
        import ray
        import ray.util.placement_group
    except ImportError as error:
        what = f"--worker-backend ray needs Ray, which is not there ({error}): pip install 'polymux[ray]'"
        raise ConfigError(what, param="worker_backend") from None
    return ray


def _connect(ray: Any, config: EngineConfig) -> None:
    address = config.workers.ray_address or "auto"
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"ray_address={address!r} cannot be reached: {error}", param="ray_address") from None
    try:
        ray.init(address=address, configure_logging=False, log_to_driver=True)
    except Exception as error:  # of many kinds: no cluster, one of another version, a host that is not part of it
        if address == "auto":
            what = f"this host is not part of a Ray cluster: use `ray start`, or --ray-address ({_line(error)})"
        else:
            what = f"ray_address={address!r}: {_line(error)}"
        raise ConfigError(what, param="ray_address") from None


def _room(ray: Any, config: EngineConfig) -> tuple[str, Any]:
    """Which kind of device the ranks have, and room for them. Raises ConfigError if the cluster does not have it."""
    ranks, has = config.parallel.world_size, ray.cluster_resources()
    cpu = config.device.device == "cpu" or (config.device.device == "auto" and not has.get("GPU"))
    each = {"CPU": config.device.num_threads or 1} if cpu else {"CPU": 1, "GPU": 1}
    who = f"{config.parallel.describe()} need {' and '.join(f'{n * ranks} {kind}' for kind, n in each.items())}"
    total = _shown(has, each)
    if any(has.get(kind, 0) < n * ranks for kind, n in each.items()):
        raise ConfigError(f"{who}, and the Ray cluster has {total}", param="worker_backend")
    group = ray.util.placement_group([dict(each) for _ in range(ranks)], strategy="PACK")
    if not group.wait(ROOM_S):
        ray.util.remove_placement_group(group)
        free = _shown(ray.available_resources(), each)
        what = f"{who}; the Ray cluster has {total}, of which {free} are free, and no room in {ROOM_S:g} s"
        raise ConfigError(what, param="worker_backend")
    return ("cpu" if cpu else "cuda"), group


def _shown(resources: dict[str, float], kinds: dict[str, int]) -> str:
    return " and ".join(f"{resources.get(kind, 0):g} {kind}" for kind in kinds)


def _actors(ray: Any, config: EngineConfig, device: str, group: Any) -> list[Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from polymux.engine.ray_rank import RayRank

    made, environment = ray.remote(RayRank), rank_environment()
    cpus, gpus = (config.device.num_threads or 1, 0) if device == "cpu" else (1, 1)
    return [
        made.options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,  # a rank alone is of no use: the whole stage is started again
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote(environment)
        for rank in range(config.parallel.world_size)
    ]


def _result(ray: Any, work: Any) -> int | None:
    """The exit code of a rank that has ended; None if it has not done so by itself."""
    try:
        return int(ray.get(work, timeout=LAST_WORD_S))
    except ray.exceptions.RayError:
        return None


def _frames(connection: socket.socket) -> Iterator[bytes]:
    """Until the end of the stream."""
    with contextlib.suppress(OSError, EOFError):
        while True:
            head = _exactly(connection, LENGTH.size)
            (length,) = LENGTH.unpack(head)
            yield head + _exactly(connection, length)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if count == 0:
            raise EOFError
        done += count
    return bytes(data)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
