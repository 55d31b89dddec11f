"""Load for brokers that are killed: producers and consumers of several kinds, and a ledger that judges them.

Each worker has a connection and a thread of its own, and works at full speed until the broker is killed. All sends and
deliveries are written into the ledger and compared with docs/contract.md: as they come, after every restart, and at the
end when all is drained.
"""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import RawClient, UnexpectedError, numbered
from truenext.model.limits import WINDOW_MAX
from truenext.wire.stomp.frame import Frame

QUEUES = ["a", "b"]
OUT = "out"
"""Queue for the results of transactions."""
ALL_QUEUES = [*QUEUES, OUT, "DLQ.a", "DLQ.b"]
BACKLOG_MAX = 3000
"""Number of waiting messages, roughly, from which on producers slow down."""
CRASHES = 0.002
"""Share of the messages at which a consumer crashes."""
CONNECTION_LOST = (OSError, EOFError)
"""Errors by which a client notices that the broker was killed."""


@dataclass
class Letter:
    """Message as its producer knows it."""

    identity: str
    queue: str
    priority: int
    persistent: bool
    cycle: int
    source: str
    """Sender. Letters of one source, queue and priority come in the order of their numbers."""
    number: int
    confirmed: bool = False
    forbidden: bool = False
    """Whether its transaction was rolled back, so that no client may see it."""
    acknowledgement_tried: bool = False
    """Whether a client has sent an acknowledgement, answered or not."""
    done: bool = False
    """Whether the broker has confirmed its acknowledgement."""
    cycles_seen: list[int] = field(default_factory=list)


@dataclass
class Transaction:
    name: str
    number: int
    letters: list[Letter]


@dataclass
class Work:
    """Received and sent messages of one transaction whose COMMIT was not answered."""

    cycle: int
    received: list[Letter]
    sent_on: list[Letter]


