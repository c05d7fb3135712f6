"""What is noted of each request."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    tokens: int = 0  # of text
    first_text: float | None = None  # to the first piece of text of a stream
    gaps: list[float] = field(default_factory=list)  # from each piece of text to the next one
    sound: float = 0.0  # seconds
    first_sound: float | None = None  # to the first piece of sound of a stream
    underruns: int | None = None  # times that somebody who plays the stream had nothing to play
    silence: float | None = None  # how long these were together

    @property
    def real_time_factor(self) -> float | None:
        """Seconds for each second of sound."""
        return self.latency / self.sound if self.latency is not None and self.sound else None

    @property
    def per_token(self) -> float | None:
        """Seconds for each token of text after the first one."""
        return sum(self.gaps) / (self.tokens - 1) if self.gaps and self.tokens > 1 else None

    @property
    def succeeded(self) -> bool:
        return self.latency is not None and self.error is None

    @property
    def failed(self) -> bool:
        return self.error is not None
