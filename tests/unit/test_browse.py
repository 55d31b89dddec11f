"""Tests of browsing: browsers delay no other work, end whatever happens meanwhile, and leave no trace.

Random orders of events are in tests/property.
"""

import pytest

from truenext.engine.background.browsing import BrowseRead, BrowseSlice
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.pages import PageMessage, PageResult, StoreRead
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import NoEventLog
from truenext.errors import RemoteProtocolError, StoreError
from truenext.model.commands import Ack, AckMode, Browse, Nack, Send, Subscribe, Unsubscribe
from truenext.model.destination import parse_address
from truenext.model.limits import (
    BROWSE_MESSAGES_PER_TURN,
    BROWSERS_MAX,
    PAGE_SIZE_SHORT,
    SUBSCRIPTIONS_MAX,
    UNSENT_BYTES_MAX,
)
from truenext.model.message import SentMessage
from truenext.model.selector import compile_selector

A = parse_address("/queue/a", "s")


class BrowseDriver:
    """An engine with transient messages in queue a, and one connection."""

    def __init__(self, count: int = 0, size: int = 0, *, stored: int = 0) -> None:
        """`stored` is how many the store has of them, with the sequences from 1 on."""
        self.engine = Engine(CommitState(NoEventLog(), sequence_limit=stored + 1))
        if stored:
            self.engine.lifespan.restore_lane(self.engine.lifespan.restore_queue(1, "a"), 5, stored)
        self.engine.lifespan.start()
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.store_results.on_committed(batch)
        self.session = self.engine.commands.connect("s")
        self.send(count, size)

    def send(self, count: int, size: int = 0) -> None:
        for _ in range(count):
            self.engine.commands.send(
                self.session, Send(A, SentMessage(4, False, 0, b"content-length:0\n", bytes(size)))
            )

    def browse(self, name: str = "b", *, selector: str | None = None, session: ConnectionState | None = None) -> None:
        browse = Browse(name, A, None if selector is None else compile_selector(selector))
        self.engine.commands.browse(session or self.session, browse)

    def turns(self, count: int = 100, *, sends: bool = True) -> list[BrowseSlice]:
        """Run turns until no work is left, at most `count`; return the slices shown."""
        browse_slices: list[BrowseSlice] = []
        for _ in range(count):
            browse_slices += self.engine.turn.run().browse_slices
            if sends:
                self.engine.commands.on_all_sent(self.session)
            if not self.engine.has_work:
                break
        return browse_slices


def counts(browse_slices: list[BrowseSlice]) -> list[tuple[str, int, bool]]:
    return [(each.browser.subscription, len(each.entries), each.is_end) for each in browse_slices]


def test_browse_shows_one_slice_in_a_turn() -> None:
    driver = BrowseDriver(2 * BROWSE_MESSAGES_PER_TURN + 1)
    driver.browse()
    assert counts(driver.turns()) == [
        ("b", BROWSE_MESSAGES_PER_TURN, False),
        ("b", BROWSE_MESSAGES_PER_TURN, False),
        ("b", 1, True),
    ]


def test_browse_slice_counts_messages_that_the_selector_rejects() -> None:
    driver = BrowseDriver(2 * BROWSE_MESSAGES_PER_TURN + 1)
    driver.browse(selector="missing = 1")
    assert counts(driver.turns(2)) == []
    assert counts(driver.turns(1)) == [("b", 0, True)]


def test_large_headers_make_a_slice_shorter() -> None:
    driver = BrowseDriver()
    for _ in range(9):
        message = SentMessage(4, False, 0, b"a:" + b"x" * 60_000 + b"\n", b"")
        driver.engine.commands.send(driver.session, Send(A, message))
    driver.browse()
    assert counts(driver.turns()) == [("b", 5, False), ("b", 4, True)]


def test_browsers_are_served_in_turns() -> None:
    driver = BrowseDriver(BROWSE_MESSAGES_PER_TURN + 1)
    driver.browse("first")
    driver.browse("second")
    assert counts(driver.turns()) == [
        ("first", BROWSE_MESSAGES_PER_TURN, False),
        ("second", BROWSE_MESSAGES_PER_TURN, False),
        ("first", 1, True),
        ("second", 1, True),
    ]


