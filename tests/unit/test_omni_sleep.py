"""Sleep through the Python entry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from polymux.config import EngineConfig
from polymux.errors import InvalidRequestError, NotReadyError
from polymux.omni import AsyncOmni, Omni
from polymux.orchestrator.stage_client import ProcessStage

MakeStage = Callable[[], ProcessStage]


def test_omni(make_stage: MakeStage) -> None:
    with Omni.from_config(EngineConfig.from_flat(model="fake"), make_stage) as omni:
        assert omni.sleep() == 1000
        assert omni.status == "asleep"
        (refused,) = omni.generate("a cat")
        assert isinstance(refused.error, NotReadyError) and "wake_up()" in refused.error.message
        omni.wake_up()
        (made,) = omni.generate("a cat")
        assert made.error is None and len(made.images) == 1
        with pytest.raises(InvalidRequestError, match="level=7"):
            omni.sleep(7)


def test_async_omni(make_stage: MakeStage) -> None:
    async def scenario() -> None:
        async with AsyncOmni.from_config(EngineConfig.from_flat(model="fake"), make_stage) as omni:
            assert await omni.sleep(level=2) == 2000
            with pytest.raises(NotReadyError):
                await omni.health()
            await omni.wake_up()
            await omni.health()

    asyncio.run(scenario())
