"""Video jobs: each is a task that follows its request in the engine, encodes what comes, and keeps the result.

A job is what its row says. Memory knows better only while a job has failed and no row can say so, for want of room.
Everything that touches the folder runs in one thread; encoding runs in threads of its own, one step at a time, so that
whoever ends a job knows that nothing writes any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from polymux.errors import GenerationError, PolymuxError, StorageError, StorageFullError, VideoNotFoundError
from polymux.omni import Streamed
from polymux.omni_output import OmniRequestOutput
from polymux.prompts import Prompt
from polymux.request import Capabilities, OmniDiffusionSamplingParams, OutputChunk, Progress
from polymux.server.errors import error_body
from polymux.server.session import Session
from polymux.server.video_file import VideoFile, Written
from polymux.server.video_store import JobError, Order, VideoRecord, VideoStore, expiry
from polymux.server.video_wish import VideoWish
from polymux.server_config import VideoConfig

logger = logging.getLogger("polymux.server")

SWEEP_S = 60.0  # at least so often, what has expired is removed
CLOSE_S = 10.0  # for the encoding of outputs that are complete

# Per cent of a job's progress: denoising, the decoder, and the frames in the file take so much.
_STARTED, _DENOISED, _DECODED, _WRITTEN = 1, 85, 90, 99

T = TypeVar("T")
Events = AsyncGenerator[Streamed]
Step = Callable[[int], Awaitable[None]]


class Streams(Protocol):
    """The part of `AsyncOmni` that jobs use."""

    @property
    def capabilities(self) -> Capabilities | None: ...

    def stream(
        self,
        prompt: Prompt,
        sampling_params: OmniDiffusionSamplingParams,
        *,
        request_id: str | None = None,
        session_id: str | None = None,
    ) -> Events:
        """Progress, parts of the output, the rest of it. Sent, or refused, before this returns. Raises PolymuxError."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request. Unknown ids are no error."""
        ...


