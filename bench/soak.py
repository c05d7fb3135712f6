"""Minutes of mixed load on a real server at the limit of its queue, and its model's process killed again and again.

    python bench/soak.py [--minutes 5] [--clients 14] [--kills 10] [--model demo]

Good requests, several pictures, streams, slow ones, bad ones, huge ones, and clients that leave. Afterwards: the
ledger of the clients is what /metrics counted; every request was answered once, with its own picture; memory, /dev/shm
and open files of the processes are where they were after the warm-up; nothing runs or waits. Then the process of the
model is killed (kill -9) under load, and everybody who waits has an answer within seconds. Exit code 1 if anything of
that is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families
from soak_clients import MAX_BODY, MODEL, URL, Clients, Ledger

PLACES, QUEUE = 4, 4
SAMPLE_S = 2.0
WARM = 0.3  # of the samples come from before the caches are full
GROWTH = 1.05
ANSWER_S = 5.0  # after the death of the stage, everybody has an answer
SHM = Path("/dev/shm")


class Server:
    """`polymux serve` as a process, and what can be seen of it."""

    def __init__(self, model: str, log: Path) -> None:
        words = ["serve", model, "--port", "0", "--served-model-name", MODEL, "--restart-stages"]
        limits = [
            "--max-num-seqs",
            str(PLACES),
            "--max-queue",
            str(QUEUE),
            "--max-inference-steps",
            "5000",
            "--num-threads",
            "1",
        ]
        command = [sys.executable, "-m", "polymux.cli", *words, *limits, "--max-body-bytes", str(MAX_BODY)]
        with log.open("wb") as file:
            self.process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        self.url = self.process.stdout.readline().split()[-1]

    async def get(self, path: str) -> httpx2.Response:
        async with httpx2.AsyncClient(base_url=self.url, timeout=20) as http:
            return await http.get(path)

    async def metrics(self) -> dict[str, float]:
        """Sums by name and the label that matters here."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families((await self.get("/metrics")).text):
            for sample in family.samples:
                if sample.labels.get("route", URL) in (URL, "none"):  # a body that is too large reaches no route
                    key = f"{sample.name} {sample.labels.get('outcome', '')}".strip()
                    found[key] = found.get(key, 0.0) + sample.value
        return found

    async def ready(self) -> bool:
        return (await self.get("/health")).status_code == 200

    async def idle(self) -> bool:
        now = await self.metrics()
        return now["polymux:num_requests_running"] == now["polymux:num_requests_waiting"] == 0

    def stage(self) -> psutil.Process:
        (stage,) = self.process.children(recursive=True)
        return stage

    def sample(self) -> dict[str, float]:
        stage = self.stage()
        return {
            "API process RSS, MiB": self.process.memory_info().rss / 2**20,
            "stage RSS, MiB": stage.memory_info().rss / 2**20,
            "API process threads": self.process.num_threads(),
            "stage open files": stage.num_fds(),
            "files in /dev/shm": len(os.listdir(SHM)) if SHM.is_dir() else 0,
        }


