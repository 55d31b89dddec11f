"""Tests of the check of a log in PostgreSQL: each kind of damage is found, and nothing else is damage."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.contract.disk import NEXT_QUEUE, key, timers
from tests.contract.postgresql.log_writer import make_log, url_of
from tests.contract.postgresql.rows import SCHEMA, Rows
from tests.contract.postgresql.test_compactor import DROP
from tests.contract.postgresql.test_initialization import record, share_of
from tests.stages.postgres import BINARIES, USER, PostgresServer, own_server
from truenext.errors import ConfigurationError, StoreError
from truenext.model.batch import ProducerState
from truenext.model.record import content_key
from truenext.store.check import SalvageSummary
from truenext.store.log import EMPTY_PAYLOAD, LogPosition, next_digest
from truenext.store.postgresql import check as check_module
from truenext.store.postgresql.check import check_log
from truenext.store.postgresql.compaction import compact
from truenext.store.postgresql.layout import Connection, statement


@pytest.fixture
def url(postgres: PostgresServer, postgres_database: str) -> str:
    return url_of(postgres, postgres_database)


@pytest.fixture
def rows(tables: Connection) -> Rows:
    """Log with 3 rows that are compacted, and 4 that are not."""
    rows = Rows(tables)
    take_over(rows)
    rows.append(
        puts=record(1) | record(2) | record(3),
        transient_puts=record(4, persistent=False) | record(5, persistent=False),
        queues={1: "orders", 2: "other"},
        paused={2: True},
        producers={"a": ProducerState(1, 1)},
        timers=timers(1, 2),
        sequence_limit=1000,
        clean_stop=True,
    )
    rows.append(**share_of(7, key(21), key(22), key(23, NEXT_QUEUE)))
    compact(tables, SCHEMA, 99)
    rows.append(removes=[key(1)], transient_removes=[key(4)], puts=record(6), marks={key(2): (1, 1)})
    take_over(rows)
    rows.append(**share_of(8, key(31), key(32, NEXT_QUEUE)), timers=timers(3), cleared_timers=[*timers(1)])
    rows.append(removes=[key(6), key(21), key(31)], marks={content_key(7): (2, 0), content_key(8): (1, 0)})
    return rows


def take_over(rows: Rows) -> None:
    """Append a row that begins the next epoch."""
    (epoch,) = rows.connection.execute("SELECT max(epoch) + 1 FROM main.log").fetchone() or (0,)
    rows.epoch = int(str(epoch))
    rows.last = LogPosition(rows.last.number + 1, next_digest(rows.last.digest, [EMPTY_PAYLOAD]))
    rows.connection.execute(
        statement(SCHEMA, "INSERT INTO {log} VALUES (%s, 0, %s, 12, %s, %s)"),
        (rows.last.number, rows.epoch, rows.last.digest, EMPTY_PAYLOAD),
    )


def check(url: str) -> tuple[list[str], SalvageSummary]:
    found: list[str] = []
    progress: list[tuple[int, int]] = []
    summary = check_log(
        url, SCHEMA, lambda damage: found.append(str(damage)), lambda done, total: progress.append((done, total))
    )
    assert len(found) == summary.damage_count
    assert progress[-1][0] == progress[-1][1] > 0
    return found, summary


def damages(url: str) -> list[str]:
    return check(url)[0]


def test_check_counts_the_state_as_of_the_last_row(rows: Rows, url: str) -> None:
    found, summary = check(url)
    assert found == []
    assert {number: (each.persistent, each.transient, each.damaged) for number, each in summary.queues.items()} == {
        1: (3, 1, 0),
        2: (2, 0, 0),
    }
    assert summary.names == {1: "orders", 2: "other"}
    assert (summary.timers, summary.contents, summary.notes_besides_damage) == (2, 2, [])
    compact(rows.connection, SCHEMA, 99)
    after = check(url)
    assert after == ([], summary)
    assert summary.queues[1].size == sum(map(len, [*(record(2) | record(3) | record(5)).values()])) + 34


def test_check_says_what_the_next_start_drops(rows: Rows, url: str) -> None:
    rows.append(clean_stop=False)
    note = "the last run did not stop cleanly: the next start drops 1 transient messages"
    assert check(url)[1].notes_besides_damage == [note]
    rows.append(marks={key(5): (1, 1), key(2): (1, 1)})
    rows.append_payload(DROP)
    rows.append(transient_puts=record(9, persistent=False))
    for _ in range(3):
        found, summary = check(url)
        assert found == []
        assert summary.queues[1].transient == 1
        dropped = "1 transient messages that were dropped after unclean stops are not deleted yet"
        assert dropped in summary.notes_besides_damage
        compact(rows.connection, SCHEMA, 99)


def test_check_reads_payloads_in_parts(rows: Rows, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "PART_BYTES_MAX", 5)
    rows.append_payload(EMPTY_PAYLOAD[:5], EMPTY_PAYLOAD[5:])
    found = damages(url)
    assert not [each for each in found if "row 8" in each], found


def test_part_before_the_last_that_is_not_full_is_damage(rows: Rows, url: str) -> None:
    rows.append_payload(EMPTY_PAYLOAD[:5], EMPTY_PAYLOAD[5:])
    assert damages(url) == [f"log: the parts of row 8 have 5, {len(EMPTY_PAYLOAD) - 5} bytes, which cannot be"]


def test_check_changes_nothing_and_needs_to_read_only(
    rows: Rows, connection: Connection, postgres: PostgresServer, postgres_database: str
) -> None:
    role = f"reader_{postgres_database}"
    connection.execute(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA main TO {role}")
    url = f"postgresql://{role}@/{postgres_database}?host={postgres.folder}"
    try:
        with pytest.raises(ConfigurationError, match="lacks rights in the database: SELECT on table 'log', SELECT on"):
            check(url)
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA main TO {role}")
        assert damages(url) == []
    finally:
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_check_of_a_read_only_server_reads_it(rows: Rows, url: str) -> None:
    rows.append_payload(EMPTY_PAYLOAD)
    assert damages(f"{url}&options=-c%20default_transaction_read_only%3Don") == []


def test_check_of_a_standby_reads_it() -> None:
    with own_server(wal_level="replica", max_wal_senders="5") as primary:
        with primary.connect() as connection:
            make_log(connection)
        with standby_of(primary) as standby:
            found = check(url_of(standby))[0]
    assert found == []


@contextmanager
def standby_of(primary: PostgresServer) -> Iterator[PostgresServer]:
    """Yield a standby of `primary` that can be read."""
    with own_server() as standby:
        standby.stop()
        shutil.rmtree(standby.folder / "data")
        places = [f"--host={primary.folder}", f"--pgdata={standby.folder / 'data'}"]
        subprocess.run(
            [BINARIES / "pg_basebackup", *places, "--username=postgres", "--write-recovery-conf", "--checkpoint=fast"],
            check=True,
            user=USER,
            cwd="/",
        )
        standby.start()
        yield standby


def test_missing_log_is_refused(connection: Connection, url: str) -> None:
    with pytest.raises(ConfigurationError, match="the database has no schema 'main'"):
        check(url)


def test_row_of_a_newer_format_is_refused(rows: Rows, url: str) -> None:
    rows.connection.execute("UPDATE main.log SET format = 99 WHERE number = 5")
    with pytest.raises(StoreError, match="has rows of format 99; this truenext reads format 14"):
        check(url)


CHAIN = "does not have the digest of its payload and the row before it"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # Rows
        ("DELETE FROM main.log WHERE number = 2", ["log: row 2 is missing"]),
        (
            "DELETE FROM main.log WHERE number < 5",
            ["log: row 4 is missing", "message 6 of queue 'orders', priority 4: it is missing, but"],
        ),
        (
            "DELETE FROM main.log WHERE number IN (4, 5)",
            [
                "log: rows 4 to 5 are missing",
                "log: row 6 has epoch 2, and the row before it 1",
                "message 6 of queue 'orders', priority 4: it is missing, but",
            ],
        ),
        ("DELETE FROM main.log WHERE number > 2", ["log: its last row is 2, before the position 3"]),
        ("DELETE FROM main.log", ["log: it has no row"]),
        (
            "UPDATE main.log SET payload = payload || '\\x00' WHERE number = 7",
            [f"log: row 7 {CHAIN}", "log: row 7 cannot"],
        ),
        ("UPDATE main.log SET digest = 'x' WHERE number = 7", [f"log: row 7 {CHAIN}"]),
        ("UPDATE main.log SET digest = 'x' WHERE number = 2", [f"log: row 2 {CHAIN}", f"log: row 3 {CHAIN}"]),
        ("UPDATE main.log SET digest = 'x' WHERE number = 0", [f"log: row 1 {CHAIN}"]),
        ("UPDATE main.log SET part = 1 WHERE number = 2", ["log: row 2 has the parts 1"]),
        (
            "INSERT INTO main.log SELECT number, 1, 9, NULL, digest, '' FROM main.log WHERE number = 6",
            ["log: the parts of row 6 are not those of one row"],
        ),
        (
            "INSERT INTO main.log SELECT number, 1, epoch, NULL, digest, '' FROM main.log WHERE number = 6",
            ["log: the parts of row 6 have "],
        ),
        (
            "INSERT INTO main.log SELECT number, 2, epoch, NULL, digest, '' FROM main.log WHERE number = 6",
            ["log: row 6 has the parts 0, 2"],
        ),
        (
            "UPDATE main.log SET epoch = 7 WHERE number = 6",
            ["log: row 6 has epoch 7, and the row before it 2", "log: row 7 has epoch 2, and the row before it 7"],
        ),
        ("UPDATE main.log SET epoch = 3 WHERE number >= 5", ["log: row 5 has epoch 3, and the row before it 1"]),
        ("UPDATE main.log SET format = NULL WHERE number = 5", ["log: row 5 has epoch 2, and the row before it 1"]),
        (
            "UPDATE main.log SET format = 12 WHERE number = 7",
            ["log: row 7 is that of a takeover, and has changes", "log: row 7 has epoch 2, and the row before it 2"],
        ),
        ("ALTER TABLE main.log DETACH PARTITION main.log_3", ["log: table log_3 is no partition of the log any more"]),
        (
            "ALTER TABLE main.log_0 SET UNLOGGED",
            ["log: table 'log_0' is UNLOGGED: PostgreSQL empties it after a crash"],
        ),
        # Position and facts
        ("UPDATE main.position SET digest = 'x'", ["position: it has another digest than row 3, where it is"]),
        (
            "UPDATE main.fact SET value = '\\x0000000000000001' WHERE kind = 'kept bytes'",
            ["fact: it counts 1 bytes of `kept`, which has "],
        ),
        (
            "UPDATE main.fact SET value = '\\x0000000000000003' WHERE kind = 'sequence limit'",
            ["kept: a message has sequence 32, but all sequences should be below 3"],
        ),
        (
            "DELETE FROM main.fact WHERE kind = 'queue' AND name = '\\x00000002'",
            [
                "fact: queue 2 is paused, and has no name",
                "fact: the name of queue 2 is lost, and the queue has messages",
            ],
        ),
        ("INSERT INTO main.fact VALUES ('mood', '', '')", ["fact: 'mood' is no kind of facts"]),
        ("INSERT INTO main.fact VALUES ('identity', 'x', '')", ["fact: 'identity' has the name 78"]),
        ("INSERT INTO main.fact VALUES ('timer', 'x', '')", ["fact: 78 is not a timer"]),
        (
            "UPDATE main.fact SET name = 'x' WHERE kind = 'producer'",
            ["fact: the key of a producer is 78, which is not that of its name"],
        ),
        # Kept
        (
            "DELETE FROM main.kept WHERE key = %(one)s",
            [
                "fact: it counts",
                "kept: message 1 of queue 'orders', priority 4: it is missing, but a later row removes it",
            ],
        ),
        (
            "DELETE FROM main.kept WHERE key = %(two)s",
            [
                "fact: it counts",
                "kept: message 2 of queue 'orders', priority 4: it is missing, but a later row marks it",
            ],
        ),
        (
            "UPDATE main.kept SET generation = 0 WHERE key = %(one)s",
            ["kept: message 1 of queue 'orders', priority 4: a later row removes it as a message of the other kind"],
        ),
        (
            "UPDATE main.kept SET generation = 1 WHERE key = %(two)s",
            [
                "kept: message 2 of queue 'orders', priority 4: it has a generation that does not exist yet",
                "kept: message 2 of queue 'orders', priority 4: it is missing, but a later row marks it",
            ],
        ),
        (
            "UPDATE main.kept SET record = set_byte(record, 26, 255) WHERE key = %(two)s",
            ["kept: message 2 of queue 'orders', priority 4: it is damaged: checksum does not match"],
        ),
        (
            "UPDATE main.kept SET mark = 'x' WHERE key = %(two)s",
            ["fact: it counts", "kept: message 2 of queue 'orders', priority 4: its mark cannot be decoded: "],
        ),
        (
            "DELETE FROM main.kept WHERE key = %(content)s",
            [
                "fact: it counts",
                "its content, number 7, is missing or damaged",
                "its content, number 7, is missing or damaged",
                "kept: content 7: it is missing, but a later row marks it",
            ],
        ),
        (
            "DELETE FROM main.kept WHERE key = %(reference)s",
            ["fact: it counts", "kept: content 7: its mark says 2 references, and 1 were found"],
        ),
        (
            "UPDATE main.kept SET key = '\\x01' WHERE key = %(two)s",
            ["kept: 01 is not the key of a message", "it is missing, but a later row marks it"],
        ),
        (
            "UPDATE main.kept SET key = %(put_later)s WHERE key = %(three)s",
            ["message 32 of queue 'other', priority 4: a later row puts it, too"],
        ),
    ],
)
def test_damage_is_found(rows: Rows, url: str, change: str, expected: list[str]) -> None:
    names: dict[str, Any] = {
        "one": key(1),
        "two": key(2),
        "three": key(3),
        "content": content_key(7),
        "reference": key(22),
        "put_later": key(32, NEXT_QUEUE),
    }
    rows.connection.execute(change, names if "%(" in change else None)
    found = damages(url)
    missing = [one for one in expected if not any(one in each for each in found)]
    assert not missing, found
    assert len(found) == len(expected), found


@pytest.mark.parametrize("kind", ["identity", "generation", "history", "kept bytes"])
def test_missing_fact_is_damage(rows: Rows, url: str, kind: str) -> None:
    rows.connection.execute("DELETE FROM main.fact WHERE kind = %s", (kind,))
    assert f"fact: the fact '{kind}' is missing" in damages(url)


def test_missing_position_is_damage(rows: Rows, url: str) -> None:
    rows.connection.execute("DELETE FROM main.position")
    assert "position: `position` has 0 rows instead of 1" in damages(url)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"puts": record(32, NEXT_QUEUE)}, "which exists already"),
        ({"removes": [key(1)]}, "which is removed already"),
        ({"removes": [key(99)]}, "message 99 of queue 'orders', priority 4: it is missing, but a later row removes it"),
        (
            {"marks": {key(99): (1, 1)}},
            "message 99 of queue 'orders', priority 4: it is missing, but a later row marks",
        ),
        ({"puts": {key(99): b"damaged"}}, "message 99 of queue 'orders', priority 4: it is damaged: record of 7 bytes"),
        ({"puts": record(999_999)}, "a message has sequence 999999"),
        ({"puts": record(50, b"\0\0\0\x09\x05")}, "the name of queue 9 is lost"),
        ({"marks": {content_key(8): (5, 0)}}, "content 8: its mark says 5 references, and 1 were found"),
    ],
)
def test_later_row_that_does_not_fit_is_damage(rows: Rows, url: str, changes: dict[str, Any], expected: str) -> None:
    rows.append(**changes)
    found = damages(url)
    assert len(found) == 1 and expected in found[0]


def test_row_that_cannot_be_decoded_is_damage(rows: Rows, url: str) -> None:
    rows.append_payload(b"nonsense")
    (found,) = damages(url)
    assert found.startswith("log: row 8 cannot be decoded: ")
