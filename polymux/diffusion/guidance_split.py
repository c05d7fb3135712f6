"""The calls of a step on several ranks: each runs a part of them, and all get all results.

Two ways. Groups of calls that came together in one round are dealt out, one to each rank. A single group that can run
as one is cut along its samples, each rank takes some, and the results are put together again. So the branches of
guidance are divided, whether a pipeline calls its denoiser for each of them or once for all, and so are the samples of
several requests. Everything else runs on every rank alike.

All ranks are in the same state before and after, whatever goes wrong in between: what fails on one rank alone is tried
on all of them undivided, and what then fails on one fails on all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from polymux.diffusion.call import Call
from polymux.diffusion.merging import NotMergeable, joined, samples_of
from polymux.diffusion.runner import Runner, is_out_of_memory
from polymux.diffusion.timing import Stopwatch
from polymux.diffusion.tracebacks import drop_frames
from polymux.errors import ErrorInfo, from_info, info_of
from polymux.parallel.sharing import NotShareable, Sharing

log = logging.getLogger(__name__)


class GuidanceSplit:
    """Executes calls, as `Runner` does. `ranks`: that divide them; `everyone`: that must agree."""

    def __init__(self, runner: Runner, ranks: Sharing, everyone: Sharing, may_split: Callable[[Call], bool]) -> None:
        self.runner, self.ranks, self.everyone, self._may_split = runner, ranks, everyone, may_split
        self.undivided: set[str] = set()  # components that proved to be so
        self.divided = 0  # rounds that were

    def parts(self, calls: list[Call]) -> int:
        """In how many parts a group may be cut."""
        head = calls[0]
        if head.component.name in self.undivided or not self._may_split(head):
            return 1
        return sum(samples_of(call.arguments).count for call in calls)

    def execute(self, calls: Sequence[Call]) -> None:
        """Run all calls; afterwards each has, on every rank, a result or an error."""
        if not calls:
            return
        sound = [call for call in calls if self.runner.unchanged(call)]
        if sound and not self._divided(sound):
            self.runner.execute(sound)
        self._agree(sound)

    def _divided(self, calls: list[Call]) -> bool:
        """Whether that is how they ran. If not, they are as they were."""
        if self.ranks.size == 1:
            return False
        random = {call.owner: call.owner.random for call in calls}
        places = 1 + max(call.place for call in calls)
        if places > 1:
            done = self._beside_each_other(calls, places)
        else:
            done = self.parts(calls) >= self.ranks.size and self._in_parts(calls)
        self.divided += done
        if not done:
            for call in calls:
                call.done, call.result, call.error, call.drew = False, None, None, False
                call.owner.random = random[call.owner]
        return done

    def _beside_each_other(self, calls: list[Call], places: int) -> bool:
        watch = Stopwatch(self.runner.device)
        mine = self.ranks.rank % places
        own = [call for call in calls if call.place == mine]
        self.runner.execute(own)
        try:
            told = self.ranks.share([_outcome(call) for call in own])
        except NotShareable:
            return self._give_up(calls, "what it returns cannot be sent to other ranks")
        if any(drew for its in told for _, _, drew in its):
            return self._give_up(calls, "it draws random numbers")
        seconds = watch.stop()
        for place in range(places):
            theirs = [call for call in calls if call.place == place]
            if place == mine or not theirs:
                continue
            for call, (result, error, _) in zip(theirs, told[place], strict=True):
                call.finish(result) if error is None else call.fail(from_info(error))
            for owner, call in {call.owner: call for call in theirs}.items():
                if not any(other.owner is owner for other in own):
                    owner.spent(call, seconds)
            self.runner.log.add(theirs[0], len(theirs), seconds)
        return True

    def _in_parts(self, calls: list[Call]) -> bool:
        """Each rank computes some of the samples."""
        total, rank, size = self.parts(calls), self.ranks.rank, self.ranks.size
        begin, end = total * rank // size, total * (rank + 1) // size
        merger = self.runner.merger
        result, problem, memory = None, "", False
        try:
            arguments = merger.merge(calls) if len(calls) > 1 else calls[0].arguments
            result = self.runner.run(calls, merger.rows(calls, arguments, begin, end))
        except Exception as error:  # a model may raise anything; whether it was the cutting will show
            drop_frames(error)
            problem, memory = f"{type(error).__name__}: {error}", is_out_of_memory(error)
        try:
            told = [its[0] for its in self.ranks.share([(result, problem, memory, calls[0].drew)])]
            if any(drew for *_, drew in told):
                return self._give_up(calls, "it draws random numbers")
            if failed := [its for its in told if its[1]]:
                return False if any(out for *_, out, _ in failed) else self._give_up(calls, failed[0][1])
            whole = joined([its[0] for its in told], samples_of(calls[0].arguments).listed)
            answers = [whole] if len(calls) == 1 else merger.split(calls, whole)
        except (NotMergeable, NotShareable) as error:
            return self._give_up(calls, str(error) or "what it returns cannot be sent to other ranks")
        for call, answer in zip(calls, answers, strict=True):
            call.finish(answer)
        return True

    def _give_up(self, calls: list[Call], why: str) -> bool:
        name = calls[0].component.name
        log.warning("%s: its calls cannot be divided among ranks (%s); from now on all run all of them", name, why)
        self.undivided.add(name)
        return False

    def _agree(self, calls: list[Call]) -> None:
        """What has failed on some rank has failed on all."""
        own = [None if call.error is None else _info(call.error) for call in calls]
        for told in self.everyone.tell(own):
            for call, error in zip(calls, told, strict=True):
                if error is not None and call.error is None:
                    call.result = None
                    call.fail(from_info(error))


def _info(error: BaseException) -> ErrorInfo:
    return info_of(error) if isinstance(error, Exception) else info_of(RuntimeError(str(error)))


def _outcome(call: Call) -> tuple[Any, ErrorInfo | None, bool]:
    return call.result, None if call.error is None else _info(call.error), call.drew
