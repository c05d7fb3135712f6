"""Where the time of a request went, of models that write tokens: those that run in sessions, and in one batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polymux.config import EngineConfig
from polymux.engine.engines import engine_for
from polymux.errors import InvalidRequestError
from polymux.media.wire import to_wire
from polymux.request import Failed, Finished, Message, Part, Request, SamplingParams
from polymux.sampling import HEARD

SOUND = to_wire(np.random.default_rng(0).standard_normal((1, 8000)).astype(np.float32) * 0.1, sample_rate=16000)
SAID = {"messages": [Message("user", [Part("text", "hello")])]}
SPOKEN = {"prompt": "hello there. good day."}


@pytest.mark.parametrize(
    ("model", "settings", "asked", "fields", "components"),
    [
        ("qwen3-lm", {"decoding": "paged"}, SAID, {"max_new_tokens": 9, "do_sample": False}, {"model"}),
        ("qwen3-lm", {"decoding": "generate"}, SAID, {"max_new_tokens": 9, "do_sample": False}, None),
        ("vits", {}, SPOKEN, {}, None),
        ("dia", {}, SPOKEN, {"max_new_tokens": 60}, None),
        ("whisper", {}, {"media": {HEARD: [SOUND]}}, {}, None),
    ],
)
def test_a_profile_adds_up(
    tiny_checkpoint: Callable[..., Path],
    model: str,
    settings: dict[str, Any],
    asked: dict[str, Any],
    fields: dict[str, Any],
    components: set[str] | None,
) -> None:
    engine = engine_for(EngineConfig.from_flat(model=str(tiny_checkpoint(model)), **settings))
    try:
        for name, profile in (("a", True), ("b", False), ("c", True)):
            sampling = SamplingParams(seed=1, profile=profile, **fields)
            engine.add(Request(request_id=name, sampling=sampling, **asked))
        ends = {}
        while engine.busy:
            for event in engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Finished):
                    ends[event.request_id] = event
        with pytest.raises(InvalidRequestError, match="profile=1: must be true or false"):
            engine.add(Request(request_id="d", sampling=SamplingParams(profile=1), **asked))  # type: ignore[arg-type]
    finally:
        engine.close()
    assert ends["b"].profile is None
    for name in ("a", "c"):
        profile = ends[name].profile
        assert profile is not None and profile.components
        spent = profile.queue + profile.computing + profile.pipeline + profile.other
        assert profile.total == pytest.approx(spent, rel=0.01) and profile.computing > 0
        assert profile.computing == pytest.approx(sum(one.seconds for one in profile.components))
        assert all(0 < one.share <= one.seconds and one.runs > 0 for one in profile.components)
        if components is not None:
            assert {one.component for one in profile.components} == components
            assert len(profile.steps) >= 9 and max(step.calls for step in profile.steps) > 2
