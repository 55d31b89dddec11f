"""An engine with random clients that release, suspend, pull, report started messages, and lose their connections."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.contract.test_history import RecordedEngine
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.model.commands import (
    Abort,
    Ack,
    AckMode,
    Begin,
    Close,
    Commit,
    Credit,
    Nack,
    Release,
    Started,
    Subscribe,
    Unsubscribe,
    Wake,
)
from truenext.model.destination import parse_address
from truenext.model.selector import compile_selector

QUEUES = ("/queue/orders", "/queue/orders", "/queue/orders.eu", "/queue/orders.>")
WAYS = (AckMode.AUTO, AckMode.CLIENT, AckMode.INDIVIDUAL, AckMode.INDIVIDUAL, AckMode.INDIVIDUAL)


class BusyClients:
    def __init__(self, seed: int, steps: int) -> None:
        self.random = random.Random(seed)
        self.recorded = RecordedEngine(attempts_max=4)
        self.engine = self.recorded.engine
        self.now_us = 1_000_000
        self.joined = 0
        self.sessions = [self.join() for _ in range(4)]
        actions: list[tuple[Callable[[int], None], int]] = [
            *(
                (self.send, 24),
                (self.turn, 14),
                (self.start_one, 16),
                (self.answer, 16),
                (self.answer_in_transaction, 6),
            ),
            *((self.end_transaction, 4), (self.release, 5), (self.wake, 4), (self.pull, 10), (self.disconnect, 5)),
            *((self.subscribe_again, 2), (self.advance, 6)),
        ]
        for action in self.random.choices([one for one, _ in actions], [weight for _, weight in actions], k=steps):
            action(self.random.randrange(len(self.sessions)))
        self.recorded.commit()

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def join(self) -> ConnectionState:
        self.joined += 1
        session = self.recorded.session(str(self.joined))
        session.is_truenext_client = self.chance(0.7)
        session.is_jms_client = not session.is_truenext_client and self.joined % 2 == 0
        self.subscribe(session)
        return session

    def subscribe(self, session: ConnectionState) -> None:
        mode = self.random.choice(WAYS)
        pulls = mode is not AckMode.AUTO and self.chance(0.3)
        window = None if pulls or self.chance(0.4) else self.random.randrange(1, 6)
        self.engine.commands.subscribe(
            session,
            Subscribe(
                "s",
                parse_address(self.random.choice(QUEUES), ""),
                mode,
                window,
                has_express=self.chance(0.1) and not pulls,
                is_pulling=pulls,
                selector=compile_selector("JMSPriority > 3") if self.chance(0.15) else None,
                is_exclusive=self.chance(0.15),
                priority=self.random.choice([-127, 0, 0, 5]),
            ),
        )

    def consumer(self, index: int) -> BrokerConsumer | None:
        return self.sessions[index].consumers.get("s")

    def some_of(self, consumer: BrokerConsumer | None) -> int | None:
        """Return the sequence of a random message that the consumer holds and must settle itself."""
        if consumer is None or not consumer.held or consumer.mode is AckMode.AUTO:
            return None
        return self.random.choice(list(consumer.held))

    def send(self, index: int) -> None:
        destination = parse_address(self.random.choice(QUEUES[:3]), "")
        priority = self.random.choice([9, 4, 4, 0])
        self.recorded.send(self.sessions[index], priority, persistent=self.chance(0.5), destination=destination)

    def turn(self, index: int) -> None:
        self.recorded.commit()
        self.engine.commands.on_all_sent(self.sessions[index])

    def start_one(self, index: int) -> None:
        consumer = self.consumer(index)
        sequence = self.some_of(consumer)
        if consumer is not None and sequence is not None and consumer.session.is_truenext_client:
            dispatch = consumer.held[sequence].deliveries
            self.engine.commands.mark_started(consumer.session, Started("s", sequence, dispatch))

    def answer(self, index: int) -> None:
        sequence = self.some_of(self.consumer(index))
        if sequence is None:
            return
        if self.chance(0.7):
            self.engine.commands.acknowledge(self.sessions[index], Ack("s", sequence))
        else:
            self.engine.commands.nack(self.sessions[index], Nack("s", sequence))

    def answer_in_transaction(self, index: int) -> None:
        session = self.sessions[index]
        sequence = self.some_of(self.consumer(index))
        if sequence is None:
            return
        if "t" not in session.transactions:
            self.engine.commands.begin(session, Begin("t"))
        if self.chance(0.7):
            self.engine.commands.acknowledge(session, Ack("s", sequence, "t"))
            if self.chance(0.2):
                # What the transaction has acknowledged it may refuse after that.
                self.engine.commands.nack(session, Nack("s", sequence, "t"))
        else:
            self.engine.commands.nack(session, Nack("s", sequence, "t"))

    def end_transaction(self, index: int) -> None:
        session = self.sessions[index]
        if "t" in session.transactions:
            if self.chance(0.5):
                commit = Commit("t")
                if session.is_jms_client and (kept := self.some_of(self.consumer(index))) is not None:
                    commit.acks = [Ack("s", kept)]
                self.engine.commands.commit(session, commit)
            else:
                self.engine.commands.abort(session, Abort("t", counts_all=self.chance(0.5)))

    def release(self, index: int) -> None:
        session, consumer = self.sessions[index], self.consumer(index)
        if consumer is None or consumer.mode is AckMode.AUTO or not session.is_truenext_client:
            return
        kept = [("s", sequence, entry.deliveries) for sequence, entry in consumer.held.items() if self.chance(0.3)]
        transaction = "t" if "t" in session.transactions and self.chance(0.5) else None
        request = Release(["s"], kept, suspends=self.chance(0.5), transaction=transaction, counts_all=self.chance(0.5))
        self.engine.commands.release(session, request)

    def wake(self, index: int) -> None:
        consumer = self.consumer(index)
        if consumer is not None and consumer.mode is not AckMode.AUTO:
            self.engine.commands.wake(self.sessions[index], Wake("s"))

    def pull(self, index: int) -> None:
        consumer = self.consumer(index)
        if consumer is not None and consumer.pull_request is not None:
            count = self.random.choice([0, 1, 2, 5])
            self.engine.commands.pull(self.sessions[index], Credit("s", count, waits=self.chance(0.5)))

    def disconnect(self, index: int) -> None:
        self.engine.commands.disconnect(self.sessions[index], is_exempt=self.chance(0.3))
        self.sessions[index] = self.join()

    def subscribe_again(self, index: int) -> None:
        """Subscribe again after an unsubscribe. Open transactions keep their messages."""
        session = self.sessions[index]
        if session.is_jms_client and self.consumer(index) is not None:
            self.engine.commands.close(session, Close(["s"], self.some_of(self.consumer(index))))
        elif self.consumer(index) is not None:
            self.engine.commands.unsubscribe(session, Unsubscribe("s"))
        if self.chance(0.7):
            self.subscribe(session)

    def advance(self, index: int) -> None:
        self.recorded.commit()
        self.now_us += self.random.choice([1_000, 30_000, 700_000, 2_000_000, 12_000_000])
        self.engine.state.commit_state.tick(self.now_us, self.now_us)
        for _ in self.engine.stretch_windows():
            pass
        self.turn(index)
