"""The calls of a step on several ranks: each runs a part of them, and all get all results.

Two ways. Groups of calls that came together in one round are dealt out, one to each rank. A single group that can run
as one is cut along its samples, each rank takes some, and the results are put together again. So the branches of
guidance are divided, whether a pipeline calls its denoiser for each of them or once for all, and so are the samples of
several requests. Everything else runs on every rank alike.

All ranks are in the same state before and after, whatever goes wrong in between: what does not work divided is tried
undivided on all of them, and what then fails on one has failed on all. Where ranks work on one call together, a failure
of some of them alone cannot be mended: the others wait for what will not come.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polymux.diffusion.call import Call
from polymux.diffusion.merging import NotMergeable, joined, samples_of
from polymux.diffusion.runner import Runner, is_out_of_memory, tell_owners
from polymux.diffusion.timing import Stopwatch
from polymux.diffusion.tracebacks import drop_frames
from polymux.errors import PolymuxError, StageDeadError, from_info, info_of
from polymux.parallel.sharing import NotShareable, Sharing

log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # of a rank that has failed, with those that have worked on the same call


@dataclass(frozen=True)
class Circles:
    """Which ranks do what together. divide: each runs other calls; tied: work on one call of this component, when it is
    divided, and when it is not; None: nobody does; everyone: all."""

    divide: Sharing
    everyone: Sharing
    tied: Callable[[Call, bool], Sharing | None]


class Part(NamedTuple):
    """What became of one rank's part."""

    result: Any
    problem: str = ""
    memory: bool = False  # it was that
    drew: bool = False  # random numbers


class GuidanceSplit:
    """Executes calls, as `Runner` does. `give_up` ends this process, or raises: the ranks have come apart."""

    def __init__(
        self,
        runner: Runner,
        circles: Circles,
        may_split: Callable[[Call], bool],
        give_up: Callable[[PolymuxError], None],
    ) -> None:
        self.runner, self.circles, self.give_up = runner, circles, give_up
        self.undivided: set[str] = set()  # components that proved to be so
        self.divided = 0  # rounds that were
        self._may_split, self._dividing = may_split, False
        runner.settle = self._settle

    def parts(self, calls: list[Call]) -> int:
        """In how many parts a group may be cut."""
        head = calls[0]
        if head.component.name in self.undivided or not self._may_split(head):
            return 1
        return sum(samples_of(call.arguments).count for call in calls)

    def execute(self, calls: Sequence[Call]) -> None:
        """Run all calls; afterwards each has, on every rank, a result or an error."""
        sound = [call for call in calls if self.runner.unchanged(call)]
        if not sound:
            return
        why = self._divided(sound) if self.circles.divide.size > 1 else ""
        if why is None:
            self.divided += 1
            return
        self.runner.execute(sound)
        if self.circles.tied(sound[0], False) is None:
            self._agree(sound)
        if why and all(call.error is None for call in sound):
            name = sound[0].component.name
            log.warning("%s: its calls cannot be divided among ranks (%s); all run all of them from now on", name, why)
            self.undivided.add(name)

    def _divided(self, calls: list[Call]) -> str | None:
        """None: that is how they ran. Else they are as they were: why it cannot be; "", if it may be another time."""
        places = 1 + max(call.lane for call in calls)
        if places == 1 and self.parts(calls) < self.circles.divide.size:
            return ""
        random = {call.owner: call.owner.random for call in calls}
        self._dividing = True
        try:
            why = self._beside_each_other(calls, places) if places > 1 else self._in_parts(calls)
        except (NotMergeable, NotShareable) as error:
            why = str(error) or "what it returns cannot be sent to other ranks"
        finally:
            self._dividing = False
        if why is not None:
            for call in calls:
                call.done, call.result, call.drew = False, None, False
                call.owner.random = random[call.owner]
        return why

    def _beside_each_other(self, calls: list[Call], places: int) -> str | None:
        """Each rank runs one of the groups."""
        merger, watch = self.runner.merger, Stopwatch(self.runner.device)
        groups = [[call for call in calls if call.lane == place] for place in range(places)]
        mine = self.circles.divide.rank % places
        own = groups[mine]
        part = self._part(own, lambda: merger.merge(own) if len(own) > 1 else own[0].arguments)
        told = [its[0] for its in self.circles.divide.share([part])][:places]
        if any(its.problem for its in told):
            return ""  # it may be one request's fault
        if any(its.drew for its in told):
            return "it draws random numbers"
        answers = [merger.split(g, t.result) if len(g) > 1 else [t.result] for g, t in zip(groups, told, strict=True)]
        seconds = watch.stop()
        for place, group in enumerate(groups):
            for call, answer in zip(group, answers[place], strict=True):
                call.finish(answer)
            if place != mine:
                self.runner.log.add(group[0], len(group), seconds)
                tell_owners(group, seconds, but=[call.owner for call in own])
        return None

    def _in_parts(self, calls: list[Call]) -> str | None:
        """Each rank computes some of the samples."""
        merger, divide = self.runner.merger, self.circles.divide
        total = self.parts(calls)
        begin, end = total * divide.rank // divide.size, total * (divide.rank + 1) // divide.size

        def arguments() -> dict[str, Any]:
            merged = merger.merge(calls) if len(calls) > 1 else calls[0].arguments
            return merger.rows(calls, merged, begin, end)

        told = [its[0] for its in divide.share([self._part(calls, arguments)])]
        if any(its.drew for its in told):
            return "it draws random numbers"
        if failed := [its for its in told if its.problem]:
            return "" if any(its.memory for its in failed) else failed[0].problem
        whole = joined([its.result for its in told], samples_of(calls[0].arguments).listed)
        answers = [whole] if len(calls) == 1 else merger.split(calls, whole)
        for call, answer in zip(calls, answers, strict=True):
            call.finish(answer)
        return None

    def _part(self, calls: list[Call], arguments: Callable[[], dict[str, Any]]) -> Part:
        made: dict[str, Any] | None = None
        try:
            made = arguments()
            result = self.runner.run(calls, made)
        except Exception as error:  # a model may raise anything; whether the dividing was at fault will show
            drop_frames(error)
            if made is None:  # it has not run: ranks that need this one to run theirs must hear of it
                self._settle(calls[0], error)
            return Part(None, f"{type(error).__name__}: {error}", is_out_of_memory(error))
        return Part(result, drew=calls[0].drew)

    def _settle(self, call: Call, error: Exception | None) -> None:
        """After a run, before anything else is tried: the ranks that work on one call must have the same to try."""
        circle = self.circles.tied(call, self._dividing)
        if circle is None or circle.size == 1:
            return
        what = f"{call.component.name} failed on some ranks and not on others, which cannot go on"
        impatience = threading.Timer(PATIENCE_S, self.give_up, [StageDeadError(f"{what}: {error}")])
        if error is not None:
            impatience.start()
        try:
            worked = circle.tell(error is None)
        except RuntimeError as lost:
            self.give_up(StageDeadError(f"{call.component.name}: the other ranks do not answer: {lost}"))
            raise
        finally:
            impatience.cancel()
        if len(set(worked)) > 1:
            self.give_up(StageDeadError(what if error is None else f"{what}: {error}"))

    def _agree(self, calls: list[Call]) -> None:
        """What has failed on some rank has failed on all."""
        own = [info_of(call.error) if isinstance(call.error, Exception) else None for call in calls]
        for told in self.circles.everyone.tell(own):
            for call, error in zip(calls, told, strict=True):
                if error is not None and call.error is None:
                    call.result = None
                    call.fail(from_info(error))
