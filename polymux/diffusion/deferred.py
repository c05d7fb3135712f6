"""Results of calls that have not run yet.

A step of a guided pipeline calls its denoiser two or three times and combines the results. The first calls return
`Deferred` tensors: they know their shape and type, views of them are deferred too, and the first operation that needs
their values suspends the session until the call has run. So a session reaches the engine with all calls of its step
together, whatever the pipeline does with them, and nothing has to be known about the pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from polymux.diffusion.call import Call
from polymux.errors import GenerationError

aten = torch.ops.aten

# Operations whose results are views of their first argument and do not read its values.
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.expand.default,
    aten.alias.default,
    aten.detach.default,
}


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it exists."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


class Deferred(torch.Tensor):
    """A tensor whose values are `read()` once `call` has run."""

    call: Call
    read: Callable[[], torch.Tensor]
    value: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, call: Call, spec: TensorSpec, read: Callable[[], torch.Tensor]) -> Deferred:
        self: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.stride, dtype=spec.dtype, device=spec.device
        )
        self.call, self.read, self.value = call, read, None
        return self

    def force(self) -> torch.Tensor:
        """The values; suspends the session until they exist."""
        if self.value is None:
            if not self.call.done:
                self.call.owner.wait_for(self.call)
            if self.call.error is not None:
                raise self.call.error
            value = self.read()
            if value.shape != self.shape or value.dtype != self.dtype:
                raise self._unfit(f"promised {tuple(self.shape)} {self.dtype}, got {tuple(value.shape)} {value.dtype}")
            self.value = value
        return self.value

    def _unfit(self, why: str) -> GenerationError:
        name = self.call.component.name
        return GenerationError(f"{name}: {why}; this pipeline's guidance calls must not be collected")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in VIEWS and not args[0].call.done:
            return _deferred_view(func, args[0], args[1:], kwargs)
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], Deferred):
            raise args[0]._unfit(f"{func} would change the shape of a result in place")
        return func(*forced(args), **forced(kwargs))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Deferred({tuple(self.shape)}, {self.dtype}, done={self.call.done})"

    # These read memory directly and never reach __torch_dispatch__.
    def numpy(self, **options: Any) -> Any:
        return self.force().numpy(**options)

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.force().__array__(*args, **options)  # type: ignore[no-untyped-call]

    def __dlpack__(self, **options: Any) -> Any:
        return self.force().__dlpack__(**options)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.force(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.force().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __format__(self, spec: str) -> str:
        return format(self.force(), spec)

    def tolist(self) -> Any:
        return self.force().tolist()

    def data_ptr(self) -> int:
        return self.force().data_ptr()


def _deferred_view(func: Any, base: Deferred, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    views = func(like, *args, **kwargs)

    def view(spec: torch.Tensor, pick: Callable[[Any], torch.Tensor]) -> Deferred:
        known = TensorSpec(tuple(spec.shape), spec.stride(), spec.dtype, base.device)
        return Deferred(base.call, known, lambda: pick(func(base.force(), *args, **kwargs)))

    if isinstance(views, torch.Tensor):
        return view(views, lambda out: out)
    return [view(spec, lambda out, i=i: out[i]) for i, spec in enumerate(views)]  # type: ignore[misc]


def forced(tree: Any) -> Any:
    """The same tree with every deferred tensor in it replaced by its values."""
    return tree_map_only(Deferred, Deferred.force, tree)


def specs_of(result: Any) -> Any:
    """The shape of a call's result: the same structure with a TensorSpec for every tensor; None if it has none."""
    if isinstance(result, torch.Tensor):
        return TensorSpec.of(result)
    if isinstance(result, tuple) and type(result) is tuple:
        return tuple(specs_of(item) for item in result)
    if isinstance(result, dict):
        return type(result)(**{k: specs_of(v) for k, v in result.items()})
    return None


def deferrable(specs: Any) -> bool:
    """Whether a result of this shape can be promised: tensors in tuples and output classes."""
    if isinstance(specs, TensorSpec):
        return True
    if isinstance(specs, tuple):
        return bool(specs) and all(deferrable(s) for s in specs)
    return isinstance(specs, dict) and bool(specs) and all(deferrable(s) for s in specs.values())


def promise(call: Call, specs: Any, path: tuple[Any, ...] = ()) -> Any:
    """A result of the given shape whose tensors are deferred."""
    if isinstance(specs, TensorSpec):
        return Deferred(call, specs, lambda: _at(call.result, path))
    if isinstance(specs, tuple):
        return tuple(promise(call, s, (*path, i)) for i, s in enumerate(specs))
    return type(specs)(**{k: promise(call, s, (*path, k)) for k, s in specs.items()})


def _at(result: Any, path: tuple[Any, ...]) -> torch.Tensor:
    for key in path:
        result = result[key]
    assert isinstance(result, torch.Tensor)
    return result
