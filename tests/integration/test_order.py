"""Tests that every receiver gets the true next message, over real sockets, with mixed messages, restarts and rollbacks.

The first tests are the cases of the ActiveMQ ordering report of 2023: persistent messages in one of its buckets and
transient ones in the other made it forget both order and priority, visibly so at prefetch 1. Source of what is
expected: docs/contract.md.
"""

import os
import random
import threading
from collections.abc import Callable
from heapq import heappop, heappush

import pytest

from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import RawClient, bodies
from truenext.wire.stomp.frame import Frame

pytestmark = LIMITS

CASES = ["P4/P4", "N4/N4", "P4/N4", "N4/P4", "P0/P9", "N0/N9", "P0/N9", "N0/P9"]
"""Set A, then set B: persistent or not, and the priority."""
SET_SIZE = 4
PREFETCHES = pytest.mark.parametrize("prefetch", [1, None], ids=["prefetch 1", "default prefetch"])
SAME_CONNECTION = pytest.mark.parametrize("is_same", [True, False], ids=["same connection", "another connection"])
SEED = int(os.environ.get("TRUENEXT_SEED", 0)) or random.SystemRandom().randrange(10**9)
"""Seed, printed where it is used; pytest shows it when the test fails."""


def expected(case: str) -> list[str]:
    a, b = case.split("/")
    first, second = ["0", "1", "2", "3"], ["4", "5", "6", "7"]
    return second + first if b[1] > a[1] else first + second


def send_case(sender: RawClient, queue: str, case: str, *, each: Callable[[], object] = lambda: None) -> None:
    """Send the messages of a case, and call `each` after each of them."""
    number = 0
    for kind in case.split("/"):
        for _ in range(SET_SIZE):
            sender.send(queue, b"%d" % number, persistent=kind[0] == "P", priority=int(kind[1]), confirmed=True)
            each()
            number += 1


def receive(receiver: RawClient, count: int) -> list[Frame]:
    """Receive `count` messages, each of which is acknowledged before the next. There must be no more."""
    messages = []
    for _ in range(count):
        messages.append(receiver.message())
        receiver.ack(messages[-1])
    assert bodies(receiver.arrived()) == []
    return messages


# ---- The report's cases ----


@pytest.mark.parametrize("case", CASES)
@PREFETCHES
@SAME_CONNECTION
def test_a_receiver_that_starts_afterwards_gets_the_reports_case_in_true_order(
    broker: BrokerProcess, queue: str, case: str, prefetch: int | None, is_same: bool
) -> None:
    receiver = broker.connect()
    send_case(receiver if is_same else broker.connect(), queue, case)

    receiver.subscribe(queue, prefetch=prefetch)

    assert bodies(receive(receiver, 2 * SET_SIZE)) == expected(case)


@pytest.mark.parametrize("case", CASES)
@SAME_CONNECTION
def test_a_receiver_at_prefetch_1_that_was_there_before_gets_the_true_order_behind_the_message_it_holds(
    broker: BrokerProcess, queue: str, case: str, is_same: bool
) -> None:
    receiver = broker.connect()
    receiver.subscribe(queue, prefetch=1)

    send_case(receiver if is_same else broker.connect(), queue, case)

    assert bodies(receive(receiver, 2 * SET_SIZE)) == ["0", *(body for body in expected(case) if body != "0")]


@pytest.mark.parametrize("case", CASES)
@SAME_CONNECTION
def test_a_receiver_at_default_prefetch_that_was_there_before_gets_every_message_as_it_comes(
    broker: BrokerProcess, queue: str, case: str, is_same: bool
) -> None:
    receiver = broker.connect()
    receiver.subscribe(queue)
    received: list[Frame] = []

    # One that has left memory is read first, and a higher priority that comes meanwhile is served before it.
    send_case(receiver if is_same else broker.connect(), queue, case, each=lambda: received.append(receiver.message()))

    assert bodies(received) == [str(number) for number in range(2 * SET_SIZE)]
    assert receiver.arrived() == []


