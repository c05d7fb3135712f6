"""A session's own copy of a pipeline of diffusers: what holds state is copied, and weights are shared."""

from __future__ import annotations

import copy
from typing import Any

from diffusers import SchedulerMixin

STATEFUL = ("scheduler", "guider")  # words in the names of parts that have state of their own


def own_copy(pipeline: Any) -> Any:
    """A shallow copy whose stateful parts and containers are its own. Weights are shared."""
    own = copy.copy(pipeline)
    for name, part in list(vars(pipeline).items()):  # some are not among the registered components
        if isinstance(part, SchedulerMixin) or any(word in name for word in STATEFUL):
            setattr(own, name, copy.deepcopy(part))
        elif type(part) in (dict, list, set):
            own.__dict__[name] = copy.copy(part)
    return own
