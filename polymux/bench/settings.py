"""The knobs of a measurement. With the dataset's file, they are all that it takes to repeat it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from polymux.errors import ConfigError
from polymux.knobs import Checked, check_unchanged, knob

IMAGES, SPEECH, CHAT = "/v1/images/generations", "/v1/audio/speech", "/v1/chat/completions"
ENDPOINTS = (IMAGES, SPEECH, CHAT)
OBJECTIVES = ("e2el", "ttfp", "ttft", "ttfa")
_ONLY = {IMAGES: ("size", "num_images", "steps"), CHAT: ("max_tokens", "speak")}  # knobs of one endpoint


@dataclass(frozen=True, kw_only=True)
class LoadSettings(Checked):
    """Load: what is sent, and when"""

    base_url: str = knob("http://127.0.0.1:8000", "the server, without /v1")
    endpoint: str = knob("/v1/images/generations", "where requests go", choices=ENDPOINTS)
    num_prompts: int = knob(16, "requests; a dataset with fewer prompts is used again from its begin", minimum=1)
    request_rate: float | None = knob(
        None, "requests per second, at random (Poisson) intervals (default: all at once)", minimum=1e-6
    )
    max_concurrency: int | None = knob(None, "requests under way at once; more wait here for their turn", minimum=1)
    load_seed: int = knob(0, "of the intervals and of random prompts", minimum=0)
    num_warmups: int = knob(1, "requests of each shape, sent before and not counted", minimum=0)
    request_timeout: float = knob(600.0, "seconds until a request is given up", minimum=0.001)


@dataclass(frozen=True, kw_only=True)
class RequestSettings(Checked):
    """Requests: their fields; those that are not given are not sent"""

    dataset_path: str | None = knob(
        None, "prompts: lines of text, or .jsonl with a prompt and further fields (default: random words)"
    )
    random_words: int = knob(12, "words of a random prompt", minimum=1)
    model: str | None = knob(None, "name of the model (default: the first that GET /v1/models lists)")
    size: str | None = knob(None, "WIDTHxHEIGHT", metavar="WxH")
    num_images: int | None = knob(None, "pictures per request, n", minimum=1)
    steps: int | None = knob(None, "num_inference_steps, which only some servers know", minimum=1)
    seed: int | None = knob(
        None, "of the first request, the next one has the next; only some servers know it", minimum=0
    )
    extra_body: dict[str, Any] = knob({}, "further fields of every request", metavar="JSON")
    max_tokens: int | None = knob(None, "chat: max_completion_tokens", minimum=1)
    speak: bool = knob(False, "chat: let answers be spoken, too")
    voice: str | None = knob(None, "speech, and spoken answers: the voice")
    stream: bool = knob(
        False, "let answers be streamed, and measure the time to the first picture, text or sound, and what follows"
    )
    api_key: str | None = knob(None, "sent as a bearer token; others on this machine can see it", secret=True)


@dataclass(frozen=True, kw_only=True)
class ReportSettings(Checked):
    """Report: what comes out"""

    goodput: tuple[str, ...] = knob(
        (),
        "objectives, in milliseconds: e2el:5000 (end-to-end latency); of streams, time to the first picture "
        "(ttfp:800), token (ttft:200), sound (ttfa:300)",
        metavar="NAME:MS",
    )
    output: str | None = knob(None, "write everything that was measured to this file, as JSON", metavar="FILE")
    allow_failures: bool = knob(False, "exit code 0 also if requests failed")
    quiet: bool = knob(False, "no progress bar")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    load: LoadSettings
    request: RequestSettings
    report: ReportSettings

    def __post_init__(self) -> None:
        url = urlsplit(self.load.base_url)
        if url.scheme not in ("http", "https") or not url.netloc:
            what = f"base_url={self.load.base_url!r}: must be like http://127.0.0.1:8000"
            raise ConfigError(what, param="base_url")
        for endpoint, names in _ONLY.items():
            if self.load.endpoint != endpoint:
                check_unchanged(self.request, f"acts only with --endpoint {endpoint}", names)
        if not self._sounds:
            check_unchanged(self.request, f"acts only with --endpoint {SPEECH}, or --speak", ("voice",))
        if self.load.endpoint == SPEECH and self.request.extra_body.get("response_format", "wav") not in ("wav", "pcm"):
            raise ConfigError("extra_body: the sound's response_format can be wav or pcm here", param="extra_body")
        measured = {"ttfp": self.load.endpoint == IMAGES, "ttft": self.load.endpoint == CHAT, "ttfa": self._sounds}
        for name in self.objectives().keys() & measured.keys():
            if not (measured[name] and self.request.stream):
                what = f"goodput: {name} is measured with --stream only, at an endpoint that makes such a thing"
                raise ConfigError(what, param="goodput")

    @property
    def _sounds(self) -> bool:
        return self.load.endpoint == SPEECH or self.request.speak

    def objectives(self) -> dict[str, float]:
        """Seconds by name. Raises ConfigError."""
        found: dict[str, float] = {}
        for objective in self.report.goodput:
            name, _, milliseconds = objective.partition(":")
            try:
                seconds = float(milliseconds) / 1000
            except ValueError:
                seconds = -1.0
            if name not in OBJECTIVES or not 0 < seconds < float("inf"):
                what = (
                    f"goodput={objective!r}: must be like e2el:5000 (milliseconds); known are {', '.join(OBJECTIVES)}"
                )
                raise ConfigError(what, param="goodput")
            found[name] = seconds
        return found
