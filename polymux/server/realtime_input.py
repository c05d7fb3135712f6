"""The sound that a realtime session takes in: a buffer with an end, and the turns in it.

Knows samples and positions, no messages.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator

import numpy as np

from polymux.errors import InvalidRequestError
from polymux.media.held import HeldMedia
from polymux.media.voice_activity import Edge, VoiceActivity
from polymux.media.wire import Array
from polymux.server.realtime_protocol import RATE, ServerVad

SHORTEST_MS = 100  # that may be committed
_BLOCK = 1 << 15  # samples of the smallest buffer


def samples_in(text: str, param: str) -> Array:
    """int16, of base64. Raises InvalidRequestError."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError(f"{param}: must be base64", param=param) from None
    if len(data) % 2:
        raise InvalidRequestError(f"{param}: {len(data)} bytes: must be whole 16-bit samples", param=param)
    return np.frombuffer(data, "<i2").astype(np.int16)


def milliseconds(samples: int) -> int:
    return samples * 1000 // RATE


class InputSound:
    """What was appended and neither committed nor dropped. Positions count samples since the session began.

    `held` counts its memory, as that of all media of the server.
    """

    def __init__(self, held: HeldMedia, max_bytes: int) -> None:
        self._held, self._max = held, max_bytes
        self._samples = np.zeros(0, np.int16)
        self._from = self._until = 0  # positions
        self._turns: ServerVad | None = None
        self._activity: VoiceActivity | None = None
        self._began = 0

    @property
    def speaking(self) -> bool:
        return self._activity is not None and self._activity.speaking

    def listen(self, turns: ServerVad | None) -> None:
        """How turns are told from now on; None: they are not."""
        if turns != self._turns:
            self._turns = turns
            self._listen()

    def add(self, samples: Array) -> Iterator[Edge]:
        """The turns that begin and end with it, by the positions of their sound; take each that has ended, before
        going on. Raises InvalidRequestError, and OverloadedError, and then takes nothing."""
        self._append(samples)
        if self._activity is None or self._turns is None:
            return
        padding = self._turns.prefix_padding_ms * RATE // 1000
        for edge in self._activity.add(samples):
            if edge.kind == "began":
                self._began = max(self._from, edge.at - padding)
                yield Edge("began", self._began)
            else:
                yield edge
        if not self._activity.speaking:
            self._drop(self._activity.quiet_until - padding)

    def check(self) -> None:
        """Raises InvalidRequestError if there is too little to be committed."""
        if (length := milliseconds(self._until - self._from)) < SHORTEST_MS:
            raise InvalidRequestError(f"the buffer holds {length} ms of sound: it must be {SHORTEST_MS} at least")

    def take(self) -> Array:
        """All of it, as (1, samples)."""
        taken = self._part(self._from, self._until)
        self.clear()
        return taken

    def take_turn(self, end: int) -> Array:
        """The sound of the turn that has ended at `end`, as (1, samples)."""
        taken = self._part(self._began, end)
        self._drop(end)
        return taken

    def clear(self) -> None:
        self._from = self._until
        self._samples = np.zeros(0, np.int16)
        self._listen()

    def _listen(self) -> None:
        turns = self._turns
        self._activity = None
        if turns is not None:
            self._activity = VoiceActivity(RATE, turns.threshold, turns.silence_duration_ms, self._until)

    def _append(self, samples: Array) -> None:
        length = self._until - self._from
        if 2 * (length + len(samples)) > self._max:
            what = f"the buffer would hold {2 * (length + len(samples))} bytes"
            raise InvalidRequestError(f"audio: {what}: allowed are {self._max} (--max-media-bytes)", param="audio")
        if length + len(samples) > len(self._samples):
            larger = np.empty(max(_BLOCK, 2 * (length + len(samples))), np.int16)
            self._held.add_array(larger)
            larger[:length] = self._samples[:length]
            self._samples = larger
        self._samples[length : length + len(samples)] = samples
        self._until += len(samples)

    def _part(self, start: int, end: int) -> Array:
        part = self._samples[start - self._from : end - self._from].reshape(1, -1).copy()
        self._held.add_array(part)
        return part

    def _drop(self, position: int) -> None:
        """What is before `position`."""
        if position > self._from:
            kept = self._until - position
            self._samples[:kept] = self._samples[position - self._from : self._until - self._from].copy()
            self._from = position
