"""Tests that each command of a JMS client needs its rights, frame by frame, whatever the client of Java checks itself;
and who may send to temporary destinations, whose names can be guessed. Source: docs/security.md.

Each case has users of its own: one that has just the rights that the row needs, and for each of them one that has all
other rights on the destination and those that the row needs on others.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from tests.integration.broker_process import BrokerProcess
from tests.integration.openwire.test_raw_connections import JmsClient
from tests.integration.test_grants import JMS_COMMANDS, PASSWORD, ROOT, SHARED_PASSWORD, UserClient
from truenext.model.commands import (
    Abort,
    Ack,
    AckRun,
    Begin,
    Browse,
    Close,
    Commit,
    CreateTemporary,
    Credit,
    Disconnect,
    ForgetProducers,
    Login,
    Nack,
    OpenProducer,
    Pause,
    ReceiptRequest,
    RemoveTemporary,
    Send,
    SendRun,
    Subscribe,
)
from truenext.wire.openwire.consumers import INDIVIDUAL, POISON, STANDARD
from truenext.wire.openwire.structures import (
    ConnectionErrorInfo,
    ConnectionId,
    ConsumerControl,
    ConsumerId,
    ConsumerInfo,
    DataArrayResponse,
    DestinationInfo,
    ExceptionResponse,
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
    Structure,
    TemporaryQueueName,
    TemporaryTopicName,
    TextMessage,
    Throwable,
    TopicName,
    TransactionInfo,
    WireCommand,
)
from truenext.wire.openwire.transactions import BEGIN, COMMIT_ONE_PHASE, RECOVER, ROLLBACK

FORBIDDEN = "javax.jms.JMSSecurityException"
EVERYWHERE = ("send", "take", "browse", "manage")
_NUMBERS = itertools.count(1)
_CONTENT = b"\0\0\0\1x"


class Refused(Exception):
    def __init__(self, exception: Throwable) -> None:
        super().__init__(f"{exception.class_name}: {exception.message}")
        self.class_name = exception.class_name
        self.text = exception.message or ""


class JmsUser(JmsClient):
    """JMS client of a user. It names destinations by the prefix of its case."""

    def __init__(
        self, broker: BrokerProcess, user: str, prefix: str = "", *, name: str = "", process: str = ""
    ) -> None:
        name = name or f"ID:{process or f'host-{next(_NUMBERS)}'}-{next(_NUMBERS)}:1"
        super().__init__(broker, name=name, user=user, password=PASSWORD, is_fault_tolerant=True)
        self.prefix = prefix
        self.delivered: list[MessageDispatch] = []
        self.number = 100
        self.transaction = LocalTransactionId(1, ConnectionId(name))

    def queue(self, word: str) -> QueueName:
        return QueueName(f"{self.prefix}.{word}")

    def topic(self, word: str) -> TopicName:
        return TopicName(f"{self.prefix}.{word}")

    def both(self) -> QueueName:
        return QueueName(f"{self.prefix}.q,topic://{self.prefix}.t")

    @property
    def producer(self) -> ProducerId:
        return ProducerId(self.name, 1, 1)

    def consumer(self, value: int = 1) -> ConsumerId:
        return ConsumerId(self.name, 1, value)

    def request(self, command: WireCommand) -> Structure:
        """Return the answer. Raises: Refused for an exception, also one of an earlier command that has asked for no
        answer."""
        self.number += 1
        self.send(replace(command, command_id=self.number, response_required=True))
        error: Throwable | None = None
        while True:
            answer = self.next()
            assert answer is not None, "the connection has ended"
            if isinstance(answer, MessageDispatch):
                self.delivered.append(answer)
            elif isinstance(answer, ConnectionErrorInfo):
                error = answer.exception
            elif isinstance(answer, Response):
                assert answer.correlation_id == self.number
                break
        if isinstance(answer, ExceptionResponse):
            error = answer.exception
        if error is not None:
            raise Refused(error)
        return answer

    def barrier(self) -> None:
        """Wait until all earlier commands are executed. Raises: Refused if one was refused"""
        self.request(TransactionInfo(operation=RECOVER))

    def delivery(self) -> MessageDispatch:
        return self.delivered.pop(0) if self.delivered else self.message()

    def message_to(self, destination: PhysicalDestination, **fields: Any) -> TextMessage:
        self.number += 1
        message_id = MessageId(None, self.producer, self.number)
        return TextMessage(0, False, self.producer, destination, message_id=message_id, content=_CONTENT, **fields)

    def subscribe(self, destination: PhysicalDestination, value: int = 1, **fields: Any) -> None:
        fields.setdefault("prefetch_size", 10)
        self.request(ConsumerInfo(consumer_id=self.consumer(value), destination=destination, **fields))

    def acknowledge(self, kind: int, delivery: MessageDispatch, **fields: Any) -> None:
        assert delivery.message is not None
        message_id = delivery.message.message_id
        self.request(
            MessageAck(0, True, delivery.destination, None, delivery.consumer_id, kind, message_id, message_id, 1)
        )

    def end(self, operation: int) -> None:
        self.request(TransactionInfo(0, True, ConnectionId(self.name), self.transaction, operation))

    def temporary(self, word: str = "1") -> TemporaryQueueName:
        return TemporaryQueueName(f"{self.name}:{word}")

    def make(self, destination: PhysicalDestination, operation: int = 0) -> None:
        self.request(DestinationInfo(0, True, ConnectionId(self.name), destination, operation))


# ---- The table ----


class Row(NamedTuple):
    """What a JMS client does, and all that it needs."""

    name: str
    kinds: tuple[type[Any], ...]
    """Commands of the broker of which it consists."""
    needs: tuple[str, ...]
    """Rights, as RIGHT NAME, in which `{p}` stands for the prefix of the case."""
    perform: Callable[[JmsUser], object]
    is_filled: bool = False
    """True if messages wait in the queue."""


def send(client: JmsUser) -> None:
    client.request(client.message_to(client.queue("q"), is_persistent=True))


def send_in_one_write(client: JmsUser) -> None:
    client.send(*[client.message_to(client.queue("q")) for _ in range(20)])
    client.barrier()


def send_in_a_transaction(client: JmsUser) -> None:
    client.end(BEGIN)
    client.request(client.message_to(client.queue("q"), transaction_id=client.transaction))
    client.end(COMMIT_ONE_PHASE)


def commit_unanswered_send(client: JmsUser) -> None:
    client.end(BEGIN)
    client.send(client.message_to(client.queue("q"), transaction_id=client.transaction))
    client.end(COMMIT_ONE_PHASE)


def consume(client: JmsUser) -> None:
    client.subscribe(client.queue("q"))
    client.acknowledge(STANDARD, client.delivery())
    first = client.delivery().message
    last = client.delivery().message
    assert first is not None and last is not None
    ids = (first.message_id, last.message_id)
    client.request(MessageAck(0, True, client.queue("q"), None, client.consumer(), STANDARD, *ids, 2))
    client.request(RemoveInfo(object_id=client.consumer(), last_delivered_sequence_id=-1))


def consume_in_transactions(client: JmsUser) -> None:
    client.subscribe(client.queue("q"))
    delivery = client.delivery()
    assert delivery.message is not None
    message_id = delivery.message.message_id
    for operation in (ROLLBACK, COMMIT_ONE_PHASE):
        client.end(BEGIN)
        ack = MessageAck(0, False, client.queue("q"), client.transaction, client.consumer(), INDIVIDUAL)
        client.send(replace(ack, last_message_id=message_id, message_count=1))
        client.end(operation)


def reject(client: JmsUser) -> None:
    client.subscribe(client.queue("q"))
    client.acknowledge(POISON, client.delivery())


def follow(client: JmsUser) -> None:
    client.subscribe(client.topic("t"))


def browse(client: JmsUser) -> None:
    client.subscribe(client.queue("q"), is_browser=True)
    while client.delivery().message is not None:
        pass


def use_a_temporary_queue(client: JmsUser) -> None:
    for destination in (client.temporary("1"), TemporaryTopicName(f"{client.name}:2")):
        client.make(destination)
        client.subscribe(destination)
        client.request(client.message_to(destination))
        assert client.delivery().message is not None
        client.request(RemoveInfo(object_id=client.consumer(), last_delivered_sequence_id=-1))
        client.make(destination, 1)


def watch(client: JmsUser) -> None:
    names = TopicName("ActiveMQ.Advisory.TempQueue,ActiveMQ.Advisory.TempTopic")
    client.request(ConsumerInfo(consumer_id=ConsumerId(client.name, -1, 1), destination=names, prefetch_size=1000))


def end_producer(client: JmsUser) -> None:
    client.request(ProducerInfo(producer_id=client.producer))
    send(client)
    client.request(RemoveInfo(object_id=client.producer))
    client.request(RemoveInfo(object_id=SessionId(client.name, 1), last_delivered_sequence_id=-2))


def recover(client: JmsUser) -> None:
    assert isinstance(client.request(TransactionInfo(operation=RECOVER)), DataArrayResponse)


ROWS = [
    Row("producer", (OpenProducer,), ("send {p}.q",), lambda client: client.request(
        ProducerInfo(producer_id=client.producer, destination=client.queue("q")))),
    Row("producer to several", (OpenProducer,), ("send {p}.q", "send /topic/{p}.t"), lambda client: client.request(
        ProducerInfo(producer_id=client.producer, destination=client.both()))),
    Row("anonymous producer", (ReceiptRequest,), (), lambda client: client.request(
        ProducerInfo(producer_id=client.producer))),
    Row("send", (Send, ReceiptRequest), ("send {p}.q",), send),
    Row("many sends", (SendRun,), ("send {p}.q",), send_in_one_write, True),
    Row("send to a topic", (Send,), ("send /topic/{p}.t",), lambda client: client.request(
        client.message_to(client.topic("t")))),
    Row("send to several", (Send,), ("send {p}.q", "send /topic/{p}.t"), lambda client: client.request(
        client.message_to(client.both()))),
    Row("send in a transaction", (Begin, Send, Commit), ("send {p}.q",), send_in_a_transaction),
    Row("commit of a send", (Begin, Send, Commit), ("send {p}.q",), commit_unanswered_send),
    Row("end of a producer", (ForgetProducers,), ("send {p}.q",), end_producer),
    Row("consumer", (Subscribe, Credit, Ack, AckRun, Close), ("take {p}.q",), consume, True),
    Row("transacted consumer", (Begin, Abort, Commit, Pause), ("take {p}.q",), consume_in_transactions, True),
    Row("poison acknowledgement", (Nack,), ("take {p}.q",), reject, True),
    Row("consumer of a topic", (Subscribe,), ("take /topic/{p}.t",), follow),
    Row("browser", (Browse, Credit), ("browse {p}.q",), browse, True),
    Row("temporary destinations", (CreateTemporary, RemoveTemporary), (), use_a_temporary_queue),
    Row("advisories", (), (), watch),
    Row("recovery", (), (), recover),
    Row("end of the connection", (Login, Disconnect), (), lambda client: client.request(
        RemoveInfo(object_id=ConnectionId(client.name), last_delivered_sequence_id=-2))),
]  # fmt: skip


class Case(NamedTuple):
    row: Row
    number: int
    lacks: str | None
    """Right that the user lacks; None if it has just what the row needs."""

    @property
    def user(self) -> str:
        return f"case{self.number}"

    @property
    def prefix(self) -> str:
        return f"p{self.number}"

    def grants(self) -> list[str]:
        """Return the grants, as RIGHT NAME."""
        grants = [need for need in self.row.needs if need != self.lacks]
        if self.lacks is not None:
            right, _, name = self.lacks.partition(" ")
            grants += [f"{other} {name}" for other in EVERYWHERE if other != right] + [f"{right} {{p}}.other"]
        return [grant.replace("{p}", self.prefix) for grant in grants]


CASES = [
    Case(row, 100 * number + place, lacks)
    for number, row in enumerate(ROWS)
    for place, lacks in enumerate([None, *row.needs])
]
USERS = {
    ROOT: [f"{right} {name}" for right in EVERYWHERE for name in (">", "DLQ.>", "/topic/>")],
    "asker": ["send r"],
    "answerer": ["take r"],
    "intruder": ["send r.free"],
}


def users_file(folder: Path) -> Path:
    password, users = folder / "password", folder / "users.toml"
    lines = []
    for name, grants in (USERS | {case.user: case.grants() for case in CASES}).items():
        lines += [f"[user.{name}]", SHARED_PASSWORD]
        for right in EVERYWHERE:
            names = [grant.partition(" ")[2] for grant in grants if grant.startswith(f"{right} ")]
            lines += [f"{right} = {names}"] if names else []
    for file, text in ((password, PASSWORD), (users, "\n".join(lines))):
        file.touch(mode=0o600)
        file.write_text(text)
    return users


@pytest.fixture(scope="module")
def guarded_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    broker = BrokerProcess(folder, ["--users", str(users_file(folder)), "--listen", "openwire://127.0.0.1:0"])
    with broker.running():
        yield broker


@contextmanager
def connecting(broker: BrokerProcess) -> Iterator[Callable[..., JmsUser]]:
    """Return a function that connects a user. All clients are closed at the end."""
    clients: list[JmsUser] = []

    def new(user: str, prefix: str = "", **options: str) -> JmsUser:
        clients.append(JmsUser(broker, user, prefix, **options))
        return clients[-1]

    try:
        yield new
    finally:
        for client in clients:
            client.close()


@pytest.fixture
def connect(guarded_broker: BrokerProcess) -> Iterator[Callable[..., JmsUser]]:
    with connecting(guarded_broker) as new:
        yield new
    guarded_broker.check_log()


def test_each_command_of_jms_clients_has_a_row() -> None:
    assert {kind for row in ROWS for kind in row.kinds} >= JMS_COMMANDS


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row.name}: {case.lacks or 'all'}")
def test_command_with_just_its_rights_is_executed_and_without_one_is_refused(
    guarded_broker: BrokerProcess, connect: Callable[..., JmsUser], case: Case
) -> None:
    # C23.1
    if case.row.is_filled:
        root = connect(ROOT, case.prefix)
        for _ in range(3):
            send(root)
    client = connect(case.user, case.prefix)
    if case.lacks is None:
        case.row.perform(client)
        return
    with pytest.raises(Refused) as refused:
        case.row.perform(client)
    right, _, name = case.lacks.replace("{p}", case.prefix).partition(" ")
    assert refused.value.class_name == FORBIDDEN
    assert f"may not {right}" in refused.value.text and name in refused.value.text
    client.close()
    watcher = UserClient(guarded_broker.port, ROOT)
    queues = [queue for queue in watcher.ask("queues") if case.prefix in queue["name"].split(".")]
    watcher.close()
    assert [queue["waiting"] for queue in queues] == ([3] if case.row.is_filled else [])


def test_wrong_login_is_refused_without_a_hint(guarded_broker: BrokerProcess) -> None:
    for user, password in (("asker", "wrong"), ("nobody", PASSWORD), (None, None)):
        with pytest.raises(AssertionError, match=r"java\.lang\.SecurityException"):
            JmsClient(guarded_broker, user=user, password=password)


# ---- Temporary destinations: their names can be guessed ----


def ask(asker: JmsUser, answerer: JmsUser, reply_to: PhysicalDestination) -> None:
    """Send a request, and wait until it was dispatched to the answerer."""
    asker.request(asker.message_to(QueueName("r"), reply_to=reply_to))
    delivery = answerer.delivery()
    assert delivery.message is not None and delivery.message.reply_to == reply_to
    answerer.acknowledge(STANDARD, delivery)


def is_refused(client: JmsUser, destination: PhysicalDestination, **fields: Any) -> bool:
    try:
        client.request(client.message_to(destination, **fields))
    except Refused as error:
        assert error.class_name == FORBIDDEN and "reply-to names" in error.text, error.text
        return True
    return False


@pytest.mark.parametrize("kind", [TemporaryQueueName, TemporaryTopicName])
def test_guessed_name_of_a_temporary_destination_gives_nothing(
    connect: Callable[..., JmsUser], kind: type[PhysicalDestination]
) -> None:
    """CVE-2026-54475: ActiveMQ leaves the isolation of temporary destinations to the client."""
    asker, intruder = connect("asker"), connect("intruder")
    private = kind(f"{asker.name}:1")
    # As long as it is not there: dropped, and not made.
    assert not is_refused(intruder, private)
    asker.make(private)
    asker.subscribe(private)
    assert is_refused(intruder, private)
    assert is_refused(
        intruder, QueueName(f"r.free,{'temp-queue' if kind is TemporaryQueueName else 'temp-topic'}://{private.name}")
    )
    assert is_refused(intruder, QueueName("r.free"), reply_to=private)
    for command in (
        ConsumerInfo(consumer_id=intruder.consumer(), destination=private, prefetch_size=1),
        ConsumerInfo(consumer_id=intruder.consumer(), is_browser=True, destination=private, prefetch_size=1),
        DestinationInfo(0, True, ConnectionId(intruder.name), private, 0),
        DestinationInfo(0, True, ConnectionId(asker.name), private, 1),
    ):
        with pytest.raises(Refused) as refused:
            intruder.request(command)
        assert refused.value.class_name == FORBIDDEN
    asker.expect_nothing()


def test_reply_is_allowed_once_the_request_was_dispatched_and_over_a_reconnect_of_both(
    connect: Callable[..., JmsUser],
) -> None:
    # C23.8. None of these clients watches advisories.
    asker, answerer, intruder = connect("asker"), connect("answerer"), connect("intruder")
    answerer.subscribe(QueueName("r"))
    private = asker.temporary()
    asker.make(private)
    asker.subscribe(private)
    assert is_refused(answerer, private)
    ask(asker, answerer, private)
    assert not is_refused(answerer, private)
    assert not is_refused(connect("answerer"), private), "another connection of the user"
    assert not is_refused(connect("asker"), private), "another connection of the owner"
    assert is_refused(intruder, private)
    assert [asker.delivery().message is not None for _ in range(3)] == 3 * [True]
    again = connect("asker", name=asker.name)
    asker.await_end()
    again.make(private)
    again.subscribe(private)
    assert not is_refused(answerer, private)
    assert is_refused(intruder, private)
    assert again.delivery().message is not None


def test_connection_id_stays_with_its_user_after_its_connection_was_lost(
    connect: Callable[..., JmsUser],
) -> None:
    # C26.20
    name = connect("asker").name

    def intrude() -> None:
        with pytest.raises(AssertionError, match=f"the connection id {name} is another user's"):
            connect("intruder", name=name)

    intrude()
    connect("asker", name=name).close()
    for _ in range(3):
        intrude()
    again = connect("asker", name=name)
    intrude()
    again.request(RemoveInfo(object_id=ConnectionId(name)))


def test_composite_with_a_temporary_part_needs_the_right_for_each_part(connect: Callable[..., JmsUser]) -> None:
    """CVE-2026-61487: a composite with a temporary part skipped the access list."""
    asker, answerer = connect("asker"), connect("answerer")
    answerer.subscribe(QueueName("r"))
    private = asker.temporary()
    asker.make(private)
    asker.subscribe(private)
    ask(asker, answerer, QueueName(f"r.done,temp-queue://{private.name}"))
    assert not is_refused(answerer, private), "named by a composite reply-to"
    # The right to one part is none to the other.
    with pytest.raises(Refused, match=r"may not send to /queue/r\.done"):
        answerer.request(answerer.message_to(QueueName(f"r.done,temp-queue://{private.name}")))
    with pytest.raises(Refused, match=r"may not send to /queue/r\.done"):
        answerer.request(answerer.message_to(QueueName(f"temp-queue://{private.name},r.done")))
    assert asker.delivery().message is not None
    asker.expect_nothing()


def test_ids_of_another_connection_are_refused_and_the_broker_names_no_user(connect: Callable[..., JmsUser]) -> None:
    root, other = connect(ROOT), connect(ROOT)
    other.subscribe(QueueName("ids"))
    message = root.message_to(QueueName("ids"), user_id="somebody", arrival=7, broker_in_time=7, redelivery_counter=9)
    root.request(replace(message, target_consumer_id=root.consumer(), is_received_by_bridge=True))
    got = other.delivery().message
    assert got is not None and got.message_id is not None
    assert (got.user_id, got.redelivery_counter, got.target_consumer_id, got.is_received_by_bridge) == (
        None,
        0,
        None,
        False,
    )
    assert got.arrival > 10**12 and got.broker_in_time > 10**12
    foreign = ConnectionId(other.name)
    for command in (
        ProducerInfo(producer_id=other.producer, destination=QueueName("ids")),
        ConsumerInfo(consumer_id=other.consumer(2), destination=QueueName("ids")),
        replace(message, producer_id=other.producer, message_id=MessageId(None, other.producer, 1)),
        MessageAck(0, True, QueueName("ids"), None, other.consumer(), STANDARD, got.message_id, got.message_id, 1),
        TransactionInfo(0, True, foreign, LocalTransactionId(1, foreign), BEGIN),
        replace(message, transaction_id=LocalTransactionId(1, foreign)),
        MessagePull(0, True, other.consumer(), QueueName("ids")),
        ConsumerControl(0, True, QueueName("ids"), consumer_id=other.consumer(), prefetch=0),
        RemoveInfo(object_id=other.consumer()),
        RemoveInfo(object_id=other.producer),
        RemoveInfo(object_id=SessionId(other.name, 1)),
        RemoveInfo(object_id=foreign),
    ):
        with pytest.raises(Refused):
            root.request(command)
    other.acknowledge(STANDARD, MessageDispatch(0, False, other.consumer(), QueueName("ids"), got))
