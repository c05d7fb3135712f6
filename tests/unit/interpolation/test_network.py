"""The network between two frames: what its weights are called, and that it follows what moves."""

from __future__ import annotations

import pytest
import torch

from polymux.interpolation.network import FlowNetwork, Layout, warp
from polymux.testing.flow_network import constant_network, random_network

RELEASED = Layout(encoder=16, features=4, widths=(192, 128, 64, 32))  # 4.22 lite


def square(x: int, y: int, side: int = 32, box: int = 6) -> torch.Tensor:
    picture = torch.full((1, 3, side, side), 0.1)
    picture[..., y : y + box, x : x + box] = 0.9
    return picture


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_a_frame_is_as_large_as_its_neighbours(scale: float) -> None:
    network = random_network(Layout(encoder=4, features=2, widths=(8, 8, 8)))
    multiple = network.multiple(scale)
    first, second = torch.rand(2, 1, 3, multiple, 2 * multiple)
    made = network(first, second, 0.25, scale)
    assert made.shape == first.shape and bool(torch.isfinite(made).all())
    assert not torch.equal(made, network(first, second, 0.75, scale)), "it matters when"


def test_names_and_shapes_are_those_of_the_released_weights() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in FlowNetwork(RELEASED).state_dict().items()}
    assert len(shapes) == 4 * (4 + 8 * 3 + 2) + 8
    some = {
        "block0.conv0.0.0.weight": (96, 15, 3, 3),
        "block1.conv0.0.0.weight": (64, 28, 3, 3),
        "block1.conv0.1.0.bias": (128,),
        "block2.convblock.7.beta": (1, 64, 1, 1),
        "block2.convblock.7.conv.weight": (64, 64, 3, 3),
        "block3.lastconv.0.weight": (32, 52, 4, 4),
        "encode.cnn0.weight": (16, 3, 3, 3),
        "encode.cnn3.weight": (16, 4, 4, 4),
    }
    assert {name: shapes[name] for name in some} == some


def test_warping_takes_pixels_from_where_the_flow_points() -> None:
    flow = torch.tensor([3.0, -2.0]).reshape(1, 2, 1, 1).expand(1, 2, 32, 32)
    assert torch.allclose(warp(square(10, 10), flow), square(7, 12), atol=1e-5)


def test_equal_frames_without_motion_give_the_same_frame() -> None:
    frame = torch.rand(1, 3, 16, 24)
    made = constant_network((0, 0, 0, 0))(frame, frame, 0.5)
    assert torch.allclose(made, frame, atol=1e-5)


def test_a_square_whose_motion_is_known_lands_in_the_middle() -> None:
    """It moves by (4, -2): the middle is 2 to the right of where it was, and 2 to the left of where it will be."""
    made = constant_network((-2, 1, 2, -1))(square(8, 12), square(12, 10), 0.5)
    assert torch.allclose(made, square(10, 11), atol=1e-4)


def test_the_mask_says_of_which_frame_a_pixel_is() -> None:
    first, second = square(8, 12), square(20, 12)
    assert torch.allclose(constant_network((0, 0, 0, 0), mask=30)(first, second, 0.5), first, atol=1e-5)
    assert torch.allclose(constant_network((0, 0, 0, 0), mask=-30)(first, second, 0.5), second, atol=1e-5)


def moving(count: int, source: torch.Generator, side: int = 24, box: int = 8) -> torch.Tensor:
    """(3, count, 3, side, side): squares before, in the middle of, and after a motion."""
    frames = torch.full((3, count, 3, side, side), 0.1)
    places = torch.randint(3, side - box - 3, (count, 2), generator=source)
    motions = torch.randint(-3, 4, (count, 2), generator=source)
    colours = torch.rand(count, 3, 1, 1, generator=source) / 2 + 0.5
    for moment in range(3):
        for i, (y, x) in enumerate((places + motions * (moment - 1)).tolist()):
            frames[moment, i, :, y : y + box, x : x + box] = colours[i]
    return frames


def test_it_learns_to_follow_what_moves() -> None:
    """Some seconds of training on moving squares, then squares that it has not seen: far better than a cross-fade."""
    network = random_network(Layout(encoder=4, features=4, widths=(16,))).requires_grad_(True)
    optimizer = torch.optim.AdamW(network.parameters(), 4e-3)
    source = torch.Generator().manual_seed(0)
    for _ in range(110):
        first, middle, last = moving(8, source)
        loss = (network(first, last, 0.5) - middle).abs().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    first, middle, last = moving(32, torch.Generator().manual_seed(99))
    with torch.no_grad():
        error = (network(first, last, 0.5) - middle).abs().mean()
    assert error < 0.6 * ((first + last) / 2 - middle).abs().mean()
