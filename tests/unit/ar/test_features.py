"""What of a prompt with media goes into which piece, and what it is known by."""

from __future__ import annotations

import numpy as np
import torch

from polymux.ar.features import Features, Rows, names_of, together

WORDS, PICTURE, SOUND = list(range(10, 14)), 7, 8
TOKENS = [*WORDS, PICTURE, PICTURE, PICTURE, PICTURE, 20, SOUND, SOUND, 21]
# Two rows and two columns of a picture, and what comes after it begins two further.
PLAIN = [0, 1, 2, 3]
POSITIONS = np.array([
    [*PLAIN, 4, 4, 4, 4, 6, 7, 8, 9],
    [*PLAIN, 4, 4, 5, 5, 6, 7, 8, 9],
    [*PLAIN, 4, 5, 4, 5, 6, 7, 8, 9],
])  # fmt: skip
PLACES = np.array([4, 5, 6, 7, 9, 10])


def features(positions: np.ndarray = POSITIONS, shift: int = -2) -> Features:  # type: ignore[type-arg]
    values = torch.arange(6.0)[None, :, None]
    deeper = Rows(PLACES[:4], torch.stack([values[0, :4] + 100, values[0, :4] + 200]))
    return Features(Rows(PLACES, values), deeper, positions, shift)


def test_pieces() -> None:
    made = features()
    assert made.stand(3, 6).tolist() == [[3, 4, 4], [3, 4, 4], [3, 4, 5]]
    assert made.stand(11, 14).tolist() == [[9, 10, 11]] * 3 and made.stand(13, 14).tolist() == [[11]] * 3
    told = together([(5, made, 6, 10), (9, made, 0, 5)], 20, torch.from_numpy)
    assert told is not None and told.deep_at is not None
    assert told.at.tolist() == [5, 6, 8, 13] and told.inputs[:, 0].tolist() == [2, 3, 4, 0]
    assert told.deep_at.nonzero()[:, 0].tolist() == [5, 6, 13]
    assert [one[:, 0].tolist() for one in told.deeper] == [[102, 103, 100], [202, 203, 200]]
    sound = together([(0, made, 8, 12)], 4, torch.from_numpy)
    assert sound is not None and sound.at.tolist() == [1, 2] and sound.deep_at is None and sound.deeper == ()
    assert together([(0, made, 0, 4), (4, made, 11, 12)], 5, torch.from_numpy) is None


def test_names() -> None:
    held = {PICTURE: (b"a cat",), SOUND: (b"a bark",)}
    names = names_of(TOKENS, features(), held)
    assert names is not None
    assert [n for n in names if n >= 0] == [*WORDS, 20, 21] and len(set(names)) == len(TOKENS)
    assert all(name >= -(2**63) for name in names)
    other = names_of(TOKENS, features(), held | {PICTURE: (b"a dog",)})
    assert other is not None and [a == b for a, b in zip(names, other, strict=True)] == [
        *[True] * 4, *[False] * 4, *[True] * 4
    ]  # fmt: skip
    parted = names_of(TOKENS, features(), held | {PICTURE: (b"a", b" cat")})  # two films, say, in one run of tokens
    assert parted == names  # known by both


def test_what_its_names_would_not_say_has_none() -> None:
    held = {PICTURE: (b"a cat",), SOUND: (b"a bark",)}
    assert names_of(TOKENS, features(shift=-1), held) is None
    elsewhere = POSITIONS.copy()
    elsewhere[:, 8:] += 1
    assert names_of(TOKENS, features(elsewhere, -1), held) is None
    assert names_of(TOKENS, features(), {PICTURE: (b"a cat",)}) is None  # nobody says what the sound holds
