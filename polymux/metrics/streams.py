"""What is counted of text and sound on their way out: how soon they begin, and whether they keep coming."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram

from polymux.metrics import catalog
from polymux.metrics.catalog import Spec
from polymux.metrics.playback import Playback
from polymux.request import News, SoundPiece, TextPiece

CONTINUITIES = ("unbroken", "broken")


@dataclass
class Stream:
    """What has come of one request. Times are those of one clock."""

    admitted: float
    text: float | None = None  # when the last piece of text came
    playback: Playback = field(default_factory=Playback)


class StreamMetrics:
    """The instruments."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        def histogram(spec: Spec) -> Histogram:
            made = Histogram(spec.name, spec.help, spec.labels, registry=registry, buckets=spec.buckets)
            return made.labels(model_name)

        self._first_text, self._next_text = histogram(catalog.FIRST_TEXT), histogram(catalog.NEXT_TEXT)
        self._first_sound, self._next_sound = histogram(catalog.FIRST_SOUND), histogram(catalog.NEXT_SOUND)
        self._factor, self._silence = histogram(catalog.REAL_TIME), histogram(catalog.SILENCE)
        spec = catalog.UNDERRUNS
        self._underruns = Counter(spec.name, spec.help, spec.labels, registry=registry).labels(model_name)
        spec = catalog.CONTINUITY
        heard = Counter(spec.name, spec.help, spec.labels, registry=registry)
        self._heard = {name: heard.labels(model_name, name) for name in CONTINUITIES}

    def came(self, stream: Stream, event: News, now: float) -> None:
        """A piece of a request's text or sound, or something else that happens to it."""
        match event:
            case TextPiece():
                if stream.text is None:
                    self._first_text.observe(now - stream.admitted)
                else:
                    self._next_text.observe(now - stream.text)
                stream.text = now
            case SoundPiece(samples=samples) if samples.sample_rate:
                if stream.playback.first is None:
                    self._first_sound.observe(now - stream.admitted)
                else:
                    self._next_sound.observe(now - stream.playback.last)
                stream.playback.came(now, samples.shape[-1] / samples.sample_rate)

    def finished(self, stream: Stream, seconds: float) -> None:
        """A request has its output, so long after it was admitted."""
        playback = stream.playback
        if not playback.sound:
            return
        self._factor.observe(seconds / playback.sound)
        self._silence.observe(playback.silence)
        self._underruns.inc(playback.breaks)
        self._heard["broken" if playback.breaks else "unbroken"].inc()
