"""A request's output in the making: one pipeline call as a coroutine.

The session owns a shallow copy of the pipeline with its own schedulers, guiders and random state, so nothing that a
pipeline stores on itself reaches another request. It is suspended whenever it needs the result of a component call.
Which call runs when is not decided here.
"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from polymux.diffusion.call import Call, CallOwner, Place, Span, Tap, TorchState, tensors_in
from polymux.diffusion.component import Component, SessionGreenlet
from polymux.diffusion.deferred import Deferred, deferrable, promise, specs_of
from polymux.diffusion.precision import Weights
from polymux.diffusion.progress import StepCounter, count_steps
from polymux.diffusion.random_state import RandomState
from polymux.diffusion.timing import Seconds
from polymux.diffusion.tracebacks import drop_frames
from polymux.diffusion.tuned import AdapterSet
from polymux.errors import GenerationError, NonFiniteOutputError


class Coroutine(greenlet, SessionGreenlet):  # type: ignore[misc]
    """The greenlet of a session."""


class ResultSpecs:
    """What calls return, by the form of their arguments; learnt from calls that ran. Shared by an engine's sessions."""

    def __init__(self, limit: int = 512) -> None:
        self.known: OrderedDict[Hashable, Any] = OrderedDict()
        self.limit = limit

    def get(self, key: Hashable) -> Any:
        return self.known.get(key)

    def learn(self, key: Hashable, result: Any) -> None:
        specs = specs_of(result)
        if deferrable(specs):
            self.known[key] = specs
            while len(self.known) > self.limit:
                self.known.popitem(last=False)


@dataclass(frozen=True)
class SessionSettings:
    """What all sessions of an engine share."""

    device: torch.device
    specs: ResultSpecs
    collect_guidance: bool
    components: Sequence[Component] = ()


