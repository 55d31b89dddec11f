"""How the broker's log reads: one line an event, its facts as fields."""

import logging
import sys
from textwrap import indent
from typing import Any

from truenext.cli.terminal import lines

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


TRACEBACK_MAX = 16_000
"""Characters of one traceback; more is cut out of its middle."""


class FieldFormatter(logging.Formatter):
    """`TIME LEVEL event key=value ...`, and indented behind it what was raised: its text begins no line."""

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return indent(lines(_cut(super().formatException(ei))), "  ")

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        fields = [f"{name}={value!r}" for name, value in vars(record).items() if name not in _STANDARD]
        text = " ".join([lines(self.formatMessage(record)), *fields])
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _cut(text: str) -> str:
    if len(text) <= TRACEBACK_MAX:
        return text
    half = TRACEBACK_MAX // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def configure(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FieldFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
