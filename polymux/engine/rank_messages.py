"""What rank 0 of a stage and its other ranks say to each other: frames as between the API process and a stage.

Tensors do not travel like this; ranks exchange them by torch.distributed.
"""

from __future__ import annotations

import msgspec

from polymux.ar.orders import Prepare, Step
from polymux.config import EngineConfig
from polymux.errors import ErrorInfo
from polymux.messages import Abort, Add, Fatal, Sleep, Stop, WakeUp

CallName = tuple[str, str, int, int]  # request, company, output, and the how manieth call of that session


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """First message to a rank: import what you need, and be this one."""

    config: EngineConfig
    rank: int
    leader: int  # the process of rank 0; 0: it is on another host


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Rank 0 is there: this is where the ranks find each other."""

    host: str
    port: int


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """Do these in order, then a step of the engine."""

    orders: list[Add | Abort]


class Round(msgspec.Struct, frozen=True, tag="round"):
    """The calls to run in this step: groups that are run beside each other, each as one."""

    groups: list[list[CallName]]


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """The warm-up is over; nothing of it is to be remembered."""


class Up(msgspec.Struct, frozen=True, tag="up"):
    """This rank has its model loaded."""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """To Sleep and WakeUp: the bytes that others have of it; or why nothing has changed."""

    freed: int
    error: ErrorInfo | None = None


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """This process lives."""


ToRank = Begin | Meet | Tick | Round | Step | Prepare | Warm | Sleep | WakeUp | Stop | Beat
FromRank = Up | Answer | Fatal | Beat

to_rank = msgspec.msgpack.Decoder(ToRank)
from_rank = msgspec.msgpack.Decoder(FromRank)
