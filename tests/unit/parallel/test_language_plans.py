"""Language models that cannot be divided, with the numbers; no weights are needed for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as T

from polymux.errors import ConfigError
from polymux.parallel.language import language_slices

SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 12}


def model_of(heads: int, kept: int, **changes: Any) -> T.LlamaForCausalLM:
    flags = SIZES | {"num_attention_heads": heads, "num_key_value_heads": kept, "head_dim": 8} | changes
    with torch.device("meta"):
        return T.LlamaForCausalLM(T.LlamaConfig(**flags))


@pytest.mark.parametrize(
    ("heads", "kept", "size", "message"),
    [
        (6, 2, 4, "num_attention_heads = 6, which 4 ranks cannot divide"),
        (12, 4, 6, "num_key_value_heads = 4, which 6 ranks can neither divide nor share"),
        (12, 3, 2, "num_key_value_heads = 3, which 2 ranks can neither divide nor share"),
        (6, 6, 3, "has 64 channels to divide, which 3 ranks cannot"),
    ],
)
def test_numbers_that_do_not_fit(heads: int, kept: int, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        language_slices(model_of(heads, kept), 0, size)
    assert caught.value.param == "tensor_parallel_size"


def test_a_plan_that_nobody_knows() -> None:
    model = model_of(4, 4)
    model.config.base_model_tp_plan = {"layers.*.mlp.gate_proj": "diagonal"}
    with pytest.raises(ConfigError, match="style 'diagonal' is not known"):
        language_slices(model, 0, 2)
    model.config.base_model_tp_plan = None
    with pytest.raises(ConfigError, match="nothing says how the layers of LlamaForCausalLM"):
        language_slices(model, 0, 2)


def test_neighbours_have_the_same_heads_where_there_are_fewer_than_ranks() -> None:
    found = [language_slices(model_of(8, 2), rank, 4)["model.layers.0.self_attn.k_proj.weight"] for rank in range(4)]
    assert [part.spans for part in found] == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]
    whole = language_slices(model_of(8, 1), 3, 4)["model.layers.0.self_attn.v_proj.weight"]
    assert whole.spans == ((0, 8),)


def test_a_vocabulary_that_does_not_divide_is_whole() -> None:
    for size, divided in ((4, True), (8, False)):
        found = language_slices(model_of(8, 8), 0, size)
        assert ("lm_head.weight" in found) == ("model.embed_tokens.weight" in found) == divided
