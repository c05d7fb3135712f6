"""How the orchestrator reaches a stage. `ProcessStage` runs it in a process of its own.

Knows the stage's process and the messages' frames, not what they mean. The process is started with `subprocess`, so
that users' scripts need no `__main__` guard, and in a session of its own, so that Ctrl-C does not reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from polymux.config import stage_environment
from polymux.errors import StageDeadError
from polymux.messages import LENGTH, FromStage, Stop, ToStage, frame, from_stage

STAGE_COMMAND = (sys.executable, "-P", "-m", "polymux.engine.process")
BUFFER_BYTES = 2**22
EXIT_WAIT_S = 1.0  # for a process that has closed its socket
STOP_WAIT_S = 5.0  # for a process that was asked to stop


class StageClient(Protocol):
    """One stage: start it once, send, read events until it ends, close it."""

    async def start(self) -> None:
        """Raises StageDeadError if there is nothing to talk to."""
        ...

    def send(self, message: ToStage) -> None:
        """Never blocks; to a dead stage it does nothing, `events` tells. Raises PayloadTooLargeError."""
        ...

    def events(self) -> AsyncGenerator[FromStage]:
        """What the stage says. Ends when the stage has exited with code 0, raises StageDeadError for any other end."""
        ...

    def kill(self) -> None:
        """End it now. Does not wait; may be called from any thread and more than once."""
        ...

    async def close(self) -> None:
        """Ask it to stop, kill it if it does not within STOP_WAIT_S. Returns when nothing of it is left."""
        ...


class ProcessStage:
    """A stage process on the other end of a socket pair. `command` gets `--fd N` appended."""

    def __init__(self, command: Sequence[str] = STAGE_COMMAND) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._burial: asyncio.Task[int] | None = None
        self._buried = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=BUFFER_BYTES)
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    "--fd",
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env=stage_environment(),
                )
            except BaseException as error:
                self._writer.close()
                if isinstance(error, OSError):
                    raise StageDeadError(f"the stage process cannot be started: {error}") from error
                raise
        self._burial = asyncio.create_task(self._bury(self._process))

    def send(self, message: ToStage) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def events(self) -> AsyncGenerator[FromStage]:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                body = await self._reader.readexactly(length)
                try:
                    message = from_stage.decode(body)
                except msgspec.DecodeError as error:
                    self.kill()
                    raise StageDeadError(f"the stage process sent what is not a message: {error}") from error
                yield message
        assert self._process is not None
        code = await self._exit_code(self._process, EXIT_WAIT_S)
        if code != 0:
            raise StageDeadError(f"the stage process ended with {_describe(code)}")

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            _kill_group(self._process.pid)

    async def close(self) -> None:
        if self._process is None:
            return
        if self._process.returncode is None:
            self.send(Stop())
        await self._exit_code(self._process, STOP_WAIT_S)
        self._writer.close()

    async def _exit_code(self, process: asyncio.subprocess.Process, patience: float) -> int:
        try:
            return await asyncio.wait_for(self._bury(process), patience)
        except TimeoutError:
            self.kill()
            return await self._bury(process)

    async def _bury(self, process: asyncio.subprocess.Process) -> int:
        """Wait for the end of the process, then end what it started: that may hold the socket, or memory."""
        code = await process.wait()
        if not self._buried:
            self._buried = True
            _kill_group(process.pid)
        return code


def _kill_group(pid: int) -> None:
    """Kill the processes of the session that `pid` leads, or led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM where only zombies are left
        os.killpg(pid, signal.SIGKILL)


def _describe(code: int) -> str:
    if code < 0:
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"exit code {code}"
