"""Tensors as arrays that go from stage to stage, and what torch's default generators will draw next.

numpy has no bfloat16: such tensors travel as elements of two bytes without a meaning.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from polymux.diffusion.random_state import RandomState, on_cuda
from polymux.families.graph import Arrays

_RANDOM = ("random.cpu", "random.cuda")
_NAMELESS = np.dtype("V2")


def packed(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """On the host, without a copy where they are there already."""
    return {name: _array(tensor.detach().cpu()) for name, tensor in tensors.items()}


def unpacked(arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors again; they may be written to."""
    return {name: _tensor(array).to(device) for name, array in arrays.items()}


def random_now(device: torch.device) -> Arrays:
    """What is drawn next here, in the words of `split_random`."""
    return _states(RandomState.now(device))


def random_of(seed: int, device: torch.device) -> Arrays:
    """What is drawn next where nothing was drawn since `seed`, in the same words."""
    return _states(RandomState.seeded(device, seed))


def _states(random: RandomState) -> Arrays:
    states = (random.cpu, random.cuda)
    return {name: state.numpy() for name, state in zip(_RANDOM, states, strict=True) if state is not None}


def split_random(arrays: Arrays, device: torch.device) -> tuple[Arrays, RandomState | None]:
    """What is no random state, and the random state; None: it did not travel. Between a CPU and a GPU, the state of the
    latter does not."""
    states = {name: torch.from_numpy(arrays[name].copy()) for name in _RANDOM if name in arrays}
    rest = {name: array for name, array in arrays.items() if name not in _RANDOM}
    if not states:
        return rest, None
    cuda = states.get(_RANDOM[1]) if on_cuda(device) else None
    return rest, RandomState(device, states[_RANDOM[0]], cuda)


def _array(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    if tensor.dtype is torch.bfloat16:
        return np.asarray(tensor.contiguous().view(torch.int16).numpy()).view(_NAMELESS)
    return np.asarray(tensor.numpy())


def _tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
    if array.dtype == _NAMELESS:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
