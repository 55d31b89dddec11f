"""State machine of JMS clients: random commands go as bytes through the real sessions, connections and broker, and the
oracle (jms_oracle.py) judges all that the clients are sent, after each read and each turn.

Each step is one read of one client's socket, cut anywhere, or the disk, the clock or a lost socket. The batches become
durable when the machine says so, often much later.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from tests.property.broker_without_threads import BrokerWithoutThreads, RecordedHistory, VirtualSocket
from tests.property.jms_oracle import (
    ATTEMPTS_MAX,
    TEMPORARY,
    Browse,
    Client,
    Consumer,
    JmsOracle,
    Letter,
    Parcel,
    Seen,
    Work,
)
from tests.property.oracle import Disagreement
from truenext.model.loose_fields import FieldReader, encode_map
from truenext.model.policy import Policies, Policy
from truenext.wire.openwire.consumers import DELIVERED, EXPIRED, INDIVIDUAL, POISON, REDELIVERED, STANDARD
from truenext.wire.openwire.fields import decode_structure, encode_frame
from truenext.wire.openwire.handshake import encode_wire_format_info
from truenext.wire.openwire.structures import (
    BytesMessage,
    ConnectionErrorInfo,
    ConnectionId,
    ConnectionInfo,
    ConsumerControl,
    ConsumerId,
    ConsumerInfo,
    DestinationInfo,
    ExceptionResponse,
    JmsMessage,
    KeepAliveInfo,
    LocalTransactionId,
    MessageAck,
    MessageDispatch,
    MessageId,
    MessagePull,
    PhysicalDestination,
    ProducerId,
    ProducerInfo,
    QueueName,
    RemoveInfo,
    Response,
    SessionId,
    SessionInfo,
    ShutdownInfo,
    Structure,
    TemporaryQueueName,
    Throwable,
    TopicName,
    TransactionInfo,
    WireCommand,
)
from truenext.wire.openwire.transactions import BEGIN, COMMIT_ONE_PHASE, ROLLBACK

STEPS = 60
POLICIES = Policies(Policy(attempts_max=ATTEMPTS_MAX))
CLIENTS_MAX = 3
CONSUMERS_MAX = 4
WORKS_MAX = 2
NAMES = ["ID:shop-1-1:1", "ID:shop-1-2:1", "ID:mill-1-1:1"]
"""The first two are of one process."""
QUEUES = ["a", "a", "a", "a", "a", "b", "DLQ.a", "topic://t"]
REFUSED_QUEUE = "ActiveMQ.Advisory.Topic"
PREFETCHES = [0, 0, 1, 1, 2, 3, 1000]
CAUSE = "java.lang.RuntimeException: no"

ACTIONS: dict[str, int] = {
    "send": 20,
    "send_again": 4,
    "consume": 12,
    "browse": 2,
    "acknowledge": 10,
    "keep": 18,
    "report_delivered": 6,
    "reject": 3,
    "report_redelivered": 2,
    "expire": 2,
    "acknowledge_wrongly": 2,
    "keep_wrongly": 1,
    "begin": 8,
    "commit": 6,
    "roll_back": 3,
    "close_consumer": 4,
    "close_session": 1,
    "disconnect": 1,
    "pull": 10,
    "control": 2,
    "add_temporary": 2,
    "remove_temporary": 1,
    "add_producer": 3,
    "remove_producer": 2,
    "watch_advisories": 2,
    "send_refused": 1,
    "keep_alive": 1,
}
"""Commands, with their weights. Each is a method of JmsMachine."""
REPEATED = ["consume", "begin", "send", "commit"]
"""What a client that has connected again may repeat, and finish (C26.15)."""


class JmsMachine:
    def __init__(self, random: Random, note: Callable[[str], None], history: RecordedHistory | None = None) -> None:
        """With a history, the broker is never restarted."""
        self._random = random
        self._note = note
        self.oracle = JmsOracle()
        self._may_restart = history is None
        self._start(BrokerWithoutThreads(POLICIES, history=history))
        self.sockets: dict[Client, VirtualSocket] = {}
        self._sequences: dict[str, int] = {}
        self._numbers = 0
        self._commands: dict[Client, int] = {}
        """Id of each client's last command."""
        self._dispatched: dict[Consumer, list[Seen]] = {}
        self._ended: list[Consumer] = []
        self._browsed: list[tuple[Browse, Seen | None]] = []
        self._messages: list[tuple[Structure, Parcel, list[str]]] = []

    def _start(self, broker: BrokerWithoutThreads) -> None:
        self.broker = broker
        self.oracle.durable = broker.committer.durable_count
        self._is_stopping = False
        run_turn, pager = broker.broker._run_turn, broker.broker.pager

        def judged_turn() -> None:
            if self._is_stopping:
                run_turn()
                return
            self._sync()
            was_reading = pager.is_busy
            run_turn()
            self._take_frames()
            self.oracle.check_turn(self._dispatched, self._ended, is_reading=was_reading or pager.is_busy)
            self._dispatched, self._ended = {}, []
            self._judge_browses()
            self.oracle.check_told()

        broker.broker._run_turn = judged_turn  # type: ignore[method-assign]

    def _restart(self) -> None:
        """Stop the broker as SIGTERM does, and start it again."""
        self._note("the broker stops and starts again")
        self._run_callbacks()
        self._is_stopping = True
        self.broker.stop()
        self.oracle.restart()
        self.sockets.clear()
        self.broker.close()
        self._start(BrokerWithoutThreads(POLICIES, self.broker.store, self.broker.loop.now_ns))

    # ---- The whole ----

    def run(self, steps: int = STEPS) -> None:
        """Run one example.

        Raises: Disagreement
        """
        for _ in range(steps):
            self._step()
        self._settle()

    def _step(self) -> None:
        random = self._random
        what = random.randrange(100)
        if not self.oracle.clients or (what < 5 and len(self.oracle.clients) < CLIENTS_MAX) or what == 5:
            self._connect()
        elif what < 8:
            self._lose(random.choice(self.oracle.clients))
        elif what < 22:
            self._finish_batch()
        elif what < 26:
            self._advance(random.choice([0.001, 0.02, 0.05, 0.6, 1.1]))
        elif what < 28:
            self._settle()
        elif what == 28 and random.random() < 0.4 and self._may_restart:
            self._restart()
        else:
            self._read(random.choice(self.oracle.clients))
        if random.random() < 0.8:
            self._run_callbacks()

    def _sync(self) -> None:
        oracle, committer = self.oracle, self.broker.committer
        oracle.gathering = committer.handed_count + 1
        oracle.durable = committer.durable_count
        oracle.now_ns = self.broker.loop.now_ns

    def _run_callbacks(self) -> None:
        while self.broker.loop.run_one():
            pass
        self._sync()

    def _finish_batch(self) -> None:
        self._run_callbacks()
        if self.broker.committer.is_busy:
            self._note(f"batch {self.oracle.durable + 1} is durable")
            self.broker.committer.finish()
            self._run_callbacks()

    def _settle(self) -> None:
        self._run_callbacks()
        while self.broker.committer.is_busy:
            self._finish_batch()
        self.oracle.check_rest()

    def _advance(self, seconds: float) -> None:
        self._note(f"{seconds} s pass")
        loop = self.broker.loop
        until_ns = loop.now_ns + round(seconds * 1e9)
        self._run_callbacks()
        while loop.move_to_next_timer(until_ns):
            self._run_callbacks()
        self._run_callbacks()
        if self.oracle.is_any_end_overdue():
            raise Disagreement("a request with a time is never withdrawn")

    # ---- Connections ----

    def _connect(self) -> None:
        random = self._random
        name = random.choice(NAMES)
        is_fault_tolerant, is_reconnect = random.random() < 0.5, random.random() < 0.3
        self._note(f"{name} connects, {is_fault_tolerant=}, {is_reconnect=}")
        sock = self.broker.connect()
        former = [each for each in self.oracle.clients if each.id == name and not each.has_ended]
        info = ConnectionInfo(
            1,
            True,
            ConnectionId(name),
            is_fault_tolerant=is_fault_tolerant,
            is_failover_reconnect=is_reconnect,
        )
        self._sync()
        for each in [each for each in self.oracle.clients if each.id == name]:
            if each not in former:
                # It has ended: its socket stays as it is.
                self.sockets.pop(each)
                self.oracle.clients.remove(each)
        client = self.oracle.connect(name, is_fault_tolerant=is_fault_tolerant, is_reconnect=is_reconnect)
        self.oracle.ask(client, 1, is_refused=False)
        self._numbers = max(self._numbers, 1)
        self.sockets[client] = sock
        sock.incoming.append(encode_wire_format_info(0) + encode_frame(info))
        self.broker.read(sock)
        self._judge_read()
        for each in former:
            if not self.sockets.pop(each).is_closed:
                raise Disagreement(f"the earlier connection {name} goes on")

    def _lose(self, client: Client) -> None:
        sock = self.sockets.pop(client)
        is_reset = self._random.random() < 0.5
        self._note(f"{client.id} is lost, {is_reset=}")
        sock.is_broken, sock.has_ended = is_reset, True
        self._sync()
        self.oracle.lose(client)
        self.broker.read(sock)
        self._judge_read()

    # ---- Commands ----

    def _read(self, client: Client) -> None:
        """Let a client send some commands, which the broker reads at once or in two parts."""
        random = self._random
        if client.has_ended:
            if client.requests:
                return
            self._write(client, encode_frame(ShutdownInfo(self._next_command(client), False)))
            self.oracle.clients.remove(client)
            self.sockets.pop(client)
            return
        self._sync()
        frames: list[bytes] = []
        actions = random.choices(list(ACTIONS), list(ACTIONS.values()), k=random.choice([1, 1, 2, 3, 5, 8]))
        if client.is_recovering and random.random() < 0.2:
            actions = REPEATED
        for action in actions:
            command = getattr(self, f"_{action}")(client)
            if command is None:
                continue
            self._note(f"{client.id}: {_brief(command)}")
            frames.append(encode_frame(command))
            if client.has_ended or action.endswith("temporary"):
                break
        self._write(client, b"".join(frames))

    def _write(self, client: Client, data: bytes) -> None:
        sock = self.sockets[client]
        cut = self._random.choice([0, self._random.randint(0, len(data))])
        for part in (data[:cut], data[cut:]):
            if part:
                sock.incoming.append(part)
                self.broker.read(sock)
        if data:
            self.oracle.request(client)
        self._judge_read()

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _next_command(self, client: Client) -> int:
        """Return the id of a client's next command. Sometimes one is missing, as if it had been an acknowledgement to
        an earlier connection."""
        self._commands[client] = self._commands.get(client, 1) + (2 if self._random.random() < 0.1 else 1)
        return self._commands[client]

    def _answer(
        self, client: Client, *, is_refused: bool = False, is_asked: bool | None = None, number: int | None = None
    ) -> tuple[int, bool]:
        """Return the id of a command, and whether it asks for an answer, and note what the client must be told."""
        number = self._next_command(client) if number is None else number
        is_asked = self._random.random() < 0.6 if is_asked is None else is_asked
        if is_asked:
            self.oracle.ask(client, number, is_refused=is_refused)
        elif is_refused:
            client.errors += 1
        return number, is_asked

    # ---- Messages ----

    def _send(self, client: Client) -> Structure | None:
        random = self._random
        work = random.choice([None, *client.works.values()])
        temporaries = [name for each in self.oracle.clients for name in each.temporaries]
        gone = f"{TEMPORARY}{random.choice(NAMES)}:9"
        queues = random.choice([["a"]] * 6 + [["b"], ["a", "b"], ["topic://t"], ["a", "topic://t"], [gone]])
        if temporaries and random.random() < 0.2:
            queues = [random.choice(temporaries)]
        session = random.choice([1, 2])
        producer = ProducerId(client.id, random.choice([1, 2]), session)
        name = f"{client.id}:{session}:{producer.value}"
        sequence = self._sequences[name] = self._sequences.get(name, 0) + 1
        # Priorities above persistence, so that lanes mix both.
        parcel = Parcel(
            f"m{self._next_number()}",
            (f"{producer.connection_id}:{producer.session_id}:{producer.value}", sequence),
            random.choice([4, 4, 4, 9, 1]),
            random.random() < 0.6,
            random.choice(temporaries) if temporaries and random.random() < 0.4 else "",
        )
        return self._produce(client, parcel, queues, producer, work)

    def _produce(
        self, client: Client, parcel: Parcel, queues: list[str], producer: ProducerId, work: Work | None
    ) -> Structure:
        is_refused = work is not None and work.is_doomed
        if not is_refused:
            self.oracle.send(client, parcel, queues, work, parcel.key[0])
        number, is_asked = self._answer(client, is_refused=is_refused)
        if work is not None:
            self.oracle.sent_in(work, parcel.key[0], producer.session_id, number)
        message = BytesMessage(
            number,
            is_asked,
            producer,
            _destination(queues),
            None if work is None else LocalTransactionId(work.number, ConnectionId(client.id)),
            message_id=MessageId(None, producer, parcel.key[1]),
            is_persistent=parcel.is_persistent,
            priority=parcel.priority,
            reply_to=_destination([parcel.reply_to]) if parcel.reply_to else None,
            content=parcel.label.encode(),
        )
        if work is None and client.is_fault_tolerant and parcel.is_persistent:
            self._messages.append((message, parcel, queues))
        return message

    def _send_again(self, client: Client) -> Structure | None:
        """C26.10: after a lost connection a client repeats what was not answered."""
        own = [
            each
            for each in self._messages
            if isinstance(each[0], JmsMessage)
            and each[0].producer_id is not None
            and each[1].key[0].startswith(client.id)
        ]
        if not own or not client.is_fault_tolerant:
            return None
        message, parcel, queues = self._random.choice(own[-5:])
        assert isinstance(message, JmsMessage) and message.producer_id is not None
        return self._produce(client, parcel, queues, message.producer_id, None)

    def _send_refused(self, client: Client) -> Structure:
        work = self._random.choice([None, *client.works.values()])
        if work is not None:
            work.is_doomed = True
        number, is_asked = self._answer(client, is_refused=True)
        producer = ProducerId(client.id, 1, 1)
        return BytesMessage(
            number,
            is_asked,
            producer,
            TopicName(REFUSED_QUEUE),
            None if work is None else LocalTransactionId(work.number, ConnectionId(client.id)),
            message_id=MessageId(None, producer, 10**9 + number),
            marshalled_properties=encode_map({}),
        )

    def _add_producer(self, client: Client) -> Structure:
        number, is_asked = self._answer(client)
        session, value = self._random.choice([1, 2]), self._random.choice([1, 2])
        self.oracle.add_producer(client, f"{client.id}:{session}:{value}", number)
        return ProducerInfo(number, is_asked, ProducerId(client.id, value, session))

    def _remove_producer(self, client: Client) -> Structure:
        session, value = self._random.choice([1, 2]), self._random.choice([1, 2])
        number, is_asked = self._answer(client)
        self.oracle.end_producer(client, f"{client.id}:{session}:{value}", number)
        return RemoveInfo(number, is_asked, ProducerId(client.id, value, session))

    # ---- Consumers ----

    def _consume(self, client: Client) -> Structure | None:
        if len(client.consumers) >= CONSUMERS_MAX:
            return None
        random = self._random
        session, value = random.choice([1, 2]), random.randint(1, 3)
        queue = random.choice([*QUEUES, *client.temporaries])
        prefetch, priority = random.choice(PREFETCHES), random.choice([0, 0, 0, 5])
        is_accepted = self.oracle.subscribe(client, session, value, queue, prefetch, priority)
        number, is_asked = self._answer(client, is_refused=not is_accepted)
        return ConsumerInfo(
            number,
            is_asked,
            ConsumerId(client.id, session, value),
            destination=_destination([queue]),
            prefetch_size=prefetch,
            priority=priority,
        )

    def _browse(self, client: Client) -> Structure | None:
        if len(client.browses) >= 2:
            return None
        session, value, queue = 1, self._random.randint(4, 6), self._random.choice(["a", "b", "DLQ.a"])
        self.oracle.browse(client, session, value, queue)
        number, is_asked = self._answer(client)
        return ConsumerInfo(
            number, is_asked, ConsumerId(client.id, session, value), True, _destination([queue]), prefetch_size=500
        )

    def _watch_advisories(self, client: Client) -> Structure | None:
        if client.advisories:
            return SessionInfo(self._next_command(client), False, SessionId(client.id, 1))
        client.advisories.add((-1, 1))
        number, is_asked = self._answer(client)
        return ConsumerInfo(
            number,
            is_asked,
            ConsumerId(client.id, -1, 1),
            destination=TopicName("ActiveMQ.Advisory.TempQueue,ActiveMQ.Advisory.TempTopic"),
            prefetch_size=1000,
        )

    def _last(self, consumers: list[Consumer]) -> int:
        """Return the number of the message that a client names as delivered last, or -1 or -2."""
        held = [each for consumer in consumers for each in consumer.held]
        choices = [-1, -2, 10**6, *(each.sequence or 0 for each in held)]
        return self._random.choice(choices) if self._random.random() < 0.5 or not held else held[0].sequence or 0

    def _close_consumer(self, client: Client) -> Structure | None:
        if not client.consumers and not client.browses:
            return None
        name = self._random.choice([*client.consumers, *client.browses])
        last = -1
        if name in client.consumers:
            consumer = client.consumers[name]
            last = self._last([consumer])
            self.oracle.close(client, [consumer], last)
        else:
            del client.browses[name]
        number, is_asked = self._answer(client)
        return RemoveInfo(number, is_asked, ConsumerId(client.id, *name), last)

    def _close_session(self, client: Client) -> Structure:
        session = self._random.choice([1, 2])
        consumers = [each for each in client.consumers.values() if each.session == session]
        last = self._last(consumers)
        self.oracle.close(client, consumers, last)
        for name in [each for each in client.browses if each[0] == session]:
            del client.browses[name]
        self.oracle.forget(client, [each for each in client.producers if each.split(":")[-2] == str(session)])
        client.beginnings = {
            each: begun for each, begun in client.beginnings.items() if each.split(":")[-2] != str(session)
        }
        number, is_asked = self._answer(client)
        return RemoveInfo(number, is_asked, SessionId(client.id, session), last)

    def _disconnect(self, client: Client) -> Structure:
        last = self._last(list(client.consumers.values()))
        self.oracle.disconnect(client, last)
        number, is_asked = self._answer(client)
        return RemoveInfo(number, is_asked, ConnectionId(client.id), last)

    def _pull(self, client: Client) -> Structure | None:
        consumers = [each for each in client.consumers.values() if not each.prefetch and not each.credit]
        if not consumers:
            return None
        consumer, timeout = self._random.choice(consumers), self._random.choice([0, -1, 1, 20, 50])
        self.oracle.pull(consumer, timeout)
        number, is_asked = self._answer(client, is_asked=False)
        return MessagePull(number, is_asked, ConsumerId(client.id, *consumer.name), timeout=timeout)

    def _control(self, client: Client) -> Structure | None:
        consumers = [each for each in client.consumers.values() if each.prefetch or not each.credit]
        if not consumers:
            return None
        consumer, prefetch = self._random.choice(consumers), self._random.choice(PREFETCHES)
        self.oracle.control(client, consumer, prefetch)
        number, is_asked = self._answer(client)
        return ConsumerControl(number, is_asked, consumer_id=ConsumerId(client.id, *consumer.name), prefetch=prefetch)

    # ---- Acknowledgements ----

    def _held(self, client: Client, *, least: int = 1) -> tuple[Consumer, list[Letter]] | None:
        """Return a consumer and consecutive messages that it holds and keeps for no transaction."""
        random = self._random
        consumers = [each for each in client.consumers.values() if each.held]
        random.shuffle(consumers)
        for consumer in consumers:
            held = consumer.held
            start = 0 if random.random() < 0.6 else random.randrange(len(held))
            end = random.randint(start + 1, len(held))
            covered = held[start:end]
            if all(each.kept_by is None for each in covered) and len(covered) >= least:
                return consumer, covered
        return None

    def _ack(
        self,
        client: Client,
        consumer: Consumer,
        kind: int,
        covered: list[Letter],
        work: Work | None = None,
        *,
        is_refused: bool = False,
        count: int | None = None,
        **others: Any,
    ) -> Structure:
        number, is_asked = self._answer(client, is_refused=is_refused)
        return MessageAck(
            number,
            is_asked,
            _destination(["a"]),
            None if work is None else LocalTransactionId(work.number, ConnectionId(client.id)),
            ConsumerId(client.id, *consumer.name),
            kind,
            None if kind in (INDIVIDUAL, DELIVERED) else _message_id(covered[0]),
            _message_id(covered[-1]),
            len(covered) if count is None else count,
            **others,
        )

    def _acknowledge(self, client: Client) -> Structure | None:
        found = self._held(client)
        if found is None:
            return None
        consumer, covered = found
        kind = STANDARD
        if self._random.random() < 0.3:
            kind, covered = INDIVIDUAL, covered[-1:]
        self.oracle.acknowledge(client, consumer, covered)
        return self._ack(client, consumer, kind, covered)

    def _keep(self, client: Client) -> Structure | None:
        found = self._held(client)
        if found is None or not client.works:
            return None
        work = self._random.choice(list(client.works.values()))
        consumer, covered = found
        kind = STANDARD
        if self._random.random() < 0.4:
            kind, covered = INDIVIDUAL, covered[-1:]
        self.oracle.keep(client, consumer, covered, work)
        return self._ack(client, consumer, kind, covered, work)

    def _report_delivered(self, client: Client) -> Structure | None:
        consumers = [each for each in client.consumers.values() if each.held]
        if not consumers:
            return None
        consumer = self._random.choice(consumers)
        covered = consumer.held[: self._random.randint(1, len(consumer.held))]
        work = self._random.choice([None, *client.works.values()])
        self.oracle.report_delivered(consumer, covered[-1])
        return self._ack(client, consumer, DELIVERED, covered, work)

    def _reject(self, client: Client) -> Structure | None:
        found = self._held(client)
        if found is None:
            return None
        consumer, covered = found
        self.oracle.reject(client, consumer, covered, CAUSE)
        return self._ack(client, consumer, POISON, covered, poison_cause=Throwable(*CAUSE.split(": ", 1)))

    def _report_redelivered(self, client: Client) -> Structure | None:
        found = self._held(client)
        return None if found is None else self._ack(client, found[0], REDELIVERED, found[1])

    def _expire(self, client: Client) -> Structure | None:
        found = self._held(client)
        if found is None:
            return None
        consumer, covered = found
        self.oracle.fail(client, consumer, covered, "expired at the client")
        return self._ack(client, consumer, EXPIRED, covered)

    def _acknowledge_wrongly(self, client: Client) -> Structure | None:
        """A range with another count, or of what another consumer holds: refused, and changes nothing. What comes
        before anything was dispatched to the consumer is ignored."""
        found = self._held(client)
        if found is None:
            return None
        consumer, covered = found
        if self._random.random() < 0.5:
            return self._ack(client, consumer, STANDARD, covered, is_refused=True, count=len(covered) + 1)
        others = [each for each in client.consumers.values() if each is not consumer]
        if not others:
            return None
        other = self._random.choice(others)
        kind = self._random.choice([STANDARD, POISON, EXPIRED, REDELIVERED, DELIVERED, INDIVIDUAL])
        return self._ack(client, other, kind, covered, is_refused=other.has_received and kind != INDIVIDUAL)

    def _keep_wrongly(self, client: Client) -> Structure | None:
        """C26.15: as if an earlier connection had got the message."""
        if not client.works or not client.consumers:
            return None
        work = self._random.choice(list(client.works.values()))
        consumer = self._random.choice(list(client.consumers.values()))
        work.is_unmatched = True
        number, is_asked = self._answer(client)
        gone = MessageId(None, ProducerId(client.id, 1, 1), 10**8, 10**8)
        return MessageAck(
            number,
            is_asked,
            _destination(["a"]),
            LocalTransactionId(work.number, ConnectionId(client.id)),
            ConsumerId(client.id, *consumer.name),
            self._random.choice([STANDARD, INDIVIDUAL]),
            gone,
            gone,
            1,
        )

    # ---- Transactions ----

    def _begin(self, client: Client) -> Structure | None:
        if len(client.works) >= WORKS_MAX:
            return None
        number = self._next_number()
        command_id = self._next_command(client)
        self.oracle.begin(client, number, command_id)
        return self._transaction(client, number, BEGIN, is_refused=False, command_id=command_id)

    def _commit(self, client: Client) -> Structure:
        number = self._random.choice([*client.works] * 4 + [10**9])
        command_id = self._next_command(client)
        is_committed = self.oracle.commit(client, number, command_id)
        return self._transaction(client, number, COMMIT_ONE_PHASE, is_refused=not is_committed, command_id=command_id)

    def _roll_back(self, client: Client) -> Structure:
        number = self._random.choice([*client.works] * 4 + [10**9])
        self.oracle.roll_back(client, number)
        return self._transaction(client, number, ROLLBACK, is_refused=False)

    def _transaction(
        self, client: Client, transaction: int, operation: int, *, is_refused: bool, command_id: int | None = None
    ) -> Structure:
        number, is_asked = self._answer(client, is_refused=is_refused, number=command_id)
        owner = ConnectionId(client.id)
        return TransactionInfo(number, is_asked, owner, LocalTransactionId(transaction, owner), operation)

    # ---- Others ----

    def _add_temporary(self, client: Client) -> Structure:
        name = f"{TEMPORARY}{client.id}:{self._random.choice([1, 2])}"
        self.oracle.add_temporary(client, name)
        number, is_asked = self._answer(client)
        return DestinationInfo(number, is_asked, ConnectionId(client.id), _destination([name]), 0)

    def _remove_temporary(self, client: Client) -> Structure:
        name = f"{TEMPORARY}{client.id}:{self._random.choice([1, 2])}"
        is_removed = self.oracle.remove_temporary(client, name)
        number, is_asked = self._answer(client, is_refused=not is_removed)
        return DestinationInfo(number, is_asked, ConnectionId(client.id), _destination([name]), 1)

    def _keep_alive(self, client: Client) -> Structure:
        return KeepAliveInfo(self._next_command(client), False)

    # ---- What the clients are sent ----

    def _judge_read(self) -> None:
        """Judge what was sent during a read: dispatches come with turns only."""
        self._take_frames()
        if self._dispatched or self._ended or self._browsed:
            raise Disagreement(f"sent outside a turn: {self._dispatched}, {self._ended}, {self._browsed}")
        self.oracle.check_told()
        self._sync()

    def _judge_browses(self) -> None:
        """A turn dispatches before it shows."""
        browsed, self._browsed = self._browsed, []
        for browse, seen in browsed:
            if seen is None:
                self.oracle.browse_ended(browse)
            else:
                self.oracle.shown(browse, seen)

    def _take_frames(self) -> None:
        for client, sock in list(self.sockets.items()):
            data = sock.take_sent()
            while data:
                size = int.from_bytes(data[:4], "big")
                self._take(client, decode_structure(FieldReader(data[4 : 4 + size])))
                data = data[4 + size :]

    def _take(self, client: Client, frame: Structure) -> None:
        if isinstance(frame, MessageDispatch):
            self._take_dispatch(client, frame)
        elif isinstance(frame, Response):
            is_refused = isinstance(frame, ExceptionResponse)
            self.oracle.answered(client, frame.correlation_id, is_refused=is_refused)
        elif isinstance(frame, ConnectionErrorInfo):
            client.errors -= 1
            if client.errors < 0:
                raise Disagreement(f"{client.id} is told {frame.exception}, and nothing was refused")
        elif not isinstance(frame, WireCommand) and client.requests.get(1) is None:
            raise Disagreement(f"{client.id} is sent {frame}")

    def _take_dispatch(self, client: Client, dispatch: MessageDispatch) -> None:
        consumer_id, message = dispatch.consumer_id, dispatch.message
        assert consumer_id is not None
        name = (consumer_id.session_id, consumer_id.value)
        if name in client.advisories:
            info = None if message is None else message.data_structure
            if not isinstance(info, DestinationInfo) or info.destination is None:
                raise Disagreement(f"{client.id} gets an advisory of nothing: {dispatch}")
            self.oracle.told(client, f"{TEMPORARY}{info.destination.name}", is_end=bool(info.operation))
            return
        browse, consumer = client.browses.get(name), client.consumers.get(name)
        if browse is None and consumer is None:
            raise Disagreement(f"{client.id} gets a message for {name}, which has ended or never was")
        if message is None:
            if browse is not None:
                self._browsed.append((browse, None))
            else:
                assert consumer is not None
                self._ended.append(consumer)
            return
        if isinstance(message.reply_to, TemporaryQueueName):
            self.oracle.check_reply_to(client, f"{TEMPORARY}{message.reply_to.name}")
        seen = _seen(dispatch, message)
        if browse is not None:
            self._browsed.append((browse, seen))
        else:
            assert consumer is not None
            self._dispatched.setdefault(consumer, []).append(seen)


