"""Servers whose model costs nothing, for bench/overhead.py: what is left is the server.

    python bench/free_server.py polymux            the whole of polymux: HTTP, orchestrator, a stage process
    python bench/free_server.py bare ANSWER_FILE   uvicorn and one FastAPI route that answers with the file's bytes
    python bench/free_server.py --fd N             the stage process of the first one; polymux starts it

A server prints the address that it listens on.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

from polymux import request as nouns
from polymux.config import EngineConfig
from polymux.engine.process import main as stage_main
from polymux.omni import AsyncOmni
from polymux.orchestrator.stage_client import ProcessStage
from polymux.server.run import http_config
from polymux.server.state import ServerState
from polymux.server_config import ServerConfig

SIZE = 64  # pixels
PIXELS = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8).tobytes()


class FreeEngine:
    """Implements `engine.base.StageEngine`: every request has the same picture, at once."""

    def __init__(self, config: EngineConfig) -> None:
        self.capabilities = nouns.Capabilities(
            family="free",
            pipeline="FreePipeline",
            modality="image",
            arguments=("prompt", "height", "width", "num_inference_steps"),
            required=("prompt",),
            media={},
        )
        self.stats = nouns.StageStats()
        self.events: list[nouns.Event] = []

    @property
    def busy(self) -> bool:
        return bool(self.events)

    def warm_up(self) -> None:
        return None

    def add(self, request: nouns.Request) -> None:
        picture = nouns.ImageData("RGB", SIZE, SIZE, PIXELS)
        done = nouns.Finished(request.request_id, "image", [[picture]], [1], nouns.RequestMetrics())
        self.events.append(done)

    def abort(self, request_id: str) -> None:
        return None

    def step(self) -> list[nouns.Event]:
        events, self.events = self.events, []
        return events

    def sleep(self, level: int) -> int:
        return 0

    def wake_up(self) -> None:
        return None

    def close(self) -> None:
        return None


async def serve_polymux() -> None:
    config = EngineConfig.from_flat(model="free", max_num_seqs=64)
    command = (sys.executable, __file__)
    async with AsyncOmni.from_config(config, lambda: ProcessStage(command)) as omni:
        await serve(http_config(ServerState(omni, ServerConfig())))


async def serve_bare(answer: bytes) -> None:
    app = FastAPI(docs_url=None, redoc_url=None)

    @app.post("/v1/images/generations")
    async def create(request: Request) -> Response:
        await request.body()
        return Response(answer, media_type="application/json")

    await serve(uvicorn.Config(app, http="h11", lifespan="off", access_log=False, log_config=None, server_header=False))


async def serve(config: uvicorn.Config) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as polymux does
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    if sys.argv[1] == "--fd":
        sys.exit(stage_main(make_engine=FreeEngine))
    if sys.argv[1] == "polymux":
        asyncio.run(serve_polymux())
    else:
        asyncio.run(serve_bare(Path(sys.argv[2]).read_bytes()))
