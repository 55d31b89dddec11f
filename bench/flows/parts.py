"""Flows with exactly-once processing of which parts are left out, to measure the cost of each part.

A patch of the same code leaves out the part, so that these flows do not keep the promise any more. Run nothing else
in the process.

    all of it             the inbox, the outbox, and the numbers
    without the numbers   no producer is borrowed or changed, and COMMIT has no number
    the inbox alone       in addition, the output is not in the outbox
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from unittest.mock import patch

from bench.client.work import Done
from bench.flows import sql
from bench.flows.work import Order
from bench.workers import Gate
from truenext.stage.core.outbox_unit import CommitNumber, OutboxProducer
from truenext.stage.outbox.exactly_once import ExactlyOnceProcessing
from truenext.stage.sql import exactly_once_writer
from truenext.stage.worker import MessageHandler

UNOWNED_PRODUCER = OutboxProducer("nobody", "nobody", 0)
"""Producer whose units no relay sends."""

_COLUMNS = "id, service, producer, number, interactive, messages, written_ms, unit"
# Statements without the producer's row.
_UNNUMBERED = {
    "postgresql": [
        f"""
        INSERT INTO truenext_outbox ({_COLUMNS}) VALUES (CAST(%(id)s AS uuid), %(service)s, %(producer)s, %(number)s,
            %(interactive)s, %(messages)s, {exactly_once_writer.CLOCK["postgresql"]}, %(unit)s)"""
    ],
    "sqlite": [
        f"""
        INSERT INTO truenext_outbox ({_COLUMNS}) VALUES (:id, :service, :producer, :number,
            :interactive, :messages, {exactly_once_writer.CLOCK["sqlite"]}, :unit)"""
    ],
}


def serve_without_numbers(gate: Gate, order: Order) -> Done:
    """Run until the last flow has ended, and all is confirmed."""
    with _without_numbers(CommitNumber(UNOWNED_PRODUCER, 1)), patch.object(exactly_once_writer, "_WRITE", _UNNUMBERED):
        return sql.serve_exactly_once(gate, order)


def serve_inbox_alone(gate: Gate, order: Order) -> Done:
    """Run until the last flow has ended, and all is confirmed."""
    ended = ExactlyOnceProcessing.on_committed

    def nothing_sent(self: ExactlyOnceProcessing, id: str, *, was_sent: bool, is_acknowledged: bool) -> None:
        ended(self, id, was_sent=False, is_acknowledged=is_acknowledged)

    with _without_numbers(None), patch.object(ExactlyOnceProcessing, "on_committed", nothing_sent):
        return sql.serve_exactly_once(gate, order)


class _Lent:
    """Replacement of a borrowed producer."""

    def __init__(self, number: CommitNumber | None) -> None:
        self._number = number

    async def __aenter__(self) -> _Lent:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def use_next_number(self) -> CommitNumber | None:
        return self._number


@contextmanager
def _without_numbers(number: CommitNumber | None) -> Iterator[None]:
    commit = MessageHandler._commit

    async def unnumbered(
        self: MessageHandler, messages: Sequence[Any], work: Any, number: CommitNumber | None = None
    ) -> None:
        await commit(self, messages, work)

    lent = _Lent(number)
    with (
        patch.object(ExactlyOnceProcessing, "borrow_producer", lambda self: lent),
        patch.object(MessageHandler, "_commit", unnumbered),
    ):
        yield
