"""Between a module and a packed file: what stands where in the file, the bytes to write, and the way back.

The first block of a file is the rest: all that is in no block of the module. Buffers are kept too, those that are
computed when a module is made as well as those that a checkpoint holds, so that a module that gets its tensors from a
file is the one that was written, whoever built it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from polymux.errors import CacheError
from polymux.memory.base import ALIGN, PAGE, Image, Layout, TensorPlace
from polymux.memory.layout import align, all_tensors, tensor_at
from polymux.memory.runtime_cache.layout import TENSOR_ALIGNMENT, BlockSpec, FileLayout, PlacedBlock, TensorSpec
from polymux.memory.runtime_cache.publish import ReadTensor

assert ALIGN == TENSOR_ALIGNMENT, "an image in a file is an image in a slot"

CODES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
}
"""safetensors' names of torch's dtypes."""

DTYPES = {code: dtype for dtype, code in CODES.items()}


def file_layout(layout: Layout) -> FileLayout:
    """Where a module's tensors stand in a packed file. Raises CacheError if they cannot be packed as they are."""
    return FileLayout.of(
        BlockSpec(image.name, tuple(map(_spec, image.places))) for image in (layout.rest, *layout.blocks)
    )


def module_layout(file: FileLayout) -> Layout:
    """The images that a packed file holds, for binding and streaming."""
    rest, *blocks = map(_image, file.placed)
    return Layout(tuple(blocks), rest)


def reader(module: torch.nn.Module) -> ReadTensor:
    """Reads a module's tensors as bytes. Raises CacheError if two of them share memory."""
    _refuse_aliases(all_tensors(module))

    def read(name: str) -> memoryview:
        tensor = tensor_at(module, name).detach().to("cpu").contiguous()
        return tensor.reshape(-1).view(torch.uint8).numpy().data

    return read


def check_fits(module: torch.nn.Module, layout: Layout) -> None:
    """Raise CacheError if a file's tensors are not all those that the module has, by name and shape."""
    wanted = {name: tuple(tensor.shape) for name, tensor in all_tensors(module)}
    held = {place.names[0]: place.shape for image in (layout.rest, *layout.blocks) for place in image.places}
    if wanted == held:
        return
    name = min(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
    raise CacheError(
        f"tensor {name!r} has shape {_shape(held.get(name))} in the entry, "
        f"{type(module).__name__} needs {_shape(wanted.get(name))}"
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


def _spec(place: TensorPlace) -> TensorSpec:
    name = place.names[0]
    if len(place.names) > 1:
        raise CacheError(f"tensor {name!r} is tied to {place.names[1]!r}")
    if place.stride != torch.empty(place.shape, device="meta").stride():
        raise CacheError(f"tensor {name!r} is not contiguous: strides {list(place.stride)}")
    if place.dtype not in CODES:
        raise CacheError(f"tensor {name!r}: dtype {place.dtype} is not supported")
    return TensorSpec(name, CODES[place.dtype], place.shape)


def _image(block: PlacedBlock) -> Image:
    places = tuple(
        TensorPlace(
            names=(tensor.spec.name,),
            dtype=DTYPES[tensor.spec.dtype],
            shape=tensor.spec.shape,
            stride=torch.empty(tensor.spec.shape, device="meta").stride(),
            offset=tensor.offset,
            nbytes=tensor.spec.nbytes,
        )
        for tensor in block.tensors
    )
    end = max((place.offset + place.nbytes for place in places), default=0)
    return Image(block.name, places, align(end, PAGE))


def _refuse_aliases(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in tensors if tensor.numel()
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(ranges):
        if start < end:
            raise CacheError(f"tensors {name!r} and {other!r} share memory")
