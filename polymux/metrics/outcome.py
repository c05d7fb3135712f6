"""How a request can end."""

from __future__ import annotations

from typing import Literal

Outcome = Literal["completed", "failed", "aborted", "refused"]
OUTCOMES: tuple[Outcome, ...] = ("completed", "failed", "aborted", "refused")
