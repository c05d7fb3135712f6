"""Runs a group of calls as one, in the engine's own context.

What fails is retried smaller: a group that does not fit in memory, or that fails because of one of its members, is
halved until single calls remain; a component that fails only when calls are merged runs call by call from then on. An
error reaches only the calls that have it when they run alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from accelerate.utils.memory import should_reduce_batch_size

from polymux.diffusion.call import Call, CallOwner
from polymux.diffusion.merging import Merger, NotMergeable
from polymux.diffusion.random_state import RandomState
from polymux.diffusion.run_log import RunLog
from polymux.diffusion.timing import Seconds, Stopwatch
from polymux.diffusion.tracebacks import drop_frames
from polymux.errors import GenerationError, OutOfMemoryError

log = logging.getLogger(__name__)


class Weights(Protocol):
    """Whoever sees to it that a component's weights are on the device while it runs."""

    def before(self, name: str) -> None: ...

    def after(self, name: str) -> None: ...


class InPlace:
    """Weights that are where they are needed, always."""

    def before(self, name: str) -> None:
        return None

    def after(self, name: str) -> None:
        return None


class Around(Protocol):
    """What some components have around their runs: a cache of steps, say. Their calls are not merged."""

    def __contains__(self, name: str) -> bool:
        """Whether the component of this name has it."""
        ...

    def active(self, call: Call) -> AbstractContextManager[None]:
        """Around a run of `call`, of any component."""
        ...


class Nothing:
    """Around nobody."""

    def __contains__(self, name: str) -> bool:
        return False

    def active(self, call: Call) -> AbstractContextManager[None]:
        return nullcontext()


class Way(Protocol):
    """How components run their calls."""

    def run(self, call: Call, arguments: dict[str, Any]) -> Any:
        """The result of `call` with these arguments, which may be those of several."""
        ...

    def forget(self) -> bool:
        """Give back the memory that it keeps for that; whether there was any."""
        ...


class Plainly:
    """Here and now."""

    def run(self, call: Call, arguments: dict[str, Any]) -> Any:
        return call.component.run(call.method, arguments)

    def forget(self) -> bool:
        return False


class Runner:
    """Executes calls and counts them. `unmergeable` names the components that proved so."""

    def __init__(
        self,
        merger: Merger,
        device: torch.device,
        weights: Weights | None = None,
        step_cache: Around | None = None,
        attention: Around | None = None,
    ) -> None:
        self.merger, self.device, self.weights = merger, device, weights or InPlace()
        self.step_cache: Around = Nothing() if step_cache is None else step_cache
        self.attention: Around = Nothing() if attention is None else attention
        self.way: Way = Plainly()
        self.unmergeable: set[str] = set()
        self.settle: Callable[[Call, Exception | None], None] | None = None  # called after each run, with its error
        self.log = RunLog()

    def may_merge(self, name: str) -> bool:
        """Whether calls of the component of this name may run as one."""
        return name not in self.unmergeable and name not in self.step_cache and name not in self.attention

    def execute(self, calls: Sequence[Call]) -> None:
        """Run all calls; afterwards each has a result or an error."""
        sound = [call for call in calls if self.unchanged(call)]
        if len(sound) == 1:
            self._run_alone(sound[0])
        elif sound:
            problem = self._run_together(sound)
            if problem is not None:
                self._run_halves(sound, problem)

    def _run_halves(self, calls: Sequence[Call], problem: Exception) -> None:
        name, middle = calls[0].component.name, len(calls) // 2
        self._free()
        self.execute(calls[:middle])
        self.execute(calls[middle:])
        if is_out_of_memory(problem):
            log.warning("%s: %d calls do not fit in memory together; they ran in parts", name, len(calls))
        elif len(calls) == 2 and all(c.error is None for c in calls):  # each works: being together is what failed
            log.warning("%s: calls cannot be merged (%s); they run one by one from now on", name, problem)
            self.unmergeable.add(name)

    def unchanged(self, call: Call) -> bool:
        """Whether its arguments are what they were when it was made; else it has failed."""
        try:
            call.check_arguments()
        except GenerationError as error:
            call.fail(error)
        return not call.done

    def _run_together(self, calls: Sequence[Call]) -> Exception | None:
        """None if it worked; else what went wrong, and no call is done."""
        try:
            parts = self.merger.split(calls, self.run(calls, self.merger.merge(calls)))
        except Exception as error:  # a model may raise anything, and it may be one member's fault
            drop_frames(error)
            return error
        for call, part in zip(calls, parts, strict=True):
            call.finish(part)
        return None

    def _run_alone(self, call: Call) -> None:
        try:
            call.finish(self.run([call], call.arguments))
        except Exception as error:  # whatever the model raises is the session's to see
            name, where = call.component.name, drop_frames(error)
            if is_out_of_memory(error):
                if self._free():  # it may fit now
                    return self._run_alone(call)
                call.fail(OutOfMemoryError(f"{name}: this request alone does not fit in memory: {error}"))
            else:
                log.info("%s failed with %s\n%s", name, type(error).__name__, where)
                call.fail(error)

    def run(self, calls: Sequence[Call], arguments: dict[str, Any]) -> Any:
        """The component's result for these arguments, which answer the calls. Raises whatever it raises."""
        if self.settle is None:
            return self._run(calls, arguments)
        try:
            result = self._run(calls, arguments)
        except Exception as error:
            self.settle(calls[0], error)
            raise
        self.settle(calls[0], None)
        return result

    def _run(self, calls: Sequence[Call], arguments: dict[str, Any]) -> Any:
        head = calls[0]
        name = head.component.name
        watch = Stopwatch(self.device)
        self.weights.before(name)
        before, outside = head.owner.random, RandomState.now(self.device)
        before.apply()
        head.component.weights.cast(head.weights)
        head.component.tuned.activate(head.adapters)
        try:
            with head.state.active(self.device.type), self.step_cache.active(head), self.attention.active(head):
                compiled = head.component.compiled
                with nullcontext() if compiled is None else compiled.active(head.adapters):
                    result = self.way.run(head, arguments)
        finally:
            after = RandomState.now(self.device)
            outside.apply()
            head.component.weights.cast(None)
            self.weights.after(name)
        if len(calls) == 1:
            head.owner.random, head.drew = after, not after.equals(before)
        elif not after.equals(before):
            raise NotMergeable("it draws random numbers, which are each request's own")
        seconds = watch.stop()
        tell_owners(calls, seconds)
        self.log.add(head, len(calls), seconds)
        return result

    def _free(self) -> bool:
        """Give back what is kept for speed alone, and what the allocator keeps; whether there was any of the first."""
        some = self.way.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return some


def tell_owners(calls: Sequence[Call], seconds: Seconds, but: Collection[CallOwner] = ()) -> None:
    """That a run of these calls took so long: once for all guidance calls of a session."""
    numbers = Counter(call.owner for call in calls)
    for owner, call in {call.owner: call for call in calls}.items():
        if owner not in but:
            owner.spent(call, seconds, len(calls), numbers[owner])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less at once might have worked. The CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and should_reduce_batch_size(error)
    )
