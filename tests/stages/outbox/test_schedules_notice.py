"""Do the drawn schedules notice it when one of the rules of the outbox is broken?"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.stages.outbox.schedule import Contradiction
from tests.stages.outbox.test_schedules import tried
from tests.unit.mutation import mutated
from truenext.stage.exactly_once import relay, sending
from truenext.stage.exactly_once.once import Borrowed, ExactlyOnce
from truenext.stage.exactly_once.relay import Relay
from truenext.stage.initiating import InitiatingInTransaction
from truenext.stage.sql import once
from truenext.stage.sql.outbox import Outbox
from truenext.stage.worker import Handling

EXAMPLES_MAX = 300


class Change(NamedTuple):
    owner: Any
    name: str
    old: str
    new: str


def unguarded(patch: pytest.MonkeyPatch) -> None:
    """Whoever sends looks whether all of it has one number: without that."""
    guard = "assert len({(row.producer, row.number) for row in rows}) == 1"
    patch.setattr(relay, "send_unit", mutated(sending.send_unit, guard, "assert True"))


def without_owner(patch: pytest.MonkeyPatch) -> None:
    statement, insert = once._WRITE["sqlite"]
    patch.setitem(once._WRITE, "sqlite", [statement.replace("owner = :owner AND ", ""), insert])


def nothing(patch: pytest.MonkeyPatch) -> None:
    pass


FAULTS: dict[str, tuple[list[Change], Callable[[pytest.MonkeyPatch], None]]] = {
    "a stage's row goes before the broker has confirmed": (
        [
            Change(
                Handling,
                "_commit",
                "self._is_committing = True",
                "self._is_committing = True\n"
                "        if self._exactly_once is not None:\n"
                "            self._exactly_once.ended(self._id, was_sent=True, is_acknowledged=False)",
            )
        ],
        nothing,
    ),
    "a program's row goes before the broker has confirmed": (
        [
            Change(
                Relay,
                "_number_some",
                "if not await self._is_sent(unit):",
                "await self._outbox.confirm([each.id for each in unit], [])\n        if not await self._is_sent(unit):",
            )
        ],
        nothing,
    ),
    "a producer has two units under way": (
        [
            Change(
                Borrowed,
                "number",
                "return self._producer.next",
                "number = self._producer.next\n"
                "    self._producer.number += 1\n"
                "    self._relay.give_back(self._producer)\n"
                "    return number",
            ),
            Change(
                Borrowed,
                "__aexit__",
                "if self._was_used and error is not None:",
                "if self._was_used and error is None:\n        return\n    if self._was_used and error is not None:",
            ),
        ],
        nothing,
    ),
    "a producer is used without a look at its owner": ([], without_owner),
    "a producer in doubt is free": (
        [Change(Relay, "in_doubt", "self._in_doubt[producer.name] = None", "self._free.append(producer)")],
        nothing,
    ),
    "a unit goes under another number at the second try": (
        [Change(sending, "_send", "number=row.number)", "number=row.number + 1)")],
        nothing,
    ),
    "a unit goes under no number at the second try": (
        [Change(sending, "_send", ", producer=row.producer, number=row.number)", ")")],
        nothing,
    ),
    "a row of the inbox is marked at a repeat": (
        [Change(Handling, "_once", "is_acknowledged=not self._is_repeat", "is_acknowledged=True")],
        nothing,
    ),
    "independent initiations have the same ids": (
        [
            Change(
                InitiatingInTransaction, "__init__", "secrets.token_hex(16) if key is None", '"0" * 32 if key is None'
            )
        ],
        nothing,
    ),
    "rows of the inbox go before they are marked": (
        [
            Change(
                Outbox,
                "clean",
                "WHERE marked_ms < {self._clock} - :kept_ms",
                "WHERE coalesce(marked_ms, 0) < {self._clock} - :kept_ms",
            )
        ],
        nothing,
    ),
    "numbers that the broker knows further are used": (
        [Change(Relay, "_send_all", "if highest == producer.number and", "if")],
        nothing,
    ),
    "what has a number already goes with what gets one": (
        [
            Change(
                Outbox,
                "number",
                "o.producer = :name AND o.number = :number ORDER BY",
                "o.producer = :name AND :number > 0 ORDER BY",
            )
        ],
        unguarded,
    ),
    "a COMMIT has no number": ([Change(Handling, "_commit", "if number is None:", "if True:")], nothing),
    "a unit is taken for sent without an answer": (
        [Change(Relay, "_send_all", "if number > highest and not await self._is_sent(unit):", "if False:")],
        nothing,
    ),
    "a hit acknowledges and has the unit go, unsent": (
        [
            Change(
                ExactlyOnce,
                "sent_before",
                "answer = await send_unit(lane.connection, [unit], self._service)",
                "answer = Answer.SENT",
            )
        ],
        nothing,
    ),
    "a message that was handled runs again": (
        [Change(once.Once, "begin", "if answer.rowcount != 1:", "if False:")],
        nothing,
    ),
}


def plant(fault: str, patch: pytest.MonkeyPatch) -> None:
    changes, other = FAULTS[fault]
    for owner, name, old, new in changes:
        patch.setattr(owner, name, mutated(vars(owner)[name], old, new))
    other(patch)


def test_what_each_fault_replaces_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that are not drawn."""
    for fault in FAULTS:
        with monkeypatch.context() as patch:
            plant(fault, patch)


@pytest.mark.drawn
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_noticed_when(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault, monkeypatch)
    random = Random()
    with pytest.raises(Contradiction):
        for _ in range(EXAMPLES_MAX):
            tried(random)
