"""What is noted of each request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Record:
    """Times are seconds from the begin of the measurement."""

    index: int
    due: float  # when it was to be sent
    sent: float | None = None  # None: never
    latency: float | None = None  # to the end of the answer, or to the error
    first: float | None = None  # to the first picture of a stream
    status: int | None = None  # of HTTP
    error: str | None = None  # its kind; None: it succeeded
    message: str | None = None
    outputs: int = 0
    pixels: int = 0

    @property
    def succeeded(self) -> bool:
        return self.latency is not None and self.error is None

    @property
    def failed(self) -> bool:
        return self.error is not None
