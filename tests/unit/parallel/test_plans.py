"""Plans, and what does not fit them, on one rank."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, UNet2DModel, WanTransformer3DModel

from polymux.errors import ConfigError
from polymux.families.sharding import Cut, Gather, Split, TensorPlan
from polymux.parallel.plans import sequence_plan, tensor_plan
from polymux.parallel.slices import slices
from polymux.parallel.tensor import check_tensor

SIZES = {"in_channels": 4, "out_channels": 4, "text_dim": 8, "ffn_dim": 18, "num_layers": 1}


def wan(heads: int, **sizes: int) -> WanTransformer3DModel:
    with torch.device("meta"):
        return WanTransformer3DModel(num_attention_heads=heads, attention_head_dim=12, **(SIZES | sizes))


def flux() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2, in_channels=4,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 2, 2),
    )  # fmt: skip


def test_diffusers_plans_are_read() -> None:
    steps = sequence_plan(flux()).steps
    assert Split(module="", argument="hidden_states", dim=1, ndim=3) in steps
    assert Gather(module="proj_out", dim=1) in steps
    cuts = tensor_plan(flux()).cuts
    assert Cut(layer="transformer_blocks.*.attn.to_q", by="column") in cuts
    assert Cut(layer="single_transformer_blocks.*.proj_out", by="row", parts="_tp_packed_row_blocks") in cuts


def test_a_family_s_plan_counts_first() -> None:
    assert tensor_plan(wan(2)).heads
    assert sequence_plan(QwenImageTransformer2DModel(num_layers=1, num_attention_heads=1)).lengthen


def test_a_class_is_enough_and_so_is_one_that_inherits() -> None:
    class Sharded(WanTransformer3DModel):
        pass

    for kind in (WanTransformer3DModel, Sharded):
        assert tensor_plan(kind) == tensor_plan(wan(2))
        assert sequence_plan(kind) == sequence_plan(wan(2))


def test_no_plan() -> None:
    with pytest.raises(ConfigError, match="UNet2DModel") as error:
        sequence_plan(UNet2DModel(sample_size=8, block_out_channels=(32,) * 4))
    assert error.value.param == "ulysses_degree"
    with pytest.raises(ConfigError, match="UNet2DModel"):
        tensor_plan(UNet2DModel(sample_size=8, block_out_channels=(32,) * 4))


@pytest.mark.parametrize(
    ("heads", "ffn", "size", "message"),
    [
        (3, 18, 2, "num_attention_heads = 3, which 2 ranks cannot divide"),
        (4, 18, 4, "blocks.0.ffn.net.0.proj.weight has 18 channels to divide, which 4 ranks cannot"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(heads: int, ffn: int, size: int, message: str) -> None:
    model = wan(heads, ffn_dim=ffn)
    with pytest.raises(ConfigError, match=message):
        check_tensor(model, tensor_plan(model), size)


def test_layers_that_are_not_plain_are_refused() -> None:
    model = wan(2)
    model.blocks[0].attn1.to_q = torch.nn.Identity()
    with pytest.raises(ConfigError, match="to_q is a Identity"):
        check_tensor(model, tensor_plan(model), 2)
    model = wan(2)
    model.blocks[0].attn1.norm_q = torch.nn.LayerNorm(24)
    with pytest.raises(ConfigError, match="norm_q is a LayerNorm"):
        check_tensor(model, tensor_plan(model), 2)
    with pytest.raises(ConfigError, match="none of the layers"):
        check_tensor(model, TensorPlan(cuts=(Cut(layer="nowhere", by="row"),)), 2)


def test_the_parts_of_all_ranks_are_the_whole() -> None:
    model = flux()
    whole = dict(model.named_parameters())
    ranks = [slices(model, tensor_plan(model), rank, 2) for rank in (0, 1)]
    packed = ranks[1]["single_transformer_blocks.0.proj_out.weight"]
    assert packed.spans == ((8, 16), (48, 80))  # of attention's 16 channels, and of the 64 behind them
    for name, first in ranks[0].items():
        parts = [part[name].of(whole[name].detach()) for part in ranks]
        if ranks[1][name].zero:
            assert torch.equal(parts[0] + parts[1], whole[name])
        elif len(first.spans) == 1:
            assert torch.equal(torch.cat(parts, first.dim), whole[name])
        assert all(part.is_contiguous() for part in parts)