def _seen(dispatch: MessageDispatch, message: JmsMessage) -> Seen:
    message_id = message.message_id
    assert message_id is not None and message_id.producer_id is not None
    producer = message_id.producer_id
    if dispatch.redelivery_counter != message.redelivery_counter:
        raise Disagreement(f"two redelivery counters: {dispatch}")
    properties = {} if message.marshalled_properties is None else FieldReader(message.marshalled_properties).read_map()
    cause = (properties or {}).get("dlqDeliveryFailureCause")
    return Seen(
        (message.content or b"").decode(),
        (f"{producer.connection_id}:{producer.session_id}:{producer.value}", message_id.producer_sequence_id),
        message.priority,
        message.is_persistent,
        message_id.broker_sequence_id,
        dispatch.redelivery_counter,
        None if cause is None else str(cause.value),
    )


def _destination(queues: list[str]) -> PhysicalDestination:
    name = ",".join(queues)
    if name.startswith(TEMPORARY):
        return TemporaryQueueName(name.removeprefix(TEMPORARY))
    return TopicName(name.removeprefix("topic://")) if name.startswith("topic://") else QueueName(name)


def _message_id(letter: Letter) -> MessageId:
    producer, number = letter.parcel.key
    connection, session, value = producer.rsplit(":", 2)
    return MessageId(None, ProducerId(connection, int(value), int(session)), number, letter.sequence or 0)


def _brief(structure: object) -> str:
    """Return a structure as a text, without what is usual."""
    if isinstance(structure, ConnectionId | MessageId | PhysicalDestination):
        return str(structure.broker_sequence_id if isinstance(structure, MessageId) else next(iter(_values(structure))))
    if isinstance(structure, Structure):
        fields = zip(structure.__struct_fields__, _values(structure), strict=True)
        return f"{type(structure).__name__}({', '.join(f'{name}={_brief(value)}' for name, value in fields if value)})"
    return repr(structure)


def _values(structure: Structure) -> list[object]:
    return [getattr(structure, name) for name in structure.__struct_fields__]


def run_example(seed: int, steps: int = STEPS, history: RecordedHistory | None = None) -> None:
    """Run the example of a seed. If it fails, the error has its steps as a note.

    Raises: Disagreement
    """
    notes: list[str] = []
    machine = JmsMachine(Random(seed), notes.append, history)
    try:
        machine.run(steps)
    except Exception as error:
        error.add_note("\n".join([f"seed {seed}:", *notes]))
        raise
    finally:
        machine.broker.close()
