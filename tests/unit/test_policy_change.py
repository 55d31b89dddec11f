"""Tests of messages in a queue whose policy changes."""

import pytest

from tests.property import targets
from truenext.engine.background.bulk import Purge
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.pages import PageMessage, PageResult, StoreRead
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import NoEventLog
from truenext.model.batch import Mark
from truenext.model.commands import Ack, AckMode, Nack, Send, Subscribe, Unsubscribe
from truenext.model.destination import parse_address
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy
from truenext.model.record import sequence_of

STORED = range(1, 7)
ENOUGH = 1 << 30


class Running:
    """An engine with stored messages of one queue, and a consumer that holds the first `window` of them."""

    def __init__(self, window: int) -> None:
        self.engine = Engine(
            CommitState(NoEventLog(), sequence_limit=10),
            memory=MemoryBudget(ENOUGH),
            policies=Policies(Policy(attempts_max=3)),
        )
        self.queue = self.engine.lifespan.restore_queue(1, "a")
        self.engine.lifespan.restore_lane(self.queue, 5, len(STORED))
        self.engine.lifespan.start()
        self.make_durable()
        self.session: ConnectionState = self.engine.commands.connect("s")
        self.engine.commands.subscribe(
            self.session, Subscribe("0", parse_address("/queue/a", "s"), AckMode.INDIVIDUAL, window)
        )
        self.read(self.turn()[1])
        assert self.turn()[0] == list(STORED)[:window]

    def make_durable(self) -> None:
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.store_results.on_committed(batch)

    def turn(self) -> tuple[list[int], list[StoreRead]]:
        """Run a turn; return the dispatched sequences and the requested reads."""
        effects = self.engine.turn.run()
        self.engine.commands.on_all_sent(self.session)
        return [entry.sequence for entries in effects.deliveries.values() for entry in entries], effects.reads

    def read(self, reads: list[StoreRead]) -> None:
        for read in reads:
            there = [sequence for sequence in STORED if sequence > read.after_sequence][: read.limit]
            found = [PageMessage(each, SentMessage(4, True, 0, b"content-length:0\n", b"")) for each in there]
            self.engine.store_results.on_page_read(read, PageResult(found, 0, there[-1:] == [STORED[-1]]))

    def nack(self, *sequences: int) -> None:
        for sequence in sequences:
            self.engine.commands.nack(self.session, Nack("0", sequence))

    def change(self, **changed: int) -> None:
        self.engine.commands.administering.change_policies(Policies(Policy(**changed)))  # type: ignore[arg-type]

    def squeeze(self) -> None:
        """Evict all messages that can be evicted."""
        self.engine.state.memory.limit = 0
        self.engine.evict()
        self.engine.state.memory.limit = ENOUGH

    def waiting(self) -> dict[str, int]:
        return {queue.name: queue.waiting_count() for queue in self.engine.queues.by_name.values()}


def test_lowered_attempts_max_gives_up_waiting_messages_that_failed_as_often() -> None:
    # C11.5, C13.2
    running = Running(window=2)
    running.nack(1, 2)
    running.change(attempts_max=2)
    assert running.waiting() == {"a": 6}
    running.change(attempts_max=1)
    assert running.waiting() == {"a": 4, "DLQ.a": 2}
    assert running.turn()[0] == [3, 4]


def test_lowered_attempts_max_leaves_held_messages_until_they_are_requeued() -> None:
    # C13.2
    running = Running(window=2)
    running.nack(1, 2)
    assert running.turn()[0] == [1, 2]
    running.change(attempts_max=1)
    assert running.waiting() == {"a": 4}
    running.engine.commands.acknowledge(running.session, Ack("0", 1))
    running.engine.commands.unsubscribe(running.session, Unsubscribe("0"))
    assert running.waiting() == {"a": 4, "DLQ.a": 1}


def test_message_given_up_stays_so_although_more_attempts_are_allowed_before_it_is_read() -> None:
    # C13.2
    running = Running(window=1)
    running.nack(1)
    running.make_durable()
    running.squeeze()
    running.change(attempts_max=1)
    assert running.waiting() == {"a": 5}
    running.change(attempts_max=9)
    dispatched = []
    for _ in range(3):
        sequences, reads = running.turn()
        dispatched += sequences
        running.read(reads)
    assert running.waiting() == {"a": 4, "DLQ.a": 1}
    assert dispatched == [2]


def test_clean_stop_writes_the_deliveries_of_a_message_given_up_and_not_read_yet() -> None:
    """The message is in no lane, and the store knows only its first dispatch."""
    running = Running(window=1)
    running.nack(1)
    running.make_durable()
    assert running.turn()[0] == [1]
    running.engine.commands.unsubscribe(running.session, Unsubscribe("0"))
    running.squeeze()
    running.change(attempts_max=1)
    running.engine.commands.connecting.stop()
    marks = {
        sequence_of(key): mark for batch in running.engine.lifespan.final_batches() for key, mark in batch.marks.items()
    }
    assert marks[1] == Mark(attempts=1, deliveries=2, due_ms=0)


