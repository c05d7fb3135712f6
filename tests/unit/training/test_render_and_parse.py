"""Renderer and parser are written apart; on rendered held-out scenes they must agree."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from training.evaluate import prompts
from training.parse import Parser
from training.render import cropped, letter_strokes, record, render, render_scenes, token_labels
from training.scenes import CANVASES, COLOURS, SHAPES, Scene, Thing, sample
from training.score import rates, score


@pytest.fixture(scope="module")
def parser() -> Parser:
    return Parser()


def one(shape: str, colour: str, background: str = "cream", x: float = 64, y: float = 64) -> Scene:
    thing = Thing(shape, colour, "solid", "medium", False, 20.0, x, y, 0.0, 10.0)
    return Scene(128, 128, "one", (thing,), (background, background), False)


def test_every_shape_and_every_colour_is_read_back(parser: Parser) -> None:
    pieces = parser(render_scenes([one(shape, "blue") for shape in SHAPES]))
    assert [[p.shape for p in found] for found in pieces] == [[shape] for shape in SHAPES]
    pieces = parser(render_scenes([one("circle", colour, "light green") for colour in COLOURS if colour != "white"]))
    assert [[p.colour for p in found] for found in pieces] == [[c] for c in COLOURS if c != "white"]


def test_position_is_the_middle_in_pixels(parser: Parser) -> None:
    ((piece,),) = parser(render_scenes([one("square", "red", x=40.0, y=90.5)]))
    assert (piece.x, piece.y) == pytest.approx((40.0, 90.5), abs=1.0)


@pytest.mark.parametrize(("kind", "size"), [("one", CANVASES[1]), ("two", CANVASES[0]), ("many", CANVASES[2])])
def test_held_out_scenes_pass_their_own_score(parser: Parser, kind: str, size: tuple[int, int]) -> None:
    scenes = [scene for scene, _ in prompts(kind, size, 25, 3)]
    pictures = render_scenes(scenes) + 0.02 * torch.randn(25, 3, size[1], size[0])
    found = rates([score(s, p) for s, p in zip(scenes, parser(pictures), strict=True)])
    assert found["all"] >= 0.96, found


def test_score_sees_each_kind_of_mistake(parser: Parser) -> None:
    rng = random.Random(4)
    scene = next(s for s in iter(lambda: sample(rng, kind="two"), None) if s.relation == "left")
    first, second = scene.things
    others = {
        "shape": dataclasses.replace(first, shape="heart" if first.shape != "heart" else "cross"),
        "colour": dataclasses.replace(first, colour="red" if first.colour != "red" else "blue"),
        "position": None,
        "count": None,
    }
    for name, changed in others.items():
        wrong = dataclasses.replace(scene, things=(changed or first, second))
        if name == "position":
            wrong = dataclasses.replace(
                scene,
                things=(dataclasses.replace(first, x=128 - first.x), dataclasses.replace(second, x=128 - second.x)),
            )
        if name == "count":
            wrong = dataclasses.replace(scene, things=(first,))
        result = score(scene, parser(render_scenes([wrong]))[0])
        assert not result[name], name
        assert not result["all"]


def test_outlines_are_hollow() -> None:
    filled, hollow = (render_scenes([one("circle", "blue")], outline=outline)[0] for outline in (False, True))
    assert torch.allclose(hollow[:, 64, 64], filled[:, 2, 2])
    assert not torch.allclose(hollow[:, 64, 46], filled[:, 2, 2])


def test_a_crop_of_the_record_is_a_crop_of_the_picture() -> None:
    scene = dataclasses.replace(one("star", "red", x=50, y=70), background=("white", "dark blue"))
    records, strokes = torch.from_numpy(np.stack([record(scene)])), letter_strokes(torch.device("cpu"))
    part = render(cropped(records, torch.tensor([[20.0, 40.0]]), 128, 64), strokes, 64, 64)
    assert torch.allclose(part, render(records, strokes, 128, 128)[:, :, 40:104, 20:84], atol=1e-5)


def test_token_labels_say_what_is_where() -> None:
    scene = dataclasses.replace(one("square", "green", x=40, y=24), width=160, height=96)
    records, strokes = torch.from_numpy(np.stack([record(scene)])), letter_strokes(torch.device("cpu"))
    labels = token_labels(records, strokes, 160, 96, 16)[0].view(6, 10, 3)
    assert labels[1, 2].tolist() == [1 + SHAPES.index("square"), 1 + list(COLOURS).index("green"), 1]
    assert int((labels[..., 0] > 0).sum()) == 9
    assert labels[3:].sum() == labels[:, 5:].sum() == 0
