"""Does bulk work say how many of what it wants others have?"""

import pytest

from truenext.engine.background import bulk
from truenext.engine.background.bulk import BulkRequest, Move, Purge
from truenext.engine.engine import Engine
from truenext.model.commands import Ack, AckMode, Begin, Send, Subscribe
from truenext.model.destination import parse_address
from truenext.model.message import SentMessage

COLOURS = ["red", "blue", "red", "red"]


class Running:
    """An engine with four messages of one queue, all of which a consumer holds."""

    def __init__(self) -> None:
        self.engine = Engine(memory_limit=1 << 30)
        self.engine.start()
        self.session = self.engine.connect("s")
        queue = parse_address("/queue/a", "s")
        for colour in COLOURS:
            headers = f"colour:{colour}\ncontent-length:1\n".encode()
            self.engine.send(self.session, Send(queue, SentMessage(4, True, 0, headers, b"x")))
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.on_committed(batch)
        self.engine.subscribe(self.session, Subscribe("0", queue, AckMode.INDIVIDUAL, len(COLOURS)))
        deliveries = self.engine.turn().deliveries
        self.engine.on_all_sent(self.session)
        self.held = [entry for entries in deliveries.values() for entry in entries]
        assert len(self.held) == len(COLOURS)

    def count_left(self, request: BulkRequest) -> int:
        assert self.engine.bulk_pieces.next_read(request) is None
        return self.engine.bulk_pieces.empty_result(request).left


def test_what_consumers_hold_is_left_as_far_as_it_is_wanted() -> None:
    running = Running()
    first, second, *_ = (entry.sequence for entry in running.held)
    assert running.count_left(Purge("a")) == 4
    assert running.count_left(Purge("a", selector="colour = 'red'")) == 3
    assert running.count_left(Purge("a", selector="colour = 'green'")) == 0
    assert running.count_left(Move("a", to="b", sequences=(first, second, 1000))) == 2
    # What was accepted since is not looked at.
    assert running.count_left(Purge("a", until=second)) == 2


def test_what_an_open_transaction_has_acknowledged_is_left_until_it_is_committed() -> None:
    running = Running()
    running.engine.begin(running.session, Begin("t"))
    running.engine.acknowledge(running.session, Ack("0", running.held[0].sequence, transaction="t"))
    assert running.count_left(Purge("a", selector="colour = 'red'")) == 3


def test_what_has_left_memory_or_is_too_much_to_compare_counts_as_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running()
    running.held[1].message = None
    assert running.count_left(Purge("a", selector="colour = 'red'")) == 4
    running = Running()
    monkeypatch.setattr(bulk, "HELD_COMPARED_MAX", 1)
    assert running.count_left(Purge("a", selector="colour = 'red'")) == 4
