"""An event loop in a background thread, for callers that have none, or that must not block theirs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

END_WAIT_S = 10.0


class LoopThread:
    """Runs until `finish`. The thread is a daemon: it never keeps the interpreter alive."""

    def __init__(self, name: str) -> None:
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._until_stopped(started)), name=name, daemon=True
        )
        self._thread.start()
        self._loop = started.result()

    async def _until_stopped(self, started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._stop.wait()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in the loop and wait for it. If the wait is interrupted (Ctrl-C), the work is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def finish(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, then end the loop. Returns when it has ended, but never waits for itself, nor for ever."""

        async def run() -> None:
            try:
                await last
            finally:
                self._stop.set()

        asyncio.run_coroutine_threadsafe(run(), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join(END_WAIT_S)
