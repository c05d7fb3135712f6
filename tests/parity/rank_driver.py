"""Tiny pipelines on several ranks, one after the other; prints a line of JSON about each.

    python -m parity.rank_driver FOLDER WORK      rank 0, which starts the others

WORK: pairs of knobs and names of pipelines, as JSON, all for one number of ranks. Run from the folder of the tests.
Each pipeline makes the same requests on one rank (of rank 0, alone) and on all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from polymux.config import EngineConfig
from polymux.diffusion.step_scheduler import StepScheduler
from polymux.engine import follower
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.engine.executor import Executor
from polymux.engine.followers import Followers, start_ranks
from polymux.engine.led_scheduler import FollowScheduler, LeadScheduler
from polymux.engine.no_outputs import NoOutputs
from polymux.engine.rank_link import Link
from polymux.engine.rank_messages import Meet, ToRank
from polymux.errors import PolymuxError
from polymux.loading import load_pipeline
from polymux.messages import Stop
from polymux.parallel.mesh import ALONE, Mesh
from polymux.request import Event, Failed, Finished, Request
from polymux.testing.tiny import TINY

from .reference import distance, request, takes_steps
from .test_families import EIGHT_BITS, another, arrays

CPU = torch.device("cpu")
Work = list[tuple[dict[str, Any], list[str]]]

TILE = 32  # pixels, where tiles are shared


class Case:
    """One pipeline and what is asked of it."""

    def __init__(self, folder: Path, name: str, flat: dict[str, Any]) -> None:
        spec = TINY[name]
        self.name = name
        self.config = EngineConfig.from_flat(model=str(folder / name), max_batched_tokens=2**14)
        self.pipeline = load_pipeline(self.config.model, CPU, torch.float32, components=dict(spec.load))
        if flat.get("vae_patch_parallel_size", 1) > 1:
            self.pipeline.vae.enable_tiling(TILE, TILE, TILE * 3 // 4, TILE * 3 // 4)
        self.call = dict(spec.call)
        self.steps = self.call.pop("num_inference_steps", 2)

    def requests(self) -> list[Request]:
        """Two that differ in prompt, seed and steps; one of them with two outputs."""
        counted, kind = takes_steps(self.pipeline), "latent" if self.name in EIGHT_BITS else "np"
        first = self.call | ({"num_inference_steps": self.steps} if counted else {})
        second = another(self.name, self.call) | ({"num_inference_steps": self.steps + 1} if counted else {})
        return [request(first, "a", 1, kind, n=2), request(second, "b", 2, kind), request(second, "left", 3, kind)]

    def engine(self, mesh: Mesh | None = None, **flat: Any) -> DiffusionEngine:
        if flat.get("tensor_parallel_size", 1) > 1:  # each rank reads its part
            config = EngineConfig.from_flat(model=self.config.model.model, max_batched_tokens=2**14, **flat)
            return DiffusionEngine.load(config, dict(TINY[self.name].load), mesh or ALONE)
        config = EngineConfig.from_flat(model=self.name, max_batched_tokens=2**14, **flat)
        return DiffusionEngine(config, self.pipeline, CPU, **({} if mesh is None else {"mesh": mesh}))


def drive(engine: DiffusionEngine | Executor, requests: list[Request]) -> dict[str, Event]:
    """The last event of each request; one of them is left half-way."""
    aborted = False
    for asked in requests:
        engine.add(asked)
    last: dict[str, Event] = {}
    while engine.busy:
        last |= {event.request_id: event for event in engine.step()}
        if not aborted and engine.stats.steps >= 1:
            engine.abort("left")
            aborted = True
    return last


def lead(folder: Path, work: Work) -> None:
    config = EngineConfig.from_flat(model="x", **work[0][0])
    command = (sys.executable, "-m", "parity.rank_driver", "--follow", str(folder), json.dumps(work))
    followers = Followers(config, start_ranks(config, command), give_up)
    store = TCPStore("127.0.0.1", 0, config.parallel.world_size, is_master=True, wait_for_workers=False)
    followers.tell(Meet(followers.host, store.port))
    for flat, name, mesh in cases(work, 0, store):
        case = Case(folder, name, flat)
        plain = case.engine()
        wanted = drive(plain, case.requests())
        plain.close()
        said = {"name": name} | flat
        try:
            engine = case.engine(mesh, **flat)
        except PolymuxError as error:
            print(json.dumps(said | {"refused": str(error)}), flush=True)
            continue
        split, inner = engine.split, engine.scheduler
        assert split is not None and isinstance(inner, StepScheduler)
        engine.scheduler = scheduler = LeadScheduler(inner, followers, mesh.degree("cfg"), split.parts)
        followers.wait_until_up()
        done = drive(Executor(engine, scheduler, followers), case.requests())
        followers.tell(Stop())
        said |= {"storage": engine.weights.describe()}
        engine.close()
        said |= {"divided": split.divided, "undivided": sorted(split.undivided)}
        print(json.dumps(said | compared(done, wanted)), flush=True)
    followers.wait_until_up()
    followers.close()


def cases(work: Work, rank: int, store: TCPStore) -> Iterator[tuple[dict[str, Any], str, Mesh]]:
    """Every pipeline, in the mesh that it is to run on."""
    for number, (flat, names) in enumerate(work):
        config = EngineConfig.from_flat(model="x", **flat)
        mesh = Mesh.join(config.parallel, rank, PrefixStore(str(number), store), CPU)
        for name in names:
            yield flat, name, mesh
        dist.destroy_process_group()


def compared(done: dict[str, Event], wanted: dict[str, Event]) -> dict[str, Any]:
    failed = [
        event.error.message for event in done.values() if isinstance(event, Failed) and event.request_id != "left"
    ]
    if failed:
        return {"failed": failed}
    pairs = [
        (name, index)
        for name, event in wanted.items()
        if isinstance(event, Finished)
        for index in range(len(event.seeds))
    ]
    worst = max(distance(arrays(done[name], index), arrays(wanted[name], index)) for name, index in pairs)
    return {"distance": worst, "aborted": isinstance(done["left"], Failed), "outputs": len(pairs)}


def give_up(error: PolymuxError) -> None:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)


def follow(asked: argparse.Namespace, config: EngineConfig, rank: int, link: Link[ToRank]) -> Any:
    """All pipelines, one after the other. What is returned only waits for the end."""
    meet = link.receive()
    assert isinstance(meet, Meet)
    store = TCPStore("127.0.0.1", meet.port, config.parallel.world_size, is_master=False)
    for flat, name, mesh in cases(asked.work, rank, store):
        engine = one(Case(asked.folder, name, flat), mesh, flat, link)
        if engine is not None:
            follower.Follower(link, engine).run()
    return follower.Follower(link, cast(Any, SimpleNamespace(close=lambda: None)))


def one(case: Case, mesh: Mesh, flat: dict[str, Any], link: Link[ToRank]) -> DiffusionEngine | None:
    try:
        engine = case.engine(mesh, **flat)
    except PolymuxError:
        return None
    engine.scheduler = FollowScheduler(link)
    engine.outputs.close()
    engine.outputs = NoOutputs(engine.outputs.chunk_bytes)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--fd")
    parser.add_argument("folder", type=Path)
    parser.add_argument("work", type=json.loads)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.follow:
        words = ["--fd", asked.fd]
        os._exit(follower.main(words, lambda *of_rank: follow(asked, *of_rank)))
    lead(asked.folder, asked.work)


if __name__ == "__main__":
    main()
