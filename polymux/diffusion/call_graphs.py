"""Which calls of denoisers are recorded and replayed, and which run as they are.

A small denoiser takes less time on a GPU than Python takes to tell the GPU what to do; a recorded call is told at once.
Recorded is a call of a form that comes often: shapes, types, flags, numbers, torch's settings. The first replay runs
beside the call itself and must give the same; if it does not, the denoiser runs as it is from then on. So do calls of a
form that cannot be recorded. A warning says why. How a call is recorded is not known here.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from diffusers.guiders.guider_utils import BaseGuidance

from polymux.compilation_config import Compilation, CompilationConfig
from polymux.diffusion.call import Call, tensors_in
from polymux.diffusion.component import Component
from polymux.diffusion.merging import tokens_of
from polymux.diffusion.random_state import RandomState
from polymux.diffusion.recording import Arguments, CudaRecorder, Recorder, Recording, form_of
from polymux.diffusion.rehearsal import NotRecordable
from polymux.errors import ConfigError

log = logging.getLogger(__name__)

GIB = 2**30
DUE = 5  # times that a form has come when it is recorded: what it costs must come in again
FORMS = 256  # that are remembered, to see which come often
FAILURES = 4  # forms of a denoiser that cannot be recorded; beyond, none is tried any more
RECENT = 256  # runs; what has run among the last ones is not dropped for something new


@dataclass
class _Kept:
    recording: Recording
    used: int  # number of the run that used it last
    proven: bool = False


class CallGraphs:
    """Of the denoisers of one model. `why`: by denoiser, why it has none."""

    def __init__(
        self, settings: Compilation, components: Sequence[Component], device: torch.device, recorder: Recorder
    ) -> None:
        self.settings, self.device, self._recorder = settings, device, recorder
        self.why: dict[str, str] = {}
        self.runs = self.replays = 0  # of calls that may be recorded, and how many were replayed
        self._weights = {c.name: [*c.module.parameters(), *c.module.buffers()] for c in components}
        self._where = {name: _places(tensors) for name, tensors in self._weights.items()}
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()  # the latest used last
        self._refused: dict[str, set[Hashable]] = {}  # forms that cannot be recorded, by denoiser
        self._said: set[tuple[str, str]] = set()
        self._full = False  # there was no memory for one more

    @classmethod
    def apply(
        cls,
        config: CompilationConfig,
        components: Sequence[Component],
        device: torch.device,
        refused: str | None,
    ) -> CallGraphs | None:
        """For components whose weights are in place. `refused`: why none of them is to have any. None: none has.

        Raises ConfigError if graphs were asked for and there can be none.
        """
        settings, reason = config.graphs(device.type)
        denoisers = [component for component in components if component.role == "denoiser"]
        if settings is None:
            why = {c.name: reason for c in denoisers}
        else:
            none = "a CPU has none" if device.type != "cuda" else refused
            problems = {c.name: none or _problem(c, settings) for c in denoisers}
            why = {name: problem for name, problem in problems.items() if problem is not None}
        for name, problem in why.items():
            log.info("graphs: %s: none: %s", name, problem)
        able = [c for c in denoisers if c.name not in why]
        if settings is None or not able:
            if settings is not None and settings.cudagraphs is True:
                reasons = "; ".join(f"{name}: {problem}" for name, problem in why.items()) or "there is no denoiser"
                raise ConfigError(f"compilation_config: cudagraphs: {reasons}", param="compilation_config")
            return None
        most = f" of up to {settings.cudagraph_max_tokens} latent tokens" if settings.cudagraphs == "auto" else ""
        for component in able:
            log.info("graphs: %s: calls%s that come often, as CUDA graphs (%s)", component.name, most, reason)
        return cls(settings, able, device, CudaRecorder(device))

    @property
    def held(self) -> int:
        """Bytes of the device."""
        return self._recorder.held + sum(kept.recording.nbytes for kept in self._kept.values())

    @property
    def kept(self) -> int:
        """How many graphs there are."""
        return len(self._kept)

    def run(self, call: Call, arguments: Arguments) -> Any:
        """The result of `call` with these arguments, which may be those of several."""
        form = self._form(call, arguments)
        if form is None:
            return call.component.run(call.method, arguments)
        self.runs += 1
        kept = self._kept.get(form)
        if kept is not None:
            kept.used = self.runs
            self._kept.move_to_end(form)
            return self._replayed(kept, call, arguments)
        refused = form in self._refused.get(call.component.name, ())
        if refused or not (self._is_due(form) and self._has_room()):
            return call.component.run(call.method, arguments)
        before = RandomState.now(self.device)
        result = call.component.run(call.method, arguments)
        if before.equals(RandomState.now(self.device)):
            self._record(form, call, arguments)
        else:
            self._give_up(call.component.name, "it draws random numbers")
        return result

    def forget(self) -> bool:
        """Drop all graphs, and give their memory back; whether there were any. Calls may be recorded again."""
        some = bool(self._kept)
        self._kept.clear()
        self._seen.clear()
        self._recorder.forget()
        return some

    def _form(self, call: Call, arguments: Arguments) -> Hashable | None:
        """None: a call like this one is never recorded."""
        name, state = call.component.name, call.state
        if name not in self._weights or name in self.why or call.method not in call.component.main:
            return None
        if call.adapters or call.weights is not None or state.grad or state.autocast:
            return None
        most = self.settings.cudagraph_max_tokens
        if self.settings.cudagraphs == "auto" and tokens_of(call.component, arguments) > most:
            return None
        try:
            form = form_of(arguments, self.device)
        except NotRecordable as problem:
            self._say(name, str(problem))
            return None
        places = _places(self._weights[name])
        if places != self._where[name]:
            self.forget()
            self._where[name] = places
        return (name, call.method, state, form)

    def _is_due(self, form: Hashable) -> bool:
        self._seen[form] = self._seen.pop(form, 0) + 1
        if len(self._seen) > FORMS:
            self._seen.popitem(last=False)
        return self._seen[form] >= DUE

    def _has_room(self) -> bool:
        """Whether one more may be recorded. What has not run for long makes room; memory is free when all are gone."""
        if self._full:
            return False
        if self.held >= self.settings.cudagraph_max_gib * GIB:
            latest = next(reversed(self._kept.values()), None)
            if latest is not None and self._is_recent(latest):
                return False
            self.forget()
        if len(self._kept) >= self.settings.cudagraph_max_graphs:
            form, oldest = next(iter(self._kept.items()))
            if self._is_recent(oldest):
                return False
            self._drop(form)
        return True

    def _drop(self, form: Hashable) -> None:
        del self._kept[form]
        if not self._kept:
            self._recorder.forget()  # memory that nobody has is not recorded into again

    def _is_recent(self, kept: _Kept) -> bool:
        return self.runs - kept.used < RECENT

    def _record(self, form: Hashable, call: Call, arguments: Arguments) -> None:
        name, component, start = call.component.name, call.component, time.perf_counter()
        try:
            plain = partial(component.run, call.method)
            recording = Recording(plain, arguments, self._recorder, component.compiled)
        except torch.OutOfMemoryError:
            self._full = True
            self.forget()
            log.warning("graphs: no memory is left for them: calls run as they are from now on")
        except (NotRecordable, RuntimeError) as problem:  # a device or its libraries may refuse anything
            self._refuse(form, name, str(problem).partition("\n")[0])
        else:
            self._kept[form] = _Kept(recording, self.runs)
            seconds, tokens = time.perf_counter() - start, tokens_of(component, arguments)
            log.info("graphs: %s: recorded a call of %d latent tokens, %.2f s", name, tokens, seconds)
            log.info("graphs: %d in %.2f GiB", len(self._kept), self.held / GIB)

    def _replayed(self, kept: _Kept, call: Call, arguments: Arguments) -> Any:
        if kept.proven:
            self.replays += 1
            return kept.recording.run(arguments)
        result = call.component.run(call.method, arguments)
        same = _same(kept.recording.run(arguments), result)
        kept.proven = same is True
        if same is False:
            self._give_up(call.component.name, "a recorded call does not give what the call gives")
        return result

    def _refuse(self, form: Hashable, name: str, why: str) -> None:
        """Calls of one form cannot be recorded; if those of several cannot, no call of that denoiser is any more."""
        refused = self._refused.setdefault(name, set())
        refused.add(form)
        if len(refused) == FAILURES:
            self._give_up(name, why)
        else:
            self._say(name, why)

    def _say(self, name: str, why: str) -> None:
        if (name, why) not in self._said:
            self._said.add((name, why))
            log.warning("graphs: %s: a call runs as it is: %s", name, why)

    def _give_up(self, name: str, why: str) -> None:
        self.why[name] = why
        for form in [form for form in self._kept if isinstance(form, tuple) and form[0] == name]:
            self._drop(form)
        log.warning("graphs: %s runs without from now on: %s", name, why)


def _problem(component: Component, settings: Compilation) -> str | None:
    """Why calls of this denoiser are not recorded; None: they may be."""
    module = component.module
    if component.looped:
        return "each of its calls has memory of its own"
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules()):
        return "there are hooks in it, which a recording would leave out"
    size = sum(t.nbytes for t in {id(t): t for t in chain(module.parameters(), module.buffers())}.values()) / GIB
    if settings.cudagraphs == "auto" and size > settings.cudagraph_max_model_gib:
        return f"its weights are {size:.1f} GiB, and auto takes up to {settings.cudagraph_max_model_gib:g}"
    return None


def hooks_at_times(parts: Iterable[object]) -> str | None:
    """Why denoisers are not the same in all calls: one of a pipeline's parts puts hooks in for some of them."""
    for part in parts:
        if isinstance(part, BaseGuidance) and type(part).prepare_models is not BaseGuidance.prepare_models:
            return f"{type(part).__name__} changes them for some calls"
    return None


def _places(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _same(got: Any, want: Any) -> bool | None:
    """Whether two results are equal to within rounding; None: they are no numbers, which tells nothing."""
    for mine, theirs in zip(tensors_in(got), tensors_in(want), strict=True):
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return False
        if not theirs.is_floating_point():
            if not torch.equal(mine, theirs):
                return False
            continue
        norm = float(theirs.float().norm())
        if not math.isfinite(norm):
            return None
        if not float((mine.float() - theirs.float()).norm()) <= max(1e-3, 4 * torch.finfo(theirs.dtype).eps) * norm:
            return False
    return True