class VideoJobs:
    """One per server. Opens its folder when it is first needed, or by `open`; close it at the end."""

    def __init__(self, omni: Streams, config: VideoConfig, folder: Path | None) -> None:
        """`folder` None: one that is removed at the end."""
        self._omni = omni
        self._config = config
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="videos")
        self._opening = asyncio.Lock()
        self._store: VideoStore | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unsaved: dict[str, JobError] = {}  # failed jobs whose row could not be written
        self._sweeper: asyncio.Task[None] | None = None
        self._expiry_changed = asyncio.Event()

    async def open(self) -> VideoStore:
        """Take the folder over; jobs that an earlier server left unfinished have failed. Raises ConfigError."""
        async with self._opening:
            if self._store is None:
                self._store = await self._on_disk(self._open)
                self._sweeper = asyncio.create_task(self._sweep(self._store))
        return self._store

    async def create(self, wish: VideoWish, model: str, session: Session) -> VideoRecord:
        """Send the request to the engine and keep the job. Raises what the engine refuses, and StorageError."""
        store = await self.open()
        record = _record(wish, model)
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        events = self._omni.stream(wish.prompt, wish.params, request_id=record.id, **session)
        task = asyncio.create_task(self._run(store, record, wish, events, accepted))
        self._tasks[record.id] = task
        task.add_done_callback(lambda _: self._ended(record.id, accepted))
        await accepted
        return record

    async def get(self, video_id: str) -> VideoRecord:
        """Raises VideoNotFoundError."""
        store = await self.open()
        found = await self._on_disk(store.get, video_id)
        if found is None:
            raise _unknown(video_id)
        return self._corrected(found)

    async def page(self, limit: int, after: str | None, order: Order) -> list[VideoRecord]:
        store = await self.open()
        return [self._corrected(record) for record in await self._on_disk(store.page, limit, after, order)]

    async def path(self, record: VideoRecord) -> Path:
        """Of the file of a completed job."""
        return (await self.open()).file(record)

    async def delete(self, video_id: str) -> None:
        """End it if it runs, remove it. Raises VideoNotFoundError if there is none."""
        store = await self.open()
        task = self._tasks.get(video_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        there = await self._on_disk(store.delete, video_id)
        self._unsaved.pop(video_id, None)
        if not there:
            raise _unknown(video_id)

    async def scratch(self) -> Path:
        """A path for a video that is no job."""
        return (await self.open()).partial(secrets.token_hex(16))

    async def write(self, events: Events, file: VideoFile, step: Step) -> tuple[OmniRequestOutput, Written]:
        """Encode what comes into the file, until it is complete. `step` hears of progress, in per cent.

        Closes `events`. Raises what they raise, StorageError and GenerationError.
        """
        async with contextlib.aclosing(events):
            async for event in events:
                match event:
                    case Progress(phase="queued"):
                        continue
                    case Progress():
                        await step(_percent(event))
                    case OutputChunk():
                        await _to_end(file.add, event)
                        await step(_DECODED + (_WRITTEN - _DECODED) * file.frames // max(1, event.shape[0]))
                    case OmniRequestOutput():
                        await step(_DECODED)
                        return event, await _to_end(file.finish, event)
        raise GenerationError("the generation ended without an output")

    async def close(self) -> None:
        """Returns when nothing writes any more. Jobs that are not done by then have failed."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        tasks = list(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._store is not None:
            await self._on_disk(self._close, self._store)
        self._disk.shutdown()

    def _open(self) -> VideoStore:
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="polymux-videos-")
            self._folder = Path(self._temporary.name)
        return VideoStore.open(self._folder, self._config.video_ttl)

    def _close(self, store: VideoStore) -> None:
        with contextlib.suppress(StorageError):  # then the next server does it
            store.stop_unfinished(self._config.video_ttl)
        store.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    async def _run(
        self, store: VideoStore, record: VideoRecord, wish: VideoWish, events: Events, accepted: asyncio.Future[None]
    ) -> None:
        file = self.file(store.partial(record.filename), wish)
        try:
            await self._on_disk(store.insert, record, self._config.video_max_jobs, self._config.video_max_bytes)
            if not accepted.done():  # whoever asked may be gone
                accepted.set_result(None)
            output, written = await self.write(events, file, self._reporter(store, record.id, file))
            await self._check_room(store, file)
            now = time.time()
            done = replace(record, completed_at=now, expires_at=expiry(now, self._config.video_ttl))
            done = replace(done, width=written.width, height=written.height, num_frames=written.frames)
            if output.profile is not None:
                done = replace(done, profile=msgspec.json.encode(output.profile).decode())
            await self._on_disk(store.complete, done, file.path)
        except PolymuxError as error:
            await _to_end(file.abandon)  # first: the row may need its room
            if accepted.done():
                await self._fail(store, record.id, error)
            else:
                self._omni.abort(record.id)
                accepted.set_exception(error)
        except Exception:  # a fault of ours: the job must not stay as it is
            logger.exception("%s failed", record.id)
            await _to_end(file.abandon)
            if accepted.done():
                await self._fail(store, record.id, PolymuxError("internal error"))
            else:
                accepted.set_exception(PolymuxError("internal error"))
        finally:
            await _to_end(file.abandon)
            self._expiry_changed.set()

    def file(self, path: Path, wish: VideoWish) -> VideoFile:
        """A file for what is wished."""
        capabilities = self._omni.capabilities
        rate = None if capabilities is None else capabilities.sample_rate
        return VideoFile(path, wish.format, wish.fps, rate)

    def _reporter(self, store: VideoStore, video_id: str, file: VideoFile) -> Step:
        """Writes progress to the row, and looks whether the file still has room."""
        told = -1

        async def step(percent: int) -> None:
            nonlocal told
            if percent > told:
                told = percent
                await self._on_disk(store.advance, video_id, percent)
            if percent > _DECODED:
                await self._check_room(store, file)

        return step

    async def _check_room(self, store: VideoStore, file: VideoFile) -> None:
        most = self._config.video_max_bytes
        if await self._on_disk(store.stored_bytes) + file.size() > most:
            allowed = f"allowed are {most} bytes (--video-max-bytes)"
            raise StorageFullError(f"the videos that are kept and this one are too large together: {allowed}")

    async def _fail(self, store: VideoStore, video_id: str, error: PolymuxError) -> None:
        told = error_body(error).error
        why = JobError(told.code, told.message, told.param)
        try:
            await self._on_disk(store.fail, video_id, why, self._config.video_ttl)
        except StorageError:
            logger.exception("that %s has failed cannot be written; trying again later", video_id)
            self._unsaved[video_id] = why

    def _corrected(self, record: VideoRecord) -> VideoRecord:
        """With what could not be written yet."""
        why = self._unsaved.get(record.id)
        if why is None:
            return record
        return replace(record, status="failed", error_code=why.code, error_message=why.message, error_param=why.param)

    def _ended(self, video_id: str, accepted: asyncio.Future[None]) -> None:
        del self._tasks[video_id]
        self._omni.abort(video_id)  # where nobody has asked for events yet, nothing else does
        if not accepted.done():
            accepted.cancel()

    async def _sweep(self, store: VideoStore) -> None:
        """Remove what has expired, and write what could not be written before."""
        while True:
            self._expiry_changed.clear()
            next_at = None
            try:
                for video_id, why in list(self._unsaved.items()):
                    await self._on_disk(store.fail, video_id, why, self._config.video_ttl)
                    self._unsaved.pop(video_id, None)
                next_at = await self._on_disk(store.expire)
            except (StorageError, OSError):
                logger.exception("the folder of the videos is in trouble")
            delay = SWEEP_S if next_at is None else min(SWEEP_S, max(0.0, next_at - time.time()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._expiry_changed.wait(), delay + 0.01)

    async def _on_disk(self, work: Callable[..., T], *args: Any) -> T:
        return await _finished(asyncio.get_running_loop().run_in_executor(self._disk, work, *args))


def _record(wish: VideoWish, model: str) -> VideoRecord:
    now = time.time()
    return VideoRecord(
        id=f"video_{int(now * 1e6):016x}{secrets.token_hex(8)}",
        model=model,
        created_at=now,
        prompt=wish.prompt.get("prompt"),
        extension=wish.format,
        fps=wish.fps,
        seed=wish.seed,
        width=wish.width,
        height=wish.height,
        num_frames=wish.num_frames,
    )


def _percent(progress: Progress) -> int:
    match progress.phase:
        case "denoise" if progress.total:
            return _STARTED + (_DENOISED - _STARTED) * progress.step // progress.total
        case "decode":
            return _DENOISED
    return _STARTED


def _unknown(video_id: str) -> VideoNotFoundError:
    return VideoNotFoundError(f"video_id={video_id[:80]!r}: there is no such video, or no more", param="video_id")


async def _to_end(work: Callable[..., T], *args: Any) -> T:
    """In a thread."""
    return await _finished(asyncio.get_running_loop().run_in_executor(None, work, *args))


async def _finished(work: asyncio.Future[T]) -> T:
    """The result of what runs in a thread. Cancelled, it still waits: whoever cancels knows that nothing runs on."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        work.exception()  # seen, if there is one
        raise
