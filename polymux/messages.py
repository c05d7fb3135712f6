"""What the API process and a stage process say to each other.

Frames on a local socket pair: four bytes of length (big-endian), then one msgpack message. The end of the stream means
that the other side is gone.
"""

from __future__ import annotations

import struct

import msgspec

from polymux.config import EngineConfig
from polymux.errors import ErrorInfo, PayloadTooLargeError
from polymux.parcel import Chunk
from polymux.request import Capabilities, Event, Request, StageStats


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First message to a stage: load this."""

    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag="add"):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """An OutputChunk, SoundPiece or Chunk of this request is used up: the stage may send another one."""

    request_id: str


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Finish what is in flight, then give the device's memory back. Level 1: weights to the host; 2: dropped."""

    level: int


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up"):
    """Have the weights in place again."""


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Note what the process does from now on; the trace's file begins with this."""

    prefix: str


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """Write the trace."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish what is in flight, then exit with code 0."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and has made a real generation."""

    capabilities: Capabilities


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The stage cannot start or go on; it exits after this."""

    error: ErrorInfo


class Slept(msgspec.Struct, frozen=True, tag="slept"):
    """The answer to Sleep: the bytes that others have of it; or why nothing has changed."""

    freed: int
    error: ErrorInfo | None = None


class Awake(msgspec.Struct, frozen=True, tag="awake"):
    """The answer to WakeUp: a generation works again; or why it does not, then the model still sleeps."""

    error: ErrorInfo | None = None


class Profiled(msgspec.Struct, frozen=True, tag="profiled"):
    """The answer to StartProfile and StopProfile: the file that was written; or why nothing has changed."""

    file: str | None = None
    error: ErrorInfo | None = None


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    stats: StageStats


ToStage = Start | Add | Abort | Taken | Sleep | WakeUp | StartProfile | StopProfile | Stop | Chunk
FromStage = Ready | Fatal | Slept | Awake | Profiled | Stats | Event

LENGTH = struct.Struct("!I")
MAX_BODY = 2**32 - 1
to_stage = msgspec.msgpack.Decoder(ToStage)
from_stage = msgspec.msgpack.Decoder(FromStage)


def frame(message: ToStage | FromStage) -> bytes:
    """One message as it goes over the socket. Raises PayloadTooLargeError over 4 GiB."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_BODY:
        raise PayloadTooLargeError(f"a message of {len(body)} bytes: allowed between processes are {MAX_BODY}")
    return LENGTH.pack(len(body)) + body
