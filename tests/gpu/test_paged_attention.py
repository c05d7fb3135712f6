"""The Triton kernels look at what the plain functions look at, and write what they write; a graph is the plain step."""

from __future__ import annotations

import pytest
import torch
import transformers as T

from polymux.ar.attention import look_steps
from polymux.ar.network import Network
from polymux.ar.paged_cache import Looks, PagedCache, Room, Shape, Steps
from polymux.ar.step_graphs import Graphs, StepGraphs

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kept", "channels", "size"), [(4, 2, 16, 16), (8, 8, 24, 8), (16, 8, 128, 16)])
def test_the_kernels(heads: int, kept: int, channels: int, size: int, dtype: torch.dtype) -> None:
    from polymux.ar.attention_triton import decode

    lengths = [0, 1, size - 1, size, 63, 64, 65, 700]
    count = len(lengths)
    cache = PagedCache(Shape(1, kept, channels, dtype), Room(400, size, count, 1024), CUDA)
    layer = cache.layer(0)
    torch.manual_seed(0)
    layer.keys.normal_()
    layer.values.normal_()
    blocks, slots = iter((torch.randperm(399) + 1).tolist()), []
    for row, length in enumerate(lengths):
        mine = [next(blocks) for _ in range(length // size + 1)]
        layer.table[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        slots.append(cache.slot(mine, length))
    steps = Steps(*(torch.tensor(one, device=CUDA) for one in (lengths, list(range(count)), slots)))
    query, key, value = (
        torch.randn(1, n, count, channels, dtype=dtype, device=CUDA)[0].transpose(0, 1) for n in (heads, kept, kept)
    )
    looks = Looks(query, key, value, channels**-0.5)
    made = decode(looks, layer, steps)
    written = layer.keys.clone(), layer.values.clone()
    wanted = look_steps(looks, layer, steps)
    assert torch.equal(written[0], layer.keys) and torch.equal(written[1], layer.values)
    assert torch.allclose(made.float(), wanted.float(), atol=1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("mode", ["plain", "compiled"])
@torch.no_grad()
def test_graphs(mode: Graphs) -> None:
    config = T.Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    network = Network(T.Qwen3ForCausalLM(config).to(CUDA).eval())
    made = {}
    for kind in ("off", mode):
        cache = PagedCache(network.shape, Room(20, 16, 5, 128), CUDA)
        last = torch.arange(6, device=CUDA)
        graphs = StepGraphs(network, cache, last, kind)
        graphs.prepare()
        made[kind] = [
            graphs.run([at] * count, list(range(count)), [16 * (row + 1) + at for row in range(count)]).clone()
            for at in range(3)
            for count in (1, 3, 5)
        ]
    for one, other in zip(made["off"], made[mode], strict=True):
        assert torch.allclose(one, other, atol=1e-4)
