"""Log lines on stderr, as text or as JSON. Whatever a record says, it cannot look like two.

Knows no loggers' names but the package's own, and those that cry wolf. What is logged, and that it holds no secrets, is
up to who logs.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

from polymux.config import LogConfig

FIELDS = "polymux_fields"  # of a record: `extra={FIELDS: {...}}`, the parts of its message by name

# Their warnings mean nothing here: bitsandbytes, which diffusers imports where it is installed, misses on a CPU a
# kernel that nobody has asked for.
CRY_WOLF = ("bitsandbytes",)

# Everything that moves the cursor or ends a line somewhere; \n is treated apart.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def configure(config: LogConfig) -> None:
    """Set up logging for this process: our own loggers at `config.log_level`, libraries' from warnings on.

    May be called again, with another configuration.
    """
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    logging.getLogger("polymux").setLevel(config.log_level.upper())
    for name in CRY_WOLF:
        logging.getLogger(name).setLevel(logging.ERROR)
    ours = [handler for handler in root.handlers if isinstance(handler, Stderr)]
    if not ours:
        ours = [Stderr()]
        root.addHandler(ours[0])
    ours[0].setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())


class Stderr(logging.StreamHandler[Any]):
    """The handler of `configure`."""


class TextFormatter(logging.Formatter):
    """`2026-11-30 12:00:00,000 INFO message`; further lines of a message, and tracebacks, are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).split("\n")
        return "\n  | ".join(_CONTROL.sub(_escape, line) for line in lines)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, a traceback if there is one, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line | record.__dict__.get(FIELDS, {}))


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
