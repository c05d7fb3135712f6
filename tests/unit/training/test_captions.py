"""Captions tell the truth, fit the model's window, and are words to its tokenizer."""

from __future__ import annotations

import random

import pytest

from training import captions, components
from training.pool import QUESTIONS, WORDS, build, labels
from training.scenes import CANVASES, NEVER_TOGETHER, SHAPES, sample

TEMPLATE = ("<|im_start|>user\n", "<|im_end|>\n")


def test_training_and_held_out_scenes_never_meet() -> None:
    rng = random.Random(1)
    training = [sample(rng) for _ in range(300)]
    held_out = [sample(rng, held_out=True) for _ in range(60)]
    assert not any(scene.held_out for scene in training)
    assert all(scene.held_out for scene in held_out)
    assert not any((t.shape, t.colour) in NEVER_TOGETHER for scene in training for t in scene.things)


def test_objects_place_and_relation_are_always_said() -> None:
    rng = random.Random(2)
    for _ in range(300):
        scene = sample(rng, rng.choice(CANVASES))
        text = captions.caption(scene, rng).lower()
        for thing in scene.things:
            words = captions.COLOUR_WORDS.get(thing.colour, (thing.colour,))
            nouns = captions.SHAPE_WORDS.get(thing.shape, (thing.shape,))
            assert any(word in text for word in words)
            assert any(noun.lower() in text for noun in nouns)
        if scene.relation:
            assert any(word in text for word in captions.RELATION_WORDS[scene.relation])
        if scene.says_background:
            assert scene.background[0] in text


def test_template_is_as_long_as_the_pipeline_assumes_and_words_are_tokens() -> None:
    tok = components.tokenizer()
    template = (
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
    )
    assert len(tok(template).input_ids) == components.TEMPLATE_TOKENS
    rng = random.Random(3)
    for _ in range(300):
        text = captions.caption(sample(rng), rng)
        tokens = tok.tokenize(text)
        spaced = text.replace(",", " ,").replace(".", " .").split()
        assert len(tokens) <= len(spaced) + 1, tokens  # a digit's space is a token of its own
    assert tok.decode(tok("Zebra 7 ünder").input_ids) == "Zebra 7 ünder"


def test_pool_is_the_same_for_the_same_seed_and_its_labels_are_in_range() -> None:
    pools = [build(30, seed, TEMPLATE) for seed in (1, 1, 2)]
    assert (pools[0].records == pools[1].records).all()
    assert (pools[0].ids == pools[1].ids).all()
    assert not (pools[0].records == pools[2].records).all()
    assert (pools[0].lengths <= WORDS).all()
    assert (pools[0].labels < [number for slot in QUESTIONS for number in slot]).all()
    scene = sample(random.Random(5), kind="two")
    assert labels(scene)[0] == 1 + SHAPES.index(scene.things[0].shape)
    assert labels(scene)[8] == 0  # there is no third thing


def test_a_caption_too_long_for_the_window_is_refused() -> None:
    from training.pool import encode

    with pytest.raises(ValueError, match="tokens, more than"):
        encode(components.tokenizer(), ["red " * 80], TEMPLATE)
