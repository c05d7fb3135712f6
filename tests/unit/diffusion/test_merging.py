"""Which calls go together, and that what is put together comes apart again."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from polymux.diffusion.call import Call, CallOwner, TorchState
from polymux.diffusion.component import Component, Role
from polymux.diffusion.merging import Contents, Merger, NotMergeable, Samples, samples_of, split
from polymux.families.base import CAUSAL_PROMPT, Padding

Arguments = dict[str, Any]


class Anything(torch.nn.Module):
    def forward(self, **kwargs: Any) -> Any:
        return kwargs


COMPONENTS = {role: Component(role, Anything(), role) for role in ("denoiser", "encoder", "decoder")}


def call(role: Role = "denoiser", **arguments: Any) -> Call:
    return Call(CallOwner(), COMPONENTS[role], "forward", arguments, TorchState.now("cpu"))


def rows(n: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of n samples that differ."""
    return torch.randn(n, *shape).to(dtype)


def go_together(first: Call, second: Call, merger: Merger | None = None) -> bool:
    merger = merger or Merger()
    return merger.key(first) == merger.key(second)


def merged(*calls: Call, merger: Merger | None = None) -> Arguments:
    merger = merger or Merger()
    assert len({merger.key(c) for c in calls}) == 1
    return merger.merge(calls)


# What a value means.


def test_tensors_of_the_batch_s_size_are_joined() -> None:
    a, b = call(x=rows(1, 5, 4), y=rows(1, 3)), call(x=rows(2, 5, 4), y=rows(2, 3))
    whole = merged(a, b)
    assert torch.equal(whole["x"], torch.cat([a.arguments["x"], b.arguments["x"]]))
    assert torch.equal(whole["y"], torch.cat([a.arguments["y"], b.arguments["y"]]))


@pytest.mark.parametrize("other", [rows(1, 6, 4), rows(1, 5, 3), rows(1, 5, 4, dtype=torch.float64), rows(1, 20)])
def test_tensors_of_another_form_stay_apart(other: torch.Tensor) -> None:
    assert not go_together(call(x=rows(1, 5, 4)), call(x=other))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 2)])
def test_a_number_is_repeated_for_every_sample(shape: tuple[int, ...], sizes: tuple[int, int]) -> None:
    a, b = (call(x=rows(n, 5), t=torch.full(shape, float(10 * n + i))) for i, n in enumerate(sizes))
    assert merged(a, b)["t"].tolist() == [10.0 * sizes[0]] * sizes[0] + [10.0 * sizes[1] + 1] * sizes[1]


def test_a_number_goes_with_one_number_for_each_sample() -> None:
    a, b = call(x=rows(1, 5), t=torch.tensor(1.0)), call(x=rows(2, 5), t=torch.tensor([2.0, 3.0]))
    assert merged(a, b)["t"].tolist() == [1.0, 2.0, 3.0]
    assert merged(b, a)["t"].tolist() == [2.0, 3.0, 1.0]
    assert not go_together(a, call(x=rows(1, 5), t=torch.tensor(1)))


def test_other_tensors_must_have_equal_contents() -> None:
    positions = torch.arange(14.0).reshape(7, 2)
    a = call(x=rows(1, 5), positions=positions)
    assert go_together(a, call(x=rows(2, 5), positions=positions.clone()))
    assert not go_together(a, call(x=rows(1, 5), positions=positions + 1))
    assert not go_together(a, call(x=rows(1, 5), positions=positions.reshape(2, 7)))
    assert merged(a, call(x=rows(2, 5), positions=positions.clone()))["positions"] is positions


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_contents_of_any_type_are_compared(dtype: torch.dtype) -> None:
    value = torch.zeros(3, 2).to(dtype)
    other = value.clone()
    other[1, 1] = 1
    a = call(x=rows(1, 5), shared=value)
    assert go_together(a, call(x=rows(1, 5), shared=value.clone().mT.contiguous().mT))
    assert not go_together(a, call(x=rows(1, 5), shared=other))


