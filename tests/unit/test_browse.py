"""Does a browse hold up nobody, end whatever comes meanwhile, and leave no trace?

That it shows what it should, while anything happens, is asked by tests/property.
"""

import pytest

from truenext.commands import Ack, AckMode, Browse, Nack, Send, Subscribe, Unsubscribe
from truenext.destination import parse
from truenext.engine.background.browsing import BrowseRead, BrowseSlice
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.pages import PageMessage, PageResult, Read
from truenext.errors import RemoteProtocolError, StoreError
from truenext.limits import BROWSE_MESSAGES_PER_TURN, BROWSERS_MAX, PAGE_SIZE_SHORT, SUBSCRIPTIONS_MAX, UNSENT_BYTES_MAX
from truenext.message import SentMessage
from truenext.selector import compile_selector

A = parse("/queue/a", "s")


class World:
    """An engine with transient messages in queue a, and one connection."""

    def __init__(self, count: int = 0, size: int = 0, *, stored: int = 0) -> None:
        """`stored` is how many the store has of them, with the sequences from 1 on."""
        self.engine = Engine(sequence_limit=stored + 1)
        if stored:
            self.engine.restore_lane(self.engine.restore_queue(1, "a"), 5, stored)
        self.engine.start()
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.committed(batch)
        self.session = self.engine.connect("s")
        self.send(count, size)

    def send(self, count: int, size: int = 0) -> None:
        for _ in range(count):
            self.engine.send(self.session, Send(A, SentMessage(4, False, 0, b"content-length:0\n", bytes(size))))

    def browse(self, name: str = "b", *, wanted: str | None = None, session: ConnectionState | None = None) -> None:
        browse = Browse(name, A, None if wanted is None else compile_selector(wanted))
        self.engine.browse(session or self.session, browse)

    def turns(self, count: int = 100, *, takes: bool = True) -> list[BrowseSlice]:
        """What is shown until nothing more is to be done; of so many turns at most."""
        browse_slices: list[BrowseSlice] = []
        for _ in range(count):
            browse_slices += self.engine.turn().browse_slices
            if takes:
                self.engine.on_all_sent(self.session)
            if not self.engine.has_work:
                break
        return browse_slices


def counts(browse_slices: list[BrowseSlice]) -> list[tuple[str, int, bool]]:
    return [(each.browser.subscription, len(each.entries), each.is_end) for each in browse_slices]


def test_one_slice_is_shown_in_a_turn() -> None:
    world = World(2 * BROWSE_MESSAGES_PER_TURN + 1)
    world.browse()
    assert counts(world.turns()) == [
        ("b", BROWSE_MESSAGES_PER_TURN, False),
        ("b", BROWSE_MESSAGES_PER_TURN, False),
        ("b", 1, True),
    ]


def test_what_a_selector_does_not_want_counts_too() -> None:
    world = World(2 * BROWSE_MESSAGES_PER_TURN + 1)
    world.browse(wanted="missing = 1")
    assert counts(world.turns(2)) == []
    assert counts(world.turns(1)) == [("b", 0, True)]


def test_large_headers_make_a_slice_shorter() -> None:
    world = World()
    for _ in range(9):
        message = SentMessage(4, False, 0, b"a:" + b"x" * 60_000 + b"\n", b"")
        world.engine.send(world.session, Send(A, message))
    world.browse()
    assert counts(world.turns()) == [("b", 5, False), ("b", 4, True)]


def test_browsers_are_served_in_turns() -> None:
    world = World(BROWSE_MESSAGES_PER_TURN + 1)
    world.browse("first")
    world.browse("second")
    assert counts(world.turns()) == [
        ("first", BROWSE_MESSAGES_PER_TURN, False),
        ("second", BROWSE_MESSAGES_PER_TURN, False),
        ("first", 1, True),
        ("second", 1, True),
    ]


def test_what_was_sent_after_it_began_is_not_waited_for() -> None:
    world = World(BROWSE_MESSAGES_PER_TURN + 1)
    world.browse()
    shown = 0
    for _ in range(3):
        world.send(BROWSE_MESSAGES_PER_TURN)
        shown += sum(len(each.entries) for each in world.turns(1))
    assert shown == BROWSE_MESSAGES_PER_TURN + 1
    assert not world.engine.has_work


def test_a_full_connection_is_shown_nothing_more_and_the_next_one_is() -> None:
    world = World(3, size=UNSENT_BYTES_MAX)
    other = world.engine.connect("other")
    world.browse()
    world.browse("other", session=other)
    assert counts(world.turns(takes=False)) == [("b", 1, False), ("other", 1, False)]
    assert not world.engine.has_work
    world.engine.on_all_sent(other)
    assert counts(world.turns(takes=False)) == [("other", 1, False)]
    assert counts(world.turns()) == [("b", 1, False), ("b", 1, False), ("b", 0, True)]


def test_a_browse_is_no_consumer_and_is_shown_what_consumers_can_take() -> None:
    world = World(2)
    world.browse()
    (queue,) = world.engine.queues()
    clients = world.engine.clients
    assert not clients.receivers_of(queue).consumers and not list(clients.held_by_consumers(queue))
    (showing,) = world.turns()
    assert [entry.deliveries for entry in showing.entries] == [0, 0]
    assert queue.waiting_count() == 2
    world.engine.subscribe(world.session, Subscribe("c", A, AckMode.INDIVIDUAL))
    (entries,) = world.engine.turn().deliveries.values()
    assert [entry.deliveries for entry in entries] == [1, 1]


