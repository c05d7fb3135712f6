"""Adds up what the runs of components have taken that answered a request's calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from polymux.diffusion.call import Span
from polymux.profile import ComponentTime, Profile, StepTime


@dataclass
class _Runs:
    """Of one kind, each once: outputs of a request that ran together share a run."""

    seconds: dict[int, float] = field(default_factory=dict)  # by run
    share: float = 0.0
    calls: int = 0

    def add(self, span: Span) -> None:
        seconds = self.seconds.setdefault(id(span.seconds), span.seconds())
        self.share += seconds * span.own / span.calls
        self.calls = max(self.calls, span.calls)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def profile_of(spans: Sequence[Span], total: float, queue: float, pipeline: float) -> Profile:
    """`spans`: of all sessions of the request; they keep the runs' identities while this adds up."""
    components: defaultdict[tuple[str, str], _Runs] = defaultdict(_Runs)
    steps: defaultdict[int, _Runs] = defaultdict(_Runs)
    every = _Runs()
    for span in spans:
        components[span.component, span.phase].add(span)
        if span.step is not None:
            steps[span.step].add(span)
        every.add(span)
    return Profile(
        total=total,
        queue=queue,
        computing=every.total,
        pipeline=pipeline,
        other=max(total - queue - every.total - pipeline, 0.0),
        components=[ComponentTime(*key, len(r.seconds), r.total, r.share) for key, r in components.items()],
        steps=[
            StepTime(step, len(runs.seconds), runs.calls, runs.total, runs.share)
            for step, runs in sorted(steps.items())
        ],
    )
