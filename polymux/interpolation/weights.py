"""From a file to the network: the sizes are read off the weights, and every tensor must be there, and no other.

The names are those of the released weights, with or without the "module." in front that parallel training leaves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from polymux.errors import CheckpointError
from polymux.interpolation.network import FlowNetwork, Layout
from polymux.loading.source import single_file

PREFIX = "module."
KNOB = "frame_interpolation_model_path"


def load_network(name: str, cache_dir: str | None, device: torch.device) -> FlowNetwork:
    """`name`: a file, a folder or a hub id. In float32, whatever the file has. Raises CheckpointError."""
    file = single_file(name, cache_dir, KNOB)
    try:
        return network_of(load_file(file)).to(device)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{KNOB}={name!r}: {file.name}: {error}", param=KNOB) from None


def network_of(state: Mapping[str, Tensor]) -> FlowNetwork:
    """Raises ValueError with the tensors that are missing, too many, or of another shape."""
    tensors = {name.removeprefix(PREFIX): tensor.to(torch.float32, copy=True) for name, tensor in state.items()}
    with torch.device("meta"):
        network = FlowNetwork(layout_of({name: tuple(tensor.shape) for name, tensor in tensors.items()}))
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    _refuse("missing", sorted(wanted.keys() - tensors.keys()))
    _refuse("unknown", sorted(tensors.keys() - wanted.keys()))
    _refuse("of another shape", [name for name in wanted if tuple(tensors[name].shape) != wanted[name]])
    _refuse("not finite", [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())])
    network.load_state_dict(tensors, assign=True)
    return network.eval().requires_grad_(False)


def layout_of(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """The sizes that these shapes stand for. Raises ValueError if they are not of such a network."""
    first, last = shapes.get("encode.cnn0.weight", ()), shapes.get("encode.cnn3.weight", ())
    blocks = {int(match[1]) for name in shapes if (match := re.match(r"block(\d)\.", name))}
    widths = [shapes.get(f"block{number}.conv0.1.0.weight", ()) for number in range(len(blocks))]
    if len(first) != 4 or len(last) != 4 or not widths or any(len(width) != 4 for width in widths):
        raise ValueError("these are not the weights of such a network: block0, block1, ... and encode are expected")
    return Layout(encoder=first[0], features=last[1], widths=tuple(width[0] for width in widths))


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise ValueError(f"{len(names)} tensors are {what}: {', '.join(names[:4])}{more}")
