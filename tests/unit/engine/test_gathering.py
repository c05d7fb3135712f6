"""Sockets between hosts: who may come, and who is waited for."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from polymux.engine import ray_stage
from polymux.engine.gathering import Gathering, come
from polymux.errors import ConfigError, StageDeadError

HOST = "127.0.0.1"


def test_those_who_know_the_secret_have_their_places() -> None:
    gathering = Gathering(HOST)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(gathering.wait_for, [0, 1], 10.0)
        strangers = [
            come(gathering.address, b"?" * len(gathering.secret), 0),
            come(gathering.address, gathering.secret, 7),
            socket.create_connection(gathering.address),
        ]
        strangers[2].close()
        ours = [come(gathering.address, gathering.secret, place) for place in (1, 0)]
        places = found.result(timeout=20)
    assert sorted(places) == [0, 1]
    for place, end in ((1, ours[0]), (0, ours[1])):
        end.sendall(b"hello")
        assert places[place].recv(5) == b"hello"
    assert [end.recv(1) for end in strangers[:2]] == [b"", b""]
    for end in (*strangers, *ours, *places.values()):
        end.close()


def test_one_that_does_not_come() -> None:
    gathering = Gathering(HOST)
    with come(gathering.address, gathering.secret, 0), pytest.raises(StageDeadError, match=r"\[1\] have not come"):
        gathering.wait_for([0, 1], 0.2)
    with pytest.raises(StageDeadError, match="cannot be reached"):
        come(gathering.address, gathering.secret, 0)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'polymux\[ray\]'") as caught:
        ray_stage._ray()
    assert caught.value.param == "worker_backend"
