"""Where the time of one request went, component by component and step by step: what a request gets that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class ComponentTime(msgspec.Struct, frozen=True):
    """Of the runs of one component in one phase that answered calls of the request. `seconds`: of these runs, in full;
    `share`: of each run the part that the request's calls were of all calls that it answered."""

    component: str
    phase: str
    runs: int
    seconds: float
    share: float


class StepTime(msgspec.Struct, frozen=True):
    """Of the runs of denoisers in one step, of all outputs of the request together. `calls`: what the largest of these
    runs answered, of all requests."""

    step: int  # from 0
    runs: int
    calls: int
    seconds: float
    share: float


class Profile(msgspec.Struct, frozen=True):
    """In seconds. `total` is from the request's arrival to its end: `queue`, and the rest, of which `computing` are the
    runs of components that answered its calls, each once, however many of its outputs were in it. `pipeline` is the
    pipeline's own code: schedulers, pictures, and waiting for the device where it reads what that computes; on a GPU
    some of that time is of the runs, too. `other` is what is left: runs of other requests alone, and the way out."""

    total: float
    queue: float
    computing: float
    pipeline: float
    other: float
    components: list[ComponentTime]
    steps: list[StepTime]


def lines_of(profile: Profile) -> Iterator[str]:
    """For people."""
    parts = (f"{name} {getattr(profile, name):.3f}" for name in ("queue", "computing", "pipeline", "other"))
    yield f"seconds: {profile.total:.3f} ({', '.join(parts)})"
    for part in profile.components:
        yield f"{part.phase} {part.component}: {part.seconds:.3f} in {_runs(part.runs)}{_share(part)}"
    for step in profile.steps:
        yield f"step {step.step}: {step.seconds:.3f} in {_runs(step.runs)}{_share(step)}"


def _runs(number: int) -> str:
    return f"{number} run{'s' if number > 1 else ''}"


def _share(time: ComponentTime | StepTime) -> str:
    return "" if time.share == time.seconds else f", its share {time.share:.3f}"
