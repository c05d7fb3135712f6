"""A call with arguments of one form, recorded once and replayed, from tensors that stay where they are to others.

What records is a `Recorder`: on a GPU a CUDA graph, which repeats kernels at the addresses that they had. So whatever
they read must stay: inputs are copied into tensors of the recording's own, and tensors that were there before, such as
tables that a model keeps for the size it saw last, are held. Which calls are recorded is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import torch

from polymux.diffusion.call import tensors_in
from polymux.diffusion.compiled_blocks import CompiledBlocks
from polymux.diffusion.constants import Constants
from polymux.diffusion.rehearsal import NotRecordable, Rehearsal

Arguments = dict[str, Any]
Plain = Callable[[Arguments], Any]  # the call, as it runs without a recording
CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)


class Recorder(Protocol):
    """Makes what can be replayed; `held`: bytes of the device that all of it holds."""

    held: int

    def record(self, run: Callable[[], Any], within: AbstractContextManager[Any]) -> tuple[Callable[[], None], Any]:
        """The run that is recorded is made `within`. What runs it again, and the result, whose tensors each run fills
        anew. Raises RuntimeError."""
        ...

    def forget(self) -> None:
        """Everything that was recorded is gone."""
        ...


class CudaRecorder:
    """Graphs of one device, which share memory for what lies between their inputs and outputs: one runs at a time, and
    its outputs are copied before another one runs."""

    def __init__(self, device: torch.device) -> None:
        self.held, self._device = 0, device
        self._aside: torch.cuda.Stream | None = None
        self._pool: Any = None  # of the graphs that there are

    def record(self, run: Callable[[], Any], within: AbstractContextManager[Any]) -> tuple[Callable[[], None], Any]:
        with torch.cuda.device(self._device):
            return self._record(run, within)

    def _record(self, run: Callable[[], Any], within: AbstractContextManager[Any]) -> tuple[Callable[[], None], Any]:
        here = torch.cuda.current_stream()
        aside = self._aside = self._aside or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):  # what is chosen or allocated at a stream's first run must not be recorded
            run()
        here.wait_stream(aside)
        graph, pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        try:
            # thread_local: another thread copies outputs to the host meanwhile
            with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
                before = torch.cuda.memory_reserved()
                with within:
                    result = run()
        except RuntimeError:
            self._mend(here, pool)
            raise
        self._pool = pool
        self.held += max(torch.cuda.memory_reserved() - before, 0)
        return graph.replay, result

    def forget(self) -> None:
        self.held, self._pool = 0, None  # memory of graphs that are gone is not recorded into again

    def _mend(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """A recording that has failed may leave its stream the current one, and the allocator and the default generator
        in the belief that it goes on. Whether it does differs between versions of torch."""
        index = torch.cuda.current_device()
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # it knows already
            torch._C._cuda_endAllocateToPool(index, pool)
        self._pool = None  # what is recorded later has memory of its own
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())


class Recording:
    """Of calls of one form. `plain` must be the same function for all of them."""

    def __init__(
        self, plain: Plain, arguments: Arguments, recorder: Recorder, compiled: CompiledBlocks | None = None
    ) -> None:
        """`compiled`: what of the denoiser runs as compiled code. Raises NotRecordable, and RuntimeError for what the
        recorder cannot do."""
        with torch.inference_mode(False):  # tensors that may be written to under any settings
            self._arguments = _mapped(arguments, _like)
        self._inputs = tensors_in(self._arguments)
        if not self._inputs:
            raise NotRecordable("it has no tensor")
        self._constants = Constants(self._inputs[0].device)
        with nullcontext() if compiled is None else compiled.apart(self._constants.left):
            with nullcontext() if compiled is None else compiled.eagerly():
                self._held = self._observed(plain)
            again = self._constants.repeat()
            self._replay, self._result = recorder.record(lambda: plain(self._arguments), again)
        self.nbytes = sum(tensor.nbytes for tensor in self._inputs)

    def _observed(self, plain: Plain) -> list[torch.Tensor]:
        """What the call reads beside its arguments. Raises NotRecordable."""
        versions = [tensor._version for tensor in self._inputs]
        with self._constants:
            plain(self._arguments)
        with self._constants.repeat(), Rehearsal() as rehearsal:
            result = plain(self._arguments)
        if versions != [tensor._version for tensor in self._inputs]:
            raise NotRecordable("it changes its arguments in place")
        copied(result)  # raises if it cannot be
        return list(rehearsal.outside.values())

    def run(self, arguments: Arguments) -> Any:
        """The result for arguments of this form, in tensors that nobody else has."""
        for mine, given in zip(self._inputs, tensors_in(arguments), strict=True):
            mine.copy_(given)
        self._replay()
        return copied(self._result)


def form_of(value: Any, device: torch.device) -> Hashable:
    """Calls whose arguments have the same form differ only in what their tensors hold. Raises NotRecordable."""
    if isinstance(value, torch.Tensor):
        if value.device.type != device.type or value.layout != torch.strided:
            raise NotRecordable(f"an argument is a tensor on {value.device}, {value.layout}")
        return (value.shape, value.dtype)
    if value is None or isinstance(value, CONSTANTS):
        return (type(value), value)
    if type(value) in (list, tuple, torch.Size):
        return (type(value), *(form_of(item, device) for item in value))
    if type(value) is dict:
        return (dict, *((name, form_of(item, device)) for name, item in value.items()))
    raise NotRecordable(f"an argument is a {type(value).__name__}")


def copied(result: Any) -> Any:
    """A result in tensors of its own. Raises NotRecordable if it has parts of other types."""
    if isinstance(result, torch.Tensor):
        return result.clone()
    if isinstance(result, dict):
        return type(result)(**{name: copied(part) for name, part in result.items()})
    if type(result) in (list, tuple):
        return type(result)(copied(part) for part in result)
    if result is None or isinstance(result, CONSTANTS):
        return result
    raise NotRecordable(f"a result is a {type(result).__name__}")


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {name: _mapped(item, change) for name, item in value.items()}
    return type(value)(_mapped(item, change) for item in value) if type(value) in (list, tuple) else value


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """With the same values, and in the same order of memory unless elements share some."""
    return torch.empty_like(tensor).copy_(tensor)
