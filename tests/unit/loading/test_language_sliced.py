"""A rank's part of a language model: what `from_pretrained` gives, cut; and files that cannot be read in parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

from polymux.errors import CheckpointError, ConfigError
from polymux.loading.component import Part
from polymux.loading.options import LoadFlags
from polymux.loading.sliced import Ranks, load_language_sliced

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 20, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def made(tied: bool = True, **how: Any) -> Path:
        torch.manual_seed(0)
        model = T.Qwen3ForCausalLM(T.Qwen3Config(**SIZES, tie_word_embeddings=tied))
        model.generation_config.update(top_k=7, repetition_penalty=1.3, do_sample=True)
        model.save_pretrained(tmp_path, **how)
        return tmp_path

    return made


def load(folder: Path, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    part = Part("model", T.Qwen3ForCausalLM, folder)
    return load_language_sliced(part, part.weights(LoadFlags()), torch.device("cpu"), dtype, Ranks(rank, size))


@pytest.mark.parametrize("tied", [True, False])
def test_as_from_pretrained(save: Save, tied: bool) -> None:
    folder = save(tied, max_shard_size="10KB")
    wanted = T.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    whole = load(folder, dtype=torch.bfloat16)
    tensors, theirs = ([*one.named_parameters(), *one.named_buffers()] for one in (whole, wanted))
    assert [name for name, _ in tensors] == [name for name, _ in theirs]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(tensors, theirs, strict=True))
    assert whole.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert not whole.training
    parts = [load(folder, rank, 2, torch.bfloat16) for rank in range(2)]
    for path, dim in (("model.embed_tokens", 0), ("lm_head", 0), ("model.layers.0.self_attn.o_proj", 1)):
        both = torch.cat([part.get_submodule(path).weight for part in parts], dim)
        assert torch.equal(both, wanted.get_submodule(path).weight)
    assert (parts[0].lm_head.weight is parts[0].model.embed_tokens.weight) == tied


def test_files_that_are_not_all_of_it(save: Save) -> None:
    folder = save(False)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}))
    with pytest.raises(CheckpointError, match=r"'model.layers.1.*' is missing"):
        load(folder, 1, 2)
    file.write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"has shape \[.*48.*\], the model needs"):
        load(folder, 1, 2)
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="only unquantized safetensors"):
        load(folder, 1, 2)
