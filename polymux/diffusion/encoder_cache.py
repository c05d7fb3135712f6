"""Results of encoder calls, kept for equal ones.

Equal are calls of one method of one component with the same arguments (by content), made under the same torch settings,
with the same cast and the same adapters. The first runs; those that come while it waits, and later ones as long as its
result is kept, get a copy. Results are kept on the host, so that they take none of the device's memory and outlive a
component that is moved away; each answer is a copy of its own, so that nothing done to one reaches another. A copy has
the same bits and strides; what cannot be copied like that is not kept.

Not asked are calls of loops, no two of which are equal, calls with arguments that have no content to compare
(generators, key-value caches, arrays) or a lot of it, those of components that draw random numbers, and those that are
made for previews.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from polymux.diffusion.call import Call, CallOwner, tensors_in
from polymux.diffusion.merging import Contents

ENTRY_BYTES = 4096  # about what an entry takes beside its tensors
MAX_ARGUMENT_BYTES = 4 * 2**20  # reading more costs about as much as a small encoder


class NotComparable(Exception):
    """A value without a content that could be compared, or be copied."""


@dataclass(frozen=True)
class Answer:
    """A result on the host."""

    copy: Callable[[], Any]  # a new one, where the first one was
    size: int  # bytes

    @classmethod
    def of(cls, result: Any) -> Answer | None:
        """None: it has parts that cannot be copied."""
        kept: dict[int, _Kept] = {}
        try:
            structure = _kept(result, kept)
        except NotComparable:
            return None
        return cls(lambda: _restored(structure, {}), ENTRY_BYTES + sum(tensor.host.nbytes for tensor in kept.values()))


class EncoderCache:
    """Of one engine. `limit`: bytes of results that are kept, the least recently used go first; 0: it does nothing."""

    def __init__(self, limit: int, contents: Contents) -> None:
        self.limit, self.contents = limit, contents
        self.queries = self.hits = self.size = 0
        self._known: OrderedDict[Hashable, Answer] = OrderedDict()
        self._waiting: dict[Hashable, list[Call]] = {}  # calls without a result; the first of them is to run
        self._random: set[str] = set()  # components that draw random numbers

    def ask(self, calls: Iterable[Call]) -> list[Call]:
        """Answer those that are known, and keep back those that another one will answer; the rest has to run."""
        return [call for call in calls if self._must_run(call)]

    def _must_run(self, call: Call) -> bool:
        key = self._key(call)
        if key is None:
            return True
        self.queries += 1
        if key in self._known:
            self._known.move_to_end(key)
            self._answer(call, self._known[key])
            return False
        waiting = self._waiting.setdefault(key, [])
        waiting.append(call)
        return len(waiting) == 1

    def settle(self, calls: Iterable[Call]) -> list[Call]:
        """After a run of `calls`: answer those that wait for their results. The calls that must run instead."""
        mine = {waiting[0]: key for key, waiting in self._waiting.items()}
        left: list[Call] = []
        for call in calls:
            if call.done and call in mine:
                left += self._settle(call, mine[call])
        return left

    def _settle(self, call: Call, key: Hashable) -> list[Call]:
        _, *others = self._waiting.pop(key)
        if call.drew:
            self._random.add(call.component.name)
        # A component may have changed its arguments in place: they would be others the next time, and so the result.
        sound = call.error is None and not call.drew and self._key(call) == key
        answer = Answer.of(call.result) if sound else None
        if answer is None:
            return others
        for other in others:
            self._answer(other, answer)
        self._keep(key, answer)
        return []

    def forget(self, owner: CallOwner) -> list[Call]:
        """A session has ended. The calls that waited for one of its own, and must run instead."""
        left: list[Call] = []
        for key, waiting in list(self._waiting.items()):
            others = [call for call in waiting if call.owner is not owner]
            if not others:
                del self._waiting[key]
            elif len(others) < len(waiting):
                self._waiting[key] = others
                left += others[:1] if others[0] is not waiting[0] else []
        return left

    def clear(self) -> None:
        """Forget all results: the components are others now."""
        self._known.clear()
        self._random.clear()
        self.size = 0

    def reset(self) -> None:
        """As if nobody had asked."""
        self.clear()
        self.queries = self.hits = 0

    def _answer(self, call: Call, answer: Answer) -> None:
        self.hits += 1
        call.finish(answer.copy())

    def _keep(self, key: Hashable, answer: Answer) -> None:
        if answer.size > self.limit:
            return
        self._known[key] = answer
        self.size += answer.size
        while self.size > self.limit:
            self.size -= self._known.popitem(last=False)[1].size

    def _key(self, call: Call) -> Hashable | None:
        """Equal for equal calls. None: it is not to be asked."""
        component, arguments = call.component, call.arguments
        if self.limit == 0 or component.role != "encoder" or component.looped or component.name in self._random:
            return None
        if call.owner.company != CallOwner.company or call.state.grad or arguments.get("use_cache") is True:
            return None
        if sum(tensor.nbytes for tensor in tensors_in(arguments)) > MAX_ARGUMENT_BYTES:
            return None
        try:
            content = self._content(arguments)
        except NotComparable:
            return None
        return (component.name, call.method, call.state, call.weights, call.adapters, content)

    def _content(self, value: Any) -> Hashable:
        kind = type(value)
        if kind is torch.Tensor and value.layout == torch.strided:
            return (value.shape, value.stride(), value.dtype, value.device, self.contents.digest(value))
        if kind is dict:
            return (kind, tuple((key, self._content(item)) for key, item in value.items()))
        if kind in (list, tuple):
            return (kind, tuple(self._content(item) for item in value))
        if kind is float:
            return (kind, value.hex())  # 0.0 and -0.0 are equal, and not the same
        if value is None or isinstance(value, (bool, int, str, torch.dtype, torch.device)):
            return (kind, value)
        raise NotComparable(kind.__name__)


@dataclass(frozen=True)
class _Kept:
    """A tensor on the host, and where it was."""

    host: torch.Tensor
    device: torch.device


def _kept(value: Any, kept: dict[int, _Kept]) -> Any:
    """A result's structure with tensors on the host in it; `kept` has each tensor once, however often it occurs."""
    kind = type(value)
    if kind is torch.Tensor:
        if id(value) not in kept:
            kept[id(value)] = _on_host(value)
        return kept[id(value)]
    if isinstance(value, dict):
        # Of a key-value cache that nobody asked for nothing is kept, as when merged results are taken apart.
        return (kind, {key: _kept(item, kept) for key, item in value.items() if not isinstance(item, Cache)})
    if kind in (list, tuple):
        return (kind, [_kept(item, kept) for item in value])
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise NotComparable(kind.__name__)


def _on_host(tensor: torch.Tensor) -> _Kept:
    if tensor.layout != torch.strided or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        raise NotComparable("a tensor that is more than its values")
    host = tensor.to("cpu", copy=True)
    if host.stride() != tensor.stride():  # what reads it might round otherwise
        raise NotComparable("a tensor with gaps")
    return _Kept(host, tensor.device)


def _restored(value: Any, made: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, _Kept):
        if id(value) not in made:
            made[id(value)] = value.host.to(value.device, copy=True)
        return made[id(value)]
    if not isinstance(value, tuple):
        return value
    kind, items = value
    if isinstance(items, dict):
        items = {key: _restored(item, made) for key, item in items.items()}
        return items if kind is dict else kind(**items)
    return kind(_restored(item, made) for item in items)
