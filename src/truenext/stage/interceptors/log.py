"""Fields of log records: the stage, flow and message to which a record belongs.

    handler.addFilter(StageFields())            every record that this handler writes gets the fields
    Service(..., interceptors=[LogFields()])    sets their values while a stage runs
    "%(flow_id)s %(stage)s %(message)s"         a format with fields; formatters for JSON show all fields

Add the filter to a handler: a filter of a logger does not get the records of its child loggers.
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
    """Interceptor that tells StageFields which stage runs. If a stage starts a thread, the thread needs a copy of the
    stage's context; `asyncio.to_thread` makes the copy."""

    @contextmanager
    def around(self, execution: Execution) -> Iterator[None]:
        token = _current.set(execution)
        try:
            yield
        finally:
            _current.reset(token)


class StageFields(logging.Filter):
    """Filter that adds `flow_id`, `trace`, `stage` (endpoint.stage), `message_id` and `attempt` to every record. It
    drops no record. Outside of stages, the fields are empty and `attempt` is 0, unless the record already has the
    fields, as records of the logger `truenext.stage` do."""

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
