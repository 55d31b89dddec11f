"""Tests that the broker keeps every message, once and in order, in races of eviction, reading, early dispatch and early
acknowledgement.

*Early* is before the message is written. Source of what is expected: docs/contract.md, C3.1, C3.2, C24.1.
"""

import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from tests.drawing import one_of
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.raw_client import RawClient, bodies
from truenext.wire.stomp.frame import Frame

CONCURRENT = ("--store-and-dispatch", "concurrent")
SMALL = ("--queue-memory-limit", "6KB", "--page-size", "5")
"""Memory for a dozen messages of the race: whether one is in memory changes all the time."""
EITHER = one_of("options", [SMALL, CONCURRENT + SMALL], ids=["durable", "concurrent"])
ONLY_CONCURRENT = pytest.mark.parametrize("options", [CONCURRENT], ids=["concurrent"])

PRODUCERS = 6
CONSUMERS = 4
BURSTS = 25
BURST = 60
"""Number of messages that a producer sends in a row."""
SEED = int(os.environ.get("TRUENEXT_SEED", 0)) or random.SystemRandom().randrange(10**9)


class Race:
    """Shared state of the threads of a race."""

    def __init__(self, broker: BrokerProcess, queue: str, expected: int) -> None:
        self.broker = broker
        self.queue = queue
        self.expected = expected
        self.seen: Counter[str] = Counter()
        """Number of committed acknowledgements of each identity."""
        self.failures: list[BaseException] = []
        self.lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        return bool(self.failures) or self.seen.total() >= self.expected

    def run(self, *workers: Callable[[], None]) -> None:
        threads = [threading.Thread(target=self._guarded, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE_SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        if self.failures:
            raise self.failures[0]

    def _guarded(self, worker: Callable[[], None]) -> None:
        try:
            worker()
        except BaseException as error:
            self.failures.append(error)

    def produce(self, name: int) -> Callable[[], None]:
        chance = random.Random(SEED + name)
        client = self.broker.connect()

        def work() -> None:
            for number in range(BURSTS * BURST):
                client.send(
                    self.queue,
                    f"{name}-{number} ".encode() + bytes(chance.randrange(400)),
                    persistent=chance.random() < 0.7,
                    priority=chance.choice([4, 4, 4, 7]),
                    confirmed=number % BURST == BURST - 1,
                )
                if number % BURST == BURST - 1:
                    # Now and then the consumers catch up.
                    time.sleep(chance.choice([0.0, 0.0, 0.1]))

        return work

    def consume(self, name: int) -> Callable[[], None]:
        """Return a worker that takes up to ten messages in each transaction, and commits early when none comes."""
        chance = random.Random(SEED - name - 1)
        client = self.broker.connect()
        client.subscribe(self.queue, prefetch=chance.choice([1, 3, 20]))

        def work() -> None:
            newest: dict[str, int] = defaultdict(int)
            silent_since = time.monotonic()
            while not self.is_over:
                client.begin("t")
                received: list[str] = []
                for _ in range(chance.randrange(1, 11)):
                    try:
                        message = client.message(0.02)
                    except TimeoutError:
                        break
                    priority, sequence = message.headers["priority"], int(message.headers["truenext-sequence"])
                    assert newest[priority] < sequence, f"{message.body[:10]!r} came behind {newest[priority]}"
                    assert "redelivered" not in message.headers
                    newest[priority] = sequence
                    client.ack(message, transaction="t")
                    received.append(identity(message))
                client.commit("t")
                with self.lock:
                    self.seen.update(received)
                if received:
                    silent_since = time.monotonic()
                assert time.monotonic() < silent_since + PATIENCE_SECONDS, (
                    f"{self.seen.total()} of {self.expected} came; {self.broker.queues()}, {self.broker.status()}"
                )

        return work

    def watch(self) -> None:
        while not self.is_over:
            status = self.broker.status()
            assert status["stuck"] == [], status
            time.sleep(0.1)


def identity(message: Frame) -> str:
    return message.body.split(b" ", 1)[0].decode()


@EITHER
def test_fast_producers_and_fast_transacted_consumers_pass_every_message_on_once(
    own_broker: BrokerProcess, queue: str
) -> None:
    """Every burst leaves the small memory, and every lull brings it back."""
    print(f"seed {SEED}")
    names = range(PRODUCERS)
    race = Race(own_broker, queue, PRODUCERS * BURSTS * BURST)
    race.run(*map(race.produce, names), *map(race.consume, range(CONSUMERS)), race.watch)

    assert race.seen == Counter(f"{name}-{number}" for name in names for number in range(BURSTS * BURST))
    own_broker.await_facts(queue, waiting=0, unacknowledged=0)
    status = own_broker.status()
    assert (status["stuck"], status["waiting"], status["in_memory"], status["page_reads"]) == ([], 0, 0, 0)
    memory = status["memory"]
    assert (memory["used"], memory["leaving"], memory["open"]) == (0, 0, 0)
    # Nothing is left that would come back.
    own_broker.close_clients()
    own_broker.restart(is_clean=False)
    assert own_broker.remaining_messages(queue, once_durable=True) == []


@EITHER
def test_messages_leave_memory_in_the_race(own_broker: BrokerProcess, queue: str) -> None:
    race = Race(own_broker, queue, 0)
    race.run(race.produce(0))
    own_broker.await_facts(queue, waiting=BURSTS * BURST)
    client = own_broker.connect()
    client.send("barrier", b"", persistent=True, confirmed=True)
    assert own_broker.status()["in_memory"] < 20


# ---- Dispatched while it is being written ----


def persistent_in_flight(broker: BrokerProcess, queue: str, body: bytes) -> tuple[RawClient, str]:
    """Send a persistent message with a receipt while the disk is held. Return the client and the receipt's name."""
    sender = broker.connect()
    receipt = sender.new_receipt()
    sender.send(queue, body, persistent=True, headers={"receipt": receipt})
    return sender, receipt


def nothing_received(client: RawClient) -> bool:
    try:
        client.next_frame(0.1)
    except TimeoutError:
        return True
    return False


@ONLY_CONCURRENT
def test_a_persistent_message_is_dispatched_before_it_is_durable_and_confirmed_after(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C3.1
    receiver = held_broker.connect()
    receiver.subscribe(queue)
    held_broker.hold_disk()
    sender, receipt = persistent_in_flight(held_broker, queue, b"early")

    assert receiver.message().body == b"early"

    assert nothing_received(sender)
    held_broker.resume_disk()
    sender.await_receipt(receipt)
    held_broker.restart(is_clean=False)
    assert bodies(held_broker.remaining_messages(queue, once_durable=True)) == ["early"]


@ONLY_CONCURRENT
def test_without_a_receipt_an_early_message_may_be_lost_although_it_was_seen(
    held_broker: BrokerProcess, queue: str
) -> None:
    receiver = held_broker.connect()
    receiver.subscribe(queue)
    held_broker.hold_disk()
    sender, _ = persistent_in_flight(held_broker, queue, b"early")
    assert receiver.message().body == b"early"
    assert nothing_received(sender)
    held_broker.kill()
    held_broker.resume_disk()
    held_broker.close_clients()
    held_broker.start()
    assert held_broker.remaining_messages(queue, once_durable=True) == []


@ONLY_CONCURRENT
@pytest.mark.parametrize("follows_another", [True, False], ids=["not handed over", "handed over"])
def test_messages_acknowledged_before_they_are_written_are_confirmed_and_do_not_come_again(
    held_broker: BrokerProcess, queue: str, follows_another: bool
) -> None:
    """A message of the gathering batch is taken out of it; a message in the store is removed by the next batch."""
    # C3.1
    receiver = held_broker.connect()
    receiver.subscribe(queue)
    held_broker.hold_disk()
    if follows_another:
        persistent_in_flight(held_broker, "other", b"")
        held_broker.await_facts("other", waiting=1)
    sender, receipt = persistent_in_flight(held_broker, queue, b"short-lived")
    message = receiver.message()
    acknowledged = receiver.new_receipt()
    receiver.send_frame("ACK", {"id": message.headers["ack"], "receipt": acknowledged})
    held_broker.await_facts(queue, waiting=0, unacknowledged=0)

    held_broker.resume_disk()

    sender.await_receipt(receipt)
    receiver.await_receipt(acknowledged)
    held_broker.restart(is_clean=False)
    assert held_broker.remaining_messages(queue, once_durable=True) == []
    assert bodies(held_broker.remaining_messages("other", once_durable=True)) == [""] * follows_another


@ONLY_CONCURRENT
def test_persistent_and_transient_keep_their_order_while_the_disk_stands_still(
    held_broker: BrokerProcess, queue: str
) -> None:
    receiver, sender = held_broker.connect(), held_broker.connect()
    held_broker.hold_disk()
    for number in range(40):
        sender.send(queue, b"%d" % number, persistent=number % 2 == 0, priority=4 + number // 10 % 2)
    held_broker.await_facts(queue, waiting=40)

    receiver.subscribe(queue, prefetch=1)

    order = [*range(10, 20), *range(30, 40), *range(10), *range(20, 30)]
    for number in order:
        message = receiver.message()
        assert message.body == b"%d" % number
        receiver.ack(message)
    held_broker.resume_disk()
    assert receiver.arrived() == []


@ONLY_CONCURRENT
def test_a_transaction_is_visible_once_it_is_durable_also_where_single_messages_are_at_once(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C3.2
    receiver, sender = held_broker.connect(), held_broker.connect()
    receiver.subscribe(queue)
    held_broker.hold_disk()
    sender.begin("t")
    sender.send(queue, b"in the transaction", persistent=True, priority=7, transaction="t")
    sender.commit("t", confirmed=False)
    held_broker.await_facts(queue, waiting=1)
    persistent_in_flight(held_broker, queue, b"single")

    assert receiver.message().body == b"single"
    assert receiver.arrived() == []

    held_broker.resume_disk()
    assert receiver.message().body == b"in the transaction"