def test_a_tuple_is_structure() -> None:
    angles = torch.randn(7, 2)
    a, b = call(x=rows(1, 5), r=(angles, angles + 1)), call(x=rows(1, 5), r=(angles.clone(), angles + 1))
    assert torch.equal(merged(a, b)["r"][0], angles) and len(merged(a, b)["r"]) == 2
    assert not go_together(a, call(x=rows(1, 5), r=(angles, angles)))
    per_sample = call(x=rows(1, 5), r=(rows(1, 3), rows(1, 4))), call(x=rows(2, 5), r=(rows(2, 3), rows(2, 4)))
    assert [part.shape for part in merged(*per_sample)["r"]] == [(3, 3), (3, 4)]


def test_lists_of_tensors_are_samples_where_the_first_argument_is_one() -> None:
    a = call(x=[rows(3, 2, 2)], words=[rows(4, 8)])
    b = call(x=[rows(3, 5, 5), rows(3, 1, 1)], words=[rows(7, 8), rows(2, 8)])
    whole = merged(a, b)
    assert whole["x"] == a.arguments["x"] + b.arguments["x"]
    assert whole["words"] == a.arguments["words"] + b.arguments["words"]
    assert not go_together(a, call(x=[rows(3, 2, 2, dtype=torch.float64)], words=[rows(4, 8)]))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_lists_of_tensors_are_structure_beside_a_batch(n: int) -> None:
    """Such as the outputs of a text encoder's layers; n = 2: there are as many layers as samples."""
    a, b = (call(x=rows(n, 5), layers=[rows(n, 3), rows(n, 4)]) for _ in range(2))
    layers = merged(a, b)["layers"]
    assert [layer.shape for layer in layers] == [(2 * n, 3), (2 * n, 4)]
    assert torch.equal(layers[1], torch.cat([a.arguments["layers"][1], b.arguments["layers"][1]]))


def test_lists_of_other_things_are_samples() -> None:
    """Such as the sizes of each sample's pictures."""
    a, b = call(x=rows(1, 5), sizes=[[(1, 2, 2)]]), call(x=rows(2, 5), sizes=[[(1, 2, 2)], [(1, 2, 2)]])
    assert merged(a, b)["sizes"] == [[(1, 2, 2)]] * 3
    assert not go_together(a, call(x=rows(1, 5), sizes=[[(1, 2, 3)]]))
    uneven = [call(x=rows(2, 5), sizes=[[(1, 2, 2)], [(1, 4, 4)]]) for _ in range(2)]
    assert not go_together(*uneven)


def test_lists_of_lists_of_tensors_are_samples() -> None:
    pictures = [[rows(3, 2, 2), rows(3, 2, 2)]]
    a, b = call(x=[rows(4, 4)], pictures=pictures), call(x=[rows(4, 4)], pictures=[list(pictures[0])])
    assert merged(a, b)["pictures"] == pictures + [list(pictures[0])]
    assert not go_together(a, call(x=[rows(4, 4)], pictures=[[rows(3, 2, 2), rows(3, 2, 2)]]))


def test_lists_of_another_length_are_structure() -> None:
    a, b = call(x=rows(1, 5), axes=[8, 8, 16]), call(x=rows(1, 5), axes=[8, 8, 16])
    assert merged(a, b)["axes"] == [8, 8, 16]
    assert not go_together(a, call(x=rows(1, 5), axes=[8, 8, 8]))


def test_dictionaries_are_structure() -> None:
    a, b = (call(x=rows(1, 5), more={"s": 1.5, "e": rows(1, 2)}) for _ in range(2))
    assert merged(a, b)["more"]["e"].shape == (2, 2) and merged(a, b)["more"]["s"] == 1.5
    assert not go_together(a, call(x=rows(1, 5), more={"s": 2.5, "e": rows(1, 2)}))


