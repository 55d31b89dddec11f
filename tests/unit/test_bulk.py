"""Tests that bulk work counts the matching messages that consumers and transactions hold."""

import msgspec
import pytest

from truenext.engine.background import bulk
from truenext.engine.background.bulk import BulkRequest, Move, Purge
from truenext.engine.engine import Engine
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.pages import PageResult
from truenext.model.commands import Ack, AckMode, Begin, Send, Subscribe, Unsubscribe
from truenext.model.dead_letters import GroupFilter
from truenext.model.destination import parse_address
from truenext.model.message import SentMessage

COLOURS = ["red", "blue", "red", "red"]


class Running:
    """An engine with four messages of one queue, all of which a consumer holds."""

    def __init__(self) -> None:
        self.engine = Engine(memory=MemoryBudget(1 << 30))
        self.engine.lifespan.start()
        self.session = self.engine.commands.connect("s")
        queue = parse_address("/queue/a", "s")
        for colour in COLOURS:
            self.send(colour)
        self.engine.commands.subscribe(self.session, Subscribe("0", queue, AckMode.INDIVIDUAL, len(COLOURS)))
        deliveries = self.engine.turn.run().deliveries
        self.engine.commands.on_all_sent(self.session)
        self.held = [entry for entries in deliveries.values() for entry in entries]
        assert len(self.held) == len(COLOURS)

    def send(self, colour: str, priority: int = 4) -> None:
        headers = f"colour:{colour}\ncontent-length:1\n".encode()
        message = SentMessage(priority, True, 0, headers, b"x")
        self.engine.commands.send(self.session, Send(parse_address("/queue/a", "s"), message))
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.store_results.on_committed(batch)

    def execute(self, request: BulkRequest) -> bulk.BulkResult:
        """Execute one piece with the messages in memory; its page is empty."""
        read = self.engine.tasks.bulk_pieces.next_read(request)
        assert read is not None
        return self.engine.tasks.bulk_pieces.execute(request, read, PageResult([], as_of=0, is_end=True))

    def count_left(self, request: BulkRequest) -> int:
        assert self.engine.tasks.bulk_pieces.next_read(request) is None
        return self.engine.tasks.bulk_pieces.empty_result(request).left


def test_bulk_work_counts_matching_messages_that_consumers_hold() -> None:
    # C12.5
    running = Running()
    first, second, *_ = (entry.sequence for entry in running.held)
    assert running.count_left(Purge("a")) == 4
    assert running.count_left(Purge("a", selector="colour = 'red'")) == 3
    assert running.count_left(Purge("a", selector="colour = 'green'")) == 0
    assert running.count_left(Move("a", to="b", sequences=(first, second, 1000))) == 2
    # What was accepted since is not looked at.
    assert running.count_left(Purge("a", until=second)) == 2


def test_bulk_work_counts_messages_acknowledged_in_an_open_transaction_as_held() -> None:
    running = Running()
    running.engine.commands.begin(running.session, Begin("t"))
    running.engine.commands.acknowledge(running.session, Ack("0", running.held[0].sequence, transaction="t"))
    assert running.count_left(Purge("a", selector="colour = 'red'")) == 3


def test_held_messages_that_cannot_be_compared_count_as_matching(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running()
    running.held[1].message = None
    assert running.count_left(Purge("a", selector="colour = 'red'")) == 4
    running = Running()
    monkeypatch.setattr(bulk, "HELD_COMPARED_MAX", 1)
    assert running.count_left(Purge("a", selector="colour = 'red'")) == 4


def test_held_messages_are_compared_with_a_group_for_a_short_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Purge("a", group=GroupFilter(cause="no such cause"))
    assert Running().count_left(request) == 0
    monkeypatch.setattr(bulk, "HELD_COST_MAX", 8)
    assert Running().count_left(request) == 2


def test_message_accepted_after_the_first_piece_stays() -> None:
    # C12.6
    running = Running()
    running.send("blue")
    running.send("blue")
    pieces = running.engine.tasks.bulk_pieces
    request = Purge("a", limit=1)
    first = running.execute(request)
    assert first.count == 1 and first.next is not None
    running.send("late")
    running.send("late", priority=0)
    count = 0
    request = msgspec.structs.replace(request, limit=None, after=first.next, until=first.until)
    while (read := pieces.next_read(request)) is not None:
        piece = pieces.execute(request, read, PageResult([], as_of=0, is_end=True))
        count += piece.count
        if piece.next is None:
            break
        request = msgspec.structs.replace(request, after=piece.next, until=piece.until)
    assert count == 1
    assert [queue.waiting_count() for queue in running.engine.queues.by_name.values()] == [2]


def test_message_returned_between_two_pieces_was_counted_as_held() -> None:
    """Fixed: only the last piece counted what is held, so that it was in neither."""
    # C12.5
    running = Running()
    # Of another colour, so that there is a piece before the end.
    running.send("blue")
    pieces = running.engine.tasks.bulk_pieces
    request = Purge("a", selector="colour = 'red'", dry_run=True)
    first = running.execute(request)
    assert (first.count, first.left) == (0, 3)
    assert first.next is not None
    running.engine.commands.unsubscribe(running.session, Unsubscribe("0"))
    last = msgspec.structs.replace(request, after=first.next, until=first.until)
    assert pieces.next_read(last) is None
    assert pieces.empty_result(last).left == 0
