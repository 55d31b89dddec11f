"""Tests of the compaction of a log in PostgreSQL: `kept` and `fact` are always what the rows up to the position add up
to."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.disk import LANE, NEXT_QUEUE, OTHER_LANE, Disk, all_timers
from tests.contract.postgresql.rows import SCHEMA, Rows, State, read_state
from tests.contract.test_store import Model, draw_batch
from truenext.model.batch import Batch, Causes
from truenext.model.events import BLOCK, CHUNK, FROM_BATCH, EventKind, event_bytes
from truenext.model.record import CONTENTS_LANE_KEY, content_key, referenced_content_number
from truenext.store.changes import RareChanges, encode_batch
from truenext.store.journal import Journal
from truenext.store.log import KeptMessage
from truenext.store.postgresql.compaction import compact, delete_dropped
from truenext.store.postgresql.kept import read_facts
from truenext.store.postgresql.layout import Connection, create_layout
from truenext.store.store import Recovered

DROP = b"".join(encode_batch(Batch(0), RareChanges(drops_transients=True)))


def history(run: int, first_event: int, events: int) -> bytes:
    """Return a chunk with this number of events, and names of a queue and a cause."""
    blocks = BLOCK.pack(EventKind.NAME, 0, 0, 1, 6, 0) + b"orders" + BLOCK.pack(EventKind.CAUSE, 0, 0, 1, 3, 0) + b"why"
    if events:
        blocks += BLOCK.pack(EventKind.EXPIRED, 0, events, 1, 0, 5) + bytes(events * event_bytes(EventKind.EXPIRED))
    return CHUNK.pack(0, len(blocks), run, FROM_BATCH, first_event) + blocks


class LoggedDisk(Disk):
    """Store in a folder, whose frames become rows of a log. `states` has the state after each row."""

    def __init__(self, folder: Path, rows: Rows, model: Model) -> None:
        self.written = rows
        self.model = model
        self.paused: set[int] = set()
        self.redelivered_below = 0
        self.next_history = (1, 1)
        self.more: dict[str, Any] = {}
        """Further changes of the next batch."""
        self.states: dict[int, tuple[State, tuple[int, int]]] = {}
        super().__init__("embedded", folder)

    def apply(self, **changes: Any) -> None:
        changes |= self.more
        self.more = {}
        parts: list[bytes] = []
        append = Journal.append

        def recording(journal: Journal, payload: list[bytes], *rest: Any) -> tuple[int, int]:
            parts.extend(payload)
            return append(journal, payload, *rest)

        with mock.patch.object(Journal, "append", recording):
            super().apply(**changes)
        self.written.append_payload(b"".join(parts))
        for number, is_paused in changes.get("paused", {}).items():
            (self.paused.add if is_paused else self.paused.discard)(number)
        self.redelivered_below = changes.get("redelivered_below") or self.redelivered_below

    def restart(self, *, is_clean: bool) -> None:
        if is_clean:
            self.apply(clean_stop=True)
            self.model.clean_stop = True
            self.save_state()
        self.store.close()
        recovered = self.open()
        expected = replace(self.recovered, identity=recovered.identity)
        assert replace(recovered, counts={}, history=[]) == expected
        if not self.model.clean_stop:
            self.written.append_payload(DROP)
        self.model.restart()
        self.save_state()

    @property
    def recovered(self) -> Recovered:
        model = self.model
        producers = sorted(model.producers.items(), key=lambda item: (item[1].last_used_ms, item[0]))
        return Recovered(
            identity="0123abcd",
            clean_stop=model.clean_stop,
            sequence_limit=model.sequence_limit,
            redelivered_below=self.redelivered_below,
            queues=model.queues,
            paused=set(self.paused),
            producers=dict(producers),
        )

    def save_state(self) -> None:
        """Save the state of the store as that of the newest row."""
        transient_references = {one for one, (_, is_persistent) in self.model.messages.items() if not is_persistent}
        messages = []
        for lane in (CONTENTS_LANE_KEY, LANE, OTHER_LANE, NEXT_QUEUE):
            for message in self.store.read_page(lane, 0, 10_000).messages:
                is_transient = message.key in transient_references or message.key in self.transient_contents
                messages.append(
                    KeptMessage(message.key, message.record, is_transient, message.mark, Causes(*message.causes))
                )
        state = State(self.written.last, self.recovered, sorted(messages), all_timers(self.store))
        self.states[self.written.last.number] = state, self.next_history

    @property
    def transient_contents(self) -> set[bytes]:
        return {
            content_key(referenced_content_number(record))
            for record, is_persistent in self.model.messages.values()
            if not is_persistent and referenced_content_number(record)
        }


def draw_row(data: st.DataObject, disk: LoggedDisk) -> None:
    """Apply one random batch, with further changes that a batch may have."""
    model = disk.model
    more: dict[str, Any] = {}
    kept_queues = sorted(model.queues.keys() - set(model.empty_queues(model.messages)))
    if kept_queues:
        more["paused"] = data.draw(st.dictionaries(st.sampled_from(kept_queues), st.booleans()), label="paused")
    more["redelivered_below"] = data.draw(
        st.sampled_from([0, 0, disk.redelivered_below + 5]), label="redelivered below"
    )
    if data.draw(st.booleans(), label="has history"):
        run, event = disk.next_history[0] - 1, disk.next_history[1]
        run = max(1, run) + data.draw(st.integers(0, 1), label="new runs")
        events = data.draw(st.integers(0, 300), label="events")
        more["history"] = history(run, event, events)
        disk.next_history = run + 1, event + events
    disk.more = more
    draw_batch(data, disk, model)
    disk.save_state()


@pytest.fixture(scope="module")
def shared_tables(request: pytest.FixtureRequest) -> Iterator[Connection]:
    postgres = request.getfixturevalue("postgres")
    with postgres.connect(request.getfixturevalue("shared_database")) as connection:
        yield connection
        connection.execute(f"DROP SCHEMA {SCHEMA} CASCADE")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_kept_and_facts_are_the_state_of_a_folder_that_has_the_same_batches(
    shared_tables: Connection, data: st.DataObject
) -> None:
    folder = Path(tempfile.mkdtemp())
    shared_tables.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE; CREATE SCHEMA {SCHEMA}")
    create_layout(shared_tables, SCHEMA)
    disk = LoggedDisk(folder / "data", Rows(shared_tables), Model())
    try:
        disk.save_state()
        for _ in range(data.draw(st.integers(1, 12), label="steps")):
            step = data.draw(
                st.sampled_from(["batch"] * 4 + ["compact"] * 2 + ["crash", "stop", "begin"]), label="step"
            )
            if step == "batch":
                draw_row(data, disk)
            elif step == "begin":
                disk.apply(clean_stop=False)
                disk.model.clean_stop = False
                disk.save_state()
            elif step == "compact":
                compact(shared_tables, SCHEMA, data.draw(st.integers(0, disk.written.last.number), label="up to"))
                check_state(shared_tables, disk)
            else:
                disk.restart(is_clean=step == "stop")
        while compact(shared_tables, SCHEMA, disk.written.last.number):
            check_state(shared_tables, disk)
        state = read_state(shared_tables)
        assert state.position == disk.written.last
        if data.draw(st.booleans(), label="delete dropped"):
            while delete_dropped(shared_tables, SCHEMA):
                pass
            check_state(shared_tables, disk)
            (rows,) = shared_tables.execute("SELECT count(*) FROM main.kept").fetchone() or (None,)
            assert rows == len(state.kept)
    finally:
        disk.store.close()
        shutil.rmtree(folder)


def check_state(connection: Connection, disk: LoggedDisk) -> None:
    """Check that the compacted rows add up to the state that the folder had after them."""
    state = read_state(connection)
    expected, next_history = disk.states[state.position.number]
    assert state == expected
    facts = read_facts(connection, SCHEMA)
    assert facts.next_history == next_history
    sizes = connection.execute(
        "SELECT coalesce(sum(100 + octet_length(record) + coalesce(octet_length(mark), 0)), 0) FROM main.kept"
    )
    assert sizes.fetchone() == (facts.kept_bytes,)
