"""How the broker's log reads: one line an event, its facts as fields."""

import logging
import sys
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


TRACEBACK_MAX = 16_000
"""Characters of one traceback; more is cut out of its middle."""


class FieldFormatter(logging.Formatter):
    """`TIME LEVEL event key=value ...`"""

    def formatException(self, ei: Any) -> str:  # noqa: N802
        text = super().formatException(ei)
        if len(text) <= TRACEBACK_MAX:
            return text
        half = TRACEBACK_MAX // 2
        return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = [f"{name}={value!r}" for name, value in vars(record).items() if name not in _STANDARD]
        return " ".join([line, *fields])


def configure(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FieldFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