def test_plain_values_must_be_equal() -> None:
    for value, other in [(True, False), (1, 2), (1, True), (0.5, 0.25), ("a", "b"), (None, 0), (torch.half, torch.int)]:
        a = call(x=rows(1, 5), v=value)
        assert go_together(a, call(x=rows(1, 5), v=value)) and not go_together(a, call(x=rows(1, 5), v=other))
    thing = object()
    assert go_together(call(x=rows(1, 5), v=thing), call(x=rows(1, 5), v=thing))
    assert not go_together(call(x=rows(1, 5), v=thing), call(x=rows(1, 5), v=object()))


def test_other_arguments_stay_apart() -> None:
    assert not go_together(call(x=rows(1, 5)), call(x=rows(1, 5), guidance=torch.tensor([1.0])))


def test_calls_under_another_torch_state_stay_apart() -> None:
    a = call(x=rows(1, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = call(x=rows(1, 5))
    with torch.inference_mode():
        c = call(x=rows(1, 5))
    assert not go_together(a, b) and not go_together(a, c)


def test_calls_without_samples_go_with_none() -> None:
    assert not go_together(call(t=torch.tensor(1.0)), call(t=torch.tensor(1.0)))
    assert not go_together(call(n=3), call(n=3))


def test_encoders_that_take_all_pictures_in_one_row_go_with_none() -> None:
    packed = [call("encoder", patches=rows(64, 12), grid=torch.tensor([[1, 8, 8]])) for _ in range(2)]
    assert not go_together(*packed)
    assert go_together(*(call("encoder", ids=torch.ones(1, 5), mask=torch.ones(1, 5)) for _ in range(2)))


def test_the_samples_of_a_call() -> None:
    assert samples_of({"t": torch.ones(3), "x": rows(2, 5)}) == Samples(2, False)
    assert samples_of({"x": [rows(5, 1)] * 3, "y": rows(2, 5)}) == Samples(3, True)
    assert samples_of({"t": torch.tensor(1), "x": []}) == Samples(0, False)


# A family's rules.

MASKED = Padding(argument="words", mask="mask")


def test_without_a_rule_another_length_stays_apart() -> None:
    assert not go_together(call(x=rows(1, 5), words=rows(1, 3, 4)), call(x=rows(1, 5), words=rows(1, 6, 4)))


def test_padding_makes_a_mask_where_there_is_none() -> None:
    merger = Merger([MASKED])
    a, b = call(x=rows(1, 5), words=rows(1, 3, 4)), call(x=rows(2, 5), words=rows(2, 6, 4))
    whole = merged(a, b, merger=merger)
    assert torch.equal(whole["words"][0, :3], a.arguments["words"][0]) and not whole["words"][0, 3:].any()
    assert torch.equal(whole["words"][1:], b.arguments["words"])
    assert whole["mask"].dtype == torch.bool
    assert whole["mask"].int().tolist() == [[1] * 3 + [0] * 3, [1] * 6, [1] * 6]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_extends_the_masks_that_are_given(dtype: torch.dtype) -> None:
    merger = Merger([MASKED])
    given = torch.tensor([[1, 1, 0]], dtype=dtype)
    a, b = call(x=rows(1, 5), words=rows(1, 3, 4), mask=given), call(x=rows(1, 5), words=rows(1, 4, 4))
    for whole, order in ((merged(a, b, merger=merger), [0, 1]), (merged(b, a, merger=merger), [1, 0])):
        assert whole["mask"].dtype == dtype
        assert whole["mask"][order].int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_equal_lengths_need_no_mask_but_keep_one() -> None:
    merger = Merger([MASKED])
    assert "mask" not in merged(*(call(x=rows(1, 5), words=rows(1, 3, 4)) for _ in range(2)), merger=merger)
    some = call(x=rows(1, 5), words=rows(1, 3, 4), mask=torch.tensor([[True, True, False]]))
    whole = merged(some, call(x=rows(1, 5), words=rows(1, 3, 4)), merger=merger)
    assert whole["mask"].tolist() == [[True, True, False], [True, True, True]]


def test_padding_of_another_dimension_without_a_mask() -> None:
    merger = Merger([Padding(argument="words", dim=2)])
    a, b = call(x=rows(1, 5), words=rows(1, 4, 3)), call(x=rows(1, 5), words=rows(1, 4, 6))
    whole = merged(a, b, merger=merger)
    assert whole["words"].shape == (2, 4, 6) and not whole["words"][0, :, 3:].any()
    assert not go_together(a, call(x=rows(1, 5), words=rows(1, 5, 3)), merger)
    assert not go_together(a, call(x=rows(1, 5), words=rows(1, 4, 3, dtype=torch.float64)), merger)


def test_a_rule_holds_for_its_role_alone() -> None:
    merger = Merger([Padding(argument="words", mask="mask")])
    a = call("encoder", ids=rows(1, 5), words=rows(1, 3), mask=torch.ones(1, 3))
    assert not go_together(a, call("encoder", ids=rows(1, 5), words=rows(1, 4), mask=torch.ones(1, 4)), merger)
    b = call("encoder", ids=rows(1, 5), words=rows(1, 3), mask=torch.zeros(1, 3))
    assert torch.equal(merged(a, b, merger=merger)["mask"], torch.tensor([[1.0] * 3, [0.0] * 3]))


def test_results_as_long_as_the_padding_are_cut() -> None:
    merger = Merger([CAUSAL_PROMPT])
    short = call("encoder", input_ids=torch.ones(1, 3, dtype=torch.int64), attention_mask=torch.ones(1, 3))
    long = call("encoder", input_ids=torch.ones(1, 5, dtype=torch.int64), attention_mask=torch.ones(1, 5))
    assert merged(short, long, merger=merger)["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    result = BaseModelOutputWithPast(last_hidden_state=rows(2, 5, 4), hidden_states=(rows(2, 5, 4), rows(2, 7)))
    first, second = merger.split([short, long], result)
    assert torch.equal(first.last_hidden_state, result.last_hidden_state[:1, :3])
    assert torch.equal(second.hidden_states[0], result.hidden_states[0][1:])
    assert first.hidden_states[1].shape == (1, 7)


def test_shared_arguments_are_passed_once() -> None:
    merger = Merger(shared=["padding_mask"])
    mask = torch.ones(1, 1, 8, 8)
    a, b = (call(x=rows(1, 5), padding_mask=mask.clone()) for _ in range(2))
    assert torch.equal(merged(a, b, merger=merger)["padding_mask"], mask)
    assert not go_together(a, call(x=rows(1, 5), padding_mask=mask * 2), merger)


def test_merging_keeps_the_arguments_order() -> None:
    a, b = (call(t=torch.ones(1), words=rows(1, n, 4), x=rows(1, 5)) for n in (2, 3))
    assert list(merged(a, b, merger=Merger([MASKED]))) == ["t", "words", "mask", "x"]


# Taking apart.


def test_every_call_gets_its_rows() -> None:
    result = rows(6, 2, 3)
    parts = split(result, [1, 2, 3])
    assert [len(part) for part in parts] == [1, 2, 3]
    assert torch.equal(torch.cat(parts), result)


def test_structures_are_taken_apart_inside() -> None:
    result = (rows(3, 2), None, (rows(3, 1), rows(3, 4)))
    first, second = split(result, [1, 2])
    assert torch.equal(first[0], result[0][:1]) and first[1] is None
    assert torch.equal(second[2][1], result[2][1][1:])
    output = Transformer2DModelOutput(sample=rows(3, 2))
    parts = split(output, [1, 2])
    assert isinstance(parts[1], Transformer2DModelOutput) and torch.equal(parts[1].sample, output.sample[1:])


def test_lists_of_results_follow_the_arguments() -> None:
    """Twelve layers for twelve samples are still layers."""
    layers = [rows(12, 2) for _ in range(12)]
    first, second = split(layers, [5, 7])
    assert len(first) == len(second) == 12
    assert torch.equal(second[3], layers[3][5:])
    pictures = [rows(3, n, n) for n in (2, 3, 4)]
    assert split(pictures, [1, 2], listed=True) == [pictures[:1], pictures[1:]]
    assert split((pictures,), [1, 2], listed=True)[1] == (pictures[1:],)


def test_the_kind_of_the_arguments_decides_how_a_result_is_split() -> None:
    merger = Merger()
    listed = [call(x=[rows(2, 2)]), call(x=[rows(3, 3)])]
    assert merger.split(listed, [torch.ones(2, 2), torch.ones(2, 3)])[1][0].shape == (2, 3)
    batched = [call(x=rows(1, 2)), call(x=rows(1, 2))]
    assert [p[1].shape for p in merger.split(batched, [torch.ones(2, 2), torch.ones(2, 3)])] == [(1, 3), (1, 3)]


def test_parts_are_as_contiguous_as_single_results() -> None:
    """Alone, a result of one sample could be viewed as one row; in company its rows lie apart."""
    result = torch.randn(5, 3, 4).permute(1, 0, 2)
    for part in split(result, [1, 2]):
        part.view(-1)


def test_a_cache_is_left_out() -> None:
    result = BaseModelOutputWithPast(last_hidden_state=rows(2, 3), past_key_values=DynamicCache())
    first, _ = split(result, [1, 1])
    assert first.past_key_values is None and first.last_hidden_state.shape == (1, 3)


class Named(NamedTuple):
    sample: torch.Tensor


@pytest.mark.parametrize(
    "result",
    [rows(3, 2), torch.tensor(1.0), "text", 3, [1, 2, 3], Named(rows(2, 2)), (rows(2, 2), 1.5), {"x": rows(4, 2)}],
)
def test_what_has_no_batch_axis_cannot_be_taken_apart(result: Any) -> None:
    with pytest.raises(NotMergeable):
        split(result, [1, 1])


# Contents.


def test_contents_are_read_again_after_a_change_in_place() -> None:
    contents, tensor = Contents(), torch.zeros(4)
    before = contents.digest(tensor)
    assert contents.digest(tensor) == before == contents.digest(torch.zeros(4))
    tensor[2] = 1
    assert contents.digest(tensor) != before


def test_a_change_in_inference_mode_is_noticed() -> None:
    contents = Contents()
    with torch.inference_mode():
        tensor = torch.zeros(4)
        before = contents.digest(tensor)
        tensor[2] = 1
        assert contents.digest(tensor) != before


def test_contents_do_not_keep_tensors_alive() -> None:
    contents = Contents()
    contents.digest(torch.zeros(4))
    assert len(contents.known) == 0


# How much work a call is.


def test_tokens_are_positions_in_patches() -> None:
    class Config:
        patch_size = 2

    module = Anything()
    module.config = Config()  # type: ignore[assignment]
    component = Component("transformer", module, "denoiser")
    state, merger = TorchState.now("cpu"), Merger()

    def tokens(**arguments: Any) -> int:
        return merger.tokens(Call(CallOwner(), component, "forward", arguments, state))

    assert tokens(x=rows(2, 4, 16, 16)) == 2 * 8 * 8
    assert tokens(x=rows(1, 4, 3, 16, 16)) == 3 * 8 * 8
    assert tokens(x=rows(2, 100, 64)) == 200  # tokens already
    assert tokens(x=[rows(4, 1, 16, 16), rows(4, 1, 8, 8)]) == 8 * 8 + 4 * 4
    assert tokens(t=torch.ones(1)) == 1
