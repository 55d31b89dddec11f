"""Tests of the rows that a database has forgotten: which ones a folder can give back."""

from __future__ import annotations

import pytest

from truenext.errors import ConfigurationError
from truenext.model.batch import Batch
from truenext.store.changes import RareChanges, Takeover, encode_batch
from truenext.store.log import EMPTY_PAYLOAD, LogPosition, Member, Role, next_digest
from truenext.store.postgresql.forgotten import (
    End,
    Fault,
    chain,
    choose_heir,
    fault_of_folder,
    former_primary_fault,
    origin_fault,
    went_other_way,
)
from truenext.store.postgresql.outcome import Row
from truenext.store.postgresql.standing_by import Origin

LAST = Row(100, 7, b"digest")


def end(folder: int = 103, digest: bytes = b"end", oldest: int = 90) -> End:
    return End(LAST, LogPosition(folder, digest), oldest)


def takeover(epoch: int) -> bytes:
    rare = RareChanges(takeover=Takeover(epoch, "a", 1, 1, b"nonce"))
    return b"".join(encode_batch(Batch(0), rare))


def test_chain_gives_rows_the_numbers_digests_and_epochs_that_they_had() -> None:
    payloads = [EMPTY_PAYLOAD, takeover(9), EMPTY_PAYLOAD]
    rows = list(chain(LAST, payloads))
    assert [(row.number, row.epoch, row.payload) for row in rows] == [
        (101, 7, payloads[0]),
        (102, 9, payloads[1]),
        (103, 9, payloads[2]),
    ]
    before = LAST.digest
    for row in rows:
        assert row.before == before
        assert row.digest == next_digest(before, [row.payload])
        before = row.digest


def test_folder_with_all_rows_behind_the_log_has_no_fault() -> None:
    assert fault_of_folder(end(oldest=101)) is None


def test_rows_that_the_folder_no_longer_has_are_lost() -> None:
    assert fault_of_folder(end(oldest=102)) == Fault(101, 103, "the folder no longer has row 101")


@pytest.mark.parametrize(("oldest", "row", "expected"), [(101, 100, False), (101, 99, True), (102, 99, False)])
def test_folder_that_is_ahead_went_another_way_if_it_lacks_the_last_row(oldest: int, row: int, expected: bool) -> None:
    """Unless the folder no longer has the rows that tell."""
    payloads = [EMPTY_PAYLOAD] * 3
    *_, folder_end = chain(LAST._replace(digest=b"%d" % row), payloads)
    one = End(LAST._replace(digest=b"100"), LogPosition(103, folder_end.digest), oldest)
    assert went_other_way(one, payloads) is expected


def test_folder_that_is_not_ahead_is_not_compared() -> None:
    assert not went_other_way(end(100), ())


BEFORE, NOW = Origin(1, 3), Origin(1, 4)


def test_other_timeline_of_a_local_log_may_lack_rows() -> None:
    fault = origin_fault(BEFORE, NOW, LAST, is_replicated=False)
    assert fault is not None
    assert (fault.first, fault.last) == (101, None)
    assert fault.reason.startswith("PostgreSQL has changed from timeline 3 to 4")


@pytest.mark.parametrize(
    ("named", "now", "is_replicated"),
    [(BEFORE, BEFORE, False), (BEFORE, NOW, True), (None, NOW, False), (BEFORE, None, False)],
    ids=["same", "replicated", "none named", "unknown"],
)
def test_timeline_that_proves_no_loss(named: Origin | None, now: Origin | None, is_replicated: bool) -> None:
    assert origin_fault(named, now, LAST, is_replicated=is_replicated) is None


def test_server_on_an_earlier_timeline_than_the_folder_knows_is_a_former_primary() -> None:
    fault = former_primary_fault(NOW, BEFORE, 100)
    assert fault is not None
    assert (fault.first, fault.last) == (101, None)


@pytest.mark.parametrize(("known", "now"), [(NOW, NOW), (BEFORE, NOW), (None, NOW), (NOW, None), (NOW, Origin(2, 3))])
def test_server_that_may_be_the_present_one(known: Origin | None, now: Origin | None) -> None:
    assert former_primary_fault(known, now, 100) is None


def member(name: str, number: int = 100, role: Role = Role.STANDING_BY, age_ms: int = 900) -> Member:
    return Member(name=name, host="h", role=role, epoch=7, number=number, age_ms=age_ms, users="")


ACTIVE = member("a", role=Role.ACTIVE)
NUMBERS = (90, 100)
"""Numbers of the active broker's last row two seconds ago and now."""


def test_heir_is_the_named_one_or_else_the_one_that_is_least_behind() -> None:
    members = [ACTIVE, member("b", 98), member("c", 99)]
    assert choose_heir(members, None, "a", NUMBERS) == "c"
    assert choose_heir(members, "b", "a", NUMBERS) == "b"


@pytest.mark.parametrize(
    "absent",
    [member("b", role=Role.STOPPED), member("a"), ACTIVE],
    ids=["stopped", "own", "active"],
)
def test_failover_without_a_broker_that_stands_by_is_refused(absent: Member) -> None:
    with pytest.raises(ConfigurationError, match="no broker stands by"):
        choose_heir([absent], None, "a", NUMBERS)


def test_failover_to_a_member_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no broker with the member name 'x' stands by"):
        choose_heir([ACTIVE, member("b")], "x", "a", NUMBERS)


@pytest.mark.parametrize("to", [None, "b"])
def test_failover_to_a_member_that_has_not_written_is_refused(to: str | None) -> None:
    members = [ACTIVE, member("b", age_ms=46_900)]
    with pytest.raises(ConfigurationError, match="no broker can take over: 'b' has not written for 46 seconds: "):
        choose_heir(members, to, "a", NUMBERS)
    assert choose_heir([*members, member("c", 99)], None, "a", NUMBERS) == "c"


def test_refused_failover_says_what_keeps_each_member_from_it() -> None:
    members = [ACTIVE, member("b", age_ms=2000), member("c", 99)]
    with pytest.raises(ConfigurationError, match=r"'b' has not written for 2 seconds: .*; 'c' is 1 row and "):
        choose_heir(members, None, "a", (100, 100))


@pytest.mark.parametrize("to", [None, "b"])
def test_failover_to_a_member_that_is_ahead_is_refused(to: str | None) -> None:
    members = [ACTIVE, member("b", 101)]
    with pytest.raises(ConfigurationError, match="'b' has rows that the log has not: see its log, and stop it"):
        choose_heir(members, to, "a", NUMBERS)
    assert choose_heir([*members, member("c", 99)], None, "a", NUMBERS) == "c"


@pytest.mark.parametrize("to", [None, "b"])
def test_failover_to_a_member_that_is_behind_is_refused(to: str | None) -> None:
    members = [ACTIVE, member("b", 99)]
    assert choose_heir(members, to, "a", (99, 100)) == "b"
    with pytest.raises(ConfigurationError, match="'b' is 235 rows and more than 2 seconds behind"):
        choose_heir(members, to, "a", (334, 334))
