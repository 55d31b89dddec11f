"""Which stage, flow and message does a record of the log belong to?

    handler.addFilter(StageFields())            every record that this handler writes gets the fields
    Service(..., interceptors=[LogFields()])    while a stage runs, they say which one
    "%(flow_id)s %(stage)s %(message)s"         in a format; whatever writes JSON finds them by itself

A filter belongs to a handler: that of a logger does not see what its children log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from truenext.stage.interceptors.interceptor import Execution, Interceptor

_OUTSIDE: Final = {"flow_id": "", "trace": "", "stage": "", "message_id": "", "attempt": 0}
_current: ContextVar[Execution | None] = ContextVar("truenext.stage", default=None)


class LogFields(Interceptor):
    """Lets StageFields know what runs here. A thread that a stage itself starts does not know it, unless it is given a
    copy of the stage's context, as `asyncio.to_thread` does."""

    @contextmanager
    def around(self, execution: Execution) -> Iterator[None]:
        token = _current.set(execution)
        try:
            yield
        finally:
            _current.reset(token)


class StageFields(logging.Filter):
    """Gives each record `flow_id`, `trace`, `stage` (endpoint.stage), `message_id` and `attempt`; outside of stages
    they are empty, and the attempt is 0, unless the record has them already, as those of `truenext.stage` do. It lets
    every record pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        execution = _current.get()
        if execution is None:
            for name, value in _OUTSIDE.items():
                record.__dict__.setdefault(name, value)
        else:
            record.flow_id = execution.flow_id
            record.trace = execution.trace
            record.stage = f"{execution.endpoint}.{execution.stage}"
            record.message_id = execution.message_id
            record.attempt = execution.attempt
        return True
