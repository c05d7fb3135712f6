"""The life of a server process: bind, load, serve, drain, exit.

The port is bound before the model loads, so that whoever watches sees 503, not a refused connection. Exit code 0 after
SIGTERM or SIGINT; 1 when the model's process is gone and is not to be restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Generator

import uvicorn

from polymux import logs
from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.omni import AsyncOmni
from polymux.server.app import build_app
from polymux.server.http_protocol import protocol_for
from polymux.server.speech_session import MAX_MESSAGE
from polymux.server.state import ServerState
from polymux.server_config import ServerConfig

logger = logging.getLogger("polymux.server")

FLUSH_S = 5  # that answers which are ready get to reach their clients, at the end
KEEP_ALIVE_S = 65  # longer than the idle connections of common clients and proxies


def run(engine: EngineConfig, config: ServerConfig) -> int:
    """Serve until a signal, or until the model's process is gone. Returns the exit code.

    Raises ConfigError, and what kept the model from loading.
    """
    logs.configure(engine.log)
    return asyncio.run(_serve(engine, config))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal in place of an exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def _serve(engine: EngineConfig, config: ServerConfig) -> int:
    omni = AsyncOmni.from_config(engine, model_name=config.served_model_name)
    state = ServerState(omni, config)
    http = _Server(http_config(state))
    listener = listen(config)
    if config.video.video_dir is not None:
        await state.videos.open()  # before the model loads: what is wrong with it should not take minutes
    if config.voices.voice_store is not None:
        state.voices.open()
    stop, hurry = _signals()
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    print(f"Listening on {_url(config, listener)}", flush=True)
    try:
        return await _live(state, omni, stop, serving)
    finally:
        await _drain(omni, engine.process.shutdown_grace, hurry)
        http.should_exit = True
        await serving
        await state.aclose()


def http_config(state: ServerState) -> uvicorn.Config:
    """uvicorn, told how to serve. Raises ConfigError."""
    http, access = state.config.http, state.config.access
    config = uvicorn.Config(
        build_app(state),
        http=protocol_for(http),
        ws="websockets-sansio",
        ws_max_size=min(MAX_MESSAGE, http.max_body_bytes),
        ws_per_message_deflate=False,  # sound does not get smaller by it, and memory is what it costs
        h11_max_incomplete_event_size=http.max_header_bytes,
        ssl_certfile=access.ssl_certfile,
        ssl_keyfile=access.ssl_keyfile,
        ssl_keyfile_password="none",  # of an encrypted key, OpenSSL would ask for the password at the terminal
        ssl_ca_certs=access.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if access.ssl_ca_certs else ssl.CERT_NONE,
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # anybody can send them
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError too
        files = ", ".join(file for file in (access.ssl_certfile, access.ssl_keyfile, access.ssl_ca_certs) if file)
        raise ConfigError(f"TLS cannot be set up with {files}: {error}", param="ssl_certfile") from None
    return config


async def _live(state: ServerState, omni: AsyncOmni, stop: asyncio.Event, serving: asyncio.Task[None]) -> int:
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(omni.start())
    dead = asyncio.create_task(omni.until_dead())
    try:
        await asyncio.wait((starting, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()  # raises what kept the model from loading
            if omni.capabilities is not None:
                logger.info("%s", omni.capabilities.storage)
                if omni.capabilities.modality == "video":
                    await state.videos.open()
            logger.info("Ready")
            await asyncio.wait((dead, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return 0
        logger.error("exiting: %s", (dead.result() if dead.done() else None) or "the server ended by itself")
        return 1
    finally:
        for task in (stopping, starting, dead):
            task.cancel()
        await asyncio.gather(stopping, starting, dead, return_exceptions=True)


async def _drain(omni: AsyncOmni, grace: float, hurry: asyncio.Event) -> None:
    """Let requests finish; a second signal ends the wait."""
    draining = asyncio.create_task(omni.drain(grace))
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        await omni.close()
    hurrying.cancel()
    await draining


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events that the first and the second SIGTERM or SIGINT set."""
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return first, second


def listen(config: ServerConfig) -> socket.socket:
    """The bound port. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from None
    listener.setblocking(False)
    # Connections inherit it. asyncio would set it, but not where the listener was made without naming the protocol; and
    # without it, the second piece of an answer waits until the client has confirmed the first one, commonly 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _url(config: ServerConfig, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.access.ssl_certfile else "http"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"
