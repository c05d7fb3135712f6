"""What travels between the stages of a model: chunks, whose tensors are in parcels.

Plain data: where the bytes of a parcel are, and how they get there, is for `polymux.connector`.
"""

from __future__ import annotations

import msgspec


class TensorInfo(msgspec.Struct, frozen=True):
    name: str
    dtype: str  # numpy's word
    shape: tuple[int, ...]


class Inline(msgspec.Struct, frozen=True, tag="inline"):
    """The bytes are in the message itself."""

    data: bytes


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    """The bytes are in memory that a process of this host has open. `token`: what stands in front of them."""

    pid: int
    fd: int
    token: bytes


class Remote(msgspec.Struct, frozen=True, tag="remote"):
    """The bytes are to be had over TCP from whoever listens there, by their token."""

    host: str
    port: int
    token: bytes


class Parcel(msgspec.Struct, frozen=True):
    """Tensors, one after the other as they are listed."""

    tensors: list[TensorInfo]
    nbytes: int
    place: Inline | Shared | Remote
    seconds: float  # that it took to put them there


class Chunk(msgspec.Struct, frozen=True, tag="handed_on"):
    """What a stage hands on to the next one, of one request. Chunks come in order."""

    request_id: str
    part: int  # which part of the request it belongs to: parts begin and end one after the other
    parcel: Parcel
    ends_part: bool
    last: bool  # nothing more comes


class Consumed(msgspec.Struct, frozen=True, tag="consumed"):
    """A chunk is used up, and another one may come. `seconds`: how long it was on its way, put and got."""

    request_id: str
    seconds: float
