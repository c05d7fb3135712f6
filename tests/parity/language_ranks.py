"""Language models on two ranks, and then on four; a line of JSON per class and number of ranks.

    python -m parity.language_ranks FOLDER

The ranks are forks: it is the imports that take long. Rank 0 has a scheduler and tells the others each step by a pipe,
as a stage does by sockets; what all sequences get is compared with what they get on one rank. Run from the folder of
the tests.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import torch.distributed as dist
import transformers as T

from polymux.ar.blocks import BlockPool
from polymux.ar.network import Network
from polymux.ar.orders import Prepare, Step
from polymux.ar.paged_cache import PagedCache, Room
from polymux.ar.ranks import Accord, FollowingRunner, Lead
from polymux.ar.runner import Flight, Runner
from polymux.ar.scheduler import Scheduler
from polymux.ar.sequence import Drawing, Sequence
from polymux.errors import OutOfMemoryError
from polymux.loading.component import Part
from polymux.loading.options import LoadFlags
from polymux.loading.sliced import Ranks, load_language_sliced
from polymux.parallel.language import shard_language

from .test_paged_answers import BLOCK, CLASSES, CONTEXT, HOWS, SMALL, TOKENS, VOCABULARY, How

CPU = torch.device("cpu")
PLACES = 9
ODD: dict[
    str, dict[str, Any]
] = {  # what else of each class there may be: ties, biases, a vocabulary that is not divided
    "Qwen3ForCausalLM": {"tie_word_embeddings": True},
    "Qwen2ForCausalLM": {"tie_word_embeddings": False},
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "MistralForCausalLM": {"tie_word_embeddings": False, "vocab_size": VOCABULARY + 1},
}
WAYS = {2: ("plain", "all"), 4: ("padded-and-ahead",)}  # by the number of ranks
ROUNDED = "Qwen3ForCausalLM"  # the class that is tried in 16 bits, too, where ranks may not agree to the last bit
DRAWN = Drawing(temperature=1.3, top_k=20, top_p=0.9, seed=7, frequency_penalty=0.4, repetition_penalty=1.2)

orders = msgspec.msgpack.Decoder(Step | Prepare | None)


def make(folder: Path, name: str) -> None:
    cls = getattr(T, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**SMALL | ODD[name]))
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / name, max_shard_size="50KB")


def asked() -> tuple[list[list[int]], list[Drawing]]:
    source = random.Random(1)
    prompts = [[source.randrange(3, VOCABULARY) for _ in range(n)] for n in (5, 33, 1, 16, 8, 50, 23)]
    prompts += [prompts[1][:24] + [9, 9], prompts[5][:17]]  # one begins like another
    return prompts, [Drawing()] * 6 + [DRAWN] * 3


class Only:
    """A constraint: these tokens alone, in turn."""

    def allowed(self, written: Any) -> torch.Tensor:
        mask = torch.zeros(MASKED[0], dtype=torch.bool)
        mask[[7, 11] if len(written) % 2 else [8, 12]] = True
        return mask


MASKED = [VOCABULARY]  # of the class under way
PIPES: list[BinaryIO] = []  # of rank 0, to all others; of another one, its own


def tell_all(message: msgspec.Struct | None) -> None:
    """All other ranks; None: of this run there is no more."""
    body = msgspec.msgpack.encode(message)
    for pipe in PIPES:
        pipe.write(struct.pack("<I", len(body)) + body)
        pipe.flush()


def answers(network: Network, how: How, lead: Lead | None) -> list[list[int]]:
    """Of all sequences; one more is left after some tokens, and one is held to a form."""
    scheduler = Scheduler(BlockPool(how.blocks, BLOCK, how.caching), PLACES, how.budget, how.chunked)
    runner = Runner(network, cache_of(network, how), how.graphs, lead)
    runner.prepare()
    prompts, drawings = asked()
    made = [
        Sequence(name=i, tokens=list(prompt), limit=TOKENS, ends=frozenset({2}), drawing=drawing)
        for i, (prompt, drawing) in enumerate(zip(prompts, drawings, strict=True))
    ]
    made.append(Sequence(name="held", tokens=[5, 6], limit=TOKENS, constraint=Only()))
    leaving = Sequence(name="leaving", tokens=[4, 3, 9], limit=TOKENS)
    for one in (leaving, *made):
        scheduler.add(one)
    before: Flight | None = None
    while not all(one.ended for one in made):
        if leaving.written > 3 and not leaving.ended:
            scheduler.remove(leaving)
        plan = scheduler.plan()
        flight = runner.launch(plan) if plan else None
        landing, before = (before, flight) if how.ahead else (flight, None)
        assert landing or flight, "nobody can go on"
        for one, token in zip(landing.sequences, landing.tokens(), strict=True) if landing else ():
            if one.ended:
                continue
            one.take(token)
            scheduler.know(one)
            if one.ended:
                scheduler.remove(one)
    assert scheduler.pool.used == 0
    assert bool(scheduler.preemptions) == (how.blocks == HOWS["preempted"].blocks)
    if lead is not None:
        tell_all(None)
        lead.share(runner._sampler.last[:PLACES])
    return [one.tokens[one.prompt :] for one in made]


def cache_of(network: Network, how: How) -> PagedCache:
    return PagedCache(network.shape, Room(how.blocks, BLOCK, PLACES, CONTEXT), CPU)


def part(folder: Path, name: str, dtype: torch.dtype) -> tuple[Network, float]:
    """This rank's part of a model, and how much of the weights it has."""
    group = dist.group.WORLD
    assert group is not None
    whole = Part("model", getattr(T, name), folder / name)
    ranks = Ranks(group.rank(), group.size())
    model: Any = load_language_sliced(whole, whole.weights(LoadFlags()), CPU, dtype, ranks)
    shard_language(model, group)
    return Network(model, ranks=group.size()), sum(p.numel() for p in model.parameters())


