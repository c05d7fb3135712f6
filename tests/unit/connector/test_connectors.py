"""Tensors from process to process: what comes out is what went in, and nothing is left of either."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from polymux.connector.base import INLINE_BYTES, Connector
from polymux.connector.choice import make_connector
from polymux.connector.memory import MemoryConnector
from polymux.connector.tcp import TcpConnector
from polymux.errors import ConfigError, StageDeadError
from polymux.parcel import Inline, Parcel, Remote, Shared
from polymux.stage_config import StageConfig

BIG = np.arange(INLINE_BYTES, dtype=np.float32)  # bytes: four times as many

PRODUCER = """
import sys, msgspec, numpy as np
from polymux.connector.memory import MemoryConnector
from polymux.connector.tcp import TcpConnector
connector = {"memory": MemoryConnector, "tcp": TcpConnector}[sys.argv[1]]()
parcel = connector.put("r", {"x": np.arange(2**16, dtype=np.float32)})
sys.stdout.buffer.write(msgspec.msgpack.encode(parcel).hex().encode() + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture(params=[MemoryConnector, TcpConnector])
def connector(request: pytest.FixtureRequest) -> Iterator[Connector[Any]]:
    made: Connector[Any] = request.param()
    yield made
    made.close()


def files() -> int:
    """Those in memory that this process holds open. Others come and go with what other tests have left behind."""
    targets = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            targets.append(os.readlink(fd))
    return sum(target.startswith("/memfd:polymux") for target in targets)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"x": np.zeros((0, 4), np.int64)},
        {"x": np.array(7), "y": np.arange(6, dtype=np.int16).reshape(2, 3).T},
        {"x": BIG, "empty": np.zeros(0), "flags": np.array([True, False])},
        {"x": BIG.reshape(2, -1)[:, ::2], "half": np.ones(9, np.float16)},
    ],
)
def test_what_comes_out_is_what_went_in(connector: Connector[Any], tensors: dict[str, Any]) -> None:
    parcel = connector.put("r", tensors)
    parcel = msgspec.msgpack.decode(msgspec.msgpack.encode(parcel), type=Parcel)  # it travels in a message
    got = connector.get(parcel)
    assert list(got) == list(tensors)
    for name, array in tensors.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(got[name], array)
    assert parcel.nbytes == sum(array.nbytes for array in tensors.values())
    assert isinstance(parcel.place, Inline) == (parcel.nbytes <= INLINE_BYTES)


def test_parcels_are_held_until_they_are_taken_or_forgotten(connector: Connector[Any]) -> None:
    first, second, other = (connector.put(key, {"x": BIG}) for key in ("a", "a", "b"))
    connector.taken("a")
    with pytest.raises(StageDeadError):
        connector.get(first)
    connector.get(second)
    connector.forget("a")
    connector.forget("a")
    connector.taken("a")
    with pytest.raises(StageDeadError):
        connector.get(second)
    connector.get(other)
    connector.close()
    with pytest.raises(StageDeadError):
        connector.get(other)


def test_nothing_is_left() -> None:
    made = MemoryConnector()
    before, shared = files(), set(os.listdir("/dev/shm"))
    for _ in range(3):
        made.put("a", {"x": BIG})
    assert files() == before + 3
    assert set(os.listdir("/dev/shm")) == shared  # it has no name
    made.close()
    assert files() == before


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_whoever_puts_is_killed(kind: str) -> None:
    producer = subprocess.Popen(
        [sys.executable, "-c", PRODUCER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert producer.stdout is not None
    parcel = msgspec.msgpack.decode(bytes.fromhex(producer.stdout.readline().decode()), type=Parcel)
    reader: Connector[Any] = {"memory": MemoryConnector, "tcp": TcpConnector}[kind]()
    assert np.array_equal(reader.get(parcel)["x"], np.arange(2**16, dtype=np.float32))
    producer.send_signal(signal.SIGKILL)
    producer.communicate()
    with pytest.raises(StageDeadError, match="another stage"):
        reader.get(parcel)


def test_a_descriptor_that_is_another_one_by_now_is_noticed() -> None:
    made = MemoryConnector()
    old = made.put("a", {"x": BIG})
    made.taken("a")
    new = made.put("b", {"x": BIG})
    assert isinstance(old.place, Shared) and isinstance(new.place, Shared)
    assert old.place.fd == new.place.fd
    with pytest.raises(StageDeadError):
        made.get(old)
    made.close()


def test_without_the_token_there_is_nothing() -> None:
    made = TcpConnector()
    parcel = made.put("a", {"x": BIG})
    assert isinstance(parcel.place, Remote)
    with socket.create_connection((parcel.place.host, parcel.place.port)) as stranger:
        stranger.sendall(bytes(16))
        assert stranger.recv(100) == bytes(8)
        assert stranger.recv(100) == b""
    with socket.create_connection((parcel.place.host, parcel.place.port)) as rude:
        rude.sendall(b"GET /")
    assert len(made.get(parcel)["x"]) == len(BIG)
    made.close()
    with pytest.raises(StageDeadError):
        made.get(parcel)


def test_an_address_that_is_not_this_hosts() -> None:
    with pytest.raises(ConfigError, match=r"connector_host='192\.0\.2\.1'"):
        TcpConnector("192.0.2.1").put("a", {"x": BIG})


def test_which_one_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(name: str) -> type:
        return type(make_connector(StageConfig(split_stages=True, stage_connector=name)))

    assert [made(name) for name in ("auto", "shared-memory", "tcp")] == [MemoryConnector, MemoryConnector, TcpConnector]
    monkeypatch.delattr(os, "memfd_create")
    assert [made(name) for name in ("auto", "tcp")] == [TcpConnector, TcpConnector]
    with pytest.raises(ConfigError, match="Linux only"):
        made("shared-memory")
