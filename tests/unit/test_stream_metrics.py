"""What is counted of text and sound as they come is what somebody who waits for them would have seen with a watch."""

from __future__ import annotations

import pytest
from test_metrics import samples

from polymux.errors import GenerationError
from polymux.metrics import Metrics
from polymux.metrics.playback import Playback
from polymux.metrics.streams import Stream
from polymux.orchestrator import tickets
from polymux.request import (
    ArrayData,
    Finished,
    News,
    Progress,
    Request,
    RequestMetrics,
    SoundPiece,
    TextPiece,
)


def sound(seconds: float, name: str = "r") -> SoundPiece:
    return SoundPiece(name, 0, ArrayData("float32", (1, int(seconds * 1000)), b"", sample_rate=1000))


def play(*pieces: tuple[float, float]) -> Playback:
    """Of (when, seconds)."""
    playback = Playback()
    for when, seconds in pieces:
        playback.came(when, seconds)
    return playback


@pytest.mark.parametrize(
    ("pieces", "breaks", "silence"),
    [
        ([(5.0, 1.0)], 0, 0.0),
        ([(5.0, 1.0), (5.5, 1.0), (6.5, 1.0)], 0, 0.0),  # ahead of who listens
        ([(5.0, 1.0), (6.0, 1.0)], 0, 0.0),  # just in time
        ([(5.0, 1.0), (6.5, 1.0), (7.0, 1.0)], 1, 0.5),  # late once; then what is there lasts from 6.5 on
        ([(5.0, 1.0), (7.0, 1.0), (8.25, 1.0)], 2, 1.25),
        ([(5.0, 0.25), (5.1, 5.0), (12.0, 1.0)], 1, 1.75),
    ],
)
def test_playback(pieces: list[tuple[float, float]], breaks: int, silence: float) -> None:
    playback = play(*pieces)
    assert (playback.breaks, playback.first) == (breaks, 5.0)
    assert playback.silence == pytest.approx(silence)
    assert playback.sound == pytest.approx(sum(seconds for _, seconds in pieces))


def test_pieces_are_timed_from_the_admission_on() -> None:
    metrics, stream = Metrics("m"), Stream(admitted=100.0)
    events: list[tuple[float, News]] = [
        (100.01, Progress("r", "encode", 0, 0)),  # nothing to see or to hear
        (100.2, TextPiece("r", "a")),
        (100.3, TextPiece("r", "b")),
        (100.6, TextPiece("r", "c")),
        (101.0, sound(0.5)),
        (101.25, sound(0.5)),
        (102.5, sound(1.0)),  # half a second too late
    ]
    for when, event in events:
        metrics.streams.came(stream, event, when)
    got = samples(metrics)
    expected = {
        "time_to_first_token_seconds": (1, 0.2),
        "inter_token_latency_seconds": (2, 0.4),
        "time_to_first_audio_seconds": (1, 1.0),
        "inter_audio_chunk_seconds": (2, 1.5),
        "audio_real_time_factor": (0, 0),
    }
    for name, (count, total) in expected.items():
        assert got[f"polymux:{name}_count",] == count
        assert got[f"polymux:{name}_sum",] == pytest.approx(total)
    metrics.streams.finished(stream, 3.0)
    got = samples(metrics)
    assert got["polymux:audio_real_time_factor_sum",] == pytest.approx(1.5)  # 3 s for 2 s of sound
    assert got["polymux:audio_underrun_seconds_sum",] == pytest.approx(0.5)
    assert got["polymux:audio_underrun_seconds_bucket", "0.0"] == 0
    assert got["polymux:audio_underruns_total",] == 1
    assert (got["polymux:audio_streams_total", "broken"], got["polymux:audio_streams_total", "unbroken"]) == (1, 0)


def test_requests_without_sound_are_no_streams_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the tickets: completed ones with sound count, failed ones do not; who has left hears nothing more."""
    clock = [10.0]
    monkeypatch.setattr(tickets.time, "monotonic", lambda: clock[0])
    metrics = Metrics("m")
    all_of_them = tickets.Tickets(metrics)
    spent = RequestMetrics()
    for name, event in (
        ("mute", TextPiece("mute", "a")),
        ("heard", sound(1.0)),
        ("failed", sound(1.0)),
        ("left", None),
    ):
        clock[0] = 10.0
        ticket = all_of_them.open(Request(request_id=name))
        clock[0] = 10.5
        if event is None:
            all_of_them.abort(name)
            all_of_them.deliver(ticket, sound(1.0))
            continue
        all_of_them.deliver(ticket, event)
        end = GenerationError("no") if name == "failed" else Finished(name, "audio", [[]], [1], spent)
        all_of_them.end(ticket, end)
    got = samples(metrics)
    assert (got["polymux:time_to_first_token_seconds_count",], got["polymux:time_to_first_audio_seconds_count",]) == (
        1,
        2,
    )
    assert got["polymux:time_to_first_audio_seconds_sum",] == 1.0
    assert (got["polymux:audio_real_time_factor_count",], got["polymux:audio_real_time_factor_sum",]) == (1, 0.5)
    assert got["polymux:audio_streams_total", "unbroken"] == 1
    assert got["polymux:audio_underrun_seconds_bucket", "0.0"] == 1


def test_an_edge_counts_sizes_and_seconds() -> None:
    metrics = Metrics("m", [("0", "0"), ("1", "0")])
    for nbytes in (1000, 5000):
        metrics.handed_on(0, 1, nbytes)
        metrics.arrived(0, 1, 0.25)
    got = samples(metrics)
    assert got["polymux:transfer_bytes_total", "0", "1"] == got["polymux:transfer_chunk_bytes_sum", "0", "1"] == 6000
    assert got["polymux:transfer_chunk_bytes_bucket", "0", "1024.0", "1"] == 1
    assert (got["polymux:transfer_seconds_count", "0", "1"], got["polymux:transfer_seconds_sum", "0", "1"]) == (2, 0.5)