class Ledger:
    """Record of all sends and deliveries. Guarded by `lock`, as all threads write into it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.cycle = 0
        self.letters: dict[str, Letter] = {}
        self.sequence_of: dict[tuple[str, str], int] = {}
        """Sequence of a letter by queue; in the dead-letter queue it has another."""
        self.sequences: dict[int, tuple[str, str]] = {}
        self.attempts_of: dict[tuple[str, str], int] = {}
        """Attempts of a letter by queue, as of the last start of the broker."""
        self.blocks: list[list[Letter]] = []
        """Letters of each committed transaction."""
        self.unresolved: list[Transaction] = []
        self.unknown_work: list[Work] = []
        self.failures: list[BaseException] = []
        self.waiting = 0
        """Number of waiting messages, roughly."""
        self._numbers: dict[str, int] = defaultdict(int)

    def write(self, source: str, queue: str, priority: int, *, persistent: bool) -> Letter:
        with self.lock:
            number = self._numbers[source] = self._numbers[source] + 1
            letter = Letter(f"{source}-{number}", queue, priority, persistent, self.cycle, source, number)
            self.letters[letter.identity] = letter
            self.waiting += 1
        return letter

    def seen(self, message: Frame) -> Letter:
        """Record a delivery, and check what can be checked of it alone."""
        letter = self.letters[identity_of(message.body)]
        queue = message.headers["destination"].removeprefix("/queue/")
        sequence = int(message.headers["truenext-sequence"])
        entry = (queue, letter.identity)
        with self.lock:
            assert not letter.done, f"{letter} came again, though its acknowledgement was confirmed"
            assert not letter.forbidden, f"{letter} came, though its transaction was rolled back"
            assert letter.persistent or queue.startswith("DLQ.") or letter.cycle == self.cycle, (
                f"{letter} is transient and outlived a kill"
            )
            assert queue.removeprefix("DLQ.") == letter.queue, f"{letter} came from {queue}"
            assert message.headers.get("priority") == str(letter.priority), f"{letter} came as {message.headers}"
            assert self.sequence_of.setdefault(entry, sequence) == sequence, f"{letter} came as two messages"
            assert self.sequences.setdefault(sequence, entry) == entry, f"sequence {sequence} was given twice"
            letter.cycles_seen.append(self.cycle)
        return letter

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self.failures.append(error)


def body_of(letter: Letter, size: int) -> bytes:
    start = f"{letter.identity} ".encode()
    whole = start + random.Random(letter.identity).randbytes(size)
    return whole + zlib.crc32(whole).to_bytes(4)


def identity_of(body: bytes) -> str:
    assert zlib.crc32(body[:-4]) == int.from_bytes(body[-4:]), f"a torn message: {body[:100]!r}"
    return body.split(b" ", 1)[0].decode()


# ---- Who works ----


class Worker:
    """Thread with one connection, which ends with the broker."""

    def __init__(self, ledger: Ledger, connect: Callable[[], RawClient], seed: str) -> None:
        self.ledger = ledger
        self.connect = connect
        self.client = connect()
        self.chance = random.Random(seed)
        self.name = seed
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive(), f"{self.name} does not notice that the broker is gone"

    @property
    def is_working(self) -> bool:
        return self._thread.is_alive()

    def work(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        try:
            self.work()
        except CONNECTION_LOST:
            pass
        except BaseException as error:
            self.ledger.fail(error)

    def write_letter(self, source: str, *, persistent: bool) -> tuple[Letter, bytes]:
        if self.ledger.waiting > BACKLOG_MAX:
            time.sleep(0.005)
        chance = self.chance
        letter = self.ledger.write(source, chance.choice(QUEUES), chance.choice([0, 4, 4, 9]), persistent=persistent)
        size = chance.randrange(200_000) if chance.random() < 0.005 else chance.randrange(1500)
        return letter, body_of(letter, size)

    def send(self, letter: Letter, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.client.send(letter.queue, body, persistent=letter.persistent, priority=letter.priority, headers=headers)

    def send_in(self, transaction: str, letter: Letter, body: bytes) -> None:
        self.send(letter, body, {"transaction": transaction})


class Producer(Worker):
    """Producer of plain messages of both kinds, some with receipts, several of them outstanding."""

    def work(self) -> None:
        outstanding: list[tuple[str, list[Letter]]] = []
        unconfirmed: list[Letter] = []
        while True:
            letter, body = self.write_letter(self.name, persistent=self.chance.random() < 0.7)
            if letter.persistent:
                unconfirmed.append(letter)
            if self.chance.random() < 0.7:
                # It confirms all persistent messages before it.
                receipt = self.client.new_receipt()
                self.send(letter, body, {"receipt": receipt})
                outstanding.append((receipt, unconfirmed))
                unconfirmed = []
            else:
                self.send(letter, body)
            while len(outstanding) > 20:
                receipt, confirmed = outstanding.pop(0)
                self.client.await_receipt(receipt)
                for letter in confirmed:
                    letter.confirmed = True


class NumberedProducer(Worker):
    """Producer of numbered messages that repeats the unconfirmed ones after a crash."""

    def __init__(
        self,
        ledger: Ledger,
        connect: Callable[[], RawClient],
        seed: str,
        unconfirmed: list[tuple[Letter, bytes]],
    ) -> None:
        super().__init__(ledger, connect, seed)
        self.unconfirmed = unconfirmed

    def work(self) -> None:
        outstanding = []
        for letter, body in self.unconfirmed:
            outstanding.append(self._send(letter, body))
        while True:
            letter, body = self.write_letter("numbered", persistent=True)
            self.unconfirmed.append((letter, body))
            outstanding.append(self._send(letter, body))
            while len(outstanding) > 10:
                self._confirm(outstanding.pop(0))

    def finish(self) -> None:
        """Repeat the unconfirmed messages and wait for their receipts."""
        for receipt in [self._send(letter, body) for letter, body in self.unconfirmed]:
            self._confirm(receipt)

    def _send(self, letter: Letter, body: bytes) -> str:
        receipt = self.client.new_receipt()
        self.send(letter, body, {"receipt": receipt} | numbered("numbered", letter.number))
        return receipt

    def _confirm(self, receipt: str) -> None:
        self.client.await_receipt(receipt)
        letter, _ = self.unconfirmed.pop(0)
        letter.confirmed = True


class TransactionalProducer(Worker):
    """Producer of transactions over two queues, with a numbered COMMIT, some of which are aborted."""

    def work(self) -> None:
        client = self.client
        number = 0
        while True:
            number += 1
            name = f"{self.name}-{number}"
            client.begin(name)
            letters = []
            for index in range(self.chance.randrange(2, 7)):
                letter, body = self.write_letter("transacted", persistent=index == 0 or self.chance.random() < 0.8)
                # Forbidden until it is known that COMMIT was said.
                letter.forbidden = True
                letters.append(letter)
                self.send_in(name, letter, body)
            if self.chance.random() < 0.2:
                client.abort(name, confirmed=self.chance.random() < 0.5)
                continue
            transaction = Transaction(name, letters[0].number, letters)
            with self.ledger.lock:
                self.ledger.unresolved.append(transaction)
                for letter in letters:
                    letter.forbidden = False
            client.commit(name, headers=numbered("transacted", transaction.number))
            settle(self.ledger, transaction, is_committed=True)


class Consumer(Worker):
    """Consumer that acknowledges one by one, some with receipts, and NACKs a few. It crashes and comes back."""

    def work(self) -> None:
        while True:
            for queue in QUEUES:
                self.client.subscribe(queue, subscription=queue, prefetch=100)
            self._serve()
            self.client.crash()
            self.client = self.connect()

    def _serve(self) -> None:
        """Consume until the crash."""
        unanswered: dict[str, Letter] = {}
        newest: dict[tuple[str, int], int] = defaultdict(int)
        while self.chance.random() > CRASHES:
            frame = self.client.next_frame()
            if frame.command == "RECEIPT":
                unanswered.pop(frame.headers["receipt-id"]).done = True
                continue
            assert frame.command == "MESSAGE", frame
            letter = self.ledger.seen(frame)
            if "redelivered" not in frame.headers:
                lane, sequence = (letter.queue, letter.priority), int(frame.headers["truenext-sequence"])
                assert newest[lane] < sequence, f"{letter} was overtaken by sequence {newest[lane]}"
                newest[lane] = sequence
            if self.chance.random() < 0.03:
                self.client.nack(frame)
                continue
            letter.acknowledgement_tried = True
            self.ledger.waiting -= 1
            if self.chance.random() < 0.3:
                receipt = self.client.new_receipt()
                unanswered[receipt] = letter
                self.client.send_frame("ACK", {"id": frame.headers["ack"], "receipt": receipt})
            else:
                self.client.ack(frame)


class TransactionalConsumer(Worker):
    """Consumer that receives and sends messages in one transaction. It aborts some transactions, and crashes in
    others."""

    def work(self) -> None:
        while True:
            for queue in QUEUES:
                self.client.subscribe(queue, subscription=queue, prefetch=20)
            number = 0
            while self._serve(f"t{number}"):
                number += 1
            self.client.crash()
            self.client = self.connect()

    def _serve(self, name: str) -> bool:
        """Run one transaction. Return False if the consumer is to crash in it."""
        client = self.client
        client.begin(name)
        work = Work(self.ledger.cycle, [], [])
        for _ in range(self.chance.randrange(1, 6)):
            message = client.message()
            work.received.append(self.ledger.seen(message))
            client.ack(message, transaction=name)
            sent_on = self.ledger.write(f"sent-on-{self.name}", OUT, 4, persistent=True)
            sent_on.forbidden = True
            work.sent_on.append(sent_on)
            self.send_in(name, sent_on, body_of(sent_on, 50))
            if self.chance.random() < CRASHES:
                return False
        if self.chance.random() < 0.1:
            client.abort(name)
            return True
        with self.ledger.lock:
            self.ledger.unknown_work.append(work)
            for letter in work.sent_on:
                letter.forbidden = False
            for letter in work.received:
                letter.acknowledgement_tried = True
        client.commit(name)
        with self.ledger.lock:
            self.ledger.waiting -= len(work.received)
            self.ledger.unknown_work.remove(work)
            self.ledger.blocks.append(work.sent_on)
            for letter in work.sent_on:
                letter.confirmed = True
            for letter in work.received:
                letter.done = True
        return True


def settle(ledger: Ledger, transaction: Transaction, *, is_committed: bool) -> None:
    """Record the outcome of a transaction."""
    with ledger.lock:
        ledger.unresolved.remove(transaction)
        if is_committed:
            ledger.blocks.append(transaction.letters)
        for letter in transaction.letters:
            letter.confirmed = is_committed
            letter.forbidden = not is_committed
            assert is_committed or not letter.cycles_seen, f"{letter} was seen, and its transaction rolled back"


# ---- What is looked at while nobody works ----


def resolve(broker: BrokerProcess, ledger: Ledger) -> None:
    """Repeat every COMMIT without an answer: it is confirmed, or refused as rolled back."""
    for transaction in list(ledger.unresolved):
        client = broker.connect()
        try:
            client.commit(transaction.name, headers=numbered("transacted", transaction.number))
        except UnexpectedError as error:
            assert "rolled back" in str(error)
            settle(ledger, transaction, is_committed=False)
        else:
            settle(ledger, transaction, is_committed=True)
            client.disconnect()


def browse_all(broker: BrokerProcess, ledger: Ledger, *, consumes: bool) -> int:
    """Read all queues with one consumer each, check their order, and leave or take all messages. Return their
    number."""
    count = 0
    facts = broker.queues()
    for queue in ALL_QUEUES:
        client = broker.connect()
        client.subscribe(queue, prefetch=WINDOW_MAX)
        messages = client.messages(facts[queue].waiting if queue in facts else 0)
        assert not client.arrived()
        # From its second failure on a message comes when it is due.
        punctual = [message for message in messages if int(message.headers["truenext-attempts"]) < 2]
        keys = [(-int(message.headers["priority"]), int(message.headers["truenext-sequence"])) for message in punctual]
        assert keys == sorted(keys), f"{queue} is out of order"
        for message in messages:
            assert message.headers["redelivered"] == "true"
            letter = ledger.seen(message)
            attempts = int(message.headers["truenext-attempts"])
            before = ledger.attempts_of.get((queue, letter.identity), 0)
            assert before <= attempts, f"{letter} has lost {before - attempts} attempts in {queue}"
            ledger.attempts_of[queue, letter.identity] = attempts
            if consumes:
                letter.acknowledgement_tried = True
                client.ack(message)
        client.arrived()
        if consumes:
            for message in messages:
                ledger.letters[identity_of(message.body)].done = True
        client.disconnect()
        count += len(messages)
    ledger.waiting = count
    check_that_nothing_is_missing(ledger)
    return count


def check_that_nothing_is_missing(ledger: Ledger) -> None:
    """Check that all messages that were confirmed or seen, and not acknowledged, are in the queues just read."""
    for letter in ledger.letters.values():
        if not letter.persistent or letter.acknowledgement_tried:
            continue
        if letter.confirmed or letter.cycles_seen:
            assert letter.cycles_seen and letter.cycles_seen[-1] == ledger.cycle, f"{letter} is lost"


def check_work(ledger: Ledger) -> None:
    """Check that transactions without an answer happened as a whole or not at all. To be called when all queues were
    read."""
    for work in ledger.unknown_work:
        outcomes = {bool(letter.cycles_seen) for letter in work.sent_on}
        # A transient message went with the kill, in either case.
        outcomes |= {letter.cycles_seen[-1] == work.cycle for letter in work.received if letter.persistent}
        assert len(outcomes) == 1, f"half of a transaction: {work}"


def check_sequences(ledger: Ledger) -> None:
    """Check that the sequences of each producer's letters are in the order of its sends, and that transactions have no
    gaps."""
    last: dict[tuple[str, str, int, int], tuple[int, Letter]] = {}
    for letter in sorted(ledger.letters.values(), key=lambda letter: letter.number):
        sequence = ledger.sequence_of.get((letter.queue, letter.identity))
        if sequence is None:
            continue
        # A message of the next cycle may be numbered before one of this cycle that is sent again.
        lane = (letter.source, letter.queue, letter.priority, 0 if letter.source == "numbered" else letter.cycle)
        before, earlier = last.get(lane, (0, letter))
        assert before < sequence, f"{letter} stands before {earlier}"
        last[lane] = (sequence, letter)
    _check_cycles(ledger)
    for letters in ledger.blocks:
        starts = {
            ledger.sequence_of[letter.queue, letter.identity] - index
            for index, letter in enumerate(letters)
            if (letter.queue, letter.identity) in ledger.sequence_of
        }
        assert len(starts) <= 1, f"a transaction with gaps: {letters}"


def _check_cycles(ledger: Ledger) -> None:
    """Check that letters come after all letters of earlier cycles. Numbered ones may be sent again later."""
    by_cycle: dict[int, list[int]] = defaultdict(list)
    for (queue, identity), sequence in ledger.sequence_of.items():
        letter = ledger.letters[identity]
        if letter.source != "numbered" and letter.queue == queue:
            by_cycle[letter.cycle].append(sequence)
    last = 0
    for cycle, sequences in sorted(by_cycle.items()):
        assert last < min(sequences), f"a letter of cycle {cycle} stands before sequence {last} of an earlier cycle"
        last = max(sequences)


def hire(broker: BrokerProcess, ledger: Ledger, unconfirmed: list[tuple[Letter, bytes]], seed: str) -> list[Worker]:
    """Return workers of all kinds, not yet started. `unconfirmed` are the numbered letters without a receipt."""
    kinds: list[Callable[[Ledger, Callable[[], RawClient], str], Worker]] = [
        Producer,
        Producer,
        TransactionalProducer,
        lambda ledger, connect, seed: NumberedProducer(ledger, connect, seed, unconfirmed),
        Consumer,
        Consumer,
        TransactionalConsumer,
    ]
    return [kind(ledger, broker.connect, f"{seed}-{index}") for index, kind in enumerate(kinds)]
