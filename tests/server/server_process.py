"""A real server process on a real socket, and what tests ask of it."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

MODEL = "tiny-img"
BASE: dict[str, Any] = {"model": MODEL, "prompt": "a", "size": "64x64", "num_inference_steps": 2, "seed": 1}
ENDLESS = BASE | {"num_inference_steps": 100_000}
START_S = 120  # for loading, on a machine that does other things too
SAME = ("model_name", "stage", "replica")  # labels
IMAGES = "/v1/images/generations"


class Server:
    """`polymux serve` on a free port of the loopback interface."""

    def __init__(self, model: Path | str, folder: Path, *flags: str) -> None:
        self.log = folder / "server.log"
        words = [sys.executable, "-m", "polymux.cli", "serve", str(model), "--port", "0", *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Listening on http://"), line + self.log.read_text()
        self.url = line.split()[-1]
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self._probe = httpx.Client(base_url=self.url, timeout=5)

    @property
    def pid(self) -> int:
        return self.process.pid

    def stages(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def wait_ready(self) -> None:
        until(lambda: self.health() == 200 or self.process.poll() is not None, START_S)
        assert self.process.poll() is None, self.log.read_text()

    def health(self) -> int:
        """Status of GET /health; 0 if nobody answers."""
        try:
            return self._probe.get("/health").status_code
        except httpx.TransportError:
            return 0

    def post(self, body: Any, **kwargs: Any) -> httpx.Response:
        sent = {"json": body} if isinstance(body, (dict, list)) else {"content": body}
        return self.http.post(IMAGES, **sent, **kwargs)

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels, as they are written: `polymux:requests_total{outcome="completed"}`.
        Labels that are the same everywhere here are left out."""
        text = self.http.get("/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {_written(sample.name, sample.labels): sample.value for sample in samples}

    def outcomes(self) -> dict[str, float]:
        metrics = self.metrics()
        kinds = ("completed", "failed", "aborted", "refused")
        return {kind: metrics[f'polymux:requests_total{{outcome="{kind}"}}'] for kind in kinds}

    def running(self) -> float:
        return self.metrics()["polymux:num_requests_running"]

    def waiting(self) -> float:
        return self.metrics()["polymux:num_requests_waiting"]

    def steps(self) -> float:
        return self.metrics()["polymux:denoise_steps_total"]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def stop(self) -> None:
        """End it, whatever state it is in."""
        stages = self.stages() if self.process.poll() is None else []
        for process in (self.process, *stages):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.http.close()
        self._probe.close()


@contextlib.contextmanager
def serving(model: Path | str, folder: Path, *flags: str, ready: bool = True) -> Iterator[Server]:
    server = Server(model, folder, "--served-model-name", MODEL, *flags)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.stop()


def until(true: Any, seconds: float = 10) -> None:
    """Wait for what must become true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.05)


def send_raw(server: Server, body: bytes, headers: Sequence[str] = ()) -> socket.socket:
    """Send a request and return the socket, without waiting for the answer."""
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port or 80), timeout=30)
    lines = [
        f"POST {IMAGES} HTTP/1.1",
        f"Host: {url.host}",
        "Content-Type: application/json",
        *(headers or [f"Content-Length: {len(body)}"]),
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return connection


def pixels(response: httpx.Response, i: int = 0) -> np.ndarray[Any, Any]:
    assert response.status_code == 200, response.text[:500]
    data = base64.b64decode(response.json()["data"][i]["b64_json"])
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, after a look at its form."""
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for leak in ("Traceback", "File ", ".py", "/root", "/tmp", "site-packages"):
        assert leak not in error["message"]
    return error


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return set(os.listdir(folder)) if folder.is_dir() else set()


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _written(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items() if key not in SAME)
    return f"{name}{{{inside}}}" if inside else name
