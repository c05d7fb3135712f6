"""One measurement from begin to end: find the model, warm up, measure, report.

The first Ctrl-C ends the measurement and what was measured until then is reported; the second one ends the program.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx2
import msgspec
from tqdm import tqdm

from polymux.bench import dataset, report
from polymux.bench.chat import Chat
from polymux.bench.endpoint import Endpoint, Images
from polymux.bench.load import UNREACHABLE, Load
from polymux.bench.records import Record
from polymux.bench.settings import CHAT, IMAGES, SPEECH, BenchSettings, RequestSettings
from polymux.bench.speech import Speech
from polymux.bench.summary import summarize
from polymux.errors import ConfigError, PolymuxError

INTERRUPTED = 130
_AT: dict[str, Callable[[RequestSettings, str | None], Endpoint]] = {IMAGES: Images, SPEECH: Speech, CHAT: Chat}


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def run(settings: BenchSettings) -> int:
    """Measure, print, write. Returns the exit code. Raises ConfigError, and PolymuxError if the server cannot be
    measured at all."""
    data = dataset.load(settings)
    _check_writable(settings.report.output)
    return asyncio.run(_run(settings, data))


async def _run(settings: BenchSettings, data: dataset.Dataset) -> int:
    key = settings.request.api_key
    async with httpx2.AsyncClient(
        base_url=settings.load.base_url,
        headers={} if key is None else {"authorization": f"Bearer {key}"},
        timeout=None,  # requests have one of their own
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    ) as http:
        model = settings.request.model or await _first_model(http)
        load = Load(http, _AT[settings.load.endpoint](settings.request, model), settings.load)
        _check_warm(await load.warm_up(data.items))
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: _interrupt(stop))
        try:
            with _Progress(len(data.items), hidden=settings.report.quiet) as progress:
                records, seconds = await load.measure(data.items, progress.ended, stop)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
    summary = summarize(records, seconds, settings.objectives())
    print(report.table(summary))
    if settings.report.output is not None:
        Path(settings.report.output).write_text(
            report.document(settings, data.source, model, summary, records), encoding="utf-8"
        )
    if stop.is_set():
        return INTERRUPTED
    return 1 if summary.failed and not settings.report.allow_failures else 0


def _interrupt(stop: asyncio.Event) -> None:
    if stop.is_set():
        raise KeyboardInterrupt
    stop.set()


async def _first_model(http: httpx2.AsyncClient) -> str | None:
    """None where models are not listed. Raises PolymuxError if nobody is there."""
    try:
        response = await http.get("/v1/models", timeout=10)
        models = msgspec.json.decode(response.content, type=_Models).data
    except httpx2.HTTPError as error:
        raise PolymuxError(f"{http.base_url}: {type(error).__name__}: {error}") from None
    except msgspec.DecodeError:
        return None
    return models[0].id if models else None


def _check_warm(records: Sequence[Record]) -> None:
    """Raises PolymuxError if none of the warm-ups succeeded: what follows would measure errors."""
    bad = [record for record in records if record.failed]
    if bad and len(bad) == len(records):
        first = bad[0]
        what = "the server cannot be reached" if first.error == UNREACHABLE else "the warm-up failed"
        raise PolymuxError(f"{what}: {first.error}: {first.message}")


def _check_writable(output: str | None) -> None:
    """Before the work and not after it."""
    if output is not None and not Path(output).absolute().parent.is_dir():
        raise ConfigError(f"output={output!r}: there is no such folder", param="output")


class _Progress:
    """A bar on stderr: how many have ended, with what, and the last latency."""

    def __init__(self, total: int, *, hidden: bool) -> None:
        self._bar = tqdm(total=total, unit="request", file=sys.stderr, disable=hidden)
        self._kinds: Counter[str] = Counter()

    def ended(self, record: Record) -> None:
        self._kinds[record.error or "ok"] += 1
        self._bar.set_postfix(self._kinds, refresh=False)
        self._bar.update()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
