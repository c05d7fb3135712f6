"""A hub on 127.0.0.1: the few routes that huggingface_hub needs to list and download a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
UNREACHABLE = "tiny/unreachable"  # the connection breaks when it is asked for


class FakeHub:
    """Serves the folders given as repositories, each with one commit on `main`; keeps the names it was asked for."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.requests: list[str] = []
        self.commit = COMMIT
        self.url = ""

    def downloaded(self) -> set[str]:
        return {path.split(f"/resolve/{COMMIT}/")[1] for path in self.requests if f"/resolve/{COMMIT}/" in path}

    @contextmanager
    def serve(self) -> Iterator[None]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(path)
            words = path.removeprefix("/api/models").strip("/").split("/")
            repo, action, revision, name = "/".join(words[:2]), *(words[2:4] or ["revision", "main"]), words[4:]
            folder = hub.repositories.get(repo)
            if repo == UNREACHABLE:
                return
            if folder is None:
                return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            if revision not in ("main", COMMIT):
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            if action == "revision":
                siblings = [{"rfilename": file.relative_to(folder).as_posix()} for file in files]
                return self._json({"id": repo, "sha": COMMIT, "siblings": siblings})
            if action == "tree":
                return self._json([_described(folder, file) for file in files])
            data = folder.joinpath(*name).read_bytes()
            self._send(200, data, {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT})

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


def _described(folder: Path, file: Path) -> dict[str, object]:
    data = file.read_bytes()
    return {"type": "file", "path": file.relative_to(folder).as_posix(), "size": len(data), "oid": _digest(data)}


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
