"""Tests of snapshots of a log in PostgreSQL, read and written as a whole."""

import gc
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.contract.disk import LANE, NEXT_QUEUE, key
from tests.contract.postgresql.rows import SCHEMA, Rows, State
from tests.stages.postgres import PostgresServer
from truenext.errors import StoreError
from truenext.model.batch import DUE_NEVER, NO_CAUSES, NO_MARK, Causes, Mark, ProducerState
from truenext.model.message import SentMessage
from truenext.model.record import content_key, encode_record, timer_key
from truenext.store.log import KeptMessage, LogPosition
from truenext.store.postgresql.kept import open_snapshot, read_facts, read_position, write_snapshot
from truenext.store.postgresql.layout import PARTITION_ROWS, Connection, drop_partitions
from truenext.store.store import Recovered


def kept(
    key: bytes, body: bytes, *, is_transient: bool = False, mark: Mark = NO_MARK, causes: Causes = NO_CAUSES
) -> KeptMessage:
    message = SentMessage(priority=4, persistent=not is_transient, expires_ms=0, header=b"", body=body, arrived_ms=1)
    return KeptMessage(key, encode_record(key, message), is_transient, mark, causes)


STATE = State(
    LogPosition(7_000_000_000, bytes(range(16))),
    Recovered(
        identity="0123abcd",
        clean_stop=False,
        sequence_limit=1 << 62,
        redelivered_below=1 << 61,
        queues={1: "orders", 2: "ü\n", 2**32 - 1: "last"},
        paused={2, 2**32 - 1},
        producers={
            "": ProducerState(-1, 0),
            "ä" * 5000: ProducerState(2**63 - 1, 1, is_gapless=True, resolved=(1, 2**63 - 2)),
            "\0": ProducerState(1, 1, is_used_once=True),
        },
    ),
    [
        kept(content_key(1), b"content", mark=Mark(3, 0)),
        kept(key(1), b""),
        kept(key(2), bytes(100_000), is_transient=True, mark=Mark(1, 2, DUE_NEVER, True), causes=Causes("a", "b")),
        kept(key(3), b"\x00\\\n\xff", is_transient=True),
        kept(key(2**62 - 1), b"last", causes=Causes("only", "only")),
        kept(key(1, NEXT_QUEUE), b"1", mark=Mark(0, 0, 0, True)),
    ],
    [timer_key(1, LANE, 0), timer_key(1, LANE, 1024), timer_key(2**63, NEXT_QUEUE, 0)],
)


def write(connection: Connection, state: State) -> list[int]:
    progress: list[int] = []
    with connection.transaction():
        write_snapshot(connection, SCHEMA, state, (3, 2**40), progress.append)
    return progress


def read_state(connection: Connection) -> State:
    with open_snapshot(connection, SCHEMA) as snapshot:
        messages = list(snapshot.messages())
        return State(snapshot.position, snapshot.recovered, messages, list(snapshot.timers()))


def test_snapshot_is_read_as_it_was_written(tables: Connection) -> None:
    assert write(tables, STATE) == [6]
    assert read_state(tables) == STATE
    assert list(read_state(tables).recovered.producers) == ["", "\0", "ä" * 5000]
    assert read_facts(tables, SCHEMA).next_history == (3, 2**40)
    assert read_position(tables, SCHEMA) == STATE.position


def test_snapshot_of_nothing_has_nothing(tables: Connection) -> None:
    state = State(LogPosition(0, b"0123456789abcdef"), Recovered(identity="0123abcd", clean_stop=True))
    assert write(tables, state) == [0]
    assert read_state(tables) == state


def test_snapshot_leaves_out_transients_of_an_earlier_generation(tables: Connection) -> None:
    write(tables, STATE)
    tables.execute("UPDATE main.fact SET value = '\\x00000001' WHERE kind = 'generation'")
    assert read_state(tables).kept == [message for message in STATE.kept if not message.is_transient]


def test_snapshot_does_not_see_later_changes(
    tables: Connection, postgres_database: str, postgres: PostgresServer
) -> None:
    write(tables, STATE)
    with open_snapshot(tables, SCHEMA) as snapshot, postgres.connect(postgres_database) as other:
        messages = snapshot.messages()
        first = next(messages)
        other.execute("DELETE FROM main.kept; DELETE FROM main.fact; UPDATE main.position SET number = 9")
        assert [first, *messages] == STATE.kept
        assert list(snapshot.timers()) == STATE.set_timers
        assert snapshot.position == STATE.position


def test_snapshot_may_be_left_before_its_end(tables: Connection) -> None:
    write(tables, STATE)
    with open_snapshot(tables, SCHEMA) as snapshot:
        next(snapshot.messages())
    with pytest.raises(ZeroDivisionError), open_snapshot(tables, SCHEMA) as snapshot:
        for message in snapshot.messages():
            assert message.key != key(2**62 - 1) or 1 / 0
    assert read_state(tables) == STATE


