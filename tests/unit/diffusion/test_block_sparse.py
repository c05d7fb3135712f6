"""Block-sparse attention: what is looked at, that the rest is ordinary attention, and where it acts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fake_pipeline import outcome, request_of

from polymux import AttentionConfig, AttentionSpec, BlockSparse
from polymux.config import AttentionChoiceConfig, EngineConfig
from polymux.diffusion import block_sparse
from polymux.diffusion.block_sparse import BLOCK, Tokens, attend, choose, kept, leaves_out
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.errors import ConfigError
from polymux.media.wire import from_wire
from polymux.request import Finished
from polymux.testing.tiny import TINY

Checkpoint = Callable[..., Path]
Array = np.ndarray[Any, Any]


def random(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(*shape, generator=generator) for _ in range(3))
    return query, key, value


LAYOUTS = [
    Tokens(video=8 * BLOCK, frame=BLOCK),
    Tokens(video=7 * 100, frame=100),  # which no block ends with
    Tokens(video=6 * 150, frame=150, text=70, text_first=True),
    Tokens(video=6 * 150, frame=150, text=70),
]


def by_hand(query: torch.Tensor, key: torch.Tensor, tokens: Tokens, sparsity: float) -> torch.Tensor:
    """[heads, tokens, tokens]: whether a query looks at a key; written token by token, block by block."""
    video = range(tokens.text, tokens.length) if tokens.text_first else range(tokens.video)
    first = set(video[: tokens.frame])
    never_out = {i // BLOCK for i in range(tokens.length) if i not in video or i in first}
    blocks = [range(i, min(i + BLOCK, tokens.length)) for i in range(0, tokens.length, BLOCK)]
    mask = torch.zeros(query.shape[1], tokens.length, tokens.length, dtype=torch.bool)
    wanted = len(never_out) + max(1, math.ceil((1 - sparsity) * (len(blocks) - len(never_out))))
    for head in range(query.shape[1]):
        for i, rows in enumerate(blocks):
            mean = query[0, head, list(rows)].mean(0)
            worth = {j: float(mean @ key[0, head, list(columns)].mean(0)) for j, columns in enumerate(blocks)}
            looked_at = never_out | {i}
            others = sorted((j for j in worth if j not in looked_at), key=lambda j: -worth[j])
            looked_at |= set(others[: max(wanted - len(looked_at), 0)])
            for j in range(len(blocks)) if i in never_out else looked_at:
                mask[head, rows.start : rows.stop, blocks[j].start : blocks[j].stop] = True
    return mask


@pytest.mark.parametrize("tokens", LAYOUTS)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_what_is_looked_at(tokens: Tokens, sparsity: float) -> None:
    query, key, value = random(1, 2, tokens.length, 16)
    mask = by_hand(query, key, tokens, sparsity)
    assert bool(mask.all()) != leaves_out(tokens, sparsity)
    got = attend(query, key, value, choose(query, key, tokens, sparsity))
    torch.testing.assert_close(got, F.scaled_dot_product_attention(query, key, value, mask[None]), atol=1e-5, rtol=1e-5)


def test_blocks_are_visited_in_their_order() -> None:
    """The last block of a sequence may be a part of one, and kernels count on visiting it last."""
    for tokens in LAYOUTS:
        query, key, _ = random(1, 2, tokens.length, 16)
        choice = choose(query, key, tokens, 0.5)
        for blocks in (choice.text, ~choice.text):
            count, numbers = choice.order(blocks)
            for row, many, looked_at in zip(
                numbers.flatten(0, 2), count.flatten(), (choice.table & blocks).flatten(0, 2), strict=True
            ):
                assert row[:many].tolist() == looked_at.nonzero().flatten().tolist()


def test_keys_that_are_not_there() -> None:
    tokens = LAYOUTS[3]
    query, key, value = (torch.cat([one, one]) for one in random(1, 2, tokens.length, 16))
    there = torch.ones(2, tokens.length, dtype=torch.bool)
    there[1, -50:] = False
    got = attend(query, key, value, choose(query, key, tokens, 0.5), there, scale=0.1)
    mask = by_hand(query, key, tokens, 0.5) & there[:, None, None]
    want = F.scaled_dot_product_attention(query, key, value, mask, scale=0.1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_how_many_are_kept() -> None:
    tokens = Tokens(video=100 * BLOCK, frame=2 * BLOCK, text=BLOCK)  # 101 blocks, of which 3 are never left out
    assert [kept(tokens, s) for s in (0, 0.5, 0.8, 0.99)] == [101, 3 + 49, 3 + 20, 3 + 1]


def load(checkpoint: Path, in_flight: int = 4, **sparse: Any) -> DiffusionEngine:
    chosen = {"diffusion_attention_config": {"default": {"backend": "TORCH_SDPA", "block_sparse": sparse}}}
    knobs = chosen if sparse else {}
    return DiffusionEngine.load(
        EngineConfig.from_flat(model=str(checkpoint), device="cpu", max_num_seqs=in_flight, **knobs)
    )


def asked(request_id: str, steps: int = 3, seed: int = 0, **params: Any) -> Any:
    """A video of 5 latent frames of 14 by 14 tokens or so, and nothing decoded."""
    given = dict(num_frames=17, height=224, width=224, output_type="latent") | params
    return request_of(request_id, steps=steps, seed=seed, **given)


def latents(engine: DiffusionEngine, *requests: Any) -> list[Array]:
    for request in requests:
        engine.add(request)
    done = outcome(engine)
    finished = [done[request.request_id] for request in requests]
    assert all(isinstance(event, Finished) for event in finished), finished
    return [from_wire(event.outputs[0][0]) for event in finished if isinstance(event, Finished)]


def test_in_a_denoiser(tiny_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = tiny_checkpoint("wan21-t2v")
    plain = load(checkpoint, 1)
    (want,) = latents(plain, asked("a"))
    plain.close()
    layers = len(plain.pipeline.transformer.blocks)
    same: list[dict[str, Any]] = [
        {"sparsity": 0.0},
        {"sparsity": 0.9, "start_step": 3},
        {"sparsity": 0.9, "skip_layers": list(range(layers))},
    ]
    for settings in same:
        engine = load(checkpoint, 1, **settings)
        np.testing.assert_array_equal(latents(engine, asked("a"))[0], want)
        engine.close()
    with caplog.at_level(logging.INFO, "polymux"):
        engine = load(checkpoint, sparsity=0.9, start_step=1, skip_layers=[0])
    said = f"; block-sparse (0.9) on {layers - 1} of {layers} layers over the video, from step 1; its calls are not mer"
    assert any(said in message for message in caplog.messages)
    (got,) = latents(engine, asked("a"))
    assert np.abs(got - want).max() > 1e-3
    other = latents(engine, asked("b", 4, 1))[0]
    for alone, together in zip((got, other), latents(engine, asked("a"), asked("b", 4, 1)), strict=True):
        np.testing.assert_allclose(together, alone, atol=2e-5)
    pipeline = engine.pipeline
    engine.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in pipeline.transformer.modules())


SIZES = {"cogvideox": {"height": 144, "width": 144}, "ltx-video": {"height": 448, "width": 448, "num_frames": 33}}


@pytest.mark.parametrize("name", ["hunyuan-video-t2v", "cogvideox", "ltx-video", "wan22-t2v-moe"])
def test_other_families(name: str, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all blocks kept it is ordinary attention, text and masks and all; with few it is not."""
    checkpoint = tiny_checkpoint(name)
    request = asked("a", 2, **{k: v for k, v in TINY[name].call.items() if k == "guidance_scale"} | SIZES.get(name, {}))
    plain = load(checkpoint)
    (want,) = latents(plain, request)
    plain.close()
    engine = load(checkpoint, sparsity=0.9)
    assert np.abs(latents(engine, request)[0] - want).max() > 1e-4
    calls: list[int] = []

    def every_block(tokens: Tokens, sparsity: float) -> int:
        calls.append(1)
        return math.ceil(tokens.length / BLOCK)

    monkeypatch.setattr(block_sparse, "kept", every_block)
    monkeypatch.setattr("polymux.diffusion.sparse_layers.leaves_out", lambda tokens, sparsity: True)
    np.testing.assert_allclose(latents(engine, request)[0], want, atol=2e-4)
    assert calls
    engine.close()