def test_a_queue_that_is_not_there_is_empty_and_is_not_made() -> None:
    world = World()
    world.browse()
    assert counts(world.turns()) == [("b", 0, True)]
    assert list(world.engine.queues()) == []


def test_what_is_shown_cannot_be_acknowledged_or_refused() -> None:
    world = World(1)
    world.browse()
    (showing,) = world.turns()
    sequence = showing.entries[0].sequence
    with pytest.raises(RemoteProtocolError, match="'b' browses: nothing of it is acknowledged"):
        world.engine.acknowledge(world.session, Ack("b", sequence))
    with pytest.raises(RemoteProtocolError, match="'b' browses: nothing of it is acknowledged"):
        world.engine.nack(world.session, Nack("b", sequence))
    with pytest.raises(RemoteProtocolError, match="is not held"):
        world.engine.acknowledge(world.session, Ack(None, sequence))


def test_it_is_a_subscription_until_it_unsubscribes() -> None:
    world = World(1)
    world.browse()
    world.turns()
    with pytest.raises(RemoteProtocolError, match="'b' exists already"):
        world.browse()
    with pytest.raises(RemoteProtocolError, match="'b' exists already"):
        world.engine.subscribe(world.session, Subscribe("b", A, AckMode.AUTO))
    world.engine.unsubscribe(world.session, Unsubscribe("b"))
    world.browse()
    assert counts(world.turns()) == [("b", 1, True)]


@pytest.mark.parametrize("ends_by", ["UNSUBSCRIBE", "DISCONNECT"])
def test_who_is_gone_is_shown_nothing_more(ends_by: str) -> None:
    world = World(BROWSE_MESSAGES_PER_TURN + 1)
    world.browse()
    world.turns(1)
    if ends_by == "UNSUBSCRIBE":
        world.engine.unsubscribe(world.session, Unsubscribe("b"))
    else:
        world.engine.disconnect(world.session, is_clean=True)
    assert not world.engine.has_work
    assert world.turns() == []


def test_there_are_only_so_many_at_once() -> None:
    world = World(1)
    for number in range(BROWSERS_MAX):
        world.browse(str(number))
    with pytest.raises(RemoteProtocolError, match=f"more than {BROWSERS_MAX} are browsing"):
        world.browse()
    world.turns(BROWSERS_MAX)
    for number in range(BROWSERS_MAX, SUBSCRIPTIONS_MAX):
        world.browse(str(number))
        world.turns()
    with pytest.raises(RemoteProtocolError, match=f"more than {SUBSCRIPTIONS_MAX} subscriptions"):
        world.browse()


def test_nobody_else_browses_a_temporary_queue() -> None:
    world = World()
    other = world.engine.connect("other")
    temporary = parse("/temp-queue/t", "s")
    with pytest.raises(RemoteProtocolError, match="only the connection that owns"):
        world.engine.browse(other, Browse("b", temporary))


# ---- Pages ----


def wanted(world: World) -> Read:
    (read,) = world.engine.turn().reads
    return read


def page(*sequences: int, is_end: bool = False) -> PageResult:
    found = [PageMessage(sequence, SentMessage(4, True, 0, b"content-length:0\n", b"")) for sequence in sequences]
    return PageResult(found, 1, is_end)


def test_one_page_of_all_browsers_is_read_at_a_time_and_those_of_lanes_do_not_wait() -> None:
    world = World(stored=3)
    world.browse("first")
    world.browse("second")
    read = wanted(world)
    assert isinstance(read, BrowseRead) and read.browser.subscription == "first"
    assert not world.engine.has_work
    world.engine.subscribe(world.session, Subscribe("c", A, AckMode.INDIVIDUAL, 1))
    assert not isinstance(wanted(world), BrowseRead)
    world.engine.page_read(read, page(1, 2))
    effects = world.engine.turn()
    assert [entry.sequence for entry in effects.browse_slices[0].entries] == [1, 2]
    second = wanted(world)
    assert isinstance(second, BrowseRead) and second.browser.subscription == "second"


def test_the_page_of_a_browser_that_is_gone_is_thrown_away() -> None:
    world = World(stored=3)
    world.browse("first")
    world.browse("second")
    read = wanted(world)
    world.engine.unsubscribe(world.session, Unsubscribe("first"))
    world.engine.page_read(read, page(1, 2))
    effects = world.engine.turn()
    assert effects.browse_slices == []
    (second,) = effects.reads
    assert isinstance(second, BrowseRead) and second.browser.subscription == "second"


def test_while_memory_is_short_pages_are_small() -> None:
    world = World(stored=3)
    world.browse()
    world.engine.memory.limit = 0
    assert wanted(world).limit == PAGE_SIZE_SHORT


def test_a_page_that_is_empty_and_not_the_last_is_damage() -> None:
    world = World(stored=3)
    world.browse()
    with pytest.raises(StoreError, match="'a', priority 4, a page is empty"):
        world.engine.page_read(wanted(world), page())


def test_a_damaged_message_is_left_out() -> None:
    world = World(stored=3)
    world.browse()
    found = page(1, 2, 3, is_end=True)
    found.messages[1].message = None
    world.engine.page_read(wanted(world), found)
    (showing, end) = world.turns()
    assert [entry.sequence for entry in showing.entries] == [1, 3]
    assert end.is_end
