"""POST /v1/videos and what follows: jobs, in OpenAI's shape. POST /v1/videos/sync: the file at once."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from polymux.errors import InvalidRequestError, PolymuxError, VideoNotFoundError, VideoNotReadyError
from polymux.media.video import MEDIA_TYPES, exact_fps
from polymux.server import video_request
from polymux.server.errors import from_validation, responses
from polymux.server.file_response import file_response
from polymux.server.generation import while_connected
from polymux.server.profile_answer import RequestProfile, profile_header
from polymux.server.schemas import schema_of
from polymux.server.session import session_of
from polymux.server.state import ServerState, check_makes
from polymux.server.video_protocol import (
    VIDEO_ID,
    Video,
    VideoContentQuery,
    VideoDeleted,
    VideoError,
    VideoFields,
    VideoList,
    VideoListQuery,
    VideoRequest,
)
from polymux.server.video_store import VideoRecord
from polymux.server.video_wish import VideoWish

Query = TypeVar("Query", bound=BaseModel)

_FILE: dict[str, Any] = {"description": "The file", "content": {kind: {} for kind in MEDIA_TYPES.values()}}
_BODY = {
    "content": {
        "application/json": {"schema": schema_of(VideoRequest)},
        "multipart/form-data": {"schema": schema_of(VideoFields)},
    },
    "required": True,
}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()
    _add_creation(router, state)
    _add_jobs(router, state)
    return router


def _add_creation(router: APIRouter, state: ServerState) -> None:
    refused = responses(400, 404, 413, 415, 429, 500, 503, 507)

    @router.post("/v1/videos", response_model=Video, responses=refused, openapi_extra={"requestBody": _BODY})
    async def create_video(request: Request) -> Video:
        """A job. Its status and its file are at the routes below."""
        with _refusals_counted(state):
            wish = await video_request.read(state, request)
        with _in_words_of(wish):
            return _video(await state.videos.create(wish, state.model_names[0], session_of(request)))

    @router.post(
        "/v1/videos/sync",
        response_class=Response,
        responses={200: _FILE, **refused},
        openapi_extra={"requestBody": _BODY},
    )
    async def make_video(request: Request) -> Response:
        """The video itself. Leaving early cancels."""
        with _refusals_counted(state):
            wish = await video_request.read(state, request)
        return await _sync(state, request, wish)


def _add_jobs(router: APIRouter, state: ServerState) -> None:
    @router.get(
        "/v1/videos",
        responses=responses(400, 503),
        openapi_extra={"parameters": _parameters(VideoListQuery)},
    )
    async def list_videos(request: Request) -> VideoList:
        """Jobs, the youngest first unless `order` says otherwise."""
        query = _query(request, VideoListQuery)
        await _check_makes_video(state)
        found = await state.videos.page(query.limit + 1, query.after, query.order)
        videos = [_video(record) for record in found[: query.limit]]
        first, last = (videos[0].id, videos[-1].id) if videos else (None, None)
        return VideoList(data=videos, has_more=len(found) > query.limit, first_id=first, last_id=last)

    @router.get("/v1/videos/{video_id}", responses=responses(400, 404, 503))
    async def get_video(video_id: str) -> Video:
        """The job: how far it is, what it made, or why it failed."""
        return _video(await _job(state, video_id))

    @router.head("/v1/videos/{video_id}/content", include_in_schema=False)
    @router.get(
        "/v1/videos/{video_id}/content",
        response_class=Response,
        responses={200: _FILE, **responses(400, 404, 416, 503)},
        openapi_extra={"parameters": _parameters(VideoContentQuery)},
    )
    async def get_content(request: Request, video_id: str) -> Response:
        """The file of a completed job; also a range of it."""
        _query(request, VideoContentQuery)
        record = await _job(state, video_id)
        if record.status != "completed":
            what = f"the video is {record.status}: GET /v1/videos/{record.id} tells when it is completed"
            raise VideoNotReadyError(what, param="video_id")
        path = await state.videos.path(record)
        headers = {"cache-control": "private", "content-disposition": f'attachment; filename="{record.filename}"'}
        try:
            return await file_response(request, path, MEDIA_TYPES[record.extension], headers)
        except FileNotFoundError:  # deleted, or expired, since
            raise VideoNotFoundError("the video is no longer there", param="video_id") from None

    @router.delete("/v1/videos/{video_id}", responses=responses(400, 404, 500, 503))
    async def delete_video(video_id: str) -> VideoDeleted:
        """Job and file are gone, and the engine works on it no more, when this answers."""
        await _job(state, video_id)
        await state.videos.delete(video_id)
        return VideoDeleted(id=video_id)


async def _sync(state: ServerState, request: Request, wish: VideoWish) -> Response:
    path = await state.videos.scratch()
    file = state.videos.file(path, wish)
    engine_id = f"{request.state.request_id}-{uuid.uuid4().hex[:8]}"
    try:
        with _in_words_of(wish):
            events = state.omni.stream(wish.prompt, wish.params, request_id=engine_id, **session_of(request))
            output, written = await state.videos.write(while_connected(request, events), file, _unheard)
        headers = {
            "x-seed": str(wish.seed),
            "x-fps": f"{wish.fps:g}",
            "x-num-frames": str(written.frames),
            "x-size": f"{written.width}x{written.height}",
            **profile_header(output.profile),
        }
        response = await file_response(request, path, MEDIA_TYPES[wish.format], headers)
    finally:
        await asyncio.to_thread(file.abandon)  # what is sent is open already
    return response


async def _unheard(percent: int) -> None:
    """Nobody asks how far a video is that is sent at once."""


async def _check_makes_video(state: ServerState) -> None:
    if state.omni.capabilities is None:
        await state.omni.health()
    can = state.omni.capabilities
    if can is not None:
        check_makes(can, "video")


async def _job(state: ServerState, video_id: str) -> VideoRecord:
    if not VIDEO_ID.fullmatch(video_id):
        raise VideoNotFoundError(f"video_id={video_id[:80]!r}: there is no such video", param="video_id")
    await _check_makes_video(state)
    return await state.videos.get(video_id)


def _video(record: VideoRecord) -> Video:
    error = None
    if record.error_code is not None:
        error = VideoError(code=record.error_code, message=record.error_message or "", param=record.error_param)
    seconds = None if record.num_frames is None else float(record.num_frames / exact_fps(record.fps))
    return Video(
        id=record.id,
        model=record.model,
        status=record.status,
        progress=record.progress,
        created_at=int(record.created_at),
        completed_at=None if record.completed_at is None else int(record.completed_at),
        expires_at=None if record.expires_at is None else int(record.expires_at),
        prompt=record.prompt,
        seconds=None if seconds is None else f"{round(seconds, 4):g}",
        size=None if record.width is None or record.height is None else f"{record.width}x{record.height}",
        fps=record.fps,
        num_frames=record.num_frames,
        seed=record.seed,
        output_format=record.extension,
        error=error,
        profile=None if record.profile is None else RequestProfile.model_validate_json(record.profile),
    )


@contextlib.contextmanager
def _in_words_of(wish: VideoWish) -> Iterator[None]:
    try:
        yield
    except InvalidRequestError as error:
        raise wish.words.of(error) from None


@contextlib.contextmanager
def _refusals_counted(state: ServerState) -> Iterator[None]:
    """Counts a request that is refused inside. All that get further are counted behind the generator."""
    try:
        yield
    except PolymuxError:
        state.omni.metrics.count("refused")
        raise


def _query(request: Request, model: type[Query]) -> Query:
    """The query of the URL. Raises InvalidRequestError."""
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"{name[:80]} is given more than once", param=name[:80])
    try:
        return model.model_validate_strings(dict(request.query_params), strict=False)
    except ValidationError as error:
        raise from_validation(error, model) from None


def _parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    """A query for the documentation of its route."""
    properties = model.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]
