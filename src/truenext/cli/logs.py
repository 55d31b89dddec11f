"""Format of the broker's log: one line for each event, with fields."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import Any

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


def _cut(text: str) -> str:
    if len(text) <= TRACEBACK_MAX:
        return text
    half = TRACEBACK_MAX // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def configure_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FieldFormatter("%(asctime)s %(levelname)s %(message)s"))
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
