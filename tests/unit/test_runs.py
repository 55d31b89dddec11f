"""Test that runs change nothing: SENDs and ACKs of one read that the engine executes together, and messages that it
dispatches together to a queue's only receiver, next to the same ones singly.

Two brokers' parts get the same random bytes, in the same pieces. One executes no run, and dispatches none.
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random, SystemRandom
from typing import Any

import pytest

from tests.property.disk import found_of
from tests.unit.inspection import evict_all
from truenext.broker.pager import read_page
from truenext.engine.dispatch.plain import Dispatcher
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.pages import PageResult, StoreRead
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import EventLog, NoEventLog
from truenext.errors import RemoteProtocolError
from truenext.model.commands import Ack, AckRun, Login, ReceiptRequest, Send, SendRun, Started, Subscribe
from truenext.model.policy import Policies, Policy, StoreAndDispatch
from truenext.store.changes import encode_batch
from truenext.store.memory import MemoryStore
from truenext.wire.stomp.server import StompSession

QUEUES = ["a", "a", "a", "b", "selected", "grouped"]
STEPS = 120


class Client:
    def __init__(self, engine: Engine, name: str, *, is_truenext: bool) -> None:
        self.wire = StompSession(session_id=name, identity="1", server_name="x")
        self.session: ConnectionState = engine.commands.connect(name)
        own = "truenext-client:1\n" if is_truenext else ""
        for command in self.wire.receive(f"CONNECT\naccept-version:1.2\nhost:x\n{own}\n\0".encode()):
            assert isinstance(command, Login)
            engine.commands.log_in(self.session, command)
            self.wire.encode_connected(command, "", is_takeover=False, is_checked=False)


class Side:
    """Engine, its store and its clients."""

    def __init__(self, policy: Policy, *, has_history: bool, with_runs: bool) -> None:
        self.with_runs = with_runs
        self.store = MemoryStore()
        self.store.recover()
        commit_state = CommitState(EventLog() if has_history else NoEventLog())
        self.engine = Engine(commit_state=commit_state, memory=MemoryBudget(10**9), policies=Policies(policy))
        self.engine.state.memory.unsent_threshold = 20_000
        self.engine.lifespan.start()
        self.reads: deque[StoreRead] = deque()
        self.log: list[Any] = []
        self.executed = Counter[str]()
        self.commit()
        self.tick(1_000)
        self.clients = [Client(self.engine, name, is_truenext=name == "two") for name in ("one", "two", "three")]
        actions = self.engine.commands
        self.actions: dict[type[Any], Any] = {
            Send: actions.send,
            SendRun: actions.send_run,
            Ack: actions.acknowledge,
            AckRun: actions.acknowledge_run,
            Started: actions.mark_started,
            Subscribe: actions.subscribe,
            ReceiptRequest: lambda *_: None,
        }

    def tick(self, now_ms: int) -> None:
        self.engine.state.commit_state.tick(now_ms * 1000, now_ms * 1000)

    def receive(self, index: int, data: bytes) -> None:
        """Execute the commands in `data`. Like `Execution`, go on behind a refused command."""
        client = self.clients[index]
        for command in client.wire.receive(data):
            if isinstance(command, SendRun | AckRun) and not self.with_runs:
                continue
            try:
                self.actions[type(command)](client.session, command)
            except RemoteProtocolError as error:
                self.log.append((str(error), client.wire.mark_refused(), client.wire.last_receipt))
            if isinstance(command, SendRun | AckRun):
                self.executed[type(command).__name__] += command.executed

    def commit(self) -> None:
        batch = self.engine.take_batch()
        if batch is not None:
            self.log.append(b"".join(encode_batch(batch, None)))
            if not batch.is_empty():
                self.store.apply(batch)
            self.engine.store_results.on_committed(batch)

    def turn(self) -> None:
        effects = self.engine.turn.run()
        self.reads.extend(effects.reads)
        commit_state, memory = self.engine.state.commit_state, self.engine.state.memory
        consumers = [one for client in self.clients for one in client.session.consumers.values()]
        self.log.append(
            (
                [
                    (one.number, [(entry.sequence, entry.deliveries) for entry in entries])
                    for one, entries in effects.deliveries.items()
                ],
                [(list(one.held), one.window, one.last_dispatch_number, one.last_ack_number) for one in consumers],
                [(each.session.unsent_bytes, each.session.last_batch, each.session.has_sent) for each in self.clients],
                (memory.message_bytes, memory.unsent_bytes, memory.unsent_bytes_max, commit_state.next_sequence),
                (commit_state.is_batch_awaited, commit_state.batch.size, commit_state.events.size),
                sorted((queue.name, queue.resident_bytes) for queue in self.engine.queues.by_name.values()),
                self.engine.has_work,
            )
        )

    def read_pages(self) -> None:
        while self.reads:
            read = self.reads.popleft()
            page = read_page(self.store, read)
            found = [found_of(each) for each in page.messages]
            self.engine.store_results.on_page_read(read, PageResult(found, page.as_of, page.is_end))

    def evict(self) -> None:
        self.commit()
        evict_all(self.engine)
        self.commit()


def sends_of(random: Random, now_ms: int) -> bytes:
    queue = random.choice(QUEUES)
    persistent = random.choice(["persistent:true\n", ""])
    others = random.choice(["", "", "", f"expires:{now_ms + random.randrange(-1, 50)}\n", "JMSXGroupID:g\n"])
    if queue == "a":
        others = others.replace("JMSXGroupID:g\n", "colour:red\n")
    frames = []
    for _ in range(random.choice([1, 2, 3, 30])):
        body = "x" * random.randrange(200)
        priority = random.choice([4, 4, 4, random.randrange(10)])
        if random.random() < 0.02:
            queue = random.choice(QUEUES[:3])
        receipt = "receipt:r\n" if random.random() < 0.05 else ""
        head = f"destination:/queue/{queue}\n{persistent}priority:{priority}\n{others}content-length:{len(body)}\n"
        frames.append(f"SEND\n{head}{receipt}\n{body}\0")
    return "".join(frames).encode()


def acks_of(random: Random, client: Client) -> bytes:
    """ACKs of the held messages of one subscription, the first ones, or some; a few that are refused."""
    consumers = [one for one in client.session.consumers.values() if one.held and one.subscription != "auto"]
    if not consumers:
        return b""
    consumer = random.choice(consumers)
    entries = list(consumer.held.values())[: random.choice([1, 2, 5, 50])]
    frames = []
    for number, entry in enumerate(entries):
        dispatch = f".{entry.deliveries + (random.random() < 0.01)}" if random.random() < 0.9 else ""
        head = f"id:{entry.sequence}{dispatch}@{consumer.subscription}\n"
        if client.session.is_truenext_client and number + 1 < len(entries) and random.random() < 0.95:
            following = entries[number + 1]
            head += f"truenext-started:{following.sequence}.{following.deliveries}@{consumer.subscription}\n"
        frames.append(f"ACK\n{head}\n\0")
    return "".join(frames).encode()


def cut(random: Random, data: bytes) -> list[bytes]:
    at = sorted(random.randrange(len(data) + 1) for _ in range(random.choice([0, 0, 1, 3])))
    return [data[start:end] for start, end in zip([0, *at], [*at, len(data)], strict=True)]


def subscribe(side: Side, selector: bool) -> None:
    head = "SUBSCRIBE\nid:{}\ndestination:/queue/{}\nack:client-individual\n{}\n\0"
    side.receive(1, head.format("i", "a", "").encode())
    side.receive(1, head.format("b", "b", "activemq.prefetchSize:7\n").encode())
    side.receive(2, head.format("g", "grouped", "").encode())
    side.receive(2, head.format("s", "selected", "selector:JMSPriority > 3\n" if selector else "").encode())
    side.receive(2, b"SUBSCRIBE\nid:auto\ndestination:/queue/b\nack:auto\nactivemq.prefetchSize:40\n\n\0")


def run(seed: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    random = Random(seed)
    policy = Policy(
        store_and_dispatch=random.choice(list(StoreAndDispatch)),
        page_size=random.choice([1, 7, 1000]),
        memory_limit=random.choice([10**9, 3000]),
    )
    has_history = random.random() < 0.8
    sides = [Side(policy, has_history=has_history, with_runs=with_runs) for with_runs in (True, False)]
    with_selector = random.random() < 0.5
    for side in sides:
        subscribe(side, with_selector)
    now_ms = 1_000
    dispatch_run = Dispatcher._dispatch_run
    in_runs = Counter[str]()

    def counted(self: Dispatcher, lane: Any, consumer: Any, deliveries: Any, entries: Any, numbers: Any) -> None:
        before = len(entries)
        dispatch_run(self, lane, consumer, deliveries, entries, numbers)
        in_runs["dispatch"] += len(entries) - before

    for step in range(STEPS):
        action = random.choice(["send", "send", "send", "ack", "ack", "taken", "evict", "wait", "commit"])
        data = b""
        if action == "send":
            data = sends_of(random, now_ms)
        elif action == "ack":
            client = random.choice([1, 2])
            data = acks_of(random, sides[0].clients[client])
        elif action == "wait":
            now_ms += random.randrange(40)
        pieces = cut(random, data)
        commits, reads = random.random() < 0.4, random.random() < 0.5
        taken = random.randrange(3)
        for side in sides:
            with monkeypatch.context() as patch:
                patch.setattr(Dispatcher, "_dispatch_run", counted if side.with_runs else lambda *_: None)
                side.tick(now_ms)
                for piece in pieces if data else []:
                    side.receive(0 if action == "send" else client, piece)
                if action == "taken":
                    side.engine.commands.on_all_sent(side.clients[taken].session)
                elif action == "evict":
                    side.evict()
                if commits or action == "commit":
                    side.commit()
                if reads:
                    side.read_pages()
                side.turn()
        first, second = sides
        assert first.log == second.log, f"seed {seed}, step {step}, {action}"
        for side in sides:
            side.log.clear()
    return sides[0].executed + in_runs


def test_runs_of_sends_acks_and_dispatches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    executed = sum((run(seed + number, monkeypatch) for number in range(15)), Counter[str]())
    # Otherwise the two were never compared.
    assert executed["SendRun"] > 100 and executed["AckRun"] > 50 and executed["dispatch"] > 100
