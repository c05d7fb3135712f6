"""What GET /metrics shows: the list of it (`catalog`), what fills it, and the page that explains it.

One `Metrics` per orchestrator, each with a registry of its own, so that several live in one process.
"""

from polymux.metrics.metrics import CONTENT_TYPE, Metrics
from polymux.metrics.outcome import OUTCOMES, Outcome

__all__ = ["CONTENT_TYPE", "OUTCOMES", "Metrics", "Outcome"]
