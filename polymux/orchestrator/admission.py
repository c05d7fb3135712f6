"""Whether a request may go to the stage: room first, then the request itself. Decides before any model work.

Pure functions; what a valid request is stands in `polymux.validation`.
"""

from __future__ import annotations

import math

from polymux.config import EngineConfig
from polymux.errors import QueueFullError
from polymux.request import Capabilities, Request
from polymux.validation import validate

LONGEST_RETRY_S = 60  # clients commonly do not believe more


def admit(
    request: Request, capabilities: Capabilities, config: EngineConfig, in_flight: int, seconds_until_room: float
) -> None:
    """Raises InvalidRequestError, or QueueFullError if `in_flight` requests are as many as there may be.

    `seconds_until_room`: when one of them is likely to end, which the error passes on.
    """
    validate(request, capabilities, config.limits)  # first: a request that can never succeed should not be retried
    if in_flight >= room(config):
        running, queued = config.scheduler.max_num_seqs, config.scheduler.max_queue
        each, replicas = "(--max-num-seqs)", config.replicas.data_parallel_size
        if replicas > 1:
            each = f"in each of {replicas} replicas {each}"
        raise QueueFullError(
            f"{in_flight} requests are in flight: allowed are {running} running {each} "
            f"and {queued} waiting (--max-queue)",
            retry_after_s=min(max(math.ceil(seconds_until_room), 1), LONGEST_RETRY_S),
        )


def room(config: EngineConfig) -> int:
    """How many requests there may be at once, running and waiting."""
    return config.scheduler.max_num_seqs * config.replicas.data_parallel_size + config.scheduler.max_queue
