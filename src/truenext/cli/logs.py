"""Formats of the log of a broker or a service: one line for each event, with fields."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from textwrap import indent
from typing import Any

from truenext.broker.settings import LogFormat
from truenext.cli.terminal import escape_text

_logger = logging.getLogger("truenext.stage")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


TRACEBACK_MAX = 16_000
"""Largest number of characters of a traceback. A longer traceback is cut in the middle."""


class FieldFormatter(logging.Formatter):
    """Formatter for lines `TIME LEVEL event key=value ...`. Tracebacks are indented, so that none of their lines looks
    like an event."""

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return indent(escape_text(_cut(super().formatException(ei))), "  ")

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        fields = [f"{name}={value!r}" for name, value in vars(record).items() if name not in _STANDARD]
        text = " ".join([escape_text(self.formatMessage(record)), *fields])
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """Formatter for one JSON object a line, in ASCII: `time` (UTC), `level`, `logger`, `message`, the fields of the
    record, and `exception` with the traceback. A field with one of these names has `_` added to its name."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = _cut(self.formatException(record.exc_info))
        for name, value in vars(record).items():
            if name not in _STANDARD:
                line[f"{name}_" if name in line else name] = value
        try:
            return json.dumps(line, default=repr, allow_nan=False)
        except (TypeError, ValueError):
            # Keys that are no texts, values that contain themselves, and numbers that JSON does not have.
            return json.dumps({name: value if isinstance(value, str) else repr(value) for name, value in line.items()})


def _cut(text: str) -> str:
    if len(text) <= TRACEBACK_MAX:
        return text
    half = TRACEBACK_MAX // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def configure_logging(level: str, log_format: LogFormat = LogFormat.TEXT) -> None:
    is_json = log_format is LogFormat.JSON
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if is_json else FieldFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


@contextmanager
def warn_of_basic_config() -> Iterator[None]:
    """Log a warning if the block calls `logging.basicConfig`, which then has no effect: the root logger already has a
    handler, for example from `configure_logging`. The warning names the line of the call."""
    basic_config = logging.basicConfig
    callers: list[str] = []

    def noticing(*arguments: Any, **options: Any) -> None:
        before = list(logging.root.handlers)
        basic_config(*arguments, **options)
        if logging.root.handlers == before:
            caller = sys._getframe(1)
            callers.append(f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}")

    logging.basicConfig = noticing
    try:
        yield
    finally:
        logging.basicConfig = basic_config
    if callers:
        _logger.warning(
            "logging.basicConfig has no effect: the command has set up logging. Use --log-level, or force=True for the "
            "program's own setting (docs/stages-running.md)",
            extra={"place": callers[0]},
        )
