"""The stage process seen from the other end of its socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from polymux.config import EngineConfig, stage_environment
from polymux.messages import LENGTH, Abort, Add, Fatal, FromStage, Ready, Start, Stats, Stop, ToStage, frame, from_stage
from polymux.request import Failed, Finished, OmniDiffusionSamplingParams, Progress, Request

FAKE_STAGE = Path(__file__).parent.parent / "orchestrator" / "fake_stage.py"
Wait = Callable[[Callable[[], bool]], None]


class Peer:
    """A stage process and our end of its socket."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", str(FAKE_STAGE), "--fd", str(theirs.fileno())]
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=stage_environment(),
                stderr=subprocess.PIPE,
            )
        self.socket.settimeout(20)

    def send(self, *messages: ToStage) -> None:
        self.socket.sendall(b"".join(map(frame, messages)))

    def receive(self) -> FromStage | None:
        """The next message, or None at the end of the stream."""
        head = self._exactly(LENGTH.size)
        return from_stage.decode(self._exactly(LENGTH.unpack(head)[0])) if head else None

    def all(self) -> list[FromStage]:
        messages = []
        while (message := self.receive()) is not None:
            messages.append(message)
        return messages

    def until_ready(self, model: str = "fake", **engine_args: object) -> list[FromStage]:
        self.send(Start(EngineConfig.from_flat(model=model, **engine_args)))
        messages = [self.receive()]
        while not isinstance(messages[-1], Ready):
            messages.append(self.receive())
            assert messages[-1] is not None, self.stderr()
        return [message for message in messages if message is not None]

    def stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (part := self.socket.recv(size - len(data))):
            data += part
        return data


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.socket.close()
    assert peer.process.wait(10) is not None
    assert peer.process.stderr is not None
    peer.process.stderr.close()


def request(request_id: str, prompt: str = "a", steps: int = 1) -> Add:
    params = OmniDiffusionSamplingParams(num_inference_steps=steps)
    return Add(Request(request_id=request_id, prompt=prompt, params=params))


def test_it_answers_each_request_once_and_stops_when_told(peer: Peer) -> None:
    peer.until_ready()
    peer.send(request("one", steps=2), request("two"), Stop())
    messages = peer.all()
    assert sorted(m.request_id for m in messages if isinstance(m, Finished)) == ["one", "two"]
    assert [m.step for m in messages if isinstance(m, Progress) and m.request_id == "one"] == [1, 2]
    assert peer.process.wait(10) == 0


def test_the_warm_up_is_reported_before_ready(peer: Peer) -> None:
    stats, ready = peer.until_ready()
    assert isinstance(stats, Stats)
    assert stats.stats.steps == 2
    assert isinstance(ready, Ready)


def test_no_warm_up(peer: Peer) -> None:
    stats, _ = peer.until_ready(warmup=False)
    assert isinstance(stats, Stats)
    assert stats.stats.steps == 0


def test_numbers_arrive_before_the_answer_that_they_count(peer: Peer) -> None:
    peer.until_ready(warmup=False)
    peer.send(request("one", steps=3))
    stats = None
    while not isinstance(message := peer.receive(), Finished):
        stats = message if isinstance(message, Stats) else stats
    assert stats is not None
    assert (stats.stats.steps, stats.stats.running, stats.stats.waiting) == (3, 0, 0)


def test_a_request_that_the_engine_does_not_take_fails_alone(peer: Peer) -> None:
    peer.until_ready(warmup=False)
    peer.send(request("1", "picky"), request("2", "odd"), request("3", "fail"), request("4"), Stop())
    ends = {m.request_id: m for m in peer.all() if isinstance(m, (Finished, Failed))}
    assert [type(ends[i]) for i in "1234"] == [Failed, Failed, Failed, Finished]
    errors = [end.error for end in ends.values() if isinstance(end, Failed)]
    assert {(e.kind, e.param) for e in errors} == {("InvalidRequestError", "height"), ("GenerationError", None)}
    assert peer.process.wait(10) == 0


def test_abort(peer: Peer) -> None:
    peer.until_ready(warmup=False)
    peer.send(request("long", steps=10**6), request("short", steps=3), Abort("long"), Abort("unknown"), Stop())
    ends = [m for m in peer.all() if isinstance(m, (Finished, Failed))]
    assert [(type(end), end.request_id) for end in ends] == [(Failed, "long"), (Finished, "short")]


@pytest.mark.parametrize(("model", "kind"), [("missing", "CheckpointError"), ("bug", "GenerationError")])
def test_what_keeps_it_from_loading_is_told(peer: Peer, model: str, kind: str) -> None:
    peer.send(Start(EngineConfig.from_flat(model=model)))
    (fatal,) = peer.all()
    assert isinstance(fatal, Fatal)
    assert fatal.error.kind == kind
    assert peer.process.wait(10) == 1


def test_an_exception_out_of_a_step_is_the_end(peer: Peer) -> None:
    peer.until_ready()
    peer.send(request("1", "crash"))
    *_, fatal = peer.all()
    assert isinstance(fatal, Fatal)
    assert "device-side assert" in fatal.error.message
    assert peer.process.wait(10) == 1
    assert "Traceback" in peer.stderr()


@pytest.mark.parametrize("data", [frame(Stop()), frame(Abort("x")), b"\0\0\0\5hello", b"\0\0\0\0"])
def test_a_first_message_that_is_no_start(peer: Peer, data: bytes) -> None:
    peer.socket.sendall(data)
    (fatal,) = peer.all()
    assert isinstance(fatal, Fatal)
    assert peer.process.wait(10) == 1


def test_garbage_later_on(peer: Peer) -> None:
    peer.until_ready()
    peer.socket.sendall(LENGTH.pack(3) + b"\xc1\xc1\xc1")
    *_, fatal = peer.all()
    assert isinstance(fatal, Fatal)


@pytest.mark.parametrize("when", ["before start", "loading", "idle", "in a step"])
def test_it_is_gone_when_the_other_end_is(peer: Peer, when: str) -> None:
    if when == "loading":
        peer.send(Start(EngineConfig.from_flat(model="never")))
    elif when != "before start":
        peer.until_ready()
    if when == "in a step":
        peer.send(request("1", "hang"))
    peer.socket.close()
    assert peer.process.wait(5) != 0


def test_it_does_not_wait_for_a_slow_reader(peer: Peer, wait_until: Wait, tmp_path: Path) -> None:
    """Far more events than a socket holds, which nobody reads: the engine comes to the last request all the same."""
    peer.until_ready(warmup=False, max_num_seqs=1000)
    peer.send(*[request(str(i)) for i in range(3000)], request("last", f"touch {tmp_path / 'reached'}"))
    wait_until((tmp_path / "reached").exists)
    peer.send(Stop())
    assert sum(isinstance(m, Finished) for m in peer.all()) == 3001
    assert peer.process.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_left_to_the_parent(peer: Peer, number: signal.Signals) -> None:
    peer.until_ready()
    os.kill(peer.process.pid, number)
    peer.send(request("1"), Stop())
    assert any(isinstance(m, Finished) for m in peer.all())
    assert peer.process.wait(10) == 0


def test_its_children_go_with_it(peer: Peer, wait_until: Wait) -> None:
    peer.until_ready("parent")
    (child,) = psutil.Process(peer.process.pid).children()
    peer.socket.close()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_the_real_stage_imports_no_torch_before_it_has_a_task() -> None:
    code = "import sys, polymux.engine.process; sys.exit('torch' in sys.modules or 'polymux.omni' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=stage_environment()).returncode == 0
