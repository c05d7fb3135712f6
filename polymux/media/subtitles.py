"""Transcripts as subtitles: SubRip and WebVTT."""

from __future__ import annotations

import html
from collections.abc import Sequence

from polymux.request import Segment


def srt(segments: Sequence[Segment]) -> str:
    lines = []
    for number, segment in enumerate(segments, 1):
        lines += [str(number), f"{_time(segment.start, ',')} --> {_time(segment.end, ',')}", _text(segment), ""]
    return "\n".join(lines)


def vtt(segments: Sequence[Segment]) -> str:
    lines = ["WEBVTT", ""]
    for segment in segments:
        times = f"{_time(segment.start, '.')} --> {_time(segment.end, '.')}"
        lines += [times, html.escape(_text(segment), quote=False), ""]
    return "\n".join(lines)


def _text(segment: Segment) -> str:
    """Without empty lines, which would end it; and an arrow in it is no arrow."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _time(seconds: float, mark: str) -> str:
    """00:01:02,345"""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"
