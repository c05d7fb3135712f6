"""Results that ranks tell each other: any structure of tensors, from each rank to all.

Tensors go from device to device; what else there is of a result (its structure, shapes, numbers, errors) goes ahead,
between the hosts, so that everybody knows what to expect. Knows neither calls nor models.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


class NotShareable(Exception):
    """Something in a result is neither a tensor nor can be pickled. Raised on all ranks, or on none."""


@dataclass(frozen=True)
class _Form:
    """A tensor that goes by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Output:
    """A dict or an output class of one of the libraries, which is one too."""

    kind: type
    items: dict[str, Any]


class Sharing:
    """Among the ranks of a group, all of which must call the same things in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.rank, self.size = group.rank(), group.size()

    def tell(self, note: object) -> list[Any]:
        """What each rank says, by rank; small things that can be pickled. Touches no device."""
        notes: list[Any] = [None] * self.size
        dist.all_gather_object(notes, note, group=self._group)
        return notes

    def share(self, mine: Sequence[Any]) -> list[list[Any]]:
        """The results of each rank, by rank; this rank's own as they are. Raises NotShareable."""
        tensors: list[torch.Tensor] = []
        forms = [_taken_apart(result, tensors) for result in mine]
        try:
            note: bytes | None = pickle.dumps(forms)
        except Exception:  # whatever an object raises that does not want to be pickled
            note = None
        notes = self.tell(note)
        if None in notes:
            raise NotShareable
        told = [forms if rank == self.rank else pickle.loads(note) for rank, note in enumerate(notes)]
        theirs = self._exchange([tensors if rank == self.rank else self._places(its) for rank, its in enumerate(told)])
        return [
            list(mine) if rank == self.rank else [_put_together(form, theirs[rank]) for form in its]
            for rank, its in enumerate(told)
        ]

    def _places(self, forms: list[Any]) -> list[torch.Tensor]:
        return [torch.empty(form.shape, dtype=form.dtype, device=self._device) for form in _forms_in(forms)]

    def _exchange(self, tensors: list[list[torch.Tensor]]) -> list[Iterator[torch.Tensor]]:
        """Each rank sends its own, and fills the others'."""
        works = []
        for rank, its in enumerate(tensors):
            source = dist.get_global_rank(self._group, rank)
            for tensor in its:
                if tensor.numel():
                    data = tensor.reshape(-1).view(torch.uint8)
                    works.append(dist.broadcast(data, source, group=self._group, async_op=True))
        for work in works:
            if work is not None:
                work.wait()
        return [iter(its) for its in tensors]


def _taken_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The structure of a result, with forms in place of its tensors, which are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        sent = value.detach().contiguous()
        tensors.append(sent.clone() if sent.is_inference() else sent)  # collectives count as writing
        return _Form(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return _Output(type(value), {key: _taken_apart(item, tensors) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_taken_apart(item, tensors) for item in value)
    return value


def _forms_in(value: Any) -> Iterator[_Form]:
    """In the order in which the tensors were taken."""
    if isinstance(value, _Form):
        yield value
    elif isinstance(value, _Output):
        yield from _forms_in(list(value.items.values()))
    elif type(value) in (list, tuple):
        for item in value:
            yield from _forms_in(item)


def _put_together(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, _Form):
        return next(tensors)
    if isinstance(value, _Output):
        items = {key: _put_together(item, tensors) for key, item in value.items.items()}
        return items if value.kind is dict else value.kind(**items)
    if type(value) in (list, tuple):
        return type(value)(_put_together(item, tensors) for item in value)
    return value
