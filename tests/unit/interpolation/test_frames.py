"""Frames between frames: how many there are, where they stand, and that the others stay as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polymux.interpolation.frames import Frames, Smoothing
from polymux.testing.flow_network import constant_network, random_network

FRAMES, HEIGHT, WIDTH = 4, 10, 14  # no multiples of anything
VIDEO = torch.rand(FRAMES, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))


def kinds() -> list[tuple[Frames, bool]]:
    last = VIDEO.permute(0, 2, 3, 1).contiguous()
    return [
        (VIDEO, True),
        (VIDEO.bfloat16(), True),
        (VIDEO.mul(255).round().to(torch.uint8), True),
        (last, False),
        (last.numpy(), False),
        ((last * 255).round().to(torch.uint8).numpy(), False),
    ]


@pytest.mark.parametrize("factor", [2, 4, 16])
@pytest.mark.parametrize("kind", range(6))
def test_what_was_there_stays_and_stands_in_its_place(kind: int, factor: int) -> None:
    video, channels_first = kinds()[kind]
    smoothing = Smoothing(random_network(), factor, 1.0)
    count = smoothing.count(FRAMES)
    assert count == 3 * factor + 1
    made = smoothing.rows(video, 0, count + 5, channels_first)
    assert made.shape == (count, *video.shape[1:]) and type(made) is type(video)
    before, after = np.asarray(torch.as_tensor(video).float()), np.asarray(torch.as_tensor(made).float())
    assert np.array_equal(after[::factor], before)
    assert made.dtype == (torch.float32 if video.dtype == torch.bfloat16 else video.dtype)
    top = 255 if "uint8" in str(video.dtype) else 1
    assert after.min() >= 0 and after.max() <= top


def test_rows_are_the_same_whoever_asks_for_how_many() -> None:
    smoothing = Smoothing(random_network(), 4, 0.5)
    whole = smoothing.rows(VIDEO, 0, 13, True)
    for step in (1, 3, 5):
        assert torch.equal(torch.cat([smoothing.rows(VIDEO, i, i + step, True) for i in range(0, 13, step)]), whole)


def test_a_single_frame_has_nothing_between() -> None:
    smoothing = Smoothing(random_network(), 4, 1.0)
    assert smoothing.count(1) == 1 and torch.equal(smoothing.rows(VIDEO[:1], 0, 1, True), VIDEO[:1])


def test_still_frames_stay_still() -> None:
    still = VIDEO[:1].expand(3, -1, -1, -1).mul(255).round().to(torch.uint8)
    made = Smoothing(constant_network((0, 0, 0, 0)), 4, 1.0).rows(still, 0, 9, True)
    assert torch.equal(made, still[:1].expand(9, -1, -1, -1))


def test_bytes_and_floats_say_the_same() -> None:
    smoothing = Smoothing(constant_network((0.5, 0, -0.5, 0)), 2, 1.0)
    eight = VIDEO.mul(255).round().to(torch.uint8)
    floats = smoothing.rows(eight.float() / 255, 0, 7, True)
    assert torch.equal(smoothing.rows(eight, 0, 7, True), floats.mul(255).round().to(torch.uint8))