@pytest.mark.parametrize(
    ("model", "sparse", "said"),
    [
        ("flux-dev", {"sparsity": 0.5}, "for flux it is not declared where the tokens of a video are"),
        ("wan21-t2v", {"sparsity": 0.5, "skip_layers": [99]}, "there is no layer 99; there are "),
    ],
)
def test_refused_at_the_start(model: str, sparse: dict[str, Any], said: str, tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=f"block_sparse: .*{said}") as caught:
        load(tiny_checkpoint(model), **sparse)
    assert caught.value.param == "diffusion_attention_config"


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert block_sparse.problem(torch.device("cpu"), torch.float32) is None
    assert "needs a CUDA device or a CPU, and this is meta" in str(
        block_sparse.problem(torch.device("meta"), torch.float32)
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = block_sparse.problem(torch.device("cuda"), torch.bfloat16)
    assert said is not None and "`triton`, is not installed" in said


def test_from_python() -> None:
    sparse = BlockSparse(sparsity=0.5, skip_layers=(0, 1))
    config = AttentionConfig(per_role={"self": AttentionSpec("CUDNN_ATTN", block_sparse=sparse)})
    given = AttentionChoiceConfig(diffusion_attention_config=config)  # type: ignore[arg-type]
    assert AttentionConfig.of(given.diffusion_attention_config) == config


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"block_sparse": {"sparsity": 1}}, r"< 1.0 - at `\$.default.block_sparse.sparsity`"),
        ({"block_sparse": {"start_step": -1}}, ">= 0"),
        ({"block_sparse": {"top_k": 3}}, "unknown field `top_k`"),
        ({"quant": {"dtype_qk": "int8"}}, "quant: TORCH_SDPA does not have it; FLASHINFER_ATTN would"),
        ({"skip_softmax": {"threshold": 0.1}}, "skip_softmax: TORCH_SDPA does not have it; FLASHINFER_ATTN and TRTLLM"),
    ],
)
def test_options_that_are_wrong(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        AttentionChoiceConfig(diffusion_attention_config={"default": {"backend": "TORCH_SDPA"} | spec})
    assert caught.value.param == "diffusion_attention_config"


def test_crossing_is_no_place_for_it() -> None:
    given: dict[str, Any] = {"per_role": {"cross": {"backend": "TORCH_SDPA", "block_sparse": {}}}}
    with pytest.raises(ConfigError, match="cross: block_sparse is for attention of a video to itself"):
        AttentionChoiceConfig(diffusion_attention_config=given)
