"""The engine for models that write pictures: what is refused and by which name, who leaves, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polymux.config import EngineConfig
from polymux.engine.picture_engine import PictureEngine
from polymux.errors import InvalidRequestError
from polymux.media.wire import from_wire
from polymux.orchestrator.defaults import with_defaults
from polymux.request import (
    Event,
    Failed,
    Finished,
    Message,
    OmniDiffusionSamplingParams,
    Part,
    Progress,
    Request,
    SamplingParams,
)

Engines = dict[str, PictureEngine]
TALK = [Message("user", [Part("text", "hello")])]


@pytest.fixture(scope="module")
def engines(tiny_checkpoint: Callable[..., Path]) -> Iterator[Engines]:
    made = {
        name: PictureEngine.load(EngineConfig.from_flat(model=str(tiny_checkpoint(name)), max_num_seqs=4))
        for name in ("janus", "emu3")
    }
    yield made
    for engine in made.values():
        engine.close()


def drawing(name: str = "a", prompt: str = "a red cat", **params: Any) -> Request:
    negative = params.pop("negative_prompt", None)
    fields = {key: params.pop(key) for key in ("partial_images", "generator_state", "media") if key in params}
    how = OmniDiffusionSamplingParams(**{"seed": 1} | params)
    return Request(request_id=name, prompt=prompt, negative_prompt=negative, params=how, **fields)


def drive(engine: PictureEngine) -> list[Event]:
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    return events


def ends(events: list[Event]) -> dict[str, Finished | Failed]:
    return {e.request_id: e for e in events if isinstance(e, (Finished, Failed))}


@pytest.mark.parametrize(
    ("model", "params", "param"),
    [
        ("janus", {"width": 64, "height": 64}, "height"),
        ("janus", {"width": 16}, "width"),
        ("janus", {"guidance_scale": 1.0}, "guidance_scale"),
        ("janus", {"guidance_scale": -3.0}, "guidance_scale"),
        ("janus", {"negative_prompt": "blurry"}, "negative_prompt"),
        ("janus", {"num_inference_steps": 4}, "num_inference_steps"),
        ("janus", {"true_cfg_scale": 4.0}, "true_cfg_scale"),
        ("janus", {"strength": 0.5}, "strength"),
        ("janus", {"output_type": "latent"}, "output_type"),
        ("janus", {"partial_images": 1}, "partial_images"),
        ("janus", {"prompt": "a <begin_of_image>"}, "prompt"),
        ("janus", {"prompt": "cat " * 600}, "prompt"),
        ("janus", {"extra_args": {"top_k": 0}}, "extra_args.top_k"),
        ("janus", {"extra_args": {"temperature": 0.5, "do_sample": False}}, "extra_args.temperature"),
        ("janus", {"extra_args": {"num_beams": 2}}, "num_beams"),
        ("janus", {"extra_args": {"do_sample": False}, "num_outputs_per_prompt": 2}, "num_outputs_per_prompt"),
        ("janus", {"seed": None, "generator_state": b"state"}, "generator"),
        ("emu3", {"width": 20, "height": 16}, "width"),
        ("emu3", {"width": 512, "height": 512}, "size"),
        ("emu3", {"guidance_scale": 0.5, "width": 16, "height": 16}, "guidance_scale"),
        ("emu3", {"guidance_scale": 1.0, "negative_prompt": "x", "width": 16, "height": 16}, "negative_prompt"),
        ("emu3", {"negative_prompt": "<|image start|>", "width": 16, "height": 16}, "negative_prompt"),
    ],
)
def test_what_is_refused(engines: Engines, model: str, params: dict[str, Any], param: str) -> None:
    engine = engines[model]
    calls = sum(engine.stats.calls.values())
    try:
        engine.add(drawing(**params))
    except InvalidRequestError as error:
        assert error.param == param, error
    else:
        end = ends(drive(engine))["a"]
        assert isinstance(end, Failed) and (end.error.kind, end.error.param) == ("InvalidRequestError", param), end
    assert sum(engine.stats.calls.values()) == calls and not engine.jobs


def test_what_it_says_of_itself(engines: Engines) -> None:
    one, many = engines["janus"].capabilities, engines["emu3"].capabilities
    assert (one.modality, one.samples, one.fixed_size, one.defaults) == (
        "image",
        False,
        True,
        {"height": 8, "width": 8},
    )
    assert (many.fixed_size, many.size_multiple, many.defaults) == (False, 8, {"height": 720, "width": 720})
    assert one.makes == ("image", "text") and one.answers is not None
    assert (one.answers.chats, one.answers.modality, one.answers.media) == (True, "text", {"image": 16})
    assert "temperature" in one.answers.arguments and one.answers.extra == ()


def test_seeds_numbers_and_progress(engines: Engines) -> None:
    engine = engines["janus"]
    engine.add(drawing("two", num_outputs_per_prompt=2, guidance_scale=2.0))
    engine.add(drawing("second", seed=2, guidance_scale=2.0, width=8, height=8))
    engine.add(drawing("floats", guidance_scale=2.0, output_type="np"))
    events = drive(engine)
    made = ends(events)
    two = made["two"]
    assert isinstance(two, Finished) and two.seeds == [1, 2] and two.metrics.steps == 32
    first, second = ([from_wire(m) for m in out] for out in two.outputs)
    other, floats = made["second"], made["floats"]
    assert isinstance(other, Finished) and isinstance(floats, Finished)
    assert other.outputs == [two.outputs[1]] and two.outputs[0] != two.outputs[1]
    assert [(p.mode, p.size) for p in (*first, *second)] == [("RGB", (8, 8))] * 2  # type: ignore[union-attr]
    array = np.asarray(from_wire(floats.outputs[0][0]))
    assert array.dtype == np.float32 and array.shape == (8, 8, 3)
    assert np.array_equal((array * 255).astype(np.uint8), np.asarray(first[0]))
    steps = [(e.step, e.total) for e in events if isinstance(e, Progress) and e.request_id == "second" and e.total]
    assert steps == sorted(steps) and steps[-1][1] == 16


def test_who_leaves_is_gone_at_the_next_call_and_nobody_notices(engines: Engines) -> None:
    engine = engines["emu3"]
    size: dict[str, Any] = {"width": 32, "height": 32}
    engine.add(drawing("alone", **size))
    alone = ends(drive(engine))["alone"]
    for stop in (1, 20, 60):
        engine.add(drawing("stays", **size))
        engine.add(drawing("leaves", seed=9, **size))
        engine.add(Request(request_id="talks", messages=TALK, sampling=SamplingParams(max_new_tokens=5, seed=3)))
        events: list[Event] = []
        for _ in range(stop):
            events += engine.step()
        engine.abort("leaves")
        assert "leaves" not in engine.jobs
        events += drive(engine)
        made = ends(events)
        left, stays, talks = made["leaves"], made["stays"], made["talks"]
        assert isinstance(left, Failed) and left.error.kind == "RequestAbortedError"
        assert isinstance(stays, Finished) and isinstance(alone, Finished) and stays.outputs == alone.outputs
        assert isinstance(talks, Finished) and talks.text is not None and talks.outputs == [[]]


def test_defaults_are_for_pictures(engines: Engines) -> None:
    can = engines["janus"].capabilities
    asked = with_defaults(drawing(), {"guidance_scale": 2.0}, can)
    assert asked.params.guidance_scale == 2.0
    talk = Request(request_id="talks", messages=TALK)
    assert with_defaults(talk, {"guidance_scale": 2.0}, can) == talk