def test_pages_and_due_messages_change_nothing_while_the_last_batches_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fixed: a page of given-up messages came in between, and a message became due. Queues and lanes changed while they
    were written, and the stop was not clean."""
    targets.STORE_TRANSACTION_BYTES_MAX.replace(monkeypatch, 1)
    running = Running(window=3)
    engine = running.engine
    engine.state.commit_state.tick(1_000_000, 0)
    running.nack(1)
    running.make_durable()
    running.squeeze()
    running.change(attempts_max=1)
    running.change(attempts_max=9)
    for sequence in (2, 3):
        engine.commands.nack(running.session, Nack("0", sequence, delay_ms=1000))
    running.make_durable()
    _, reads = running.turn()
    engine.commands.connecting.stop()
    batches = []
    for batch in engine.lifespan.final_batches():
        batches.append(batch)
        engine.state.commit_state.tick(10_000_000, 9_000_000)
        engine.store_results.on_committed(batch)
        running.read(reads)
        reads = engine.turn.run().reads
    assert len(batches) > 2
    assert batches[-1].clean_stop
    assert not any(batch.removes or batch.puts for batch in batches)
    marks = {sequence_of(key): mark for batch in batches for key, mark in batch.marks.items()}
    assert [marks[sequence].due_ms for sequence in (1, 2, 3)] == [0, 2000, 2000]


def test_raised_attempts_max_applies_to_messages_not_given_up_yet() -> None:
    running = Running(window=1)
    running.nack(1)
    assert running.turn()[0] == [1]
    running.change(attempts_max=2)
    running.change(attempts_max=3)
    running.nack(1)
    assert running.waiting() == {"a": 6}


def test_changed_delays_and_dead_letter_queue_apply_to_later_failures_alone() -> None:
    # C13.4
    running = Running(window=1)
    running.engine.commands.administering.change_policies(Policies(Policy(first_delay_ms=50)))
    running.nack(1)
    running.engine.commands.administering.change_policies(Policies(Policy(first_delay_ms=500, dead_letters="failed")))
    assert running.turn()[0] == [2]
    running.nack(2)
    assert running.turn()[0] == [3]
    running.engine.commands.nack(running.session, Nack("0", 3, is_rejected=True))
    assert running.waiting() == {"a": 5, "failed": 1}
    assert running.turn()[0] == [4]
    running.engine.commands.acknowledge(running.session, Ack("0", 4))
    running.engine.state.commit_state.tick(50_000, 50_000)
    assert running.turn()[0] == [1]
    running.engine.commands.acknowledge(running.session, Ack("0", 1))
    for due in (5, 6):
        assert running.turn()[0] == [due]
        running.engine.commands.acknowledge(running.session, Ack("0", due))
    running.engine.state.commit_state.tick(499_000, 499_000)
    assert running.turn()[0] == []
    running.engine.state.commit_state.tick(500_000, 500_000)
    assert running.turn()[0] == [2]


def test_a_smaller_limit_makes_messages_leave_memory_though_nothing_else_happens() -> None:
    running = Running(window=1)
    before = running.queue.resident_bytes
    running.change(memory_limit=before // 2)
    running.turn()
    running.engine.evict()
    assert 0 < running.queue.resident_bytes <= before // 2
    assert running.waiting() == {"a": 5}


def test_eviction_that_waited_for_a_piece_of_bulk_work_happens_after_it() -> None:
    running = Running(window=6)
    waits = SentMessage(4, True, 0, b"content-length:0\n", b"")
    running.engine.commands.send(running.session, Send(parse_address("/queue/a", "s"), waits))
    running.make_durable()
    before = running.queue.resident_bytes
    read = running.engine.tasks.bulk_pieces.next_read(Purge("a", selector="colour = 'red'"))
    assert read is not None
    running.change(memory_limit=before // 2)
    running.engine.evict()
    assert running.queue.resident_bytes == before
    running.engine.tasks.bulk_pieces.execute(Purge("a", selector="colour = 'red'"), read, PageResult([], 0, True))
    running.engine.evict()
    assert running.queue.resident_bytes <= before // 2


def test_the_next_page_has_the_new_size() -> None:
    running = Running(window=1)
    running.squeeze()
    running.change(page_size=2)
    running.engine.commands.acknowledge(running.session, Ack("0", 1))
    (read,) = running.turn()[1]
    assert read.limit == 2


def test_a_queue_that_is_made_later_has_the_new_policy() -> None:
    running = Running(window=1)
    running.change(attempts_max=5)
    running.engine.commands.subscribe(running.session, Subscribe("1", parse_address("/queue/b", "s"), AckMode.AUTO, 1))
    assert {queue.policy.attempts_max for queue in running.engine.queues.by_name.values()} == {5}
