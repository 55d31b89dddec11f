"""Tests of single compactions, of several compactors at once, and of the choice of the rows to compact."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest

from tests.contract.disk import NEXT_QUEUE, key, put, timers
from tests.contract.postgresql.rows import SCHEMA, Rows, State, read_state, state_of
from tests.stages.postgres import PostgresServer
from truenext.errors import StoreError
from truenext.model.batch import Batch, Mark, ProducerState
from truenext.store.changes import RareChanges, encode_batch
from truenext.store.log import LogPosition, next_digest
from truenext.store.postgresql import compaction, layout
from truenext.store.postgresql.compaction import Compactor, compact, delete_dropped
from truenext.store.postgresql.kept import CopyReader, _PostgresqlSnapshot, read_facts, read_position
from truenext.store.postgresql.layout import (
    KEPT_ROW_BYTES,
    PARTITION_ROWS,
    Connection,
    attach_partitions,
    create_layout,
    delete_compacted_rows,
    drop_partitions,
    partitions_in,
)
from truenext.store.postgresql.net_effect import NetEffect
from truenext.store.spans import JournalLane

DROP = b"".join(encode_batch(Batch(0), RareChanges(drops_transients=True)))


@pytest.fixture
def rows(tables: Connection) -> Rows:
    return Rows(tables)


@pytest.fixture
def connect(postgres: PostgresServer, postgres_database: str) -> Iterator[Callable[[], Connection]]:
    """Function that opens one more connection to the log."""
    opened: list[Connection] = []

    def connect() -> Connection:
        opened.append(postgres.connect(postgres_database))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def compact_all(rows: Rows) -> State:
    while compact(rows.connection, SCHEMA, rows.last.number):
        pass
    state = read_state(rows.connection)
    assert state.position == rows.last
    return state


def kept(connection: Connection) -> dict[bytes, tuple[bytes, Mark]]:
    return {message.key: (message.record, message.mark) for message in read_state(connection).kept}


def count_kept(connection: Connection) -> int:
    """Return the number of rows of `kept`, dropped transients included."""
    return next(int(str(count)) for (count,) in connection.execute("SELECT count(*) FROM main.kept"))


# ---- Net effect ----


def test_compaction_of_no_row_changes_nothing(rows: Rows) -> None:
    before = read_state(rows.connection)
    assert compact(rows.connection, SCHEMA, 0) is None
    assert compact(rows.connection, SCHEMA, 99) is None
    assert read_state(rows.connection) == before


def test_compaction_ends_at_the_row_that_was_named(rows: Rows) -> None:
    positions = [rows.append(puts=put(number)) for number in (1, 2, 3)]
    assert compact(rows.connection, SCHEMA, 2) == positions[1]
    assert list(kept(rows.connection)) == [key(1), key(2)]
    assert compact(rows.connection, SCHEMA, 1) is None
    assert compact(rows.connection, SCHEMA, 99) == positions[2]


def test_each_compaction_moves_the_position_to_the_last_row_it_compacted(rows: Rows) -> None:
    """No row is compacted twice."""
    compactor = Compactor(rows.connection, SCHEMA)
    for number in range(1, 8):
        last = rows.append(puts=put(number))
        assert compactor.compact(number) == last
        assert read_position(rows.connection, SCHEMA) == last


def test_empty_payload_moves_the_position(rows: Rows) -> None:
    last = rows.append()
    assert compact(rows.connection, SCHEMA, 1) == last


def test_payload_in_several_parts_is_joined(rows: Rows) -> None:
    payload = b"".join(encode_batch(_batch(puts=put(1, 2)), None))
    last = rows.append_payload(payload[:10], payload[10:40], payload[40:])
    assert compact(rows.connection, SCHEMA, 1) == last
    assert kept(rows.connection) == {key(n): (b"record %d" % n, Mark(0, 0)) for n in (1, 2)}


def test_mark_of_a_transient_that_is_dropped_later_is_ignored(rows: Rows) -> None:
    """The mark and the drop would be in one window."""
    rows.append(transient_puts=put(1), puts=put(2))
    compact_all(rows)
    rows.append(marks={key(1): (1, 1), key(2): (2, 2)})
    rows.append_payload(DROP)
    rows.append(marks={key(2): (3, 3)}, transient_puts=put(3))
    compact_all(rows)
    assert kept(rows.connection) == {key(2): (b"record 2", Mark(3, 3)), key(3): (b"record 3", Mark(0, 0))}


def test_mark_of_a_message_that_the_same_rows_remove_is_ignored(rows: Rows) -> None:
    rows.append(puts=put(1, 2))
    compact_all(rows)
    rows.append(marks={key(1): (1, 1), key(2): (1, 1)})
    rows.append(removes=[key(1)], puts=put(3), marks={key(3): (1, 1)})
    rows.append(removes=[key(3)])
    compact_all(rows)
    assert kept(rows.connection) == {key(2): (b"record 2", Mark(1, 1))}


def test_message_that_is_removed_and_put_again_is_there(rows: Rows) -> None:
    rows.append(puts={key(1): b"old"}, marks={key(1): (1, 1)})
    compact_all(rows)
    rows.append(removes=[key(1)], puts={key(1): b"new"}, unmarks=[key(1)])
    compact_all(rows)
    assert kept(rows.connection) == {key(1): (b"new", Mark(0, 0))}


def test_message_that_is_put_again_has_no_earlier_cause(rows: Rows) -> None:
    rows.append(puts=put(1), marks={key(1): (1, 1)}, causes={key(1): ("a", "b")})
    rows.append(removes=[key(1)])
    rows.append(puts=put(1), marks={key(1): (2, 2)})
    (message,) = compact_all(rows).kept
    assert (message.mark, message.causes) == (Mark(2, 2), ("", ""))


def test_mark_that_is_reset_is_stored_as_none(rows: Rows) -> None:
    rows.append(puts=put(1), marks={key(1): (1, 1)})
    compact_all(rows)
    rows.append(marks={key(1): (0, 0)})
    compact_all(rows)
    assert rows.connection.execute("SELECT mark FROM main.kept").fetchall() == [(None,)]


def test_timer_cleared_and_set_in_one_batch_is_set(rows: Rows) -> None:
    one, two = timers(1), timers(2)
    rows.append(timers=one | two)
    compact_all(rows)
    rows.append(timers=one, cleared_timers=[*one, *two])
    rows.append(cleared_timers=[*timers(3)])
    assert compact_all(rows).set_timers == [*one]


def test_producer_forgotten_and_used_again_exists(rows: Rows) -> None:
    used, again = ProducerState(1, 1), ProducerState(2, 2)
    rows.append(producers={"a": used, "b": used})
    compact_all(rows)
    rows.append(forgotten_producers=["a", "b"], producers={"a": again})
    assert compact_all(rows).recovered.producers == {"a": again}
    rows.append(producers={"b": used})
    rows.append(forgotten_producers=["b"])
    assert compact_all(rows).recovered.producers == {"a": again}


def test_sequence_limit_is_never_lowered(rows: Rows) -> None:
    rows.append(sequence_limit=100)
    compact_all(rows)
    rows.append(sequence_limit=50)
    assert compact_all(rows).recovered.sequence_limit == 100


def test_dropped_transients_are_deleted_in_pieces(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "DROPPED_KEYS", 2)
    rows.append(transient_puts=put(1, 2, 3), puts=put(4))
    compact_all(rows)
    rows.append_payload(DROP)
    rows.append(transient_puts=put(5, 6))
    compact_all(rows)
    rows.append_payload(DROP)
    rows.append(transient_puts=put(7))
    compact_all(rows)
    left = []
    last: tuple[int, bytes] | None = (-1, b"")
    while last and (last := delete_dropped(rows.connection, SCHEMA, last)):
        left.append(count_kept(rows.connection))
        assert sorted(kept(rows.connection)) == [key(4), key(7)]
    assert left == [5, 3, 2]
    assert read_facts(rows.connection, SCHEMA).kept_bytes == 2 * KEPT_ROW_BYTES + len(b"record 4record 7")


def _batch(**changes: Any) -> Batch:
    batch = Batch(1)
    for name, value in changes.items():
        setattr(batch, name, value)
    return batch


# ---- Windows ----


@pytest.mark.parametrize(
    ("bound", "value", "windows"),
    [
        ("WINDOW_ROWS", 3, [3, 6, 9, 10]),
        ("RECORD_BYTES_MAX", 2500, [2, 4, 6, 8, 10]),
        ("RECORD_BYTES_MAX", 1, [*range(1, 11)]),
        ("CHANGES_MAX", 4, [2, 4, 6, 8, 10]),
        ("READ_BYTES", 1, [10]),
        ("READ_BYTES", 2500, [10]),
        ("WRITE_BYTES", 1, [10]),
        ("WRITE_KEYS", 3, [10]),
    ],
)
def test_one_compaction_is_bounded(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, bound: str, value: int, windows: list[int]
) -> None:
    for number in range(1, 11):
        rows.append(puts={key(number): bytes(1000)}, timers=timers(number), marks={key(number): (number, 1)})
    monkeypatch.setattr(compaction, bound, value)
    positions = []
    while (position := compact(rows.connection, SCHEMA, 99)) is not None:
        positions.append(position.number)
    # A change to a mark or a timer counts, too.
    assert positions == windows
    assert [*kept(rows.connection).values()] == [(bytes(1000), Mark(number, 1)) for number in range(1, 11)]
    monkeypatch.setattr(compaction, bound, max(value, 4))
    rows.append(removes=[key(number) for number in range(1, 9)], cleared_timers=[*timers(*range(1, 9))])
    rows.append(marks={key(9): (99, 99), key(10): (99, 99)})
    state = compact_all(rows)
    assert [message.key for message in state.kept] == [key(9), key(10)]
    assert state.set_timers == [*timers(9, 10)]


def test_compaction_leaves_nothing_in_memory_for_the_garbage_collector(rows: Rows) -> None:
    """Fixed: positions of all compacted messages stayed in memory, 16 MiB for each million."""
    for number in range(1, 11):
        rows.append(puts={key(number): bytes(1000)})
    gc.collect()
    gc.disable()
    try:
        assert compact(rows.connection, SCHEMA, 5) is not None
        assert compact(rows.connection, SCHEMA, 99) == rows.last
        assert not [each for each in gc.get_objects() if type(each) is JournalLane]
    finally:
        gc.enable()


def test_messages_that_come_and_go_do_not_end_a_window(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "RECORD_BYTES_MAX", 2500)
    monkeypatch.setattr(compaction, "CHANGES_MAX", 4)
    for number in range(1, 11):
        rows.append(puts={key(number): bytes(1000)}, removes=[key(number - 1)] if number > 1 else [])
    assert compact(rows.connection, SCHEMA, 99) == rows.last
    assert list(kept(rows.connection)) == [key(10)]


def test_compactor_leaves_the_newest_rows(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "WINDOW_ROWS", 3)
    monkeypatch.setattr(compaction, "UNCOMPACTED_ROWS", 4)
    compactor = Compactor(rows.connection, SCHEMA)
    positions = []
    for number in range(1, 14):
        rows.append(puts=put(number))
        while compactor.step():
            pass
        positions.append(read_position(rows.connection, SCHEMA).number)
    assert positions == [0, 0, 0, 0, 0, 0, 3, 3, 3, 6, 6, 6, 9]


def test_compactor_leaves_the_newest_bytes(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "WINDOW_BYTES", 2500)
    compactor = Compactor(rows.connection, SCHEMA)
    positions = []
    for number in range(1, 10):
        rows.append(puts={key(number): bytes(1000)})
        while compactor.step(4000):
            pass
        positions.append(read_position(rows.connection, SCHEMA).number)
    assert positions == [0, 0, 0, 0, 0, 2, 2, 4, 4]


def test_used_bytes_fall_when_messages_are_acknowledged(rows: Rows) -> None:
    compactor = Compactor(rows.connection, SCHEMA)
    empty = compactor.used_bytes()
    used = []

    def compact_and_delete() -> None:
        while compactor.step(0):
            pass
        delete_compacted_rows(rows.connection, SCHEMA, 0)

    for changes in (
        {"puts": {key(number): bytes(10_000) for number in range(1, 101)}},
        {"removes": [key(number) for number in range(11, 101)]},
        {"transient_puts": {key(number): bytes(10_000) for number in range(201, 211)}},
    ):
        rows.append(**changes)
        rows.append_payload(DROP)
        used.append(compactor.used_bytes())
        compact_and_delete()
        used.append(compactor.used_bytes())
    assert [round((each - empty) / 100_000) for each in used] == [10, 10, 10, 1, 2, 1]


def test_used_bytes_have_partitions_that_cannot_be_dropped_yet(rows: Rows) -> None:
    compactor = Compactor(rows.connection, SCHEMA)
    before = compactor.used_bytes()
    rows.connection.execute(f"UPDATE main.position SET number = {PARTITION_ROWS - 1}")
    size = next(rows.connection.execute("SELECT pg_total_relation_size('main.log_0')"))[0]
    assert compactor.used_bytes() == before + int(str(size)) > before


def test_compactor_leaves_nothing_if_the_disk_is_short(rows: Rows) -> None:
    compactor = Compactor(rows.connection, SCHEMA)
    for number in range(1, 4):
        rows.append(puts=put(number))
        assert not compactor.step()
        # There is no more to do now: rows that come meanwhile are compacted together.
        assert not compactor.step(0)
        assert read_position(rows.connection, SCHEMA) == rows.last


def test_compactor_deletes_dropped_transients(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "DROPPED_KEYS", 2)
    rows.append(transient_puts=put(1, 2, 3, 4, 5), puts=put(6))
    rows.append_payload(DROP)
    compactor = Compactor(rows.connection, SCHEMA)
    assert not compactor.step()
    steps = 0
    while compactor.step(0):
        steps += 1
    # A window before the drop, one with it and the first piece, and two more pieces.
    assert (steps, count_kept(rows.connection)) == (4, 1)


def test_kept_is_bounded_by_the_messages_that_live(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "WINDOW_ROWS", 50)
    monkeypatch.setattr(compaction, "UNCOMPACTED_ROWS", 100)
    compactor = Compactor(rows.connection, SCHEMA)
    rows.append(puts=put(*range(1, 11)))
    most = 0
    for number in range(11, 1011):
        removed = key(number - 10)
        unmarks = [removed] if number > 20 else []
        timer = timers(number)
        rows.append(
            puts=put(number),
            removes=[removed],
            marks={key(number): (1, 1)},
            unmarks=unmarks,
            timers=timer,
            cleared_timers=[*timers(number - 10)],
            producers={f"producer {number % 3}": ProducerState(number, number)},
        )
        if number % 10 == 0:
            while compactor.step():
                pass
            most = max(most, count_kept(rows.connection))
    assert most == 10
    facts = next(int(str(count)) for (count,) in rows.connection.execute("SELECT count(*) FROM main.fact"))
    assert facts < 30


def test_partitions_are_dropped_after_their_rows_were_compacted(rows: Rows) -> None:
    rows.connection.execute(
        "CREATE FUNCTION main.fill(first bigint, last bigint, payload bytea, digests bytea[]) RETURNS void "
        "LANGUAGE sql AS $$INSERT INTO main.log SELECT n, 0, 0, NULL, digests[n - first + 1], payload FROM "
        "generate_series(first, last) AS n$$"
    )
    payload = b"".join(encode_batch(Batch(1), None))
    compactor = Compactor(rows.connection, SCHEMA)
    counts = []
    last = rows.last
    for partition in range(22):
        digests = []
        first = last.number + 1
        for _ in range(PARTITION_ROWS):
            last = LogPosition(last.number + 1, next_digest(last.digest, [payload]))
            digests.append(last.digest)
        attach_partitions(rows.connection, SCHEMA, partition * PARTITION_ROWS)
        rows.connection.execute("SELECT main.fill(%s, %s, %b, %b)", (first, last.number, payload, digests))
        while compactor.step():
            pass
        drop_partitions(rows.connection, SCHEMA, 1 << 62)
        counts.append(len([one for one in partitions_in(rows.connection, SCHEMA) if one <= partition + 1]))
    # 12 are left, 4 are compacted together, and one is being filled; the next one is attached ahead.
    assert max(counts) <= 18
    assert counts[-1] == counts[-5] < 18


# ---- Damage ----


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("DELETE FROM main.log WHERE number = 1", "row 1 is missing or changed"),
        ("DELETE FROM main.log WHERE number = 2", "row 2 is missing or changed"),
        ("UPDATE main.log SET payload = payload || 'x' WHERE number = 2", "row 2 does not have the digest"),
        ("UPDATE main.log SET digest = 'x' WHERE number = 1", "row 1 does not have the digest"),
        ("UPDATE main.position SET digest = 'x'", "row 1 does not have the digest"),
        (
            "INSERT INTO main.kept VALUES ('\\x00000001050000000000000001', NULL, '')",
            "a new message is in `kept` already",
        ),
        ("DELETE FROM main.fact WHERE kind = 'generation'", "the fact 'generation' is missing"),
        ("DELETE FROM main.position", "`position` has 0 rows"),
    ],
)
def test_damage_is_not_compacted(rows: Rows, damage: str, text: str) -> None:
    for number in (1, 2, 3):
        rows.append(puts=put(number))
    rows.connection.execute(damage)
    with pytest.raises(StoreError, match="the log in schema 'main' is damaged: " + text):
        compact(rows.connection, SCHEMA, 99)
    rows.connection.execute("SELECT 1")


@pytest.mark.parametrize(
    "changes",
    [
        {"removes": [key(1), key(2)]},
        {"removes": [key(3)]},
        {"transient_removes": [key(1)]},
        {"marks": {key(2): (1, 1), key(1): (1, 1)}},
        {"puts": put(1)},
        {"transient_puts": put(3)},
    ],
)
def test_row_that_does_not_fit_kept_is_damage(rows: Rows, changes: dict[str, Any]) -> None:
    rows.append(puts=put(1), transient_puts=put(3))
    compact_all(rows)
    before = read_state(rows.connection)
    rows.append(**changes)
    with pytest.raises(StoreError, match=r"the log in schema 'main' is damaged: .* in `kept`"):
        compact(rows.connection, SCHEMA, 99)
    assert read_state(rows.connection) == before


def test_payload_that_cannot_be_decoded_is_damage(rows: Rows) -> None:
    rows.append_payload(b"nonsense")
    with pytest.raises(StoreError, match="row 1 cannot be decoded"):
        compact(rows.connection, SCHEMA, 99)


# ---- Several compactors ----


class Interrupted(Exception):
    pass


@contextmanager
def interrupted(
    monkeypatch: pytest.MonkeyPatch, connection: Connection, at: int, action: Callable[[], None]
) -> Iterator[list[str]]:
    """Call `action` before statement number `at` of this connection. Yield the statements so far."""
    statements: list[str] = []
    execute = psycopg.Connection.execute

    def counting(self: Connection, query: Any, *arguments: Any, **options: Any) -> Any:
        if self is connection:
            statements.append(query if isinstance(query, str) else query.as_string(self))
            if len(statements) == at:
                action()
        return execute(self, query, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Connection, "execute", counting)
        yield statements


def fill(rows: Rows) -> list[State]:
    """Append rows that change everything, and return the state after each compaction of two rows."""
    rows.append(
        puts=put(1, 2, 3),
        transient_puts=put(4, 5),
        timers=timers(1, 2),
        queues={1: "orders", 2: "ended"},
        paused={1: True},
        producers={"a": ProducerState(1, 1), "b": ProducerState(1, 1)},
        sequence_limit=100,
        clean_stop=False,
    )
    compact_all(rows)
    states = [read_state(rows.connection)]
    for number in (10, 20, 30):
        rows.append(
            puts=put(number),
            removes=[key(number // 10)],
            marks={key(number): (1, 1), key(3): (number, 1)} if number < 30 else {},
            causes={key(3): ("first", f"last {number}")} if number < 30 else {},
            timers=timers(number),
            cleared_timers=[*timers(number // 10)],
            producers={"a": ProducerState(number, number)},
            sequence_limit=100 + number,
            redelivered_below=number,
        )
        if number == 20:
            rows.append_payload(DROP)
        rows.append(transient_puts=put(number + 1, lane=NEXT_QUEUE), queues={number: "new"}, forgotten_producers=["b"])
    return states


def expected_states(rows: Rows, monkeypatch: pytest.MonkeyPatch, states: list[State]) -> dict[int, State]:
    """Return the state after each row, found by compacting one by one and going back."""
    connection = rows.connection
    with monkeypatch.context() as patch:
        patch.setattr(compaction, "WINDOW_ROWS", 1)
        with suppress(Interrupted), connection.transaction():
            while compact_within(connection, rows.last.number):
                states.append(_state_within(connection))
            raise Interrupted
    assert read_state(connection) == states[0]
    return {state.position.number: state for state in states}


def compact_within(connection: Connection, up_to: int) -> bool:
    """Compact within an outer transaction."""
    before = read_position(connection, SCHEMA)
    effect = NetEffect()
    after = compaction._read_window(connection, SCHEMA, before, up_to, effect)
    if after != before:
        compaction._Application(connection, SCHEMA, effect).apply()
        compaction._move_position(connection, SCHEMA, before, after)
    return after != before


def _state_within(connection: Connection) -> State:
    return state_of(connection, SCHEMA, _PostgresqlSnapshot(CopyReader(connection), SCHEMA))


@pytest.fixture
def states(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> dict[int, State]:
    """State after each row."""
    states = expected_states(rows, monkeypatch, fill(rows))
    monkeypatch.setattr(compaction, "WINDOW_ROWS", 2)
    return states


@pytest.mark.parametrize("first_window", [0, 1, 2])
def test_compactor_killed_at_any_statement_has_changed_nothing(
    rows: Rows,
    states: dict[int, State],
    connect: Callable[[], Connection],
    monkeypatch: pytest.MonkeyPatch,
    first_window: int,
) -> None:
    for _ in range(first_window):
        compact(rows.connection, SCHEMA, 99)
    before = read_state(rows.connection)
    at = 0
    while True:
        at += 1
        killed = connect()

        def kill(killed: Connection = killed) -> None:
            rows.connection.execute("SELECT pg_terminate_backend(%s, 5000)", (killed.info.backend_pid,))

        with interrupted(monkeypatch, killed, at, kill) as statements, suppress(psycopg.OperationalError):
            compact(killed, SCHEMA, 99)
        if len(statements) < at:
            break
        assert read_state(rows.connection) == before
    assert at > 10
    assert read_state(rows.connection) == states[read_position(rows.connection, SCHEMA).number]
    assert read_state(rows.connection) != before
    assert compact_all(rows) == states[rows.last.number]


@pytest.mark.parametrize("others", [1, 2])
def test_two_compactors_compact_each_row_once(
    rows: Rows,
    states: dict[int, State],
    connect: Callable[[], Connection],
    monkeypatch: pytest.MonkeyPatch,
    others: int,
) -> None:
    """The second compactor runs while the first one is before one of its statements."""
    outcomes = set()
    for at in itertools.count(1):
        first, second = connect(), connect()
        moved: list[LogPosition | None] = []

        def compact_second(second: Connection = second, moved: list[LogPosition | None] = moved) -> None:
            for _ in range(others):
                moved.append(compact(second, SCHEMA, 99))
                state = read_state(second)
                assert state == states[state.position.number]

        with interrupted(monkeypatch, first, at, compact_second) as statements:
            moved.append(compact(first, SCHEMA, 99))
        if not others <= len(moved) - 1:
            break
        outcomes.add(tuple(each is not None for each in moved))
        state = read_state(rows.connection)
        assert state == states[state.position.number]
        assert state.position in moved
        assert compact_all(rows) == states[rows.last.number]
        rows.connection.execute(f"DROP SCHEMA {SCHEMA} CASCADE; CREATE SCHEMA {SCHEMA}")
        create_layout(rows.connection, SCHEMA)
        rows = Rows(rows.connection)
        fill(rows)
        first.close()
        second.close()
    assert len(statements) > 10
    # The second one is first, before the first one has its snapshot, or after; or the first one has the lock.
    one = (True,) * others
    assert outcomes == {(*one, True), (*one, False), (*(not each for each in one), True)}


def test_zombie_compacts_nothing_after_others_have(
    rows: Rows, states: dict[int, State], connect: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie = connect()

    def compact_others() -> None:
        compact_all(rows)

    before_lock = 6
    with interrupted(monkeypatch, zombie, before_lock, compact_others) as statements:
        assert compact(zombie, SCHEMA, 99) is None
    assert len(statements) >= before_lock
    assert read_state(rows.connection) == states[rows.last.number]


def test_rows_that_another_compactor_drops_are_not_missed(
    connection: Connection, connect: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one compacts and drops before each statement of the first one in turn."""
    monkeypatch.setattr(layout, "PARTITION_ROWS", 2)
    drops = set()
    for at in itertools.count(1):
        connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE; CREATE SCHEMA {SCHEMA}")
        create_layout(connection, SCHEMA)
        rows = Rows(connection)
        for number in range(1, 8):
            rows.append(puts=put(number))
        first, second = connect(), connect()

        def compact_and_drop(second: Connection = second) -> None:
            compact(second, SCHEMA, 99)
            drops.add(bool(drop_partitions(second, SCHEMA, 99)))

        with interrupted(monkeypatch, first, at, compact_and_drop) as statements:
            compact(first, SCHEMA, 99)
        first.close()
        second.close()
        if len(statements) < at:
            break
        assert len(compact_all(rows).kept) == 7
    assert drops == {True, False}


