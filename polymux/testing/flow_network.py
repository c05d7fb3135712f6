"""Weights of small networks that make frames between frames: random ones, and ones that move everything by so much.

    write(Path("network.safetensors"), random_network())

For tests and for trying out; what they make of a real video is nothing to look at.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from polymux.interpolation.network import UPSCALE, FlowNetwork, Layout

TINY = Layout(encoder=4, features=2, widths=(8, 8))


def random_network(layout: Layout = TINY, seed: int = 0) -> FlowNetwork:
    """Weights as a network has them before it is trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FlowNetwork(layout).eval().requires_grad_(False)


def constant_network(flow: tuple[float, float, float, float], mask: float = 0.0, layout: Layout = TINY) -> FlowNetwork:
    """Whatever it sees, its flow is (x, y) to the first frame and (x, y) to the second one, in pixels."""
    network = random_network(layout)
    # What is left is the finest block's bias, which the shuffle takes apart channel by channel.
    wanted = torch.repeat_interleave(torch.tensor([*flow, mask]), UPSCALE**2)
    state = network.state_dict()
    for name, tensor in state.items():
        if ".lastconv." in name:
            tensor.zero_()
    state[f"block{len(layout.widths) - 1}.lastconv.0.bias"][: len(wanted)] = wanted
    return network


def write(file: Path, network: FlowNetwork, prefix: str = "") -> Path:
    save_file({prefix + name: tensor.contiguous() for name, tensor in network.state_dict().items()}, file)
    return file