@pytest.mark.parametrize("ack", ["auto", "client", "client-individual"])
@pytest.mark.parametrize("case", CASES)
def test_the_acknowledgement_mode_changes_nothing_about_the_order(
    broker: BrokerProcess, queue: str, case: str, ack: str
) -> None:
    send_case(broker.connect(), queue, case)
    receiver = broker.connect()

    receiver.subscribe(queue, ack=ack)

    assert bodies(receiver.messages(2 * SET_SIZE)) == expected(case)


@PREFETCHES
@SAME_CONNECTION
def test_strict_alternation_of_persistent_and_transient_comes_as_it_was_sent(
    broker: BrokerProcess, queue: str, prefetch: int | None, is_same: bool
) -> None:
    receiver = broker.connect()
    sender = receiver if is_same else broker.connect()
    for number in range(40):
        sender.send(queue, b"%d" % number, persistent=number % 2 == 0)
    sender.send(queue, b"40", confirmed=True)
    receiver.subscribe(queue, prefetch=prefetch)

    assert bodies(receive(receiver, 41)) == [str(number) for number in range(41)]


@PREFETCHES
def test_an_alternating_stream_that_is_not_waited_for_is_not_reordered_by_the_commits_in_flight(
    broker: BrokerProcess, queue: str, prefetch: int | None
) -> None:
    receiver, sender = broker.connect(), broker.connect()
    receiver.subscribe(queue, prefetch=prefetch)

    for number in range(400):
        sender.send(queue, b"%d" % number, persistent=number % 2 == 0)

    assert bodies(receive(receiver, 400)) == [str(number) for number in range(400)]


# ---- Any mix ----


@PREFETCHES
def test_a_random_mix_is_sorted_by_priority_and_then_by_arrival(
    broker: BrokerProcess, queue: str, prefetch: int | None
) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    sender = broker.connect()
    order = []
    for number in range(300):
        priority = chance.randrange(-2, 13)
        sender.send(queue, b"%d" % number, persistent=chance.random() < 0.5, priority=priority)
        order.append((9 - min(max(priority, 0), 9), number))
    sender.send(queue, b"300", priority=0, confirmed=True)
    order.append((9, 300))
    receiver = broker.connect()

    receiver.subscribe(queue, prefetch=prefetch)

    assert bodies(receive(receiver, 301)) == [str(number) for _, number in sorted(order)]


def test_a_random_mix_of_sends_and_receives_gives_the_smallest_key_at_every_moment(
    broker: BrokerProcess, queue: str
) -> None:
    # C2.1, C4.1
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    sender, receiver = broker.connect(), broker.connect()
    receiver.subscribe(queue, prefetch=1)
    waiting: list[tuple[int, int]] = []
    held: Frame | None = None
    for number in range(400):
        if chance.random() < 0.6:
            priority = chance.choice([0, 4, 4, 9])
            sender.send(queue, b"%d" % number, persistent=chance.random() < 0.5, priority=priority, confirmed=True)
            heappush(waiting, (9 - priority, number))
        elif held is not None:
            # The receipt says that its credit is back before anything else is sent.
            receiver.ack(held, confirmed=True)
            held = None
        if held is None and waiting:
            # What has left memory is read first, and what is sent meanwhile may come before it: wait for it.
            held = receiver.message()
            assert held.body == b"%d" % heappop(waiting)[1]


