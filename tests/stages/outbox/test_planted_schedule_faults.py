"""Tests that the drawn schedules fail when one of the rules of the outbox is broken.

Some rules do not show here, and have tests of their own (test_planted_faults.py):

- A producer has one unit under way, and is used by its owner. With two units or two owners, the broker and the
  database still refuse what is out of turn: nothing was lost in any example, it only takes longer.
- Producers are not used whose numbers the broker knows further than a restored database. Here all such producers
  belong to processes that are gone, so they are not used again in any case.
- A row of the inbox is not marked at a repeated COMMIT. It would have to expire, a week later, before its message is
  redelivered.
- A producer's units are read after the statement that locks it. This matters where transactions overlap, on
  PostgreSQL; SQLite has one writing transaction at a time.
- The row of the inbox is written first. Written last it would still be unique: the key refuses the second
  transaction, which is rolled back. It would only cost more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.stages.outbox.schedule import Contradiction
from tests.stages.outbox.test_schedules import tried
from tests.unit.mutation import mutated
from truenext.stage.core import outbox_unit
from truenext.stage.initiation_contexts import OutboxInitiationContext
from truenext.stage.outbox import publishing
from truenext.stage.outbox.exactly_once import ExactlyOnceProcessing
from truenext.stage.outbox.relay import OutboxRelay
from truenext.stage.sql import exactly_once_writer
from truenext.stage.sql.outbox_table import Outbox
from truenext.stage.worker import MessageHandler

EXAMPLES_MAX = 300
ALL = os.environ.get("TRUENEXT_FAULTS") == "all"
QUICK = {
    "a program's row is deleted before the broker has confirmed",
    "a unit is sent again without a number",
    "independent initiations have the same ids",
    "inbox rows are deleted before they are marked",
    "a delay in the outbox is over when it is sent",
}
"""Faults that show in the first few examples. The others take up to minutes, and show in `make faults`."""


class Change(NamedTuple):
    owner: Any
    name: str
    old: str
    new: str


def nothing(patch: pytest.MonkeyPatch) -> None:
    pass


FAULTS: dict[str, tuple[list[Change], Callable[[pytest.MonkeyPatch], None]]] = {
    "a stage's row is deleted before the broker has confirmed": (
        [
            Change(
                MessageHandler,
                "_commit",
                'point("SQL committed", self._stage)',
                'point("SQL committed", self._stage)\n'
                "                once = self._exactly_once\n"
                "                once and once.on_committed(self._inbox_id, was_sent=True, is_acknowledged=False)",
            )
        ],
        nothing,
    ),
    "a program's row is deleted before the broker has confirmed": (
        [
            Change(
                OutboxRelay,
                "_send_numbered",
                "is_sent = await self._send_unit(unit)",
                "await self._outbox.delete_sent(producer.name, unit.number); is_sent = await self._send_unit(unit)",
            )
        ],
        nothing,
    ),
    "a producer in doubt is lent again": (
        [
            Change(
                OutboxRelay,
                "_mark_in_doubt",
                "self._producers_in_doubt[producer.name] = False",
                "self._free_producers.append(producer)",
            )
        ],
        nothing,
    ),
    "a unit is sent again under another number": (
        [Change(publishing, "_send", "number=unit.number)", "number=unit.number + 1)")],
        nothing,
    ),
    "a unit is sent again without a number": (
        [Change(publishing, "_send", ", producer=unit.producer, number=unit.number)", ")")],
        nothing,
    ),
    "independent initiations have the same ids": (
        [Change(OutboxInitiationContext, "_start", "seed or ServiceContext.new_id()", 'seed or "0" * 32')],
        nothing,
    ),
    "inbox rows are deleted before they are marked": (
        [
            Change(
                Outbox,
                "delete_expired",
                '("truenext_inbox", "acknowledged_ms")',
                '("truenext_inbox", "coalesce(acknowledged_ms, 0)")',
            )
        ],
        nothing,
    ),
    "rows that were combined into a unit are not deleted": (
        [
            Change(
                Outbox,
                "_combine_in_steps",
                'await self._execute(connection, f"DELETE {_THESE}", these)',
                "pass",
            )
        ],
        nothing,
    ),
    "a delay in the outbox is over when it is sent": (
        [Change(outbox_unit, "_adjust_time", "delay=left if left.ms or left.at_ms else None", "delay=None")],
        nothing,
    ),
    "a COMMIT has no number": ([Change(MessageHandler, "_commit", "if number is None:", "if True:")], nothing),
    "a unit counts as sent without an answer": (
        [
            Change(
                OutboxRelay,
                "_send_all",
                "if number > highest and not await self._send_unit(unit) and not await self._send_after_gap(unit):",
                "if False:",
            )
        ],
        nothing,
    ),
    "a redelivered message is acknowledged and its unit deleted unsent": (
        [
            Change(
                ExactlyOnceProcessing,
                "ensure_sent",
                "is_sent = await send_unit(pool, unit, self._service, self.counters)",
                "is_sent = True",
            )
        ],
        nothing,
    ),
    "a message that was processed runs again": (
        [Change(exactly_once_writer.ExactlyOnceWriter, "insert_inbox_id", "if result.rowcount != 1:", "if False:")],
        nothing,
    ),
}


def plant(fault: str, patch: pytest.MonkeyPatch) -> None:
    changes, other = FAULTS[fault]
    for owner, name, old, new in changes:
        patch.setattr(owner, name, mutated(vars(owner)[name], old, new))
    other(patch)


def test_planted_faults_can_all_be_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the faults that are not drawn."""
    for fault in FAULTS:
        with monkeypatch.context() as patch:
            plant(fault, patch)


@pytest.mark.drawn
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", [each for each in FAULTS if ALL or each in QUICK])
def test_planted_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault, monkeypatch)
    random = Random()
    with pytest.raises(Contradiction):
        for _ in range(EXAMPLES_MAX):
            tried(random)
