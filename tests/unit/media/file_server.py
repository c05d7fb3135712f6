"""A real HTTP server on the loopback interface whose answers a test decides, and a resolver that it decides too."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from polymux.media.web import WebSource
from polymux.server_config import MediaConfig

LOOPBACK = ("127.0.0.1/32",)
CERTIFICATE = Path(__file__).with_name("media.test.pem")  # for the host media.test, signed by itself, until 2126


TRUSTS_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # quicker to make than one with this machine's certificates


class FileServer:
    """`answers` maps a path to what writes the answer; `seen` are the requests' lines and headers."""

    def __init__(self, tls: bool = False) -> None:
        self.answers: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.seen: list[tuple[str, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                with contextlib.suppress(OSError):  # clients may leave
                    outer.answers[self.path](self)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.port = self.http.server_port

    def url(self, path: str = "/", host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def file(self, path: str, data: bytes, status: int = 200, **headers: str) -> str:
        """Answer `path` with `data`; its URL."""

        def answer(request: BaseHTTPRequestHandler) -> None:
            request.send_response(status)
            sent = {"Content-Length": str(len(data))} | {k.replace("_", "-"): v for k, v in headers.items()}
            for name, value in sent.items():
                if value:
                    request.send_header(name, value)
            request.end_headers()
            request.wfile.write(data)

        self.answers[path] = answer
        return self.url(path)

    def redirect(self, path: str, target: str, status: int = 302) -> str:
        return self.file(path, b"elsewhere", status, Location=target)


@contextlib.contextmanager
def running(server: FileServer) -> Iterator[FileServer]:
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()


class Names:
    """A resolver. A name has one list of addresses after the other, and the last one for ever."""

    def __init__(self, **names: list[list[str]]) -> None:
        self.names = {name.replace("_", "."): answers for name, answers in names.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self.names.get(host, [[host]])
        return answers.pop(0) if len(answers) > 1 else answers[0]


def web(names: Names | None = None, tls: ssl.SSLContext | None = None, **config: object) -> WebSource:
    """A source that may reach the loopback interface, unless `config` says otherwise."""
    values: dict[str, object] = {"allowed_media_networks": LOOPBACK} | config
    chosen = MediaConfig(**values)  # type: ignore[arg-type]
    return WebSource(chosen, resolve=names, tls=tls or TRUSTS_NOBODY)
