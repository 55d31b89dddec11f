"""Tests of the oracle alone: release and pull requests in plain examples, without an engine."""

import pytest

from tests.property.oracle import Disagreement, Ended, Letter, NackOptions, Oracle, Parcel, Peer, Reader, Seen
from truenext.model.commands import AckMode


class ScriptedBroker:
    """An oracle, and a broker that does what is said here."""

    def __init__(self, attempts_max: int = 7) -> None:
        self.oracle = Oracle(attempts_max)
        self.sequence = 0

    def connect(self, name: str = "s") -> Peer:
        return self.oracle.connect(name, is_truenext_client=True)

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
                Seen(
                    *(label, "q", sequence, 4, False, 0, deliveries, letter.attempts, is_first, letter.was_lost),
                    is_redelivered=letter.is_flagged,
                )
            )
        self.oracle.check_turn(dispatched, [], {}, list(ended))

    def letter(self, label: str) -> Letter:
        return self.oracle.letter(label, "q")

    def name(self, label: str) -> tuple[str, int, int]:
        letter = self.letter(label)
        assert letter.holder is not None
        return (letter.holder.subscription, self.oracle.sequences[letter], letter.deliveries)


def test_released_messages_come_again_without_an_attempt_except_those_kept() -> None:
    broker = ScriptedBroker()
    peer = broker.connect()
    reader = broker.subscribe(peer)
    broker.send(peer, "m1", "m2", "m3")
    broker.turn((reader, "m1"), (reader, "m2"), (reader, "m3"))
    broker.oracle.release(peer, [reader], [broker.name("m2")])
    assert (peer.round, broker.letter("m1").attempts) == (1, 0)
    broker.turn((reader, "m1"), (reader, "m3"))


def test_release_that_keeps_only_an_earlier_dispatch_releases_the_message() -> None:
    broker = ScriptedBroker()
    peer = broker.connect()
    reader = broker.subscribe(peer)
    broker.send(peer, "m1")
    broker.turn((reader, "m1"))
    earlier = broker.name("m1")
    for _ in range(2):
        broker.oracle.release(peer, [reader], [])
        broker.turn((reader, "m1"))
    broker.oracle.release(peer, [reader], [earlier])
    broker.turn((reader, "m1"))


def test_suspended_consumer_gets_nothing_until_it_is_woken() -> None:
    broker = ScriptedBroker()
    peer = broker.connect()
    reader = broker.subscribe(peer)
    broker.send(peer, "m1")
    broker.turn((reader, "m1"))
    broker.oracle.release(peer, [reader], [], suspends=True)
    broker.turn()
    broker.oracle.check_idle()
    broker.oracle.wake(reader)
    broker.turn((reader, "m1"))


def test_group_leaves_a_suspended_consumer_once_it_holds_no_message_of_it() -> None:
    broker = ScriptedBroker()
    peer = broker.connect()
    reader, other = broker.subscribe(peer), broker.subscribe(broker.connect("t"), "d")
    broker.send(peer, "m1", "m2", "m3", group="g")
    broker.turn((reader, "m1"), (reader, "m2"), (reader, "m3"))
    broker.oracle.begin(peer, "t")
    broker.oracle.acknowledge(peer, broker.letter("m2"), "t")
    broker.oracle.release(peer, [reader], [broker.name("m1")], suspends=True)
    broker.turn()
    broker.oracle.acknowledge(peer, broker.letter("m1"))
    broker.turn()
    broker.oracle.commit(peer, "t")
    broker.turn((other, "m3"))


def test_release_of_a_transaction_counts_attempts_of_nacked_messages_only() -> None:
    broker = ScriptedBroker()
    peer = broker.connect()
    reader = broker.subscribe(peer)
    broker.send(peer, "m1", "m2", "m3")
    broker.turn((reader, "m1"), (reader, "m2"), (reader, "m3"))
    broker.oracle.begin(peer, "t")
    for label in ("m1", "m2"):
        broker.oracle.acknowledge(peer, broker.letter(label), "t")
    broker.oracle.nack_acknowledged(broker.letter("m2"), NackOptions())
    broker.oracle.release(peer, [reader], [], transaction="t", counts_all=False)
    assert [broker.letter(label).attempts for label in ("m1", "m2", "m3")] == [0, 1, 0]


