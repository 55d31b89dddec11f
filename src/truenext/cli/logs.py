"""How the broker's log reads: one line an event, its facts as fields."""

import logging
import sys

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class FieldFormatter(logging.Formatter):
    """`TIME LEVEL event key=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = [f"{name}={value!r}" for name, value in vars(record).items() if name not in _STANDARD]
        return " ".join([line, *fields])


def configure(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FieldFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