def test_browse_does_not_wait_for_messages_sent_after_its_start() -> None:
    driver = BrowseDriver(BROWSE_MESSAGES_PER_TURN + 1)
    driver.browse()
    shown = 0
    for _ in range(3):
        driver.send(BROWSE_MESSAGES_PER_TURN)
        shown += sum(len(each.entries) for each in driver.turns(1))
    assert shown == BROWSE_MESSAGES_PER_TURN + 1
    assert not driver.engine.has_work


def test_a_full_connection_is_shown_nothing_more_and_the_next_one_is() -> None:
    # C17.5
    driver = BrowseDriver(3, size=UNSENT_BYTES_MAX)
    other = driver.engine.commands.connect("other")
    driver.browse()
    driver.browse("other", session=other)
    assert counts(driver.turns(sends=False)) == [("b", 1, False), ("other", 1, False)]
    assert not driver.engine.has_work
    driver.engine.commands.on_all_sent(other)
    assert counts(driver.turns(sends=False)) == [("other", 1, False)]
    assert counts(driver.turns()) == [("b", 1, False), ("b", 1, False), ("b", 0, True)]


def test_browse_is_no_consumer_and_shows_messages_that_consumers_can_get() -> None:
    driver = BrowseDriver(2)
    driver.browse()
    (queue,) = driver.engine.queues.by_name.values()
    clients = driver.engine.state.clients
    assert not clients.receivers_of(queue).consumers and not list(clients.held_by_consumers(queue))
    (showing,) = driver.turns()
    assert [entry.deliveries for entry in showing.entries] == [0, 0]
    assert queue.waiting_count() == 2
    driver.engine.commands.subscribe(driver.session, Subscribe("c", A, AckMode.INDIVIDUAL))
    (entries,) = driver.engine.turn.run().deliveries.values()
    assert [entry.deliveries for entry in entries] == [1, 1]


def test_a_queue_that_is_not_there_is_empty_and_is_not_made() -> None:
    # C8.1
    driver = BrowseDriver()
    driver.browse()
    assert counts(driver.turns()) == [("b", 0, True)]
    assert list(driver.engine.queues.by_name.values()) == []


def test_browsed_messages_cannot_be_acknowledged_or_nacked() -> None:
    driver = BrowseDriver(1)
    driver.browse()
    (showing,) = driver.turns()
    sequence = showing.entries[0].sequence
    with pytest.raises(RemoteProtocolError, match="'b' is a browser: its messages are not acknowledged"):
        driver.engine.commands.acknowledge(driver.session, Ack("b", sequence))
    with pytest.raises(RemoteProtocolError, match="'b' is a browser: its messages are not acknowledged"):
        driver.engine.commands.nack(driver.session, Nack("b", sequence))
    with pytest.raises(RemoteProtocolError, match="is not held"):
        driver.engine.commands.acknowledge(driver.session, Ack(None, sequence))


def test_browse_is_a_subscription_until_it_unsubscribes() -> None:
    driver = BrowseDriver(1)
    driver.browse()
    driver.turns()
    with pytest.raises(RemoteProtocolError, match="'b' exists already"):
        driver.browse()
    with pytest.raises(RemoteProtocolError, match="'b' exists already"):
        driver.engine.commands.subscribe(driver.session, Subscribe("b", A, AckMode.AUTO))
    driver.engine.commands.unsubscribe(driver.session, Unsubscribe("b"))
    driver.browse()
    assert counts(driver.turns()) == [("b", 1, True)]


@pytest.mark.parametrize("ends_by", ["UNSUBSCRIBE", "DISCONNECT"])
def test_browse_ends_with_unsubscribe_and_disconnect(ends_by: str) -> None:
    driver = BrowseDriver(BROWSE_MESSAGES_PER_TURN + 1)
    driver.browse()
    driver.turns(1)
    if ends_by == "UNSUBSCRIBE":
        driver.engine.commands.unsubscribe(driver.session, Unsubscribe("b"))
    else:
        driver.engine.commands.disconnect(driver.session, is_exempt=True)
    assert not driver.engine.has_work
    assert driver.turns() == []


