"""`polymux bench serve` against servers of every kind: what is sent, when, what counts, and what is reported."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polymux.bench.records import Record
from polymux.bench.settings import ENDPOINTS
from polymux.bench.summary import Spread, quantile, summarize
from polymux.cli.main import main

Answer = tuple[int, str, bytes]  # status, content type, body


def picture(width: int = 8, height: int = 4) -> str:
    data = io.BytesIO()
    Image.new("RGB", (width, height)).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def pictures(*items: dict[str, Any]) -> Answer:
    return 200, "application/json", json.dumps({"created": 1, "data": list(items)}).encode()


def events(*items: dict[str, Any] | str) -> Answer:
    lines = [item if isinstance(item, str) else json.dumps(item) for item in items]
    return 200, "text/event-stream", b"".join(b": beat\n\ndata: " + line.encode() + b"\n\n" for line in lines)


def refusal(status: int, code: str) -> Answer:
    return status, "application/json", json.dumps({"error": {"message": "no", "code": code}}).encode()


class Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client that left is no error."""


class FakeServer:
    """Answers request i with `answer(body, i)`."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any], int], Answer] = lambda body, i: pictures({"b64_json": picture()})
        self.models: Answer = (200, "application/json", b'{"object": "list", "data": [{"id": "m1"}, {"id": "m2"}]}')
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.under_way = self.most = 0
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(server.models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with server.lock:
                    server.bodies.append(body)
                    server.keys.add(self.headers["authorization"])
                    server.under_way += 1
                    server.most = max(server.most, server.under_way)
                    number = len(server.bodies) - 1
                answer = server.answer(body, number)
                with server.lock:
                    server.under_way -= 1
                self.reply(answer if self.path in ENDPOINTS else refusal(404, "unknown_url"))

            def reply(self, answer: Answer) -> None:
                status, kind, content = answer
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=lambda: fake.http.serve_forever(poll_interval=0.02))
    thread.start()
    yield fake
    fake.http.shutdown()
    fake.http.server_close()
    thread.join()


@pytest.fixture
def bench(server: FakeServer, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run(*words: str) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "result.json"
        code = main(["bench", "serve", "--base-url", server.url, "--quiet", "--output", str(file), *words])
        return code, json.loads(file.read_text(encoding="utf-8"))

    return run


def test_only_what_openai_knows_is_sent_unless_asked(server: FakeServer, bench: Any) -> None:
    code, result = bench("--num-prompts", "3", "--num-warmups", "0")
    assert code == 0
    assert [set(body) for body in server.bodies] == [{"prompt", "model"}] * 3
    assert {body["model"] for body in server.bodies} == {"m1"} == {result["model"]}
    assert len({body["prompt"] for body in server.bodies}) == 3
    assert all(len(body["prompt"].split()) == 12 for body in server.bodies)
    assert server.keys == {None}


def test_every_field(server: FakeServer, bench: Any) -> None:
    words = (
        "--num-prompts 2 --num-warmups 0 --max-concurrency 1 --model x --size 64x32 --num-images 2 --steps 3 --seed 7"
    )
    code, result = bench(*words.split(), "--extra-body", '{"user": "u", "size": "1x1"}', "--api-key", "secret")
    assert code == 0
    for number, body in enumerate(server.bodies):
        del body["prompt"]
        assert body == {"model": "x", "size": "1x1", "n": 2, "num_inference_steps": 3, "seed": 7 + number, "user": "u"}
    assert server.keys == {"Bearer secret"}
    assert "secret" not in json.dumps(result)


def test_the_same_seed_sends_the_same_at_the_same_times(server: FakeServer, bench: Any) -> None:
    words = ("--num-prompts", "5", "--num-warmups", "0", "--request-rate", "200")
    due = [[request["due"] for request in bench(*words, "--load-seed", seed)[1]["requests"]] for seed in "112"]
    prompts = [sorted(body["prompt"] for body in server.bodies[i : i + 5]) for i in (0, 5, 10)]
    assert due[0] == due[1] != due[2] and prompts[0] == prompts[1] != prompts[2]
    assert due[0] == sorted(due[0]) and due[0][0] == 0.0


def test_arrivals_do_not_wait_for_answers(server: FakeServer, bench: Any) -> None:
    together = threading.Barrier(4)

    def answer(body: dict[str, Any], i: int) -> Answer:
        together.wait(20)
        return pictures({"b64_json": picture()})

    server.answer = answer
    code, result = bench("--num-prompts", "4", "--num-warmups", "0", "--request-rate", "1000")
    assert (code, result["summary"]["completed"]) == (0, 4)


def test_concurrency_is_kept(server: FakeServer, bench: Any) -> None:
    def answer(body: dict[str, Any], i: int) -> Answer:
        time.sleep(0.02)
        return pictures({"b64_json": picture()})

    server.answer = answer
    words = ("--num-prompts", "9", "--num-warmups", "0", "--max-concurrency", "3")
    code, result = bench(*words)
    assert code == 0 and 1 < server.most <= 3
    assert max(request["due"] for request in result["requests"]) > 0.02, (
        "each is due when its client has its last answer"
    )
    _, result = bench(*words, "--request-rate", "1000")
    assert server.most <= 3 and result["summary"]["client_wait"]["max"] > 0.01


def test_warm_ups_have_the_measured_shapes_and_do_not_count(server: FakeServer, bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "a", "size": "8x8"},
        {"prompt": "b", "size": "16x16"},
        {"prompt": "c", "size": "8x8", "seed": 3},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    code, result = bench("--dataset-path", str(file), "--num-prompts", "4", "--num-warmups", "2", "--seed", "1")
    assert code == 0
    warm, measured = server.bodies[:4], server.bodies[4:]
    assert [body["size"] for body in warm] == ["8x8", "8x8", "16x16", "16x16"]
    sent = sorted((body["prompt"], body["size"], body["seed"]) for body in measured)
    assert sent == [("a", "8x8", 1), ("a", "8x8", 4), ("b", "16x16", 2), ("c", "8x8", 3)]
    assert result["summary"]["requests"] == len(result["requests"]) == 4
    assert result["dataset"]["prompts"] == 3 and len(result["dataset"]["sha256"]) == 64


def test_lines_of_text(server: FakeServer, bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a cat\n\n  zwei Hunde  \n", encoding="utf-8")
    assert bench("--dataset-path", str(file), "--num-prompts", "3", "--num-warmups", "0")[0] == 0
    assert sorted(body["prompt"] for body in server.bodies) == ["a cat", "a cat", "zwei Hunde"]


def test_what_came_is_counted(server: FakeServer, bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = lambda body, i: pictures({"b64_json": picture()}, {"url": "http://elsewhere/x.png"})
    _, result = bench("--num-prompts", "5", "--goodput", "e2el:60000")
    summary = result["summary"]
    assert (summary["completed"], summary["outputs"], summary["attainment"]) == (5, 10, 1.0)
    assert summary["output_throughput"] == pytest.approx(10 / summary["duration"])
    assert summary["pixel_throughput"] == pytest.approx(5 * 32 / summary["duration"])
    assert summary["goodput"] == summary["request_throughput"]
    latencies = [request["latency"] for request in result["requests"]]
    assert summary["latency"]["max"] == max(latencies) and summary["latency"]["p50"] == sorted(latencies)[2]
    printed = capsys.readouterr().out
    assert "5 of 5" in printed and "p95" in printed and "goodput" in printed


KINDS = {
    "http_429_queue_full": refusal(429, "queue_full"),
    "http_500": (500, "text/plain", b"oh"),
    "invalid_answer": (200, "application/json", b"{"),
    "no_picture": pictures(),
    "broken_picture": pictures({"b64_json": "aGVsbG8="}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_failures_are_told_by_kind(server: FakeServer, bench: Any, kind: str) -> None:
    server.answer = lambda body, i: pictures({"b64_json": picture()}) if i == 0 or i > 3 else KINDS[kind]
    words = ("--num-prompts", "6", "--goodput", "e2el:60000")
    code, result = bench(*words)
    summary = result["summary"]
    assert (code, summary["completed"], summary["failed"], summary["errors"]) == (1, 3, 3, {kind: 3})
    assert summary["attainment"] == 0.5
    server.bodies.clear()
    assert bench(*words, "--allow-failures")[0] == 0


def test_an_answer_that_does_not_come(server: FakeServer, bench: Any) -> None:
    release = threading.Event()

    def answer(body: dict[str, Any], i: int) -> Answer:
        release.wait(20)
        return pictures({"b64_json": picture()})

    server.answer = answer
    code, result = bench("--num-prompts", "1", "--num-warmups", "0", "--request-timeout", "0.1")
    release.set()
    assert (code, result["summary"]["errors"]) == (1, {"timeout": 1})


def test_a_stream(server: FakeServer, bench: Any) -> None:
    part = {"type": "image_generation.partial_image", "b64_json": picture()}
    done = {"type": "image_generation.completed", "b64_json": picture()}
    progress = {"type": "image_generation.progress", "step": 1}
    server.answer = lambda body, i: events(progress, part, part, done, "[DONE]")
    code, result = bench("--num-prompts", "2", "--stream", "--goodput", "ttfp:60000", "e2el:60000")
    summary = result["summary"]
    assert (code, summary["outputs"], summary["attainment"]) == (0, 2, 1.0)
    assert 0 < summary["first"]["max"] <= summary["latency"]["max"]
    assert all(body["stream"] is True for body in server.bodies)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("stream_error", events({"type": "error", "error": {"message": "no"}})),
        ("no_picture", events({"type": "image_generation.partial_image", "b64_json": picture()})),
        ("invalid_answer", events("{")),
    ],
)
def test_a_stream_that_goes_wrong(server: FakeServer, bench: Any, kind: str, sent: Answer) -> None:
    server.answer = lambda body, i: sent
    code, result = bench("--num-prompts", "2", "--stream", "--num-warmups", "0")
    assert (code, result["summary"]["errors"]) == (1, {kind: 2})


def test_ctrl_c_reports_what_was_measured(server: FakeServer, bench: Any) -> None:
    release = threading.Event()

    def answer(body: dict[str, Any], i: int) -> Answer:
        if i == 2:
            os.kill(os.getpid(), signal.SIGINT)
        if i >= 2:
            release.wait(20)
        return pictures({"b64_json": picture()})

    server.answer = answer
    code, result = bench("--num-prompts", "9", "--num-warmups", "0", "--max-concurrency", "1")
    release.set()
    summary = result["summary"]
    assert (code, summary["completed"], summary["failed"], summary["unfinished"]) == (130, 2, 0, 7)


def test_a_server_that_lists_no_models(server: FakeServer, bench: Any) -> None:
    server.models = (404, "text/html", b"<p>no</p>")
    code, result = bench("--num-prompts", "1")
    assert (code, result["model"]) == (0, None) and "model" not in server.bodies[0]


def test_nobody_is_there(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.http.server_close()
    assert main(["bench", "serve", "--base-url", server.url]) == 1
    assert server.url in capsys.readouterr().err


def test_a_warm_up_that_fails_ends_it(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = lambda body, i: refusal(400, "invalid_value")
    assert main(["bench", "serve", "--base-url", server.url, "--quiet"]) == 1
    assert "http_400_invalid_value" in capsys.readouterr().err and len(server.bodies) == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--base-url", "127.0.0.1:80"], "--base-url"),
        (["--base-url", "ftp://x"], "--base-url"),
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--dataset-path", "/no/such/file"], "--dataset-path"),
        (["--goodput", "fast:1"], "--goodput"),
        (["--goodput", "e2el:-1"], "--goodput"),
        (["--goodput", "ttfp:1"], "--goodput"),
        (["--goodput", "ttft:1", "--stream"], "--goodput"),
        (["--goodput", "ttfa:1", "--stream", "--endpoint", "/v1/chat/completions"], "--goodput"),
        (["--speak"], "--speak"),
        (["--voice", "a", "--endpoint", "/v1/chat/completions"], "--voice"),
        (["--size", "8x8", "--endpoint", "/v1/audio/speech"], "--size"),
        (["--endpoint", "/v1/audio/speech", "--extra-body", '{"response_format": "mp3"}'], "--extra-body"),
        (["--output", "/no/such/folder/x.json"], "--output"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--endpoint", "/v1/nothing"], "--endpoint"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["bench", "serve", *words]) == 2
    except SystemExit as ended:  # argparse's own refusals
        assert ended.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{\n", '{"size": "8x8"}\n', "[1]\n", '{"prompt": 1}\n'])
def test_a_dataset_that_cannot_be_used(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert main(["bench", "serve", "--dataset-path", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_no_torch_and_no_server_is_imported() -> None:
    program = (
        "import sys, polymux.bench.run; print([m for m in ('torch', 'fastapi', 'polymux.omni') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_quantiles_lie_between_the_nearest_values() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], q) for q in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert Spread.of([]) is None
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, 5.0, 5.0)


def test_goodput_counts_those_that_met_all_objectives() -> None:
    def done(latency: float, first: float) -> Record:
        return Record(0, 0.0, 0.0, latency, first, 200, outputs=1)

    records = [
        done(1.0, 0.1),
        done(3.0, 0.1),
        done(1.0, 0.9),
        Record(0, 0.0, 0.0, 1.0, error="http_500"),
        Record(0, 0.0),
    ]
    summary = summarize(records, 2.0, {"e2el": 2.0, "ttfp": 0.5})
    assert (summary.goodput, summary.attainment, summary.unfinished) == (0.5, 0.25, 1)
    nothing = summarize([], 0.0, {"e2el": 2.0})
    assert (nothing.request_throughput, nothing.goodput, nothing.attainment, nothing.latency) == (0.0, 0.0, None, None)