@dataclass(eq=False)
class Session(CallOwner):
    """One output of one request. `run` gets the session's own pipeline and returns its result."""

    request_id: str
    index: int  # which of the request's outputs
    seed: int
    settings: SessionSettings
    adapters: AdapterSet = ()
    steps: StepCounter = field(default_factory=StepCounter)
    tap: Tap = field(default_factory=Tap)
    waiting: list[Call] = field(default_factory=list)  # made since the last suspension, not yet in the engine's queue
    result: Any = None
    error: BaseException | None = None
    where: str = ""  # the lines that the error came from
    spans: list[Span] = field(default_factory=list)  # the runs that answered its calls
    own_seconds: float = 0.0  # of its pipeline's own code
    blocked_on: Call | None = None
    coroutine: Coroutine | None = None
    pipeline: Any = None  # its own copy, while it runs
    cancelled: bool = False
    made: int = 0  # calls so far
    casts: dict[Weights, torch.dtype] = field(default_factory=dict)  # of components' weights, while it is suspended

    def open(self, pipeline: Any, run: Callable[[Any], Any], own_copy: Callable[[Any], Any] = copy.copy) -> None:
        """Make the coroutine. Nothing runs until the first `resume`. `own_copy`: makes the session's own pipeline."""

        def body() -> None:
            self.pipeline = own = own_copy(pipeline)
            count_steps(own, self.steps)
            self.tap.attach(own)
            try:
                self.result = run(own)
            finally:
                self.pipeline = None

        self.coroutine = Coroutine(body, getcurrent())
        self.coroutine.handler = self._on_call
        self.company = self.tap.company
        self.random = RandomState.seeded(self.settings.device, self.seed)
        self.torch_state = TorchState.now(self.settings.device.type)

    @property
    def finished(self) -> bool:
        return self.coroutine is None or self.coroutine.dead

    @property
    def computing(self) -> bool:
        """Whether it has come to its denoiser, or a call of its has failed."""
        in_call = self.failure is not None and self.error is self.failure
        return in_call or any(span.phase != "encode" for span in self.spans)

    @property
    def ready(self) -> bool:
        """Whether `resume` would make progress."""
        return not self.finished and (self.blocked_on is None or self.blocked_on.done)

    def resume(self) -> None:
        """Run until the session needs a result that is not there, or ends."""
        self._switch(None)

    def take_calls(self) -> list[Call]:
        """The calls made since the last time."""
        calls, self.waiting = self.waiting, []
        return calls

    def cancel(self) -> None:
        """End it where it stands, if it has not ended, and let go of all but its numbers; batch-mates do not notice."""
        self.cancelled = True
        if not self.finished:
            self._switch(GreenletExit())
        self.coroutine = self.pipeline = self.blocked_on = self.error = self.failure = None
        self.tap = Tap()
        self.waiting.clear()

    def _switch(self, exception: BaseException | None) -> None:
        """Enter the coroutine under its own torch settings, random state and casts; then restore the engine's."""
        assert self.coroutine is not None
        self.coroutine.parent = getcurrent()
        device = self.settings.device
        outside, random_outside = TorchState.now(device.type), RandomState.now(device)
        start = time.perf_counter()
        try:
            with dispatcher_kept():
                self.torch_state.apply(device.type)
                self.random.apply()
                for weights, dtype in self.casts.items():
                    weights.cast(dtype)
                if exception is None:
                    self.coroutine.switch()
                else:
                    self.coroutine.throw(exception)
        except Exception as error:
            self.error, self.where = error, drop_frames(error)
        except BaseException as error:  # it has ended the session all the same
            self.error = error
            raise
        finally:
            self.own_seconds += time.perf_counter() - start
            self.torch_state = TorchState.now(device.type)
            self.random = RandomState.now(device)
            outside.apply(device.type)
            random_outside.apply()
            self._undo_casts()

    def _undo_casts(self) -> None:
        every = [component.weights for component in self.settings.components]
        self.casts = {weights: dtype for weights in every if (dtype := weights.cast_to) is not None}
        for weights in self.casts:
            weights.cast(None)

    def _on_call(self, component: Component, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the coroutine: a component was called."""
        assert self.coroutine is not None
        arguments = settled(component.bind(method, args, kwargs))
        state = TorchState.now(self.settings.device.type)
        adapters = component.tuned.mine(self.adapters)
        call = Call(self, component, method, arguments, state, component.weights.cast_to, adapters, self._place())
        call.number = self.made = self.made + 1
        known = self.tap.answer(call)
        if known is not None:
            return known[0]
        result = self._result_of(call)
        self.tap.note(call, result)
        return result

    def _place(self) -> Place:
        assert self.coroutine is not None
        timestep = self.pipeline.__dict__.get("_current_timestep")  # behind the property that diffusers' pipelines have
        return Place(self.steps.done, self.steps.total, self.coroutine.branch, timestep)

    def _result_of(self, call: Call) -> Any:
        """Have it run; suspends the session now, or when the result is needed."""
        component = call.component
        if call.phase == "decode":
            check_finite(latents_in(call), f"the latents that {component.name} is to decode")
        self.waiting.append(call)
        if not self._may_defer(call):
            self.wait_for(call)
            return checked_result(call)
        form = form_of(component, call)
        specs = self.settings.specs.get(form)
        if specs is None:
            self.wait_for(call)
            self.settings.specs.learn(form, call.result)
            return call.result
        call.keep_arguments()
        return promise(call, specs)

    def _may_defer(self, call: Call) -> bool:
        if not self.settings.collect_guidance or call.state.inference:  # there, no change in place can be noticed
            return False
        return call.component.role == "denoiser" and call.method in call.component.main

    def spent(self, call: Call, seconds: Seconds, calls: int = 1, own: int = 1) -> None:
        step = call.place.step if call.place is not None and call.phase == "denoise" else None
        self.spans.append(Span(call.component.name, call.phase, step, seconds, calls, own))

    def wait_for(self, call: Call) -> None:
        if self.coroutine is None or getcurrent() is not self.coroutine:
            raise GenerationError(f"{call.component.name}: a result that is not there yet was read outside its request")
        self.blocked_on = call
        while not call.done:
            if self.cancelled:  # the pipeline caught the end of its request, and goes on calling
                raise GreenletExit
            with dispatcher_kept():
                self.coroutine.parent.switch()
        self.blocked_on = None
        if call.error is not None:
            raise call.error


def dispatcher_kept() -> torch.inference_mode:
    """Around a switch: whatever mode torch is in afterwards, it goes on in the mode of before.

    A session usually waits in the middle of an operation on a deferred tensor, where the dispatcher leaves out most of
    what it does: gradients, conjugates, the counting of changes. Leaving inference mode restores all of this.
    """
    return torch.inference_mode(torch.is_inference_mode_enabled())


def settled(value: Any) -> Any:
    """Nested arguments with values for deferred tensors. What has none in it stays itself: the callee may fill it."""
    if isinstance(value, Deferred):
        return value.force()
    if type(value) is dict:
        changed = {k: new for k, v in value.items() if (new := settled(v)) is not v}
        return value | changed if changed else value
    if type(value) in (list, tuple):
        items = [settled(v) for v in value]
        return type(value)(items) if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value


def form_of(component: Component, call: Call) -> Hashable:
    """What determines the shapes of a call's result: the shapes and types of what goes in, and the flags."""

    def form(value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return (value.shape, value.dtype, value.device)
        if isinstance(value, (list, tuple)):
            return tuple(form(v) for v in value)
        if isinstance(value, dict):
            return tuple((k, form(v)) for k, v in value.items())
        if value is None or isinstance(value, (bool, int, str)):
            return value
        return id(type(value))

    return (component.name, call.method, call.state, call.weights, form(call.arguments))


def latents_in(call: Call) -> Any:
    """What a decoder gets. The lists and dicts that its parts get hold what it remembers of earlier calls."""
    if call.method in call.component.main:
        return call.arguments
    return [value for value in call.arguments.values() if isinstance(value, torch.Tensor)]


def check_finite(value: Any, what: str) -> None:
    for tensor in tensors_in(value):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteOutputError(f"the model produced NaN or infinity: {what} are not finite")


def checked_result(call: Call) -> Any:
    if call.phase == "decode":
        check_finite(call.result, f"the outputs of {call.component.name}")
    return call.result
