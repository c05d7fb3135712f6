"""Models that see, hear and speak, on a GPU: with steps as graphs and without, answers that go on together are those of
the engine in which each is a loop of its own; and so is what is spoken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polymux.config import EngineConfig
from polymux.engine.answering import load_answering
from polymux.engine.ar_speak_engine import ArSpeakEngine
from polymux.engine.chat_engine import ChatEngine
from polymux.request import Finished
from polymux.testing.tiny.inputs import have_torchvision

from ..parity.test_chat import Got, request_for
from ..parity.test_omni_stages import drive
from ..parity.test_paged_omni import ASKS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["qwen25-omni", "qwen3-omni-moe"])
def test_answers_with_graphs_and_without(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    if not have_torchvision():
        pytest.skip("its processor needs torchvision")
    flags: dict[str, Any] = {"model": str(tiny_checkpoint(name)), "device": "cuda", "dtype": "fp32", "max_num_seqs": 8}
    made: list[dict[str, Got]] = []
    for how in ({"decoding": "generate"}, {"decode_graphs": "off"}, {"decode_graphs": "plain", "block_size": 8}):
        cache = {} if "decoding" in how else {"kv_cache_memory_bytes": 2**26}
        engine = load_answering(EngineConfig.from_flat(**flags, **how, **cache))
        assert type(engine) is (ChatEngine if "decoding" in how else ArSpeakEngine)
        engine.warm_up()
        for _ in range(2):  # again, where beginnings may be found
            made.append(drive((engine,), [request_for(ask, ask.name) for ask in ASKS]))
        engine.close()
    for got in made[1:]:
        for ask in ASKS:
            mine, his = got[ask.name], made[0][ask.name]
            assert isinstance(mine.end, Finished) and isinstance(his.end, Finished), (mine.end, his.end)
            assert mine.text == his.text, ask.name
            if ask.speaks:
                assert np.allclose(np.concatenate(mine.wave, 1), np.concatenate(his.wave, 1), rtol=0, atol=1e-3)