def test_transactions_stand_in_the_order_of_their_commits(broker: BrokerProcess, queue: str) -> None:
    # C2.4
    sender, receiver = broker.connect(), broker.connect()
    sender.begin("first begun")
    sender.begin("second begun")
    for number in range(3):
        sender.send(queue, b"first begun %d" % number, persistent=True, transaction="first begun")
        sender.send(queue, b"second begun %d" % number, transaction="second begun")
        sender.send(queue, b"plain %d" % number, persistent=number % 2 == 0)
    sender.commit("second begun")
    sender.send(queue, b"between", confirmed=True)
    sender.commit("first begun")

    receiver.subscribe(queue, prefetch=1)

    messages = receive(receiver, 10)
    assert bodies(messages) == [
        *(f"plain {number}" for number in range(3)),
        *(f"second begun {number}" for number in range(3)),
        "between",
        *(f"first begun {number}" for number in range(3)),
    ]
    sequences = [int(message.headers["truenext-sequence"]) for message in messages]
    assert sequences == list(range(sequences[0], sequences[0] + 10))


def test_two_receivers_at_prefetch_1_share_the_messages_in_order(broker: BrokerProcess, queue: str) -> None:
    sender, first, second = broker.connect(), broker.connect(), broker.connect()
    first.subscribe(queue, prefetch=1)
    second.subscribe(queue, prefetch=1)
    for number in range(6):
        sender.send(queue, b"%d" % number, persistent=number % 2 == 0, confirmed=True)

    held = [first.message(), second.message()]
    assert bodies(held) == ["0", "1"]
    # Whoever acknowledges gets the next, as the other one has no credit.
    second.ack(held[1])
    assert second.message().body == b"2"
    first.ack(held[0])
    assert first.message().body == b"3"


# ---- Commits in flight ----


def test_two_subscriptions_of_one_connection_share_a_queue_and_each_is_in_order(
    broker: BrokerProcess, queue: str
) -> None:
    # C4.2
    client = broker.connect()
    for subscription in "ab":
        client.subscribe(queue, prefetch=10, subscription=subscription)
    client.begin("t")
    for number in range(20):
        client.send(queue, b"%d" % number, persistent=number % 3 == 0, transaction="t")
    client.commit("t")
    messages = client.messages(20)
    by_subscription = {
        each: [int(message.body) for message in messages if message.headers["subscription"] == each] for each in "ab"
    }
    assert [len(numbers) for numbers in by_subscription.values()] == [10, 10]
    assert all(numbers == sorted(numbers) for numbers in by_subscription.values())