async def until(true: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not await true():  # type: ignore[misc]
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s: {what}")
        await asyncio.sleep(0.1)


async def soak(server: Server, clients: int, minutes: float) -> list[str]:
    """Mixed load; what is wrong afterwards."""
    load, samples = Clients(server.url, seed=1), list[dict[str, float]]()
    before = await server.metrics()
    work = asyncio.create_task(load.run(clients))
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and not work.done():
        await asyncio.sleep(SAMPLE_S)
        samples.append(server.sample())
    load.stop()
    await work
    await until(server.idle, 30, "nothing runs or waits")
    show(load.ledger)
    return [*load.ledger.wrong, *uneven(load.ledger, before, await server.metrics()), *grown(samples)]


def show(ledger: Ledger) -> None:
    print(f"{ledger.sent} requests: {dict(ledger.kinds)}")
    print(f"answers: {dict(ledger.answers)}, clients that left: {ledger.left}")
    if ledger.latencies:
        p50, p99 = statistics.median(ledger.latencies), statistics.quantiles(ledger.latencies, n=100)[98]
        print(f"latency of good ones: p50 {p50:.2f} s, p99 {p99:.2f} s")


def uneven(ledger: Ledger, before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Where the clients' ledger and the server's counters differ. Of a request whose client left, only the server knows
    how it ended: each may have ended in any way, or not have been read at all, but only once."""
    counted = {
        kind: after[f"polymux:requests_total {kind}"] - before[f"polymux:requests_total {kind}"]
        for kind in ("completed", "refused", "failed", "aborted")
    }
    answers = ledger.answers
    seen = {
        "completed": answers["200"],
        "refused": sum(n for a, n in answers.items() if a.startswith(("400", "429")) or a.endswith("not_ready")),
        "failed": sum(n for a, n in answers.items() if a.endswith("stage_dead")),
        "aborted": 0,
    }
    print(f"counted by the server: {counted}, seen by clients: {seen}")
    more = {kind: counted[kind] - seen[kind] for kind in seen}
    wrong = [f"{kind}: the server counted {-n:.0f} fewer than the clients saw" for kind, n in more.items() if n < 0]
    if sum(more.values()) > ledger.left:
        wrong.append(f"the server counted {sum(more.values()):.0f} ends that no client saw; {ledger.left} clients left")
    arrived = after["polymux:http_requests_total"] - before.get("polymux:http_requests_total", 0.0)
    if arrived != ledger.sent:
        wrong.append(f"{arrived:.0f} HTTP requests ended, {ledger.sent} were sent")
    return wrong


def grown(samples: list[dict[str, float]]) -> list[str]:
    """What has grown since the warm-up: the last third against the third after it."""
    warm = samples[int(len(samples) * WARM) :]
    third, wrong = max(1, len(warm) // 3), []
    for name in warm[0]:
        early, late = (statistics.median(s[name] for s in part) for part in (warm[:third], warm[-third:]))
        print(f"{name}: {early:.0f} after the warm-up, {late:.0f} at the end")
        if late > early * GROWTH + 1:
            wrong.append(f"{name} has grown from {early:.0f} to {late:.0f}")
    return wrong


async def kill(server: Server, clients: int, times: int) -> list[str]:
    """Kill the stage under load; what is wrong afterwards."""
    load, wrong, waits = Clients(server.url, seed=2), list[str](), list[float]()
    before = await server.metrics()
    work = asyncio.create_task(load.run(clients))
    for _ in range(times):
        await until(server.ready, 120, "the stage is back")
        await asyncio.sleep(3)
        failed = load.ledger.answers["503 stage_dead"] + load.ledger.answers["stream stage_dead"]
        start = time.monotonic()
        server.stage().kill()
        await until(lambda: not_ready(server), ANSWER_S, "/health tells of the death")
        await asyncio.sleep(0.5)
        waits.append(time.monotonic() - start)
        if load.ledger.answers["503 stage_dead"] + load.ledger.answers["stream stage_dead"] == failed:
            wrong.append("a death that nobody was told of")
    await until(server.ready, 120, "the stage is back")
    load.stop()
    await asyncio.wait_for(work, 60)
    await until(server.idle, 30, "nothing runs or waits")
    show(load.ledger)
    after = await server.metrics()
    restarts = after["polymux:stage_restarts_total"] - before["polymux:stage_restarts_total"]
    if restarts != times:
        wrong.append(f"{restarts:.0f} restarts were counted, not {times}")
    return [*wrong, *load.ledger.wrong, *uneven(load.ledger, before, after)]


async def not_ready(server: Server) -> bool:
    return not await server.ready()


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=14)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--log", type=Path, default=Path("soak.log"), help="of the server")
    arguments = parser.parse_args()
    shared = set(os.listdir(SHM)) if SHM.is_dir() else set()
    server = Server(arguments.model, arguments.log)
    try:
        await until(server.ready, 300, "the model is loaded")
        wrong = await soak(server, arguments.clients, arguments.minutes)
        if arguments.kills:
            wrong += await kill(server, arguments.clients, arguments.kills)
        server.process.terminate()
        if (code := server.process.wait(60)) != 0:
            wrong.append(f"exit code {code}")
    finally:
        for process in (
            [*server.process.children(recursive=True), server.process] if server.process.is_running() else []
        ):
            process.kill()
    if "Traceback" in arguments.log.read_text():
        wrong.append(f"a traceback in {arguments.log}")
    wrong += [f"left in {SHM}: {name}" for name in (set(os.listdir(SHM)) if SHM.is_dir() else set()) - shared]
    print("\n".join(f"WRONG: {what}" for what in wrong[:40]) or "all is well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