def test_compactor_that_does_nothing_is_ended(
    rows: Rows, states: dict[int, State], connect: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "IDLE_TIMEOUT_S", 1)
    stopped = connect()

    def wait() -> None:
        assert compact(rows.connection, SCHEMA, 99) is None
        with pytest.raises(psycopg.Error, match="idle-in-transaction timeout"):
            for _ in range(100):
                threading.Event().wait(0.1)
                if compact(rows.connection, SCHEMA, 99) is not None:
                    stopped.execute("SELECT 1")

    with interrupted(monkeypatch, stopped, 12, wait), pytest.raises(psycopg.Error):
        compact(stopped, SCHEMA, 99)
    assert compact_all(rows) == states[rows.last.number]


def test_snapshots_read_while_rows_are_compacted_are_of_one_row(
    rows: Rows, connect: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.append(puts=put(1))
    compact_all(rows)
    monkeypatch.setattr(compaction, "WINDOW_ROWS", 1)
    for number in range(2, 102):
        rows.append(puts=put(number), removes=[key(number - 1)], timers=timers(number))
    compacting = threading.Thread(target=compact_all, args=(rows,))
    reader = connect()
    compacting.start()
    positions = set()
    while compacting.is_alive():
        state = read_state(reader)
        number = state.position.number
        positions.add(number)
        assert [message.key for message in state.kept] == [key(number)]
        assert len(state.set_timers) == number - 1
    compacting.join()
    assert len(positions) > 5
