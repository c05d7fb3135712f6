"""Deferred tensors behave as the tensors that they stand for, and wait as long as they can."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.utils import BaseOutput
from fake_pipeline import Denoiser

from polymux.diffusion.call import Call, CallOwner, TorchState
from polymux.diffusion.component import Component
from polymux.diffusion.deferred import Deferred, TensorSpec, deferrable, forced, promise, specs_of
from polymux.errors import GenerationError

Tensors = Callable[[torch.Tensor], Any]


class Owner(CallOwner):
    """Gives a call its result when somebody waits for it."""

    request_id = "a"

    def __init__(self, result: Any) -> None:
        self.result = result

    def wait_for(self, call: Call) -> None:
        call.finish(self.result)


def call_for(result: Any) -> Call:
    state = TorchState.now("cpu")
    return Call(Owner(result), Component("transformer", Denoiser(), "denoiser"), "forward", {}, state)


def values() -> torch.Tensor:
    return torch.arange(24.0).reshape(2, 3, 4)


def promised() -> tuple[Deferred, Call]:
    call = call_for(values())
    return promise(call, specs_of(values())), call


def plain(result: Any) -> Any:
    """Tensors and arrays as nested lists, with their types."""
    if isinstance(result, (list, tuple)):
        return [plain(item) for item in result]
    if isinstance(result, (torch.Tensor, np.ndarray)):
        return tuple(result.shape), str(result.dtype), result.tolist()
    return result


VIEWS: dict[str, Tensors] = {
    "view": lambda x: x.view(2, 12),
    "reshape": lambda x: x.reshape(6, 4),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "chunk": lambda x: x.chunk(2),
    "split": lambda x: x.split([1, 2], dim=1),
    "tensor_split": lambda x: x.tensor_split(2, dim=2),
    "unbind": lambda x: x.unbind(1),
    "iterate": lambda x: list(x),
    "select": lambda x: x[1],
    "slice": lambda x: x[:, 1:, None, ::2],
    "ellipsis": lambda x: x[..., 0],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "squeeze": lambda x: x[None].squeeze(0),
    "squeeze several": lambda x: x[None, None].squeeze((0, 1)),
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(-1, 1),
    "transposed": lambda x: x.mT,
    "expand": lambda x: x[:1].expand(5, 3, 4),
    "detach": lambda x: x.detach(),
    "same type": lambda x: x.float().contiguous().cpu(),
    "views of views": lambda x: x.chunk(2)[1].unbind(0)[0][1:].unsqueeze(0).permute(2, 1, 0),
}

READS: dict[str, Tensors] = {
    "add": lambda x: x + x,
    "add to a number": lambda x: 1 - x,
    "compare": lambda x: x > 3,
    "other type": lambda x: x.to(torch.float64),
    "reshape that copies": lambda x: x.permute(2, 0, 1).reshape(4, 6),
    "clone": lambda x: x.clone(),
    "deep copy": lambda x: copy.deepcopy(x),
    "copy": lambda x: copy.copy(x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cat": lambda x: torch.cat([x, x[:1], torch.ones(1, 3, 4)]),
    "stack": lambda x: torch.stack([x, x]),
    "norm": lambda x: x.norm(dim=[1, 2], keepdim=True),
    "interpolate": lambda x: torch.nn.functional.interpolate(x, size=8),
    "where": lambda x: torch.where(x > 2, x, 0),
    "mask": lambda x: x[x > 3],
    "as a mask": lambda x: torch.arange(24).reshape(2, 3, 4)[x > 3],
    "strided": lambda x: x.as_strided((2, 2), (1, 2)),
    "out": lambda x: torch.add(x, 1, out=torch.empty(2, 3, 4)),
    "copy into": lambda x: torch.empty(2, 3, 4).copy_(x),
    "assign into": lambda x: torch.zeros(3, 3, 4).index_put_((torch.tensor([0, 2]),), x),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "array of a type": lambda x: np.asarray(x, dtype=np.float64),
    "dlpack": lambda x: torch.from_dlpack(x),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[1, 2, 3].item(),
    "bool": lambda x: [bool(x[0, 0, 0]), bool(x[0, 0, 1])],
    "branch": lambda x: "high" if x.mean() > 3 else "low",
    "float": lambda x: float(x[0, 0, 1]),
    "int": lambda x: int(x[0, 0, 2]),
    "contains": lambda x: [3.0 in x, 99.0 in x],
    "format": lambda x: f"{x[0, 0, 1]:.3f}",
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_waits(name: str) -> None:
    deferred, call = promised()
    views, wanted = VIEWS[name](deferred), VIEWS[name](values())
    assert not call.done
    many = isinstance(wanted, (list, tuple))
    for view, want in zip(views if many else [views], wanted if many else [wanted], strict=True):
        assert (view.shape, view.stride(), view.dtype) == (want.shape, want.stride(), want.dtype)
        assert not call.done
    assert plain(forced(views)) == plain(wanted)
    assert call.done


@pytest.mark.parametrize("name", READS)
def test_a_read_gives_what_the_tensor_gives(name: str) -> None:
    deferred, call = promised()
    assert plain(READS[name](deferred)) == plain(READS[name](values()))
    assert call.done


def test_shape_and_type_are_known_before_the_values() -> None:
    deferred, call = promised()
    assert isinstance(deferred, torch.Tensor) and torch.is_tensor(deferred)
    known = (len(deferred), deferred.ndim, deferred.numel(), deferred.is_contiguous(), deferred.device.type)
    assert known == (2, 3, 24, True, "cpu")
    assert "done=False" in repr(deferred) and not call.done


def test_views_and_their_base_share_memory() -> None:
    deferred, _ = promised()
    before = deferred.chunk(2)[1]
    deferred.mul_(2)
    after = deferred[1]
    after.add_(1)
    before[0, 0] = 0
    wanted = values() * 2
    wanted[1] += 1
    wanted[1, 0] = 0
    assert torch.equal(forced(deferred), wanted)
    assert torch.equal(forced(before), wanted[1:])


def test_arithmetic_in_place_keeps_the_name() -> None:
    deferred, _ = promised()
    same = deferred
    deferred += 1
    deferred[0] = 7
    assert deferred is same
    assert torch.equal(forced(deferred)[1], values()[1] + 1)
    assert bool((deferred[0] == 7).all())


@pytest.mark.parametrize(
    "change", [lambda x: x.unsqueeze_(0), lambda x: x.transpose_(0, 1), lambda x: x.squeeze_(), lambda x: x.resize_(24)]
)
def test_a_change_of_shape_in_place_is_refused(change: Tensors) -> None:
    deferred, _ = promised()
    with pytest.raises(GenerationError, match=r"transformer.*shape.*in place"):
        change(deferred)


def test_deferred_tensors_of_two_calls_meet() -> None:
    first, call = promised()
    other, later = promised()
    total = first - other.chunk(2)[0]
    assert call.done and later.done
    assert torch.equal(total, values() - values()[:1])
    assert torch.equal(torch.cat([first, other, first[:1]]), torch.cat([values(), values(), values()[:1]]))


def test_an_error_meets_every_reader() -> None:
    deferred, call = promised()
    view = deferred[0]
    call.fail(RuntimeError("it broke"))
    for _ in range(2):
        for tensor in (deferred, view):
            with pytest.raises(RuntimeError, match="it broke"):
                tensor.sum()


@pytest.mark.parametrize("given", [torch.zeros(2, 3, 5), torch.zeros(2, 3, 4, dtype=torch.float64)])
def test_another_shape_or_type_than_promised_is_an_error(given: torch.Tensor) -> None:
    deferred = promise(call_for(given), specs_of(values()))
    with pytest.raises(GenerationError, match="promised"):
        deferred.sum()


@dataclass
class Output(BaseOutput):
    sample: torch.Tensor
    extra: torch.Tensor | None = None


def test_results_in_tuples_and_output_classes_are_promised() -> None:
    real = (values(), Output(sample=values() + 1), Output(sample=values() + 2, extra=values() + 3))
    call = call_for(real)
    first, second, third = promise(call, specs_of(real))
    assert isinstance(first, Deferred) and isinstance(second, Output) and isinstance(third, Output)
    assert second.extra is None
    assert second.sample is second["sample"] is second[0]
    assert not call.done
    assert torch.equal(third.sample + third.extra, 2 * values() + 5)
    assert torch.equal(forced(second.sample), values() + 1)


def test_what_can_be_promised() -> None:
    assert deferrable(specs_of(values()))
    assert deferrable(specs_of((values(), (values(),))))
    assert deferrable(specs_of(Output(sample=values())))
    for other in (None, 3, (), {}, [values()], (values(), None), ([values()],), Output(sample=[values()])):
        assert not deferrable(specs_of(other))


def test_a_spec_is_what_the_tensor_is() -> None:
    turned = values().to(torch.float64).permute(2, 0, 1)
    spec = specs_of(turned)
    assert spec == TensorSpec((4, 2, 3), (1, 12, 4), torch.float64, torch.device("cpu"))
    deferred = promise(call_for(turned), spec)
    assert (deferred.shape, deferred.stride()) == (turned.shape, turned.stride())
