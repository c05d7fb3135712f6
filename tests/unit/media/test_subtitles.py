"""Subtitles of transcripts."""

from __future__ import annotations

from polymux.media.subtitles import srt, vtt
from polymux.request import Segment

SAID = [
    Segment(start=0.0, end=1.5, text=" Hello\n\nthere. ", tokens=[]),
    Segment(start=3599.9996, end=3725.0404, text="a --> b <i>&", tokens=[]),
]


def test_subrip() -> None:
    assert srt(SAID) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n2\n01:00:00,000 --> 01:02:05,040\na -> b <i>&\n"
    )
    assert srt([]) == ""


def test_webvtt() -> None:
    assert vtt(SAID) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there.\n\n"
        "01:00:00.000 --> 01:02:05.040\na -&gt; b &lt;i&gt;&amp;\n"
    )