def accord() -> None:
    """The least of all; and what one rank cannot do, none has done."""
    agreed, rank = Accord(dist.group.WORLD), dist.get_rank()
    assert agreed.least(5 - rank) == 6 - dist.get_world_size()
    assert agreed.all(lambda: rank) == rank

    def fails() -> None:
        if rank == 1:
            raise ValueError("here alone")

    try:
        agreed.all(fails)
    except ValueError:
        assert rank == 1
        return
    except OutOfMemoryError:
        assert rank != 1
        return
    raise AssertionError("nobody has heard of it")


def lead_all(folder: Path, name: str, network: Network) -> dict[str, bool]:
    """Whether all tokens are those of one rank, by how they were made."""
    assert dist.group.WORLD is not None
    lead = Lead(dist.group.WORLD, tell_all)
    alone = Network(getattr(T, name).from_pretrained(folder / name).eval())
    same = {}
    for how in WAYS[dist.get_world_size()]:
        got = answers(network, HOWS[how], lead)
        same[how] = network.shape.dtype != torch.float32 or got == answers(alone, HOWS[how], None)
    return same


def follow_all(network: Network, pipe: BinaryIO) -> None:
    assert dist.group.WORLD is not None
    for how in map(HOWS.__getitem__, WAYS[dist.get_world_size()]):
        runner = FollowingRunner(network, cache_of(network, how), how.graphs, dist.group.WORLD)
        while (message := orders.decode(pipe.read(struct.unpack("<I", pipe.read(4))[0]))) is not None:
            if isinstance(message, Step):
                runner.run(message)
            else:
                runner.prepare()
        last = torch.empty(PLACES, dtype=torch.long)
        dist.broadcast(last, src=0)
        assert torch.equal(last, runner._last[:PLACES])


@torch.no_grad()
def rank_main(rank: int, size: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size)
    accord()
    for name, dtype in [*((name, torch.float32) for name in CLASSES), (ROUNDED, torch.bfloat16)]:
        MASKED[0] = getattr(T, name).config_class.from_pretrained(folder / name).vocab_size
        network, held = part(folder, name, dtype)
        if rank:
            follow_all(network, PIPES[0])
            continue
        same = lead_all(folder, name, network)
        whole = sum(p.numel() for p in getattr(T, name).from_pretrained(folder / name).parameters())
        said = {"class": name, "dtype": str(dtype), "ranks": size, "same": same, "share": held / whole}
        print(json.dumps(said), flush=True)


def ranks(size: int, folder: Path) -> None:
    lines = [os.pipe() for _ in range(1, size)]
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            code = 0
            try:
                ends = [os.fdopen(writing, "wb") for _, writing in lines]
                PIPES.extend(ends if rank == 0 else [os.fdopen(lines[rank - 1][0], "rb")])
                rank_main(rank, size, folder)
            except BaseException:
                traceback.print_exc()
                code = 1
            os._exit(code)
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:  # the others may wait for it
            for other in children:
                os.kill(other, signal.SIGKILL)
            raise SystemExit("a rank has failed")


def main() -> None:
    torch.set_num_threads(1)  # so that no threads are lost in forks
    T.utils.logging.disable_progress_bar()
    folder = Path(sys.argv[1])
    for name in CLASSES:
        make(folder, name)
    for size in (2, 4):
        ranks(size, folder)


if __name__ == "__main__":
    main()