def test_a_message_being_committed_holds_back_only_messages_of_its_priority(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C3.5
    receiver, persistent, transient = held_broker.connect(), held_broker.connect(), held_broker.connect()
    receiver.subscribe(queue)
    held_broker.hold_disk()
    persistent.send(queue, b"P4", persistent=True)
    held_broker.await_facts(queue, waiting=1)

    transient.send(queue, b"N4 behind", confirmed=True)
    assert bodies(receiver.arrived()) == []
    transient.send(queue, b"N9", priority=9, confirmed=True)
    transient.send(queue, b"N0", priority=0, confirmed=True)
    assert bodies(receiver.only(2)) == ["N9", "N0"]

    held_broker.resume_disk()
    assert bodies(receiver.messages(2)) == ["P4", "N4 behind"]


def test_ready_messages_of_priority_4_do_not_wait_for_a_priority_9_in_flight(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C3.5
    receiver, persistent, transient = held_broker.connect(), held_broker.connect(), held_broker.connect()
    receiver.subscribe(queue, prefetch=1)
    held_broker.hold_disk()
    persistent.send(queue, b"P9", persistent=True, priority=9)
    held_broker.await_facts(queue, waiting=1)

    for number in range(4):
        transient.send(queue, b"%d" % number, confirmed=True)
    first = receiver.message()
    receiver.ack(first)
    second = receiver.message()
    assert bodies([first, second]) == ["0", "1"]

    held_broker.resume_disk()
    held_broker.await_facts(queue, waiting=3, unacknowledged=1)
    persistent.arrived()
    receiver.ack(second)
    assert bodies(receive(receiver, 3)) == ["P9", "2", "3"]


def test_a_transaction_becomes_visible_in_one_step(held_broker: BrokerProcess, new_queue: Callable[[], str]) -> None:
    # C3.2
    queue, other_queue = new_queue(), new_queue()
    receiver, sender = held_broker.connect(), held_broker.connect()
    receiver.subscribe(queue, subscription="1")
    receiver.subscribe(other_queue, subscription="2")
    held_broker.hold_disk()
    sender.begin("t")
    sender.send(queue, b"transient", transaction="t")
    sender.send(other_queue, b"persistent", persistent=True, transaction="t")
    sender.commit("t", confirmed=False)
    held_broker.await_facts(other_queue, waiting=1)

    assert bodies(receiver.arrived()) == []

    held_broker.resume_disk()
    assert sorted(bodies(receiver.messages(2))) == ["persistent", "transient"]


class Stream:
    """Producer that sends persistent messages all the time, with at most `ahead` of them unconfirmed or not taken."""

    def __init__(self, broker: BrokerProcess, queue: str, priority: int, *, ahead: int) -> None:
        self._client = broker.connect()
        self._queue = queue
        self._priority = priority
        self._free_slots = threading.Semaphore(ahead)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent = 0
        self.failure: Exception | None = None

    def __enter__(self) -> "Stream":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._free_slots.release(1000)
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def on_received(self) -> None:
        self._free_slots.release()

    def _run(self) -> None:
        try:
            confirmed = 0
            while not self._is_over.is_set():
                self._free_slots.acquire()
                receipt = str(self.sent)
                self._client.send(
                    self._queue,
                    b"stream %d" % self.sent,
                    persistent=True,
                    priority=self._priority,
                    headers={"receipt": receipt},
                )
                self.sent += 1
                # Two behind: whenever a batch is durable, the next one has something in it.
                if self.sent - confirmed > 40:
                    self._client.await_receipt(str(confirmed))
                    confirmed += 1
        except Exception as error:
            self.failure = error


def test_a_transient_of_priority_9_is_the_very_next_under_a_sustained_persistent_stream(
    broker: BrokerProcess, queue: str
) -> None:
    # C4.1
    receiver, express = broker.connect(), broker.connect()
    receiver.subscribe(queue, prefetch=1)
    next_of_stream = 0
    with Stream(broker, queue, 4, ahead=300) as stream:
        for number in range(60):
            for _ in range(5):
                message = receiver.message()
                assert message.body == b"stream %d" % next_of_stream
                next_of_stream += 1
                stream.on_received()
                receiver.ack(message)
            held = receiver.message()
            assert held.body == b"stream %d" % next_of_stream
            next_of_stream += 1
            stream.on_received()
            # Whatever else arrives, the next to be dispatched is the 9.
            express.send(queue, b"express %d" % number, priority=9, confirmed=True)
            receiver.ack(held)
            message = receiver.message()
            assert message.body == b"express %d" % number
            receiver.ack(message)
    # Nothing of the stream was lost or starved.
    assert bodies(receive(receiver, stream.sent - next_of_stream)) == [
        f"stream {number}" for number in range(next_of_stream, stream.sent)
    ]


def test_a_sustained_persistent_stream_of_priority_9_does_not_hold_back_ready_messages_of_priority_4(
    broker: BrokerProcess, queue: str
) -> None:
    """Some messages of priority 9 are always in flight. A consumer that keeps up with the ready ones gets the 4s in
    between."""
    if broker.options:
        pytest.skip("9s that have left memory are ready all the time, and no consumer keeps up with them")
    receiver, sender = broker.connect(), broker.connect()
    receiver.subscribe(queue, ack="client")
    transients: list[str] = []
    streamed: list[str] = []
    with Stream(broker, queue, 9, ahead=900) as stream:
        while len(transients) < 100:
            message = receiver.message()
            if message.headers["priority"] == "9":
                streamed.append(message.body.decode())
                stream.on_received()
                # Each ACK covers all before it.
                if len(streamed) % 20 == 0:
                    receiver.ack(message)
                if len(streamed) == 200:
                    for number in range(100):
                        sender.send(queue, b"%d" % number)
            else:
                transients.append(message.body.decode())
            assert len(streamed) < 50_000, f"only {len(transients)} of 100 came"
    assert transients == [str(number) for number in range(100)]
    assert streamed == [f"stream {number}" for number in range(len(streamed))]


# ---- Restarts ----


def send_mix(sender: RawClient, queue: str, count: int) -> list[tuple[int, int, bool]]:
    """Send messages of three priorities. Return rank, number and persistence of each, sorted by key."""
    mix = []
    for number in range(count):
        priority, persistent = (0, 4, 9)[number % 3], number % 2 == 0
        sender.send(queue, b"%d" % number, persistent=persistent, priority=priority, confirmed=True)
        mix.append((9 - priority, number, persistent))
    return sorted(mix)


@PREFETCHES
def test_after_a_clean_stop_everything_stands_at_its_place_transients_too(
    own_broker: BrokerProcess, queue: str, prefetch: int | None
) -> None:
    # C16.2
    mix = send_mix(own_broker.connect(), queue, 30)

    own_broker.restart(is_clean=True)

    later = send_mix(own_broker.connect(), queue, 6)
    receiver = own_broker.connect()
    receiver.subscribe(queue, prefetch=prefetch)
    messages = receive(receiver, 36)
    order = sorted(mix + [(rank, 100 + number, persistent) for rank, number, persistent in later])
    assert bodies(messages) == [str(number % 100) for _, number, _ in order]
    assert not any("redelivered" in message.headers for message in messages)


@PREFETCHES
def test_after_a_crash_only_the_transients_are_gone_and_the_others_are_flagged(
    own_broker: BrokerProcess, queue: str, prefetch: int | None
) -> None:
    # C10.1, C16.1, C25.4
    mix = send_mix(own_broker.connect(), queue, 30)

    own_broker.restart(is_clean=False)

    receiver = own_broker.connect()
    receiver.subscribe(queue, prefetch=prefetch)
    kept = [number for _, number, persistent in mix if persistent]
    messages = receive(receiver, len(kept))
    assert bodies(messages) == [str(number) for number in kept]
    assert all(message.headers["redelivered"] == "true" for message in messages)
    assert all(message.headers["truenext-attempts"] == "0" for message in messages)


@pytest.mark.parametrize("is_clean", [True, False], ids=["clean", "kill -9"])
def test_messages_held_at_a_restart_come_again_at_their_place(
    own_broker: BrokerProcess, queue: str, is_clean: bool
) -> None:
    mix = send_mix(own_broker.connect(), queue, 12)
    receiver = own_broker.connect()
    receiver.subscribe(queue, prefetch=5)
    held = receiver.messages(5)
    receiver.ack(held[2], confirmed=True)
    # On the credit that the acknowledgement gave back; it may have to be read from the store first.
    held.append(receiver.message())
    assert bodies(held) == [str(number) for _, number, _ in mix[:6]]

    own_broker.restart(is_clean=is_clean)

    expected_mix = [entry for entry in mix if entry != mix[2] and (is_clean or entry[2])]
    receiver = own_broker.connect()
    receiver.subscribe(queue, prefetch=1)
    messages = receive(receiver, len(expected_mix))
    assert bodies(messages) == [str(number) for _, number, _ in expected_mix]
    assert all(message.headers["truenext-attempts"] == "0" for message in messages)
    if is_clean:
        # 0, 1, 3, 4 and 5.
        assert [message.headers.get("redelivered") for message in messages] == ["true"] * 5 + [None] * 6


def test_sequences_go_on_behind_every_one_that_was_given_out_also_to_lost_transients(
    own_broker: BrokerProcess, queue: str
) -> None:
    # C2.3, C16.1
    seen = []
    for is_clean in (False, True, False):
        sender = own_broker.connect()
        sender.subscribe(queue)
        for persistent in (True, False):
            sender.send(queue, b"", persistent=persistent, confirmed=True)
        messages = sender.messages(2)
        seen += [int(message.headers["truenext-sequence"]) for message in messages]
        sender.ack(messages[0])
        sender.ack(messages[1], confirmed=True)
        own_broker.restart(is_clean=is_clean)
    assert seen == sorted(set(seen))


# ---- Rolled back ----


@pytest.mark.parametrize("mix", ["PPPPP", "NNNNN", "PNPNP", "NPNPN"])
def test_the_third_of_five_rolled_back_comes_again_before_the_fourth_to_a_new_receiver(
    broker: BrokerProcess, queue: str, mix: str
) -> None:
    receiver, _ = roll_back_the_third(broker, queue, mix, prefetch=None)
    receiver.disconnect()

    again = broker.connect()
    again.subscribe(queue, prefetch=1)
    messages = receive(again, 3)
    assert bodies(messages) == ["2", "3", "4"]
    assert [message.headers["truenext-attempts"] for message in messages] == ["1", "0", "0"]


@pytest.mark.parametrize("mix", ["PPPPP", "NNNNN", "PNPNP", "NPNPN"])
def test_the_third_of_five_rolled_back_comes_at_once_where_there_is_credit(
    broker: BrokerProcess, queue: str, mix: str
) -> None:
    receiver, held = roll_back_the_third(broker, queue, mix, prefetch=None)

    assert bodies(held) == ["0", "1", "2", "3", "4"]
    messages = receiver.only(1)
    assert bodies(messages) == ["2"]
    assert messages[0].headers["redelivered"] == "true"


@pytest.mark.parametrize("mix", ["PPPPP", "NNNNN", "PNPNP", "NPNPN"])
def test_the_third_of_five_rolled_back_at_prefetch_1_is_next_behind_the_one_that_took_its_credit(
    broker: BrokerProcess, queue: str, mix: str
) -> None:
    receiver, held = roll_back_the_third(broker, queue, mix, prefetch=1)

    # The acknowledgement in the open transaction gave the credit back, and the fourth took it.
    assert bodies(held) == ["0", "1", "2", "3"]
    receiver.ack(held[3])
    assert bodies(receive(receiver, 2)) == ["2", "4"]


def roll_back_the_third(
    broker: BrokerProcess, queue: str, mix: str, *, prefetch: int | None
) -> tuple[RawClient, list[Frame]]:
    """Acknowledge three messages, each in a transaction of its own, and abort the third. Return the receiver and its
    messages."""
    sender, receiver = broker.connect(), broker.connect()
    for number, letter in enumerate(mix):
        sender.send(queue, b"%d" % number, persistent=letter == "P", confirmed=True)
    receiver.subscribe(queue, prefetch=prefetch)
    held = []
    for number in range(3):
        held.append(receiver.message())
        receiver.begin(f"t{number}")
        receiver.ack(held[-1], transaction=f"t{number}")
        if number < 2:
            receiver.commit(f"t{number}")
    held += receiver.messages(1 if prefetch == 1 else 2)
    receiver.abort("t2")
    return receiver, held


def test_the_five_messages_of_an_aborted_transaction_come_again_in_order(broker: BrokerProcess, queue: str) -> None:
    # C9.1
    sender, receiver = broker.connect(), broker.connect()
    for number in range(6):
        sender.send(queue, b"%d" % number, persistent=number % 2 == 0, confirmed=True)
    receiver.subscribe(queue, prefetch=5)
    held = receiver.messages(5)
    receiver.begin("t")
    for message in (held[3], held[0], held[4], held[2], held[1]):
        receiver.ack(message, transaction="t")
    held.append(receiver.message())
    assert held[5].body == b"5"

    receiver.abort("t")

    assert bodies(receiver.messages(4)) == ["0", "1", "2", "3"]
    receiver.ack(held[5])
    assert bodies(receiver.only(1)) == ["4"]
