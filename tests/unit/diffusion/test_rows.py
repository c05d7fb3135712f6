"""Merged arguments cut along their samples, and results put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from polymux.diffusion.call import Call, CallOwner, TorchState
from polymux.diffusion.component import Component
from polymux.diffusion.merging import Merger, NotMergeable, joined
from polymux.families.base import Padding


class Anything(torch.nn.Module):
    def forward(self, **kwargs: Any) -> Any:
        return kwargs


DENOISER = Component("transformer", Anything(), "denoiser")


def call(**arguments: Any) -> Call:
    return Call(CallOwner(), DENOISER, "forward", arguments, TorchState.now("cpu"))


def parts(calls: list[Call], merger: Merger, size: int) -> list[dict[str, Any]]:
    whole = merger.merge(calls) if len(calls) > 1 else calls[0].arguments
    return [merger.rows(calls, whole, i, i + 1) for i in range(size)]


def test_each_part_is_the_call_that_it_came_from() -> None:
    calls = [call(x=torch.randn(1, 5, 4), t=torch.tensor(3.0 + i), names=[f"n{i}"]) for i in range(2)]
    for own, part in zip(calls, parts(calls, Merger(), 2), strict=True):
        assert torch.equal(part["x"], own.arguments["x"])
        assert torch.equal(part["t"], own.arguments["t"].reshape(1))
        assert part["names"] == own.arguments["names"]


def test_what_is_shared_stays_whole_though_its_length_is_that_of_all_samples() -> None:
    scale, ids = torch.ones(2), torch.randn(2, 3)
    calls = [call(x=torch.randn(1, 5, 4), scale=scale, rotary=(ids, ids), flag=True) for _ in range(2)]
    for part in parts(calls, Merger(), 2):
        assert torch.equal(part["scale"], scale)
        assert all(torch.equal(item, ids) for item in part["rotary"])
        assert part["flag"] is True
    (single,) = [call(x=torch.randn(2, 5, 4), pairs=torch.randn(2, 7))]
    assert parts([single], Merger(shared=("pairs",)), 2)[1]["pairs"].shape == (2, 7)


def test_a_mask_that_merging_has_made_is_cut_too() -> None:
    merger = Merger((Padding(argument="text", mask="mask"),))
    calls = [call(x=torch.randn(1, 5, 4), text=torch.randn(1, length, 4)) for length in (2, 3)]
    first, second = parts(calls, merger, 2)
    assert first["mask"].tolist() == [[True, True, False]]
    assert second["mask"].tolist() == [[True, True, True]]
    assert first["text"].shape == second["text"].shape == (1, 3, 4)


def test_one_call_of_several_samples() -> None:
    whole = call(x=torch.randn(2, 5, 4), t=torch.tensor(3.0), added={"size": torch.randn(2, 6)})
    for i, part in enumerate(parts([whole], Merger(), 2)):
        assert torch.equal(part["x"], whole.arguments["x"][i : i + 1])
        assert part["t"].ndim == 0
        assert torch.equal(part["added"]["size"], whole.arguments["added"]["size"][i : i + 1])


def test_results_are_joined() -> None:
    a, b = torch.randn(1, 4), torch.randn(2, 4)
    assert torch.equal(joined([a, b], False), torch.cat([a, b]))
    assert torch.equal(joined([(a, None), (b, None)], False)[0], torch.cat([a, b]))
    outputs = [Transformer2DModelOutput(sample=a), Transformer2DModelOutput(sample=b)]
    assert torch.equal(joined(outputs, False).sample, torch.cat([a, b]))
    assert len(joined([[a], [a, a]], True)) == 3


@pytest.mark.parametrize(
    "parts", [[torch.zeros(1, 3), torch.zeros(1, 4)], [torch.zeros(1), (1,)], [1, 1], [torch.zeros(())] * 2]
)
def test_what_cannot_be_joined(parts: list[Any]) -> None:
    with pytest.raises(NotMergeable):
        joined(parts, False)
