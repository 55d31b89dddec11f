"""Tests that tests of the outbox fail when one of its rules is broken. Each planted fault breaks one rule of decision
67."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.stages.outbox import test_exactly_once, test_initiate_in_transaction, test_producers
from tests.unit.mutation import mutated
from truenext.stage.outbox import publishing
from truenext.stage.outbox.exactly_once import BorrowedProducer, ExactlyOnceProcessing
from truenext.stage.outbox.relay import OutboxRelay
from truenext.stage.sql import exactly_once_writer
from truenext.stage.sql.outbox_table import Outbox
from truenext.stage.worker import MessageHandler

Notices = Callable[[str], None]


def lost_answer_of_the_broker(when: Any) -> Notices:
    return lambda url: test_exactly_once.test_lost_answer_to_a_commit_loses_and_repeats_nothing(url, True, when)


def lost_commit_of_the_relay(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_exactly_once.test_lost_answer_to_the_relay_loses_and_repeats_nothing(
            url, "of the broker, which did not hear", patch
        )


def redelivery_without_a_relay(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_exactly_once.test_redelivered_message_sends_its_unit_without_a_relay(url, patch)


def unknown_producer(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_producers.test_producer_claimed_with_a_lost_answer_is_found_and_its_unit_sent(url, "claim", False, patch)


def repeated_commit(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_exactly_once.test_inbox_row_is_not_marked_acknowledged_after_a_repeated_commit(url, patch)


def gap_of_a_restored_broker(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_exactly_once.test_stale_readers_do_not_send_a_unit_twice_after_a_restored_broker_lost_numbers(
            url, "before they are settled", patch
        )


def initiation_after_a_send(url: str) -> None:
    test_initiate_in_transaction.test_flows_initiated_right_after_a_stage_has_sent_are_sent(url, "stage's")


class Fault(NamedTuple):
    rule: str
    owner: Any
    name: str
    old: str
    new: str
    noticed_by: Notices


FAULTS = [
    Fault(
        "a COMMIT has no number",
        MessageHandler,
        "_commit",
        "if number is None:",
        "if True:",
        test_exactly_once.test_unit_sent_but_not_confirmed_before_its_process_died_is_not_sent_again,
    ),
    Fault(
        "a unit is sent again under another number",
        publishing,
        "_send",
        "number=unit.number)",
        "number=unit.number + 1)",
        lost_answer_of_the_broker("before"),
    ),
    Fault(
        "a unit counts as sent without an answer",
        OutboxRelay,
        "_send_all",
        "if number > highest and not await self._send_unit(unit) and not await self._send_after_gap(unit):",
        "if False:",
        lost_commit_of_the_relay,
    ),
    Fault(
        "a redelivered message is acknowledged and its unit deleted unsent",
        ExactlyOnceProcessing,
        "ensure_sent",
        "is_sent = await send_unit(pool, unit, self._service, self.counters)",
        "is_sent = True",
        redelivery_without_a_relay,
    ),
    Fault(
        "a message that was processed runs again",
        exactly_once_writer.ExactlyOnceWriter,
        "insert_inbox_id",
        "if result.rowcount != 1:",
        "if False:",
        test_exactly_once.test_a_message_that_comes_twice_and_sends_nothing_is_handled_once,
    ),
    Fault(
        "producers of a running process are claimed",
        Outbox,
        "claim",
        "condition = self._ownerless if owner_is_dead",
        'condition = "p.service = :service" if owner_is_dead',
        test_producers.test_a_process_that_is_alive_keeps_its_producers_and_one_that_is_not_loses_them,
    ),
    Fault(
        "a producer has two units under way",
        BorrowedProducer,
        "use_next_number",
        "return self._producer.next_commit",
        "self._relay.return_producer(self._producer); return self._producer.next_commit",
        test_producers.test_producer_with_an_unanswered_number_is_not_lent_again,
    ),
    Fault(
        "an inbox row is marked though its message is not acknowledged",
        MessageHandler,
        "_run_and_commit",
        "is_acknowledged = self._life.state is COMMITTED",
        "is_acknowledged = True",
        repeated_commit,
    ),
    Fault(
        "inbox rows are deleted before they are marked",
        Outbox,
        "delete_expired",
        '("truenext_inbox", "acknowledged_ms")',
        '("truenext_inbox", "coalesce(acknowledged_ms, 0)")',
        test_producers.test_the_inbox_forgets_what_was_marked_seven_days_ago_and_nothing_else,
    ),
    Fault(
        "an unknown producer is not looked up",
        OutboxRelay,
        "_find_unknown",
        "if name not in known:",
        "if False:",
        unknown_producer,
    ),
    Fault(
        "rows that were combined into a unit are not deleted",
        Outbox,
        "_combine_in_steps",
        'await self._execute(connection, f"DELETE {_THESE}", these)',
        "pass",
        initiation_after_a_send,
    ),
    Fault(
        "a unit after a gap is renumbered",
        OutboxRelay,
        "_send_after_gap",
        "if number - highest > RESOLVED_MAX:",
        "if True:",
        gap_of_a_restored_broker,
    ),
    Fault(
        "a producer is used though the broker knows higher numbers of it",
        OutboxRelay,
        "_send_all",
        "if highest == producer.last_number:",
        "if True:",
        test_exactly_once.test_a_database_that_has_lost_commits_uses_none_of_their_numbers,
    ),
]


@pytest.fixture
def url(tmp_path: Path) -> str:
    file = tmp_path / "shop.db"
    file.touch()
    return f"sqlite:///{file}"


def plant(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    namespace = vars(fault.owner)
    patch.setattr(fault.owner, fault.name, mutated(namespace[fault.name], fault.old, fault.new))


def test_planted_faults_can_all_be_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the faults that are not drawn."""
    for fault in FAULTS:
        with monkeypatch.context() as patch:
            plant(fault, patch)


@pytest.mark.drawn
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.rule)
def test_planted_fault_is_noticed(fault: Fault, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What would never come is not waited for as long as what is slow.
    monkeypatch.setattr(test_exactly_once, "PATIENCE_S", 5)
    monkeypatch.setattr(test_initiate_in_transaction, "PATIENCE_S", 5)
    plant(fault, monkeypatch)
    with pytest.raises((AssertionError, TimeoutError, ExceptionGroup)):
        fault.noticed_by(url)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "rule, old, new",
    [
        ("owner", "name = :producer AND owner = :owner AND", "name = :producer AND"),
        ("number", "owner = :owner AND number = :number - 1", "owner = :owner"),
    ],
)
def test_producer_used_without_a_check_is_noticed(
    rule: str, old: str, new: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement, insert = exactly_once_writer._WRITE["sqlite"]
    assert statement.count(old) == 1
    monkeypatch.setitem(exactly_once_writer._WRITE, "sqlite", [statement.replace(old, new), insert])
    noticed = {
        "owner": test_producers.test_process_that_lost_a_producer_writes_nothing_under_its_numbers,
        "number": test_producers.test_a_number_is_used_once_and_none_is_left_out,
    }
    with pytest.raises(pytest.fail.Exception):
        noticed[rule](url)
