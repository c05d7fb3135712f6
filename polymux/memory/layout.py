"""Flat images of a module's blocks: which tensor stands where, packing, and binding a module's tensors to memory.

Works on plain dense tensors, on any device including meta. What is done with the images is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from polymux.errors import ConfigError
from polymux.memory.base import ALIGN, PAGE, Image, Layout, TensorPlace


def layout_of(module: torch.nn.Module, blocks: Sequence[str]) -> Layout:
    """The layout of `module` whose blocks are the submodules at these paths, in this order. Raises ConfigError."""
    owners: dict[int, set[int]] = {}
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in all_tensors(module):
        check_plain(name, tensor)
        owners.setdefault(id(tensor), set()).add(_block_of(name, blocks))
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    rest = len(blocks)
    members: list[list[int]] = [[] for _ in range(rest + 1)]
    for key, owner in owners.items():
        members[owner.pop() if len(owner) == 1 else rest].append(key)
    images = [
        _image(name, [(tuple(names[key]), tensors[key]) for key in keys])
        for name, keys in zip([*blocks, ""], members, strict=True)
    ]
    return Layout(tuple(images[:-1]), images[-1])


def image_of(named: Iterable[tuple[str, torch.Tensor]]) -> Image:
    """One image of these tensors of a module. Raises ConfigError."""
    tensors: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in named:
        check_plain(name, tensor)
        tensors.setdefault(id(tensor), ([], tensor))[0].append(name)
    return _image("", [(tuple(names), tensor) for names, tensor in tensors.values()])


def all_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer under every name it has."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError for a tensor that is more than its bytes, such as those of some quantized layers."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or tensor.layout != torch.strided or tensor.is_quantized:
        kind = type(tensor).__name__
        raise ConfigError(f"{name} is a {kind}: only plain dense tensors can be moved between memories")


def pack(module: torch.nn.Module, image: Image, out: torch.Tensor) -> None:
    """Write the image of `module`'s tensors into `out` (uint8, at least the image's size, on any device)."""
    for place in image.places:
        place.view(out).copy_(tensor_at(module, place.names[0]))


def move_others(module: torch.nn.Module, places: Iterable[TensorPlace], device: torch.device) -> None:
    """Move all tensors but these to the device."""
    inside = {name for place in places for name in place.names}
    for name, tensor in list(all_tensors(module)):
        if name not in inside and tensor.device != device:
            set_tensor(module, (name,), tensor.to(device))


def bind(module: torch.nn.Module, image: Image, memory: torch.Tensor) -> None:
    """Make the image's tensors of `module` views into `memory` (uint8). Parameters stay the objects they are if they
    can; tensors on the meta device are replaced, under all their names."""
    for place in image.places:
        set_tensor(module, place.names, place.view(memory))


def let_go(module: torch.nn.Module, image: Image, device: torch.device) -> None:
    """Free the memory of the image's tensors. They keep shape and type, say that they are on `device`, and hold NaN (or
    zeros, where the type has none): what is computed with them by mistake does not pass for a result."""
    values: dict[torch.dtype, torch.Tensor] = {}
    for place in image.places:
        if place.dtype not in values:
            value = float("nan") if place.dtype.is_floating_point else 0
            values[place.dtype] = torch.full((), value, dtype=place.dtype, device=device)
        set_tensor(module, place.names, values[place.dtype].expand(place.shape))


def set_tensor(module: torch.nn.Module, names: Iterable[str], value: torch.Tensor) -> None:
    """Give the tensor with these names other memory."""
    made: torch.Tensor | None = None
    for name in names:
        owner, last = _owner_of(module, name)
        old = tensor_at(module, name)
        if old.device.type != "meta":
            old.data = value
            return
        if made is None:
            is_parameter = isinstance(old, torch.nn.Parameter)
            made = torch.nn.Parameter(value, requires_grad=False) if is_parameter else value
        setattr(owner, last, made)


def tensor_at(module: torch.nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer at this path."""
    owner, last = _owner_of(module, name)
    tensor = getattr(owner, last)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _owner_of(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module that has the tensor, and its name there. A layer that has got adapters stands behind the one that adds
    them, which is at its path since."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    while last not in owner._parameters and last not in owner._buffers and "base_layer" in owner._modules:
        owner = owner.get_submodule("base_layer")
    return owner, last


def align(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def _block_of(name: str, blocks: Sequence[str]) -> int:
    return next((i for i, block in enumerate(blocks) if name.startswith(block + ".")), len(blocks))


def _image(name: str, tensors: Iterable[tuple[tuple[str, ...], torch.Tensor]]) -> Image:
    places, offset = [], 0
    for names, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        places.append(TensorPlace(names, tensor.dtype, tuple(tensor.shape), dense_stride(tensor), offset, nbytes))
        offset += align(nbytes, ALIGN)
    return Image(name, tuple(places), align(offset, PAGE))


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if its elements fill their memory without gaps or overlap, else contiguous ones."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return torch.empty(tensor.shape, device="meta").stride()
            expected *= size
    return tensor.stride()
