"""Does the oracle know what docs/contract.md says of giving back and pulling? In plain examples, without an engine."""

import pytest

from tests.property.oracle import Disagreement, Ended, Letter, NackOptions, Oracle, Parcel, Peer, Reader, Seen
from truenext.commands import AckMode


class World:
    """An oracle, and a broker that does what is said here."""

    def __init__(self, attempts_max: int = 7) -> None:
        self.oracle = Oracle(attempts_max)
        self.sequence = 0

    def connect(self, name: str = "s", *, names_begun: bool = False) -> Peer:
        return self.oracle.connect(name, has_rounds=True, names_begun=names_begun, keeps_open=True)

    def subscribe(self, peer: Peer, name: str = "c", *, window: int | None = 10, is_pulling: bool = False) -> Reader:
        return self.oracle.subscribe(
            peer, name, "q", AckMode.INDIVIDUAL, None if is_pulling else window, is_pulling=is_pulling
        )

    def send(self, peer: Peer, *labels: str, group: str = "") -> None:
        for label in labels:
            self.oracle.send(peer, "q", Parcel(label, 4, False, 0, 0, "", group))

    def turn(self, *got: tuple[Reader, str], ended: tuple[tuple[Reader, Ended], ...] = ()) -> None:
        dispatched: dict[Reader, list[Seen]] = {}
        started: set[str] = set()
        for reader, label in got:
            letter = self.letter(label)
            if letter not in self.oracle.sequences:
                self.sequence += 1
            sequence = self.oracle.sequences.get(letter, self.sequence)
            is_first = letter.parcel.group not in ("", *(group for _, group in self.oracle.owners), *started)
            started.add(letter.parcel.group)
            deliveries = letter.deliveries + 1
            dispatched.setdefault(reader, []).append(
                Seen(label, "q", sequence, 4, False, 0, deliveries, letter.attempts, is_first, letter.was_lost)
            )
        self.oracle.check_turn(dispatched, [], {}, list(ended))

    def letter(self, label: str) -> Letter:
        return self.oracle.letter(label, "q")

    def name(self, label: str) -> tuple[str, int, int]:
        letter = self.letter(label)
        assert letter.holder is not None
        return (letter.holder.subscription, self.oracle.sequences[letter], letter.deliveries)


def test_what_is_given_back_comes_again_without_an_attempt_but_for_what_is_kept() -> None:
    world = World()
    peer = world.connect()
    reader = world.subscribe(peer)
    world.send(peer, "m1", "m2", "m3")
    world.turn((reader, "m1"), (reader, "m2"), (reader, "m3"))
    world.oracle.release(peer, [reader], [world.name("m2")])
    assert (peer.round, world.letter("m1").attempts) == (1, 0)
    world.turn((reader, "m1"), (reader, "m3"))


def test_what_is_kept_by_an_earlier_dispatch_is_given_back() -> None:
    world = World()
    peer = world.connect()
    reader = world.subscribe(peer)
    world.send(peer, "m1")
    world.turn((reader, "m1"))
    earlier = world.name("m1")
    for _ in range(2):
        world.oracle.release(peer, [reader], [])
        world.turn((reader, "m1"))
    world.oracle.release(peer, [reader], [earlier])
    world.turn((reader, "m1"))


def test_one_that_rests_gets_nothing_until_it_is_woken() -> None:
    world = World()
    peer = world.connect()
    reader = world.subscribe(peer)
    world.send(peer, "m1")
    world.turn((reader, "m1"))
    world.oracle.release(peer, [reader], [], suspends=True)
    world.turn()
    world.oracle.check_idle()
    world.oracle.wake(reader)
    world.turn((reader, "m1"))


def test_a_group_leaves_one_that_rests_once_it_has_nothing_of_it() -> None:
    world = World()
    peer = world.connect()
    reader, other = world.subscribe(peer), world.subscribe(world.connect("t"), "d")
    world.send(peer, "m1", "m2", "m3", group="g")
    world.turn((reader, "m1"), (reader, "m2"), (reader, "m3"))
    world.oracle.begin(peer, "t")
    world.oracle.acknowledge(peer, world.letter("m2"), "t")
    world.oracle.release(peer, [reader], [world.name("m1")], suspends=True)
    world.turn()
    world.oracle.acknowledge(peer, world.letter("m1"))
    world.turn()
    world.oracle.commit(peer, "t")
    world.turn((other, "m3"))