def test_lost_connection_counts_attempts_of_messages_started_in_this_dispatch() -> None:
    broker = ScriptedBroker()
    peer = broker.connect()
    reader = broker.subscribe(peer)
    broker.send(peer, "m1", "m2", "m3")
    broker.turn((reader, "m1"), (reader, "m2"), (reader, "m3"))
    broker.oracle.mark_started(broker.letter("m2"))
    broker.oracle.mark_started(broker.letter("m3"))
    broker.oracle.release(peer, [reader], [broker.name("m2")])
    broker.turn((reader, "m1"), (reader, "m3"))
    broker.oracle.disconnect(peer, is_clean=False)
    assert [broker.letter(label).attempts for label in ("m1", "m2", "m3")] == [0, 1, 0]
    assert [broker.letter(label).was_lost for label in ("m1", "m2", "m3")] == [False, True, False]


def test_pulling_consumer_gets_its_credit_and_is_told_the_unused_rest() -> None:
    broker = ScriptedBroker()
    peer = broker.connect()
    reader = broker.subscribe(peer, is_pulling=True)
    broker.send(peer, "m1", "m2", "m3")
    broker.turn()
    broker.oracle.pull(reader, 1, waits=False, correlation="a")
    broker.turn((reader, "m1"))
    broker.oracle.acknowledge(peer, broker.letter("m1"))
    broker.turn()
    broker.oracle.pull(reader, 4, waits=False, correlation="b")
    broker.turn((reader, "m2"), (reader, "m3"), ended=((reader, Ended(2, "b")),))
    broker.send(peer, "m4")
    broker.turn()


def test_waiting_pull_request_does_not_end_until_it_is_withdrawn() -> None:
    broker = ScriptedBroker()
    peer = broker.connect()
    reader = broker.subscribe(peer, is_pulling=True)
    broker.oracle.pull(reader, 3, waits=True, correlation=None)
    broker.turn()
    broker.oracle.check_idle()
    with pytest.raises(Disagreement, match="has withdrawn"):
        broker.oracle.withdraw(reader, "w", None)
    broker.oracle.withdraw(reader, "w", Ended(3, "w"))
    broker.oracle.withdraw(reader, "v", Ended(0, "v"))
    broker.turn()


def test_no_wait_pull_request_ends_at_once_if_no_message_is_ready() -> None:
    broker = ScriptedBroker()
    peer = broker.connect()
    reader = broker.subscribe(peer, is_pulling=True)
    broker.oracle.pull(reader, 3, waits=False, correlation=None)
    with pytest.raises(Disagreement, match="it is not told"):
        broker.turn()


def test_pull_request_does_not_end_while_a_message_is_ready() -> None:
    broker = ScriptedBroker()
    peer = broker.connect()
    reader = broker.subscribe(peer, is_pulling=True)
    broker.send(peer, "m1")
    broker.oracle.pull(reader, 3, waits=False, correlation=None)
    with pytest.raises(Disagreement):
        broker.turn(ended=((reader, Ended(3, None)),))
    broker.oracle.check_turn({}, [], {"q": 0}, [])
    with pytest.raises(Disagreement, match="is told"):
        broker.oracle.check_turn({}, [], {"q": 0}, [(reader, Ended(3, None))])


def test_pull_request_ends_with_a_release_without_notice() -> None:
    broker = ScriptedBroker()
    peer = broker.connect()
    reader = broker.subscribe(peer, is_pulling=True)
    broker.oracle.pull(reader, 3, waits=True, correlation=None)
    broker.oracle.release(peer, [reader], [])
    broker.send(peer, "m1")
    broker.turn()
