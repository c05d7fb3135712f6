"""Every tiny pipeline: through the engine, alone and in company, its output is that of diffusers' own call.

fp32 on a CPU. Alone on the plain path (one request in flight) the difference is zero: the same operations run in the
same order. Where calls are merged, sums are taken in another order: up to 6e-5 has been seen, 1e-4 is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polymux.config import EngineConfig
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.loading import load_pipeline
from polymux.media.wire import from_wire
from polymux.omni_output import output_of
from polymux.request import Event, Failed, Finished
from polymux.testing.tiny import TINY, names

from .files import check_files
from .reference import Arrays, distance, reference, request, takes_steps
from .small import choose_small, small_call

TOLERANCE = 1e-4

# Their denoisers merge for prompts of equal length only.
EQUAL_LENGTHS = {"acestep", "minimax-h3"}

# Their pipelines round to eight bits for the safety checker, so a difference of 1e-6 may become one of 1/255: their
# latents are compared.
EIGHT_BITS = {"cosmos1-t2w", "cosmos2-t2i", "cosmos2-v2w", "cosmos25-predict"}


# A language model writes hundreds of tokens for each of its pictures, however small.
LONG = {"glm-image"}


def drive(engine: DiffusionEngine) -> dict[str, Event]:
    """Step until nothing is left; the last event of each request."""
    last: dict[str, Event] = {}
    while engine.busy:
        last |= {event.request_id: event for event in engine.step()}
    return last


def arrays(event: Event, index: int = 0) -> Arrays:
    assert isinstance(event, Finished), event
    return [from_wire(medium) for medium in event.outputs[index]]


def another(name: str, call: dict[str, Any]) -> dict[str, Any]:
    """The same call with another prompt; of another length, unless the prompt's form or length matters."""
    prompt = call["prompt"]
    if any(mark in prompt for mark in '{"') or name in EQUAL_LENGTHS:
        return call
    return call | {"prompt": prompt + " and a blue cup"}


@pytest.mark.parametrize("name", [*names("diffusers"), *names("modular")])
def test_family(name: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    choose_small(name, monkeypatch)
    spec = TINY[name]
    config = EngineConfig.from_flat(model=str(tiny_checkpoint(name)))
    pipeline = load_pipeline(config.model, torch.device("cpu"), torch.float32, components=dict(spec.load))
    output_type = "latent" if name in EIGHT_BITS else "np"

    def engine(in_flight: int) -> DiffusionEngine:
        # A budget with which the denoiser's calls for a picture of a megapixel are merged, which would run alone. Its
        # decoder's still are not: a batch of those is convolved by another method on a CPU, with errors of 4e-4.
        flat = EngineConfig.from_flat(model=name, max_num_seqs=in_flight, max_batched_tokens=2**15 - 1)
        return DiffusionEngine(flat, pipeline, torch.device("cpu"))

    call = small_call(name, pipeline)
    steps = call.pop("num_inference_steps", 2)
    counted = takes_steps(pipeline)
    first = call | ({"num_inference_steps": steps} if counted else {})
    second = another(name, call) | ({"num_inference_steps": steps + 1} if counted else {})
    wanted = reference(pipeline, first, 1, output_type), reference(pipeline, second, 2, output_type)

    # One request in flight, unbatched: the plain path.
    plain = engine(1)
    asked = request(first, "a", 1, output_type)
    plain.add(asked)
    alone = drive(plain)["a"]
    assert distance(arrays(alone), wanted[0]) == 0.0
    if plain.family.modality != "image":
        assert isinstance(alone, Finished)
        check_files(name, output_of(asked, alone), wanted[0])
    assert plain.stats.calls == plain.stats.merged
    plain.close()

    # Together: two requests with other prompts, seeds and step counts, one of them with two outputs, and a third one
    # that is aborted half-way.
    company = engine(8)
    company.add(request(second, "left", 3, output_type))
    company.add(request(first, "a", 1, output_type, n=2))
    company.add(request(second, "b", 2, output_type))
    while company.stats.steps < 1:
        company.step()
    company.abort("left")
    done = drive(company)
    assert isinstance(done["left"], Failed) and done["left"].error.kind == "RequestAbortedError"
    assert distance(arrays(done["a"]), wanted[0]) <= TOLERANCE
    assert distance(arrays(done["b"]), wanted[1]) <= TOLERANCE
    assert distance(arrays(done["a"], 1), arrays(done["a"])) > 0
    check_merging(company)
    company.close()

    # Nothing of a request stays on the pipeline: it still gives what it gave.
    if name not in LONG:
        assert distance(reference(pipeline, first, 1, output_type), wanted[0]) == 0.0


def check_merging(engine: DiffusionEngine) -> None:
    assert not engine.runner.unmergeable, "a family declares only what can be merged"
    stats = engine.stats
    denoisers = [c.name for c in engine.components if c.role == "denoiser" and c.name in stats.calls]
    merged = any(stats.merged[name] > stats.calls[name] for name in denoisers)
    assert merged == ("denoiser" in engine.family.merge)
