"""Two ranks, and then four, that divide models among themselves; a line of JSON per scenario and rank.

python -m unit.parallel.rank_worker

The models are made once, and the ranks are forks: it is the imports that take long.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, AutoencoderKLWan, QwenImageTransformer2DModel, WanTransformer3DModel
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from polymux.families import all_shardings
from polymux.loading.component import Part
from polymux.loading.options import LoadFlags
from polymux.loading.sliced import Ranks, load_sliced
from polymux.parallel import early, exchange
from polymux.parallel.attention import SplitAttention, plain_attention
from polymux.parallel.exchange import send_heads
from polymux.parallel.groups import SequenceGroups, Turn
from polymux.parallel.hsdp import shard_weights
from polymux.parallel.plans import sequence_plan, tensor_plan
from polymux.parallel.sequence import shard_sequence
from polymux.parallel.tensor import shard_tensor
from polymux.parallel.tiles import share_tiles
from polymux.testing.tiny.inputs import have_torchvision

from .denoiser_calls import DenoiserCall, denoiser_call, difference

CLOSE = 1e-4
RING = [
    *("wan21-t2v", "wan22-ti2v-i2v", "wan21-i2v", "wan21-vace", "skyreels-v2-t2v", "flux-dev", "flux2-klein"),
    *("qwen-image", "ltx-video-i2v", "ltx2", "sd3", "z-image", "hunyuan-video-t2v", "hunyuan-image21"),
]
SEQUENCE = [  # where the ring works, the rest is the same as for Ulysses
    *RING,
    *("ovis-image", "cogview4", "cogvideox", "cosmos1-t2w", "cosmos2-v2w", "pixart-sigma", "auraflow", "lumina2"),
    *("hunyuan-video15-t2v", *(["longcat-image", "minimax-h3"] if have_torchvision() else [])),
]
TENSOR = [
    *RING,
    *("cogview4", "cogvideox", "cosmos1-t2w", "pixart-sigma", "chroma", "hunyuan-video15-t2v"),
    *(["qwen-image-21"] if have_torchvision() else []),
]
ENCODERS = ["flux-dev text_encoder", "flux-dev text_encoder_2", "sd3", "wan21-t2v", "hunyuan-video-t2v", "z-image"]
ENCODERS += ["lumina2", "flux2-klein", "qwen-image", "ltx2"]
HSDP = ["wan21-vace", "flux-dev", "qwen-image"]
FOUR = ["wan21-t2v", "flux-dev", "ltx2"]

CALLS: dict[str, DenoiserCall] = {}  # made before the ranks part


def close(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert (far := difference(got, wanted)) <= CLOSE, far


@functools.cache
def groups(ulysses: int, ring: int) -> SequenceGroups:
    """All ranks in one sequence; with four ranks and a degree of two in all, two sequences."""
    rank, size = dist.get_rank(), dist.get_world_size()
    degree = ulysses * ring
    found: dict[str, dist.ProcessGroup] = {}
    for begin in range(0, size, degree):
        members = list(range(begin, begin + degree))
        parts = [("whole", members)]
        parts += [("ulysses", members[i : i + ulysses]) for i in range(0, degree, ulysses)]
        parts += [("ring", members[i::ulysses]) for i in range(ulysses)]
        for kind, ranks in parts:
            group = dist.new_group(ranks)
            if rank in ranks and group is not None:
                found[kind] = group
    return SequenceGroups(
        found["whole"], found["ulysses"] if ulysses > 1 else None, found["ring"] if ring > 1 else None
    )


@functools.cache
def columns() -> dist.ProcessGroup:
    """Of four ranks, those that hold the same part of a sequence split in two."""
    pairs = [dist.new_group([i, i + 2]) for i in (0, 1)]
    return pairs[dist.get_rank() % 2]


def split_sequence(call: DenoiserCall, ulysses: int, ring: int, module: torch.nn.Module | None = None) -> None:
    module = module or call.module
    wanted = call.run()
    sharding = shard_sequence(module, sequence_plan(call.module), groups(ulysses, ring))
    close(call.run(module), wanted)
    close(call.run(module), wanted)  # what the ranks told each other is known now
    sharding.undo()
    close(call.run(module), wanted)


def ulysses(name: str) -> None:
    split_sequence(CALLS[name], dist.get_world_size(), 1)


def values_go_early(_: str) -> None:
    """They do where they are what the projection gave; not if an adapter stands around it; and all are exchanged as
    large ones are."""
    torch.manual_seed(0)
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 8, "ffn_dim": 16, "num_layers": 2}
    module = WanTransformer3DModel(num_attention_heads=4, attention_head_dim=12, **sizes).eval()
    size = dist.get_world_size()
    video, text = torch.randn(2, 4, 4, 4, 4), torch.randn(2, 5, 8)
    call = DenoiserCall(module, (video, torch.tensor([5, 9]), text), {})
    with mock.patch.object(exchange, "TOGETHER", 0), mock.patch.object(early, "send_heads", wraps=send_heads) as sent:
        wanted = call.run()
        sharding = shard_sequence(module, sequence_plan(module), groups(size, 1))
        counts = []
        for _ in range(3):
            close(call.run(), wanted)
            counts.append(sent.call_count)
        assert counts == [0, 2, 4]  # of two layers, from the second forward on
        plain = module.blocks[0].attn1.to_v
        module.blocks[0].attn1.to_v = torch.nn.Sequential(plain, torch.nn.Linear(48, 48))
        changed = call.run()
        sharding.undo()
        close(changed, call.run())
        assert sent.call_count == 5


def ring(name: str) -> None:
    split_sequence(CALLS[name], 1, dist.get_world_size())


def ulysses_and_ring(name: str) -> None:
    split_sequence(CALLS[name], 2, 2)


def tensor(name: str) -> None:
    module = copy.deepcopy(CALLS[name].module)
    shard_tensor(module, tensor_plan(module), dist.group.WORLD)
    close(CALLS[name].run(module), CALLS[name].run())


def text_encoder(name: str) -> None:
    module = encoder_of(name)
    ids = torch.arange(18).view(2, 9) % 7 + 3
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    call = DenoiserCall(module, (), {"input_ids": ids, "attention_mask": mask, "output_hidden_states": True})
    divided = copy.deepcopy(module)
    shard_tensor(divided, tensor_plan(divided), dist.group.WORLD)
    assert sum(p.numel() for p in divided.parameters()) < sum(p.numel() for p in module.parameters())
    close(call.run(divided), call.run())


@functools.cache
def encoder_of(name: str) -> torch.nn.Module:
    """A text encoder like that of a tiny checkpoint, whose heads two ranks can divide."""
    model, _, which = name.partition(" ")
    tiny = getattr(CALLS[model].pipeline, which or "text_encoder")
    config = copy.deepcopy(tiny.config)
    text = config.get_text_config()
    if "num_key_value_heads" in text.to_dict():
        text.num_key_value_heads = 2
    if text.to_dict().get("head_dim") is not None:
        text.num_attention_heads = 4
    torch.manual_seed(0)
    encoder: torch.nn.Module = type(tiny)(config).eval()
    return encoder


def tensor_and_sequence(name: str) -> None:
    module = copy.deepcopy(CALLS[name].module)
    shard_tensor(module, tensor_plan(module), columns())
    split_sequence(CALLS[name], 1, 2, module)
    split_sequence(CALLS[name], 2, 1, module)


def hsdp(name: str) -> None:
    call, size = CALLS[name], dist.get_world_size()
    module = copy.deepcopy(call.module)
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=names) if size > 2 else init_device_mesh("cpu", (2,))
    shard_weights(module, mesh, ("vace_blocks", "blocks") if "vace" in name else ())
    close(call.run(module), call.run())
    close(call.run(module.forward), call.run())  # as an engine calls it
    if name == "flux-dev":
        sharding = shard_sequence(module, sequence_plan(call.module), groups(size, 1))
        close(call.run(module), call.run())
        sharding.undo()


def read_in_parts(name: str) -> None:
    """The part that was read is the part that would have been cut."""
    call = CALLS[name]
    with tempfile.TemporaryDirectory() as folder:
        call.module.save_pretrained(folder, max_shard_size="50KB")
        part, cpu = Part("transformer", type(call.module), Path(folder)), torch.device("cpu")
        ranks = Ranks(dist.get_rank(), dist.get_world_size())
        module, plan = load_sliced(part, part.weights(LoadFlags()), cpu, torch.float32, ranks)
    held = sum(p.numel() for p in module.parameters())
    assert held < sum(p.numel() for p in call.module.parameters())
    shard_tensor(module, plan, dist.group.WORLD, sliced=True)
    close(call.run(module), call.run())


def odd_tokens_and_heads(_: str) -> None:
    """Seven tokens and three heads, over two ranks or four, one of which then has no head."""
    torch.manual_seed(0)
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 8, "ffn_dim": 16, "num_layers": 2}
    module = WanTransformer3DModel(num_attention_heads=3, attention_head_dim=12, **sizes).eval()
    size = dist.get_world_size()
    for frames in (7, 5):
        call = DenoiserCall(module, (torch.randn(2, 4, frames, 2, 2), torch.tensor([5, 9]), torch.randn(2, 5, 8)), {})
        for degrees in {(size, 1), (1, size), (2, size // 2)}:
            split_sequence(call, *degrees)


def odd_tokens_with_masks(_: str) -> None:
    """Texts of other lengths, in one batch; and one shorter than there are ranks."""
    torch.manual_seed(0)
    sizes = {
        "in_channels": 4,
        "out_channels": 1,
        "joint_attention_dim": 8,
        "num_layers": 2,
        "axes_dims_rope": (4, 2, 2),
    }
    module = QwenImageTransformer2DModel(num_attention_heads=3, attention_head_dim=8, **sizes).eval()
    size = dist.get_world_size()
    for longest in (5, 1):
        mask = torch.ones(2, longest, dtype=torch.bool)
        mask[1, 1:] = False
        kwargs = {
            "hidden_states": torch.randn(2, 7, 4),
            "encoder_hidden_states": torch.randn(2, longest, 8),
            "encoder_hidden_states_mask": mask,
            "timestep": torch.tensor([0.5, 0.1]),
            "img_shapes": [[(1, 7, 1)]] * 2,
        }
        for degrees in {(size, 1), (1, size), (2, size // 2)}:
            split_sequence(DenoiserCall(module, (), kwargs), *degrees)


def attention_of_other_lengths(_: str) -> None:
    """Grouped heads, keys that are not the queries, and masks with and without heads."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    query, (key, value) = torch.randn(2, 7, 6, 8), torch.randn(2, 2, 9, 3, 8)
    seen = torch.rand(2, 1, 1, 9) > 0.4
    seen[..., 0] = True
    masks = [None, seen, seen[:, 0, 0], torch.randn(2, 6, 1, 9), seen.expand(2, 6, 1, 9)]
    for degrees in ((size, 1), (1, size), (2, size // 2)):
        split = SplitAttention(Turn(groups(*degrees)), 0, plain_attention)
        for mask in masks:
            split._turn.begin(())
            split._turn.even = False  # 7 and 9 tokens
            whole = mask[:, None, None] if mask is not None and mask.ndim == 2 else mask
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            wanted = scaled_dot_product_attention(q, k, v, attn_mask=whole, enable_gqa=True).transpose(1, 2)
            q, k, v = (x.tensor_split(size, dim=1)[rank] for x in (query, key, value))
            part = None if mask is None else mask.tensor_split(size, dim=-1)[rank]
            close([split(q, k, v, part, None)], [wanted.tensor_split(size, dim=1)[rank]])


def tiles(_: str) -> None:
    torch.manual_seed(0)
    image = AutoencoderKL(block_out_channels=(32, 32), down_block_types=["DownEncoderBlock2D"] * 2,
                          up_block_types=["UpDecoderBlock2D"] * 2, sample_size=16).eval()  # fmt: skip
    video = AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval()
    image.enable_tiling()
    video.enable_tiling(32, 32, 24, 24)
    for vae, latents in ((image, torch.randn(1, 4, 20, 11)), (video, torch.randn(1, 4, 2, 9, 5))):
        with torch.no_grad():
            decoded = vae.decode(latents, return_dict=False)[0]
            encoded = vae.encode(decoded).latent_dist.mode()
            shared = share_tiles(vae, dist.group.WORLD)
            for _ in range(2):  # what tiles look like is known the second time
                close([vae.decode(latents, return_dict=False)[0]], [decoded])
                close([vae.encode(decoded).latent_dist.mode()], [encoded])
            shared.undo()
            close([vae.decode(latents, return_dict=False)[0]], [decoded])


def whatever_is_declared(_: str) -> None:
    """Is proven: of each class of models that a family declares a plan for, there is one here."""
    for plan, names in (("sequence", SEQUENCE), ("tensor", TENSOR)):
        declared = {m for sharding in all_shardings() if getattr(sharding, plan) for m in sharding.models}
        missing = declared - {type(CALLS[name].module).__name__ for name in names}
        missing -= {type(encoder_of(name)).__name__ for name in ENCODERS}
        assert missing <= (set() if have_torchvision() else {"LongCatImageTransformer2DModel"}), missing


Scenario = tuple[Callable[[str], None], str]
ALONE = (values_go_early, odd_tokens_and_heads, odd_tokens_with_masks, attention_of_other_lengths, tiles)
SCENARIOS: dict[int, list[Scenario]] = {
    2: [
        (whatever_is_declared, ""),
        *((scenario, "") for scenario in ALONE),
        *((ulysses, name) for name in SEQUENCE),
        *((ring, name) for name in RING),
        *((tensor, name) for name in TENSOR),
        *((text_encoder, name) for name in ENCODERS),
        *((hsdp, name) for name in HSDP),
        *((read_in_parts, name) for name in ("wan21-t2v", "flux2-klein")),
    ],
    4: [
        *((scenario, "") for scenario in ALONE),
        *((scenario, name) for scenario in (ulysses_and_ring, tensor_and_sequence) for name in FOUR),
        (hsdp, "flux-dev"),
    ],
}


def rank_main(rank: int, size: int, store: str) -> str:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    lines = []
    for scenario, name in SCENARIOS[size]:
        problem = None
        try:
            scenario(name)
        except Exception:
            problem = traceback.format_exc()
        said = {"scenario": scenario.__name__, "name": name, "size": size, "rank": rank, "problem": problem}
        lines.append(json.dumps(said))
        if problem is not None:  # the other ranks may be elsewhere now
            break
    return "\n".join(lines) + "\n"


def fork(rank: int, size: int, store: str) -> tuple[int, io.BufferedReader]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with open(writing, "w") as stream:
            stream.write(rank_main(rank, size, store))
        os._exit(0)
    os.close(writing)
    return child, open(reading, "rb")


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # so that no threads are lost in forks
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys([*SEQUENCE, *TENSOR, *HSDP, *FOUR]):
            CALLS[name] = denoiser_call(name)
        for size in SCENARIOS:
            ranks = [fork(rank, size, f"{folder}/store-{size}") for rank in range(size)]
            for child, reading in ranks:
                sys.stdout.write(reading.read().decode())
                os.waitpid(child, 0)


if __name__ == "__main__":
    main()
