"""Outputs that nobody waits for: those of a rank that is not rank 0. They end when they are made."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from polymux.diffusion.outputs import RawOutput
from polymux.engine.outbound import Outbound


class NoStream:
    """Implements `outbound.FrameStream`."""

    def __init__(self, outbound: Outbound) -> None:
        self.outbound = outbound

    def put(self, frames: torch.Tensor, start: int, count: int) -> None:
        return None

    def end(self) -> None:
        self.outbound.media.set_result([])


class NoOutputs:
    """Implements `outbound.Outputs`. `chunk_bytes` decides, as on rank 0, which frames leave during the decoding."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes

    def stream(self, request_id: str, output: int) -> NoStream:
        return NoStream(Outbound(request_id, output))

    def send(self, request_id: str, output: int, raw: RawOutput, at_once: bool) -> Outbound:
        outbound = Outbound(request_id, output)
        outbound.media.set_result([])
        return outbound

    def wait(self, outbounds: Iterable[Outbound], seconds: float) -> None:
        return None

    def close(self) -> None:
        return None