def test_partitions_are_not_dropped_while_a_snapshot_is_read(
    tables: Connection, postgres_database: str, postgres: PostgresServer
) -> None:
    rows = Rows(tables, state=State(LogPosition(PARTITION_ROWS - 1, bytes(16)), STATE.recovered))
    rows.append()
    with postgres.connect(postgres_database) as other:
        with open_snapshot(other, SCHEMA) as snapshot:
            tables.execute("UPDATE main.position SET number = number + 1")
            assert drop_partitions(tables, SCHEMA, 1 << 40) is None
            assert snapshot.position.number == PARTITION_ROWS - 1
        assert drop_partitions(tables, SCHEMA, 1 << 40) == [0]


def test_snapshot_reads_one_stream_at_a_time(tables: Connection) -> None:
    write(tables, STATE)
    with open_snapshot(tables, SCHEMA) as snapshot:
        messages = snapshot.messages()
        next(messages)
        with pytest.raises(AssertionError, match="the stream before has not ended"):
            list(snapshot.timers())
        assert len(list(messages)) == 5
        assert list(snapshot.timers()) == STATE.set_timers


@pytest.mark.parametrize("kind", ["identity", "generation", "sequence limit", "clean stop", "history", "kept bytes"])
def test_missing_fact_is_damage(tables: Connection, kind: str) -> None:
    write(tables, STATE)
    tables.execute("DELETE FROM main.fact WHERE kind = %s", (kind,))
    with pytest.raises(StoreError, match=f"the log in schema 'main' is damaged: the fact '{kind}' is missing"):
        read_state(tables)


@pytest.mark.parametrize("kind", ["generation", "sequence limit", "history", "queue", "producer"])
def test_fact_that_cannot_be_decoded_is_damage(tables: Connection, kind: str) -> None:
    write(tables, STATE)
    tables.execute("UPDATE main.fact SET value = '\\xff' WHERE kind = %s", (kind,))
    with pytest.raises(StoreError, match="the log in schema 'main' is damaged: a fact is damaged"):
        read_state(tables)


@pytest.mark.parametrize(
    "change",
    ["DELETE FROM main.position", "DROP INDEX main.position_is_one_row; INSERT INTO main.position VALUES (1, '')"],
)
def test_position_is_one_row(tables: Connection, change: str) -> None:
    write(tables, STATE)
    tables.execute(change)
    with pytest.raises(StoreError, match=r"`position` has [02] rows instead of 1"):
        read_state(tables)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("DELETE FROM main.kept WHERE key = %(key)s", r"the fact 'kept bytes' is \d+, but `kept` uses \d+ bytes"),
        ("DELETE FROM main.kept", r"the fact 'kept bytes' is \d+, but `kept` uses 0 bytes"),
        (
            "UPDATE main.kept SET mark = mark || 'x' WHERE key = %(dropped)s",
            r"the fact 'kept bytes' is \d+, but `kept` uses \d+ bytes",
        ),
        (
            "UPDATE main.fact SET value = '\\x000000000000000a' WHERE kind = 'sequence limit'",
            rf"message {2**62 - 1} of queue 'orders', priority 4: all sequences should be below 10",
        ),
        (
            "UPDATE main.kept SET record = set_byte(record, 20, 255) WHERE key = %(key)s",
            "message 1 of queue 'orders', priority 4: it is damaged: checksum does not match",
        ),
        (
            "UPDATE main.kept SET key = set_byte(key, 12, 9) WHERE key = %(key)s",
            r"message \d+ of queue 'orders', priority 4: it is damaged: checksum does not match",
        ),
        ("UPDATE main.kept SET key = '\\x01' WHERE key = %(key)s", "01 is not the key of a message"),
        (
            "UPDATE main.kept SET mark = 'x' WHERE key = %(key)s",
            "message 1 of queue 'orders', priority 4: its mark cannot be decoded: ",
        ),
        (
            "UPDATE main.kept SET generation = 2 WHERE key = %(dropped)s",
            "message 2 of queue 'orders', priority 4: it has a generation that does not exist yet",
        ),
    ],
)
def test_snapshot_that_does_not_add_up_is_damage(tables: Connection, change: str, problem: str) -> None:
    write(tables, STATE)
    tables.execute("UPDATE main.fact SET value = '\\x00000001' WHERE kind = 'generation'")
    tables.execute(change, {"key": key(1), "dropped": key(2)} if "%(" in change else None)
    with pytest.raises(StoreError, match=f"schema 'main' is damaged: {problem}.* `truenext store check URL"):
        read_state(tables)


@dataclass
class ManyMessages(State):
    count: int = 0
    size: int = 0

    def messages(self) -> Iterator[KeptMessage]:
        return (kept(key(number), bytes(self.size)) for number in range(self.count))


@pytest.mark.parametrize(("count", "size"), [(40_000, 1000), (20, 2_000_000)])
def test_snapshot_takes_the_memory_of_few_messages(tables: Connection, count: int, size: int) -> None:
    many = ManyMessages(STATE.position, STATE.recovered, count=count, size=size)
    for action in (lambda: write(tables, many), lambda: _read_all(tables, count)):
        gc.collect()
        tracemalloc.start()
        action()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000 + 6 * size


def _read_all(connection: Connection, count: int) -> None:
    with open_snapshot(connection, SCHEMA) as snapshot:
        assert sum(1 for _ in snapshot.messages()) == count