def test_number_of_concurrent_browsers_is_limited() -> None:
    driver = BrowseDriver(1)
    for number in range(BROWSERS_MAX):
        driver.browse(str(number))
    with pytest.raises(RemoteProtocolError, match=f"more than {BROWSERS_MAX} browsers at once"):
        driver.browse()
    driver.turns(BROWSERS_MAX)
    for number in range(BROWSERS_MAX, SUBSCRIPTIONS_MAX):
        driver.browse(str(number))
        driver.turns()
    with pytest.raises(RemoteProtocolError, match=f"this connection has {SUBSCRIPTIONS_MAX} subscriptions"):
        driver.browse()


def test_temporary_queue_of_another_connection_cannot_be_browsed() -> None:
    driver = BrowseDriver()
    other = driver.engine.commands.connect("other")
    temporary = parse_address("/temp-queue/t", "s")
    with pytest.raises(RemoteProtocolError, match="only the connection that owns"):
        driver.engine.commands.browse(other, Browse("b", temporary))


# ---- Pages ----


def next_read(driver: BrowseDriver) -> StoreRead:
    (read,) = driver.engine.turn.run().reads
    return read


def page(*sequences: int, is_end: bool = False) -> PageResult:
    found = [PageMessage(sequence, SentMessage(4, True, 0, b"content-length:0\n", b"")) for sequence in sequences]
    return PageResult(found, 1, is_end)


def test_browsers_read_one_page_at_a_time_and_do_not_delay_pages_of_lanes() -> None:
    driver = BrowseDriver(stored=3)
    driver.browse("first")
    driver.browse("second")
    read = next_read(driver)
    assert isinstance(read, BrowseRead) and read.browser.subscription == "first"
    assert not driver.engine.has_work
    driver.engine.commands.subscribe(driver.session, Subscribe("c", A, AckMode.INDIVIDUAL, 1))
    assert not isinstance(next_read(driver), BrowseRead)
    driver.engine.store_results.on_page_read(read, page(1, 2))
    effects = driver.engine.turn.run()
    assert [entry.sequence for entry in effects.browse_slices[0].entries] == [1, 2]
    second = next_read(driver)
    assert isinstance(second, BrowseRead) and second.browser.subscription == "second"


def test_the_page_of_a_browser_that_is_gone_is_thrown_away() -> None:
    driver = BrowseDriver(stored=3)
    driver.browse("first")
    driver.browse("second")
    read = next_read(driver)
    driver.engine.commands.unsubscribe(driver.session, Unsubscribe("first"))
    driver.engine.store_results.on_page_read(read, page(1, 2))
    effects = driver.engine.turn.run()
    assert effects.browse_slices == []
    (second,) = effects.reads
    assert isinstance(second, BrowseRead) and second.browser.subscription == "second"


def test_browse_reads_small_pages_while_memory_is_short() -> None:
    driver = BrowseDriver(stored=3)
    driver.browse()
    driver.engine.state.memory.limit = 0
    assert next_read(driver).limit == PAGE_SIZE_SHORT


def test_a_page_that_is_empty_and_not_the_last_is_damage() -> None:
    driver = BrowseDriver(stored=3)
    driver.browse()
    with pytest.raises(StoreError, match="'a', priority 4: no message was read"):
        driver.engine.store_results.on_page_read(next_read(driver), page())


def test_a_damaged_message_is_left_out() -> None:
    driver = BrowseDriver(stored=3)
    driver.browse()
    found = page(1, 2, 3, is_end=True)
    found.messages[1].message = None
    driver.engine.store_results.on_page_read(next_read(driver), found)
    (showing, end) = driver.turns()
    assert [entry.sequence for entry in showing.entries] == [1, 3]
    assert end.is_end