def test_an_aborted_transaction_is_charged_for_what_it_refused() -> None:
    world = World()
    peer = world.connect()
    reader = world.subscribe(peer)
    world.send(peer, "m1", "m2", "m3")
    world.turn((reader, "m1"), (reader, "m2"), (reader, "m3"))
    world.oracle.begin(peer, "t")
    for label in ("m1", "m2"):
        world.oracle.acknowledge(peer, world.letter(label), "t")
    world.oracle.nack_acknowledged(world.letter("m2"), NackOptions())
    world.oracle.release(peer, [reader], [], transaction="t", counts_all=False)
    assert [world.letter(label).attempts for label in ("m1", "m2", "m3")] == [0, 1, 0]


def test_a_lost_connection_is_charged_for_what_it_has_begun_in_this_dispatch() -> None:
    world = World()
    peer = world.connect(names_begun=True)
    reader = world.subscribe(peer)
    world.send(peer, "m1", "m2", "m3")
    world.turn((reader, "m1"), (reader, "m2"), (reader, "m3"))
    world.oracle.say_started(world.letter("m2"))
    world.oracle.say_started(world.letter("m3"))
    world.oracle.release(peer, [reader], [world.name("m2")])
    world.turn((reader, "m1"), (reader, "m3"))
    world.oracle.disconnect(peer, is_clean=False)
    assert [world.letter(label).attempts for label in ("m1", "m2", "m3")] == [0, 1, 0]
    assert [world.letter(label).was_lost for label in ("m1", "m2", "m3")] == [False, True, False]


def test_one_that_pulls_gets_what_it_asks_for_and_is_told_of_the_rest() -> None:
    world = World()
    peer = world.connect()
    reader = world.subscribe(peer, is_pulling=True)
    world.send(peer, "m1", "m2", "m3")
    world.turn()
    world.oracle.ask(reader, 1, waits=False, correlation="a")
    world.turn((reader, "m1"))
    world.oracle.acknowledge(peer, world.letter("m1"))
    world.turn()
    world.oracle.ask(reader, 4, waits=False, correlation="b")
    world.turn((reader, "m2"), (reader, "m3"), ended=((reader, Ended(2, "b")),))
    world.send(peer, "m4")
    world.turn()


def test_a_wish_that_waits_does_not_end_until_it_is_withdrawn() -> None:
    world = World()
    peer = world.connect()
    reader = world.subscribe(peer, is_pulling=True)
    world.oracle.ask(reader, 3, waits=True, correlation=None)
    world.turn()
    world.oracle.check_idle()
    with pytest.raises(Disagreement, match="has withdrawn"):
        world.oracle.withdraw(reader, "w", None)
    world.oracle.withdraw(reader, "w", Ended(3, "w"))
    world.oracle.withdraw(reader, "v", Ended(0, "v"))
    world.turn()


def test_a_wish_that_does_not_wait_ends_at_once_where_nothing_is_ready() -> None:
    world = World()
    peer = world.connect()
    reader = world.subscribe(peer, is_pulling=True)
    world.oracle.ask(reader, 3, waits=False, correlation=None)
    with pytest.raises(Disagreement, match="it is not told"):
        world.turn()


def test_a_wish_does_not_end_while_something_is_ready() -> None:
    world = World()
    peer = world.connect()
    reader = world.subscribe(peer, is_pulling=True)
    world.send(peer, "m1")
    world.oracle.ask(reader, 3, waits=False, correlation=None)
    with pytest.raises(Disagreement):
        world.turn(ended=((reader, Ended(3, None)),))
    world.oracle.check_turn({}, [], {"q": 0}, [])
    with pytest.raises(Disagreement, match="is told"):
        world.oracle.check_turn({}, [], {"q": 0}, [(reader, Ended(3, None))])


def test_a_wish_ends_with_a_request_to_give_back_and_nobody_says_so() -> None:
    world = World()
    peer = world.connect()
    reader = world.subscribe(peer, is_pulling=True)
    world.oracle.ask(reader, 3, waits=True, correlation=None)
    world.oracle.release(peer, [reader], [])
    world.send(peer, "m1")
    world.turn()
