"""Tests of `truenext store status`, `accept-loss` and `adopt`, and of `truenext failover`, without a database."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from truenext.cli import failover, store_log
from truenext.cli.main import main
from truenext.errors import ConfigurationError, Refused, StoreError
from truenext.store.log import Member, Role
from truenext.store.postgresql.forgotten import Fault
from truenext.store.postgresql.renewal import StoreStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

WHERE = ("postgresql:///truenext", "--schema", "main")
ACTIVE = Member(name="a", host="host1", role=Role.ACTIVE, epoch=2, number=1_205, age_ms=350, users="")
STANDING_BY = replace(ACTIVE, name="b", host="host2", role=Role.STANDING_BY, number=1_200, age_ms=1_250)
STATUS = StoreStatus(
    server="db1:5432",
    epoch=2,
    number=1_205,
    members=(ACTIVE, STANDING_BY),
    missing=None,
    is_copy=False,
)
LOST_ROWS = Fault(1_200, 1_205, "the folder no longer has row 1200")
LOST = replace(STATUS, number=1_199, missing=LOST_ROWS)
COPY = replace(STATUS, is_copy=True)


@pytest.fixture
def renew(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    renew = mock.Mock(return_value="89abcdef")
    monkeypatch.setattr(store_log, "renew_log", renew)
    return renew


def run(monkeypatch: pytest.MonkeyPatch, command: str, status: StoreStatus, typed: str = "") -> Result:
    monkeypatch.setattr(store_log, "read_status", mock.Mock(return_value=status))
    return CliRunner().invoke(main, ["store", command, *WHERE], input=typed)


def test_status_of_a_whole_log_shows_each_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """C28.2"""
    result = run(monkeypatch, "status", STATUS)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "log      epoch 2, row 1,205, on db1:5432",
        "members  a on host1: active, row 1,205, 0.3 seconds ago",
        "         b on host2: standing by, row 1,200, 5 behind, 1.2 seconds ago",
        "missing  none",
    ]


def test_status_shows_that_the_standby_of_postgresql_does_not_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, "status", replace(STATUS, waiting_since_ms=1_790_000_000_000))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == (
        "standby  of PostgreSQL has not confirmed since 2026-09-21 14:13:20 UTC: nothing is confirmed meanwhile"
    )


def test_status_shows_a_broker_that_no_longer_writes_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """C28.2"""
    members = (
        replace(ACTIVE, age_ms=46_000),
        replace(STANDING_BY, age_ms=5_000),
        replace(STANDING_BY, name="c", age_ms=4_900),
        replace(STANDING_BY, name="d", role=Role.STOPPED, age_ms=46_000),
    )
    lines = run(monkeypatch, "status", replace(STATUS, members=members)).stdout.splitlines()
    assert lines[1:5] == [
        "members  a on host1: gone (was active), row 1,205, 46.0 seconds ago",
        "         b on host2: gone (was standing by), row 1,200, 5 behind, 5.0 seconds ago",
        "         c on host2: standing by, row 1,200, 5 behind, 4.9 seconds ago",
        "         d on host2: stopped, row 1,200, 5 behind, 46.0 seconds ago",
    ]


@pytest.mark.parametrize("age_ms", [900, 46_000])
def test_status_shows_one_broker_as_active_after_a_takeover(monkeypatch: pytest.MonkeyPatch, age_ms: int) -> None:
    """C28.2"""
    members = (replace(ACTIVE, epoch=1, number=1_190, age_ms=age_ms), replace(ACTIVE, name="b", host="host2"))
    lines = run(monkeypatch, "status", replace(STATUS, members=members)).stdout.splitlines()
    assert lines[1:3] == [
        f"members  a on host1: taken over (was active), row 1,190, {age_ms / 1000:.1f} seconds ago",
        "         b on host2: active, row 1,205, 0.3 seconds ago",
    ]


def test_status_names_missing_rows_and_the_brokers_that_had_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """C28.13"""
    result = run(monkeypatch, "status", LOST)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-2:] == [
        "missing  rows 1,200 to 1,205: the folder no longer has row 1200; a had row 1,205; b had row 1,200",
        f"         {LOST_ROWS.advice}",
    ]
    unknown = replace(LOST, missing=Fault(1_201, None, "PostgreSQL has changed"))
    last = run(monkeypatch, "status", unknown).stdout.splitlines()[-2]
    assert last == "missing  perhaps from row 1,201 on: PostgreSQL has changed; a had row 1,205"


def test_status_does_not_tell_from_which_row_another_broker_has_gone_on(monkeypatch: pytest.MonkeyPatch) -> None:
    members = (replace(ACTIVE, number=1_199), replace(STANDING_BY, number=1_300))
    status = replace(LOST, members=members, missing=Fault(1_200, 1_300, "they are lost"))
    assert "  rows up to 1,300: they are lost; b had row 1,300\n" in run(monkeypatch, "status", status).stdout
    silent = replace(status, members=(replace(members[0], age_ms=2_000), members[1]))
    assert "rows 1,200 to 1,300: " in run(monkeypatch, "status", silent).stdout


def test_status_of_a_copied_database_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """C28.15"""
    result = run(monkeypatch, "status", COPY)
    assert (result.exit_code, "`truenext store adopt`" in result.stdout) == (1, True)


@pytest.mark.parametrize("error", [ConfigurationError("no schema"), StoreError("no server")])
@pytest.mark.parametrize("command", ["status", "accept-loss", "adopt"])
def test_database_that_cannot_be_read_gives_status_2(
    command: str, error: Exception, monkeypatch: pytest.MonkeyPatch, renew: mock.Mock
) -> None:
    monkeypatch.setattr(store_log, "read_status", mock.Mock(side_effect=error))
    result = CliRunner().invoke(main, ["store", command, *WHERE], input="main\n")
    assert (result.exit_code, result.stderr) == (2, f"truenext: {error}\n")
    renew.assert_not_called()


@pytest.mark.parametrize(
    ("command", "status"), [("accept-loss", LOST), ("adopt", COPY), ("adopt", STATUS), ("adopt", LOST)]
)
def test_log_is_renewed_once_the_name_of_its_schema_is_typed(
    command: str, status: StoreStatus, monkeypatch: pytest.MonkeyPatch, renew: mock.Mock
) -> None:
    """C28.13, C28.15"""
    result = run(monkeypatch, command, status, "main\n")
    assert result.exit_code == 0
    assert "identity 89abcdef" in result.stdout
    assert ("missing: " in result.stdout) == (status is LOST)
    assert (f"{LOST_ROWS.advice}.\n" in result.stdout) == (command == "accept-loss")
    assert ("This may be the original" in result.stdout) == (command == "adopt" and not status.is_copy)
    renew.assert_called_once_with("postgresql:///truenext", "main", is_copy=command == "adopt")


@pytest.mark.parametrize("typed", ["", "\n", "yes\n", "Main\n", "main2\n"])
@pytest.mark.parametrize(("command", "status"), [("accept-loss", LOST), ("adopt", COPY)])
def test_log_is_not_renewed_after_another_answer(
    command: str, status: StoreStatus, typed: str, monkeypatch: pytest.MonkeyPatch, renew: mock.Mock
) -> None:
    result = run(monkeypatch, command, status, typed)
    assert result.exit_code == 2
    assert result.stderr.endswith("truenext: that is not the name of the schema: nothing was changed\n")
    renew.assert_not_called()


@pytest.mark.parametrize(
    ("command", "status", "reason"),
    [
        ("accept-loss", STATUS, "no row is missing in schema main"),
        ("accept-loss", COPY, "no row is missing in schema main"),
    ],
)
def test_log_that_needs_no_new_identity_is_left_alone(
    command: str, status: StoreStatus, reason: str, monkeypatch: pytest.MonkeyPatch, renew: mock.Mock
) -> None:
    """C28.18"""
    result = run(monkeypatch, command, status, "main\n")
    assert (result.exit_code, reason in result.stderr, result.stderr.count("\n")) == (2, True, 1)
    renew.assert_not_called()


def test_refusal_while_a_broker_is_active_gives_status_2(monkeypatch: pytest.MonkeyPatch, renew: mock.Mock) -> None:
    """C28.18"""
    renew.side_effect = ConfigurationError("the broker a is active: stop it")
    result = run(monkeypatch, "accept-loss", LOST, "main\n")
    assert (result.exit_code, "truenext: the broker a is active: stop it" in result.stderr) == (2, True)


# ---- failover ----


def run_failover(monkeypatch: pytest.MonkeyPatch, answer: mock.Mock, *options: str) -> Result:
    @contextmanager
    def connected(_: Any) -> Iterator[mock.Mock]:
        yield mock.Mock(control_request=answer)

    monkeypatch.setattr(failover, "connected", connected)
    return CliRunner().invoke(main, ["failover", *options])


@pytest.mark.parametrize(("options", "request_body"), [((), None), (("--to", "b"), {"to": "b"})])
def test_failover_asks_the_active_broker_and_names_the_next_one(
    options: tuple[str, ...], request_body: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C28.7"""
    answer = mock.Mock(return_value=b'{"member":"b"}')
    result = run_failover(monkeypatch, answer, *options)
    assert (result.exit_code, result.stdout) == (0, "b is to take over.\n")
    answer.assert_called_once_with("failover", request_body)


def test_refused_failover_gives_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """C28.18"""
    result = run_failover(monkeypatch, mock.Mock(side_effect=Refused("no broker stands by")))
    assert (result.exit_code, result.stderr) == (1, "truenext: no broker stands by\n")
