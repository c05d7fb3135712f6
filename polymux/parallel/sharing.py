"""Results that ranks tell each other: anything that can be pickled, from each rank to all.

Tensors, wherever they are in a result, go from device to device; the rest of it (structure, shapes, numbers, errors)
goes ahead, between the hosts, so that everybody knows what to expect. Knows neither calls nor models.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_OWN_DEVICE = "the receiver's"


class NotShareable(Exception):
    """Something in a result is neither a tensor nor can be pickled. Raised on all ranks, or on none."""


class _Form(NamedTuple):
    """A tensor that goes by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


class _Note(NamedTuple):
    """What goes ahead: results without their tensors."""

    pickled: bytes
    forms: list[_Form]


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
        notes: list[_Note | None] = self.tell(_without_tensors(list(mine), tensors))
        told = [note for note in notes if note is not None]
        if len(told) < len(notes):
            raise NotShareable
        sent = [tensors if rank == self.rank else self._places(note.forms) for rank, note in enumerate(told)]
        self._exchange(sent)
        return [
            list(mine) if rank == self.rank else _Whole(note.pickled, sent[rank], self._device).load()
            for rank, note in enumerate(told)
        ]

    def _places(self, forms: Sequence[_Form]) -> list[torch.Tensor]:
        devices = ("cpu" if form.on_host else self._device for form in forms)
        return [torch.empty(f.shape, dtype=f.dtype, device=d) for f, d in zip(forms, devices, strict=True)]

    def _exchange(self, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
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


def _without_tensors(results: list[Any], tensors: list[torch.Tensor]) -> _Note | None:
    """The tensors are appended to `tensors`. None: it cannot be pickled."""
    file = io.BytesIO()
    try:
        _TakingTensors(file, tensors).dump(results)
    except Exception:  # whatever an object raises that does not want to be pickled
        return None
    return _Note(file.getvalue(), [_Form(tuple(t.shape), t.dtype, t.device.type == "cpu") for t in tensors])


class _TakingTensors(pickle.Pickler):
    """Puts the number of a tensor in its place; and nothing in that of a device, which each rank has of its own."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> int | str | None:
        if isinstance(value, torch.device):
            return None if value.type == "cpu" else _OWN_DEVICE
        if not isinstance(value, torch.Tensor):
            return None
        sent = value.detach().contiguous()
        self._tensors.append(sent.clone() if sent.is_inference() else sent)  # collectives count as writing
        return len(self._tensors) - 1


class _Whole(pickle.Unpickler):
    """Puts the tensors back."""

    def __init__(self, pickled: bytes, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors, self._device = tensors, device

    def persistent_load(self, number: int | str) -> torch.Tensor | torch.device:
        return self._device if isinstance(number, str) else self._tensors[number]
