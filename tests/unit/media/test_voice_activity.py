"""Turns in a sound, by its energy: where they begin and end, whatever the pieces it comes in."""

from __future__ import annotations

import numpy as np
import pytest

from polymux.media.voice_activity import BEGINS_MS, FRAME_MS, Edge, VoiceActivity
from polymux.media.wire import Array

RATE = 24000
FRAME = RATE * FRAME_MS // 1000


def sound(*parts: tuple[int, float]) -> Array:
    """Noise of so many milliseconds and so many dB of full scale."""
    generator = np.random.default_rng(0)
    made = [generator.standard_normal(ms * RATE // 1000) * 32768 * 10 ** (db / 20) for ms, db in parts]
    return np.concatenate(made).round().clip(-32768, 32767).astype(np.int16)


def edges(samples: Array, piece: int = 10**9, threshold: float = 0.5, silence_ms: int = 200) -> list[Edge]:
    activity = VoiceActivity(RATE, threshold, silence_ms)
    return [edge for i in range(0, len(samples), piece) for edge in activity.add(samples[i : i + piece])]


def at(ms: int) -> int:
    return ms * RATE // 1000


TALK = sound((500, -90), (400, -25), (100, -90), (400, -25), (600, -90), (300, -25), (100, -90))


@pytest.mark.parametrize("piece", [1, 7, FRAME, 1000, 10**9])
def test_turns_do_not_depend_on_the_pieces(piece: int) -> None:
    samples = TALK if piece > 1 else TALK[: at(700)]
    expected = [Edge("began", at(500)), Edge("ended", at(1600)), Edge("began", at(2000))]  # a short pause ends nothing
    assert edges(samples, piece) == (expected if piece > 1 else expected[:1])


@pytest.mark.parametrize(
    ("loud_ms", "db", "threshold", "begins"),
    [
        (BEGINS_MS - FRAME_MS, -10, 0.5, False), (BEGINS_MS, -10, 0.5, True), (500, -42, 0.5, False),
        (500, -38, 0.5, True), (500, -38, 0.6, False), (500, -12, 1.0, False), (500, -8, 1.0, True),
        (500, -68, 0.0, True), (500, -72, 0.0, False),
    ],
)  # fmt: skip
def test_what_is_loud_enough_for_long_enough(loud_ms: int, db: float, threshold: float, begins: bool) -> None:
    samples = sound((200, -95), (loud_ms, db), (200, -95))
    assert [edge.kind for edge in edges(samples, threshold=threshold, silence_ms=1000)] == ["began"] * begins


@pytest.mark.parametrize(("silence_ms", "end"), [(0, 520), (20, 520), (30, 540), (200, 700), (1000, None)])
def test_how_much_silence_ends_a_turn(silence_ms: int, end: int | None) -> None:
    found = edges(sound((500, -20), (500, -90)), silence_ms=silence_ms)
    assert found[1:] == ([] if end is None else [Edge("ended", at(end))])


def test_positions_begin_where_they_are_told_to() -> None:
    activity = VoiceActivity(RATE, 0.5, 200, start=1000)
    assert list(activity.add(sound((200, -90), (60, -20)))) == []
    assert activity.quiet_until == 1000 + at(200) and not activity.speaking
    assert list(activity.add(sound((60, -20)))) == [Edge("began", 1000 + at(200))]
    assert activity.speaking


def test_the_loudest_samples_do_not_overflow() -> None:
    assert edges(np.full(at(200), -32768, np.int16)) == [Edge("began", 0)]
