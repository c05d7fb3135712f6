"""A component call: what a session asks the engine to compute.

A call is data: component, method, bound arguments, and the torch state it was made under. It does not know when, with
whom or where it will run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from polymux.diffusion.random_state import RandomState
from polymux.diffusion.timing import Seconds
from polymux.diffusion.tuned import AdapterSet
from polymux.errors import GenerationError

if TYPE_CHECKING:
    from polymux.diffusion.component import Component

Phase = Literal["encode", "denoise", "decode"]


class CallOwner:
    """Whoever makes calls and is resumed with their results: a session."""

    request_id: str
    index: int  # which of the request's outputs
    company: str = "outputs"  # its calls run together with those of owners in the same company only
    failure: BaseException | None = None  # what a call of its raised
    random: RandomState  # of the default generators; a component that draws from them draws from the caller's

    def wait_for(self, call: Call) -> None:
        """Suspend until `call` has run; raises what it raised."""
        raise NotImplementedError

    def spent(self, call: Call, seconds: Seconds, calls: int = 1, own: int = 1) -> None:
        """A run took this long that answered so many calls, `own` of them its own, one of which is `call`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Span:
    """A run that answered calls of a session. `step`: of a denoiser, which step of the session's loop it was for."""

    component: str
    phase: Phase
    step: int | None
    seconds: Seconds  # one object for all sessions whose calls the run answered
    calls: int  # that it answered
    own: int  # of these, the session's


class Tap:
    """Looks on at the calls of a session, and may answer them."""

    company = CallOwner.company

    def attach(self, pipeline: Any) -> None:
        """Before the session begins; `pipeline` is its own copy."""

    def answer(self, call: Call) -> tuple[Any] | None:
        """The result in place of a run of `call`, in a tuple of one; None: it is to be run."""
        return None

    def note(self, call: Call, result: Any) -> None:
        """`call` has returned `result` to the pipeline; its tensors may still be deferred."""


@dataclass(frozen=True)
class Place:
    """Where in its loop a pipeline is when it makes a call."""

    step: int  # from 0
    steps: int  # all of them; 0: the loop has not begun, or does not say
    branch: str | None = None  # of guidance, as the pipeline has named it
    timestep: Any = None  # of the noise schedule, a number or a tensor of one; None: the pipeline does not say


@dataclass(eq=False)
class Call:
    """One call of one component by one session."""

    owner: CallOwner
    component: Component
    method: str
    arguments: dict[str, Any]  # by parameter name; var-keyword arguments are flattened into it
    state: TorchState
    weights: torch.dtype | None = None  # what the component's weights were cast to when it was called
    adapters: AdapterSet = ()  # of the component, switched on for this call
    place: Place | None = None  # in the pipeline's loop
    order: int = 0  # position in the engine's queue
    done: bool = False
    result: Any = None
    error: BaseException | None = None
    drew: bool = False  # random numbers, when it ran alone
    number: int = 0  # among the calls of its owner
    lane: int = 0  # which of the groups that run beside each other it is in
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    @property
    def phase(self) -> Phase:
        return self.component.phase(self.method)

    def finish(self, result: Any) -> None:
        self.done, self.result = True, result

    def fail(self, error: BaseException) -> None:
        self.done, self.error = True, error
        self.owner.failure = error

    def keep_arguments(self) -> None:
        """A call that runs later than it was made must see what was passed then: copy containers, watch tensors."""
        self.arguments = containers_copied(self.arguments)
        self.versions = [(t, t._version) for t in tensors_in(self.arguments) if not t.is_inference()]

    def check_arguments(self) -> None:
        for tensor, version in self.versions:
            if tensor._version != version:
                raise GenerationError(
                    f"{self.component.name}: an argument of shape {tuple(tensor.shape)} was changed in place between "
                    "the call and its use; this pipeline's guidance calls must not be collected"
                )


@dataclass(frozen=True)
class TorchState:
    """Thread-wide torch settings that belong to the caller: a call runs under those it was made under."""

    grad: bool
    inference: bool
    autocast: bool
    autocast_dtype: torch.dtype
    default_dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> TorchState:
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.get_default_dtype(),
        )

    def apply(self, device_type: str) -> None:
        """All but inference mode, which can only be entered and left."""
        torch.set_grad_enabled(self.grad)
        torch.set_autocast_enabled(device_type, self.autocast)
        torch.set_autocast_dtype(device_type, self.autocast_dtype)
        torch.set_default_dtype(self.default_dtype)

    @contextmanager
    def active(self, device_type: str) -> Iterator[None]:
        """Run what follows under these settings; afterwards those of before hold again."""
        outside = TorchState.now(device_type)
        with torch.inference_mode(self.inference):
            self.apply(device_type)
            try:
                yield
            finally:
                outside.apply(device_type)


def containers_copied(value: Any) -> Any:
    """Nested dicts, lists and tuples anew, with the same things in them."""
    if type(value) is dict:
        return {k: containers_copied(v) for k, v in value.items()}
    return type(value)(map(containers_copied, value)) if type(value) in (list, tuple) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_in(item)]
    return []
