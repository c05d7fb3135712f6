"""What polymux costs where the model costs nothing: requests per second and latency, against a bare route.

    python bench/overhead.py [--seconds 4] [--rounds 3] [--connections 1 16]

"bare" is uvicorn with one FastAPI route that answers the same bytes (a picture of 64 x 64 in JSON). "polymux" parses,
checks, queues, sends the request to another process, takes its pixels back, encodes them as PNG and answers. The load
comes from wrk, and from `polymux bench serve` to see what that measures. The two servers take turns, and the ratio of a
round is of runs next to each other; what is printed is the round with the median ratio. CPU is what all processes of a
server spent per request, which depends less on what else the machine does. Needs wrk (Debian: apt-get install wrk).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

HERE = Path(__file__).parent
BODY = '{"prompt": "a lighthouse at dusk", "size": "64x64", "seed": 1}'
LUA = f"""wrk.method, wrk.path = "POST", "/v1/images/generations"
wrk.headers["Content-Type"], wrk.body = "application/json", '{BODY}'"""
PROMPTS, WARMUPS = 300, 5  # of polymux bench serve, per run
UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True)
class Measured:
    rate: float  # requests per second
    median: float  # milliseconds
    requests: int
    cpu: float = 0.0  # milliseconds per request


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process

    def measure(self, load: Load, connections: int, seconds: int, folder: Path) -> Measured:
        before = self._cpu()
        measured = load(self.url, connections, seconds, folder)
        return replace(measured, cpu=(self._cpu() - before) / measured.requests * 1e3)

    def _cpu(self) -> float:
        processes = [self.process, *self.process.children(recursive=True)]
        return sum(process.cpu_times().user + process.cpu_times().system for process in processes)


Load = Callable[[str, int, int, Path], Measured]


@contextlib.contextmanager
def server(*words: str) -> Iterator[Server]:
    command = [sys.executable, str(HERE / "free_server.py"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Server(process.stdout.readline().strip(), psutil.Process(process.pid))
        finally:
            process.terminate()


def one_answer(url: str) -> bytes:
    request = urllib.request.Request(
        url + "/v1/images/generations", BODY.encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        content: bytes = response.read()
        return content


def wrk(url: str, connections: int, seconds: int, folder: Path) -> Measured:
    script = folder / "post.lua"
    script.write_text(LUA)
    words = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(script), url]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "Non-2xx" not in text and "Socket errors" not in text, text
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    median = re.search(r"50%\s+([\d.]+)(us|ms|s)", text)
    count = re.search(r"(\d+) requests in", text)
    assert rate and median and count, text
    return Measured(float(rate[1]), float(median[1]) * UNITS[median[2]], int(count[1]))


def bench_serve(url: str, connections: int, seconds: int, folder: Path) -> Measured:
    file = folder / "result.json"
    load = ["--num-prompts", str(PROMPTS), "--max-concurrency", str(connections), "--num-warmups", str(WARMUPS)]
    words = ["bench", "serve", "--base-url", url, *load, "--model", "free", "--quiet", "--output", str(file)]
    fields = ["--extra-body", '{"size": "64x64", "seed": 1}']
    subprocess.run([sys.executable, "-m", "polymux.cli", *words, *fields], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads(file.read_text())["summary"]
    return Measured(summary["request_throughput"], summary["latency"]["p50"] * 1e3, PROMPTS + WARMUPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16])
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed (Debian: apt-get install wrk)")
    print("| load | connections | bare req/s | ours | ratio | bare p50 ms | ours | bare CPU ms | ours | ratio |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, server("polymux") as polymux:
        folder = Path(name)
        (folder / "answer.json").write_bytes(one_answer(polymux.url))
        with server("bare", str(folder / "answer.json")) as bare:
            loads: list[tuple[str, Load]] = [("wrk", wrk), ("polymux bench serve", bench_serve)]
            for title, load in loads:
                for count in arguments.connections:
                    rounds = [
                        [server.measure(load, count, arguments.seconds, folder) for server in (bare, polymux)]
                        for _ in range(arguments.rounds)
                    ]
                    rounds.sort(key=lambda pair: pair[1].rate / pair[0].rate)
                    print(row(title, count, *rounds[len(rounds) // 2]), flush=True)


def row(title: str, connections: int, bare: Measured, ours: Measured) -> str:
    rates = f"{bare.rate:.0f} | {ours.rate:.0f} | {ours.rate / bare.rate:.2f}"
    cpu = f"{bare.cpu:.2f} | {ours.cpu:.2f} | {ours.cpu / bare.cpu:.1f}"
    return f"| {title} | {connections} | {rates} | {bare.median:.2f} | {ours.median:.2f} | {cpu} |"


if __name__ == "__main__":
    main()
