"""Tests of the session of OpenWire: handshake, login, answers and refusals, without an engine."""

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.openwire_client import CONNECTION, QUEUE, Client, message_id, refusals
from tests.unit.openwire_examples import COMMANDS, structures
from truenext.errors import Code, OtherProtocolError, RemoteProtocolError
from truenext.model.answers import ErrorAnswer
from truenext.model.commands import (
    Begin,
    Close,
    CreateTemporary,
    Credit,
    Disconnect,
    ForgetProducers,
    InvalidFrame,
    Login,
    OpenProducer,
    RemoveTemporary,
    Send,
    SendRun,
    Subscribe,
)
from truenext.model.limits import (
    LOGIN_BYTES_MAX,
    OPENWIRE_FRAME_BYTES_MAX,
    OPENWIRE_MESSAGE_BYTES_MAX,
    PROPERTY_VALUES_MAX,
)
from truenext.model.loose_fields import FieldReader, Tag, TypedValue, encode_map, text_value
from truenext.model.message import OPENWIRE_FORM
from truenext.wire.openwire import producers, transactions
from truenext.wire.openwire.consumers import DELIVERED, INDIVIDUAL, REDELIVERED, STANDARD
from truenext.wire.openwire.fields import decode_structure, encode_frame
from truenext.wire.openwire.handshake import encode_wire_format_info
from truenext.wire.openwire.refusals import exception_class
from truenext.wire.openwire.session import OpenWireSession
from truenext.wire.openwire.structures import (
    BlobMessage,
    BrokerInfo,
    ConnectionControl,
    ConnectionErrorInfo,
    ConnectionId,
    ConnectionInfo,
    ConsumerControl,
    ConsumerId,
    ConsumerInfo,
    ControlCommand,
    DataArrayResponse,
    DestinationInfo,
    ExceptionResponse,
    KeepAliveInfo,
    LocalTransactionId,
    MessageAck,
    MessageDispatch,
    MessageId,
    MessagePull,
    ProducerAck,
    ProducerId,
    ProducerInfo,
    QueueName,
    RemoveInfo,
    RemoveSubscriptionInfo,
    Response,
    SessionId,
    SessionInfo,
    ShutdownInfo,
    Structure,
    TemporaryQueueName,
    TextMessage,
    Throwable,
    TopicName,
    TransactionInfo,
    WireCommand,
    WireFormatInfo,
    XATransactionId,
)

WIRE_FORMAT_INFO = b"\x01ActiveMQ" + struct.pack(">i?ii", 12, True, 4, 0)
FAULT = ErrorAnswer("no", Code.NOT_SUPPORTED, "no", None)


def frame_of(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def command(kind: int, *, number: int = 7, is_response_required: bool = True, body: bytes = b"") -> bytes:
    return frame_of(struct.pack(">Bi?", kind, number, is_response_required) + body)


def new_session() -> OpenWireSession:
    return OpenWireSession(session_id="me", identity="b1", server_name="x")


def receive(session: OpenWireSession, data: bytes, size: int) -> None:
    for at in range(0, len(data), size):
        assert list(session.receive(data[at : at + size])) == []


def negotiated() -> OpenWireSession:
    session = new_session()
    receive(session, frame_of(WIRE_FORMAT_INFO), 100)
    session.outgoing.clear()
    return session


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_wire_format_info_is_answered_once_with_loose_encoding(size: int) -> None:
    session = new_session()
    assert session.is_opening and not session.outgoing
    assert session.replies.encode_fault(FAULT) == b"", "nothing is sent before the client's"
    receive(session, frame_of(WIRE_FORMAT_INFO), size)
    assert bytes(session.outgoing) == encode_wire_format_info()
    assert not session.pending and session.replies.encode_fault(FAULT) != b""


def test_client_may_end_without_a_login() -> None:
    session = negotiated()
    receive(session, command(11), 3)
    assert session.is_closed


@pytest.mark.parametrize("data", [command(10, is_response_required=False), frame_of(b"\0")])
def test_keep_alive_infos_do_not_count_towards_the_bytes_of_a_login(data: bytes) -> None:
    receive(negotiated(), data * LOGIN_BYTES_MAX, 1000)


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (LOGIN_BYTES_MAX, f"more than {LOGIN_BYTES_MAX} bytes before ConnectionInfo"),
        (2**31 - 1, "at most"),
        (2**32 - 1, "at most"),
    ],
)
def test_larger_login_is_refused_before_it_is_complete(size: int, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        list(negotiated().receive(struct.pack(">I", size)))


@pytest.mark.parametrize("data", [command(3), frame_of(b"\0"), frame_of(b"\x01activemq" + bytes(9))])
def test_first_command_other_than_wire_format_info_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="WireFormatInfo") as refused:
        list(new_session().receive(data))
    assert refused.value.code is Code.MALFORMED_FRAME


@pytest.mark.parametrize("session", [new_session(), negotiated()])
def test_frame_without_bytes_is_refused(session: OpenWireSession) -> None:
    with pytest.raises(RemoteProtocolError, match=r"without a type|WireFormatInfo"):
        list(session.receive(frame_of(b"") + frame_of(WIRE_FORMAT_INFO)))


def test_other_protocol_is_named() -> None:
    with pytest.raises(OtherProtocolError, match="the client speaks STOMP, and this port speaks OpenWire"):
        list(new_session().receive(b"CONNECT\naccept-version:1.2\n\n\0"))


@pytest.mark.parametrize(("offered_ms", "agreed_s"), [(3000, 3), (90_000, 30), (0, 0)])
def test_silence_is_judged_by_the_shorter_time_after_the_first_keep_alive(offered_ms: int, agreed_s: int) -> None:
    session = new_session()
    receive(session, encode_wire_format_info(offered_ms), 1000)
    assert session.beat_check_s == agreed_s / 3
    assert session.silence_limit_s == (agreed_s + 10 if agreed_s else 0)


# ---- Login ----


def test_login_becomes_a_command_and_is_answered_after_the_broker_has_named_itself() -> None:
    client = Client(logs_in=False)
    info = ConnectionInfo(1, True, ConnectionId("ID:a-1:1"), "me", "secret", "ann")
    client.send(info)
    assert client.take_commands() == [
        Login(user="ann", passcode="secret", is_jms_client=True, connection_id="ID:a-1:1")
    ]
    broker, control, response = client.take_answers()
    assert isinstance(broker, BrokerInfo) and broker.broker_name == "x"
    assert isinstance(control, ConnectionControl) and control == ConnectionControl()
    assert response == Response(correlation_id=1)
    assert (client.session.client_id, client.session.is_connected) == ("me", True)


@pytest.mark.parametrize("is_fault_tolerant", [False, True])
def test_optimize_acknowledge_is_switched_off_on_failover_alone(is_fault_tolerant: bool) -> None:
    client = Client(logs_in=False)
    client.send(ConnectionInfo(1, True, ConnectionId("ID:a-1:1"), is_fault_tolerant=is_fault_tolerant))
    client.take_commands()
    broker, *_ = client.take_answers()
    assert isinstance(broker, BrokerInfo) and broker.is_fault_tolerant == is_fault_tolerant


@pytest.mark.parametrize("name", ["", "plain", "ID:a,b-1:1", "ID:a/b-1:1", "ID:\n-1:1", "ID:" + "x" * 300])
def test_login_with_an_id_that_can_be_no_part_of_an_address_is_refused(name: str) -> None:
    client = Client(logs_in=False)
    with pytest.raises(RemoteProtocolError, match="connection id") as refused:
        client.send(ConnectionInfo(1, True, ConnectionId(name)))
    assert refused.value.code is Code.LOGIN and not client.session.is_connected


@pytest.mark.parametrize("field", ["user_name", "password", "client_id"])
def test_login_with_a_text_that_is_no_unicode_is_refused(field: str) -> None:
    """The broker hashes user and password, and logs the client id."""
    client = Client(logs_in=False)
    with pytest.raises(RemoteProtocolError, match="half of a surrogate pair") as refused:
        client.send(replace(ConnectionInfo(1, True, ConnectionId("ID:a-1:1")), **{field: "a\ud83d"}))
    assert refused.value.code is Code.LOGIN and not client.session.is_connected
    client = Client(logs_in=False)
    client.send(replace(ConnectionInfo(1, True, ConnectionId("ID:a-1:1")), **{field: "a\U0001f600"}))
    assert client.session.is_connected


def test_wrong_login_is_a_security_exception_to_the_request() -> None:
    client = Client(logs_in=False)
    client.refuses = lambda command: isinstance(command, Login)
    with pytest.raises(RemoteProtocolError, match="wrong"):
        client.send(ConnectionInfo(7, True, ConnectionId("ID:a-1:1")))
    fault = ErrorAnswer("wrong", Code.LOGIN, "wrong", client.session.last_receipt)
    client.read(client.session.replies.encode_fault(fault))
    answer = client.take_answers()[-1]
    assert answer == ExceptionResponse(correlation_id=7, exception=Throwable("java.lang.SecurityException", "wrong"))


def test_busy_broker_says_nothing_to_a_login_so_that_the_client_tries_again() -> None:
    client = Client(logs_in=False)
    fault = ErrorAnswer("busy", Code.BUSY, "busy", "1")
    assert client.session.replies.encode_fault(fault) == b""
    assert Client().session.replies.encode_fault(fault) != b""


@pytest.mark.parametrize("structure", [SessionInfo(2, True), MessagePull(2), TransactionInfo(2)])
def test_command_before_the_login_ends_the_connection(structure: Structure) -> None:
    client = Client(logs_in=False)
    with pytest.raises(RemoteProtocolError, match="before ConnectionInfo"):
        client.send(structure)


def test_connection_control_may_come_before_the_login() -> None:
    client = Client(logs_in=False)
    client.send(ConnectionControl(1, is_fault_tolerant=True))
    assert client.take_commands() == []


# ---- Answers ----

OWN = ConnectionId(CONNECTION)
TEMPORARY = TemporaryQueueName(f"{CONNECTION}:1")
ADVISORIES = TopicName("ActiveMQ.Advisory.TempQueue")
REQUESTS: list[WireCommand] = [
    SessionInfo(7, True, SessionId(CONNECTION, 1)),
    ProducerInfo(7, True, ProducerId(CONNECTION, 1, 1)),
    ProducerInfo(7, True, ProducerId(CONNECTION, 1, 1), QUEUE),
    ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=QUEUE, prefetch_size=3),
    ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), True, QUEUE),
    ConsumerInfo(7, True, ConsumerId(CONNECTION, -1, 1), destination=ADVISORIES),
    DestinationInfo(7, True, OWN, TEMPORARY, 0),
    DestinationInfo(7, True, OWN, TEMPORARY, 1),
    TransactionInfo(7, True, OWN, LocalTransactionId(1, OWN), 0),
    TransactionInfo(7, True, OWN, LocalTransactionId(1, OWN), 4),
    TransactionInfo(7, True, OWN, None, 5),
    RemoveInfo(7, True, ConsumerId(CONNECTION, 1, 1)),
    RemoveInfo(7, True, ProducerId(CONNECTION, 1, 1)),
    RemoveInfo(7, True, SessionId(CONNECTION, 1)),
    RemoveInfo(7, True, OWN),
    ConsumerControl(7, True, QUEUE, consumer_id=ConsumerId(CONNECTION, 1, 1), prefetch=4),
    ConnectionControl(7, True),
    MessagePull(7, True, ConsumerId(CONNECTION, 1, 1)),
]
REFUSED: list[WireCommand] = [
    ProducerInfo(7, True, ProducerId("ID:other-1:1", 1, 1)),
    ConsumerInfo(7, True, ConsumerId("ID:other-1:1", 1, 1), destination=QUEUE),
    SessionInfo(7, True, SessionId("ID:other-1:1", 1)),
    RemoveInfo(7, True, ConnectionId("ID:other-1:1")),
    TransactionInfo(7, True, OWN, LocalTransactionId(1, ConnectionId("ID:other-1:1")), 0),
    TransactionInfo(7, True, OWN, XATransactionId(1, b"a", b"b"), 0),
    TransactionInfo(7, True, OWN, XATransactionId(1, b"a", b"b"), 1),
    ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1)),
    ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=QueueName("a,b")),
    ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=QueueName("a.>")),
    ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=TopicName("ActiveMQ.Advisory.Connection")),
    ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=TopicName("t"), subscription_name="s"),
    ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=TopicName("t"), is_no_local=True),
    ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=QUEUE, selector="a ="),
    ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=QUEUE, is_network_subscription=True),
    ProducerInfo(7, True, ProducerId(CONNECTION, 1, 1), TopicName("ActiveMQ.Advisory.Connection")),
    ProducerInfo(7, True, ProducerId(CONNECTION, 1, 1), QueueName("ActiveMQ.Statistics.Broker")),
    ProducerInfo(7, True, ProducerId(CONNECTION, 1, 1), QueueName("")),
    DestinationInfo(7, True, OWN, QUEUE, 1),
    RemoveSubscriptionInfo(7, True, OWN, "s", "me"),
    ControlCommand(7, True, "shutdown"),
    BrokerInfo(7, True),
    BlobMessage(7, True, message_id=message_id(1)),
    MessageDispatch(7, True),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_request_is_answered_once(request_: WireCommand) -> None:
    client = Client()
    client.send(request_)
    (answer,) = client.take_answers()
    expected = DataArrayResponse if isinstance(request_, TransactionInfo) and request_.operation == 5 else Response
    assert type(answer) is expected and isinstance(answer, Response) and answer.correlation_id == 7


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_command_that_asks_for_no_answer_gets_none(request_: WireCommand) -> None:
    client = Client()
    client.send(replace(request_, response_required=False))
    assert client.take_answers() == []


def message_with(**fields: Any) -> TextMessage:
    producer_id = ProducerId(CONNECTION, 1, 1)
    return TextMessage(7, True, producer_id, message_id=MessageId(None, producer_id, 1), **fields)


MANY = {str(number): TypedValue(Tag.NULL, None) for number in range(PROPERTY_VALUES_MAX)}
OF_MANY: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "group": ({"group_id": "g" * 255}, {"group_id": "g" * 256}, "JMSXGroupID of 256 characters; at most 255"),
    "group that is no ASCII": ({"group_id": "ä" * 255}, {"group_id": "ä" * 256}, "JMSXGroupID of 256 characters"),
    "properties": (
        {"marshalled_properties": encode_map(MANY)},
        {"marshalled_properties": encode_map(MANY | {"a": TypedValue(Tag.NULL, None)})},
        "message with more than 1024 properties, and values in these",
    ),
    "values in a list": (
        {"marshalled_properties": encode_map({"a": TypedValue(Tag.LIST, list(MANY.values())[1:])})},
        {"marshalled_properties": encode_map({"a": TypedValue(Tag.LIST, [TypedValue(Tag.INTEGER, 1)] * 1024)})},
        "message with more than 1024 properties, and values in these",
    ),
    "values in maps of a map": (
        {"marshalled_properties": encode_map({"a": TypedValue(Tag.MAP, {"b": TypedValue(Tag.NULL, None)})})},
        {"marshalled_properties": encode_map({"a": TypedValue(Tag.MAP, {"b": TypedValue(Tag.MAP, MANY)})})},
        "message with more than 1024 properties, and values in these",
    ),
}


@pytest.mark.parametrize("is_usual", [True, False], ids=["usual", "unusual"])
@pytest.mark.parametrize(("fits", "exceeds", "reason"), OF_MANY.values(), ids=OF_MANY)
def test_message_with_too_many_of_something_is_refused_alone(
    fits: dict[str, Any], exceeds: dict[str, Any], reason: str, is_usual: bool
) -> None:
    client = Client()
    usual = replace(message_with(destination=QUEUE), is_droppable=not is_usual)
    client.send(replace(usual, **fits), replace(usual, command_id=8, **exceeds), replace(usual, command_id=9))
    assert [type(command) for command in client.take_commands()] == [Send, InvalidFrame, Send]
    answers = client.take_answers()
    assert [answer.correlation_id for answer in answers if isinstance(answer, Response)] == [7, 8, 9]
    ((name, text),) = refusals(answers)
    assert name == "javax.jms.ResourceAllocationException" and reason in text
    # It is no part of a run, either.
    run = [replace(usual, response_required=False)] * 2
    client.send(*run, replace(run[0], **exceeds), *run)
    assert isinstance(client.take_answers()[-1], ConnectionErrorInfo)


def test_transaction_of_a_message_with_a_group_that_is_too_long_cannot_be_committed() -> None:
    client = Client()
    client.control(0)
    usual = message_with(destination=QUEUE, transaction_id=client.transaction())
    client.take_commands()
    client.send(replace(usual, response_required=False, group_id="g" * 256))
    (refused,) = client.take_commands()
    assert isinstance(refused, InvalidFrame) and refused.transaction is not None


def ack_of(client: Client, kind: int, sequence: int = 1, **options: Any) -> MessageAck:
    named = message_id(sequence)
    return MessageAck(9, False, QUEUE, None, client.consumer_id(**options), kind, named, named, 1)


@pytest.mark.parametrize("is_ended", [False, True])
def test_each_frame_becomes_a_command_so_that_other_connections_are_served_in_between(is_ended: bool) -> None:
    client = Client()
    client.send(DestinationInfo(7, False, OWN, TEMPORARY, 0))
    client.send(ConsumerInfo(7, False, ConsumerId(CONNECTION, -1, 1), destination=ADVISORIES))
    client.consume(3)
    client.consume(3, value=2, is_browser=True)
    client.consume(3, value=3)
    client.deliver(1, 2, 3)
    client.deliver(1, subscription="1:2")
    client.control(0)
    if is_ended:
        client.send(RemoveInfo(7, True, OWN))
    frames = [
        *REQUESTS[:2],
        *REQUESTS[:2],
        replace(ack_of(client, STANDARD, 3), transaction_id=client.transaction()),
        *(ack_of(client, kind) for kind in (DELIVERED, REDELIVERED, INDIVIDUAL, INDIVIDUAL)),
        *(ack_of(client, DELIVERED, value=value) for value in (2, 3)),
        ack_of(client, DELIVERED, session=-1),
        *REQUESTS[2:],
        KeepAliveInfo(8, True),
    ]
    for frame in frames:
        commands = list(client.session.receive(encode_frame(replace(frame, response_required=False))))
        assert commands, frame


@pytest.mark.parametrize("request_", REFUSED, ids=lambda each: type(each).__name__)
def test_refused_request_is_answered_once_and_alone(request_: WireCommand) -> None:
    client = Client()
    client.send(request_, KeepAliveInfo(8, True))
    refusal, alive = client.take_answers()
    if isinstance(alive, ExceptionResponse):
        refusal, alive = alive, refusal
    assert isinstance(refusal, ExceptionResponse) and refusal.correlation_id == 7
    assert isinstance(alive, KeepAliveInfo)
    assert [type(command) for command in client.take_commands()] == [InvalidFrame]


def test_structure_that_is_no_command_is_refused_without_the_id_of_the_command_before() -> None:
    client = Client()
    client.send(SessionInfo(7, True, SessionId(CONNECTION, 1)), ConnectionId("x"))
    answer, refusal = client.take_answers()
    assert answer == Response(correlation_id=7) and isinstance(refusal, ConnectionErrorInfo)


@pytest.mark.parametrize("request_", REFUSED, ids=lambda each: type(each).__name__)
def test_refused_command_that_asks_for_no_answer_is_a_connection_error(request_: WireCommand) -> None:
    client = Client()
    client.send(replace(request_, response_required=False))
    (answer,) = client.take_answers()
    assert isinstance(answer, ConnectionErrorInfo) and answer.connection_id == OWN


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (Code.FORBIDDEN, "javax.jms.JMSSecurityException"),
        (Code.DESTINATION, "javax.jms.InvalidDestinationException"),
        (Code.SELECTOR, "javax.jms.InvalidSelectorException"),
        (Code.NO_SPACE, "javax.jms.ResourceAllocationException"),
        (Code.NOT_SUPPORTED, "javax.jms.JMSException"),
    ],
)
def test_code_of_a_refusal_chooses_the_exception(code: Code, name: str) -> None:
    assert exception_class(ErrorAnswer("no", code, "no")) == name


@pytest.mark.parametrize(
    ("cause", "name"),
    [
        (Code.FORBIDDEN, "JMSSecurityException"),
        (Code.NO_SPACE, "ResourceAllocationException"),
        (Code.LIMIT, "ResourceAllocationException"),
        (Code.DESTINATION, "InvalidDestinationException"),
        (Code.SELECTOR, "InvalidSelectorException"),
        (Code.NOT_SUPPORTED, "JMSException"),
        (Code.COMMAND, "JMSException"),
        (Code.HEADER, "JMSException"),
        (Code.MALFORMED_FRAME, "JMSException"),
        (Code.NOT_FOUND, "TransactionRolledBackException"),
        (Code.NOT_HELD, "TransactionRolledBackException"),
        (None, "TransactionRolledBackException"),
    ],
)
def test_commit_of_a_refused_transaction_has_the_exception_of_the_refusal_if_a_repeat_cannot_help(
    cause: Code | None, name: str
) -> None:
    assert exception_class(ErrorAnswer("no", Code.ROLLBACK_ONLY, "no", cause=cause)) == f"javax.jms.{name}"
    assert exception_class(ErrorAnswer("no", Code.NO_TRANSACTION, "no", cause=cause)).endswith("RolledBackException")


NOT_OFFERED: dict[str, tuple[WireCommand, str, str]] = {
    "durable subscription": (
        ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=TopicName("t"), subscription_name="s"),
        "JMSException",
        "the durable subscription 's': this broker does not support it; consume from a queue",
    ),
    "end of a durable subscription": (
        RemoveSubscriptionInfo(7, True, OWN, "s", "me"),
        "JMSException",
        "durable subscriptions: this broker does not support it; consume from a queue",
    ),
    "wildcard": (
        ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=QueueName("a.>")),
        "JMSException",
        "a consumer of a pattern, a.>: this broker does not support it; make a consumer of each destination",
    ),
    "send to a wildcard": (
        message_with(destination=TopicName("a.*")),
        "InvalidDestinationException",
        "send to a.*: it is a pattern, send to a queue or topic",
    ),
    "schedule": (
        message_with(
            destination=QUEUE, marshalled_properties=encode_map({"AMQ_SCHEDULED_CRON": text_value("* * * * *")})
        ),
        "JMSException",
        "scheduled messages by AMQ_SCHEDULED_CRON: this broker does not support it; send the message when it is due",
    ),
    "statistics": (
        message_with(destination=TopicName("ActiveMQ.Statistics.Broker")),
        "JMSException",
        "statistics by ActiveMQ.Statistics.Broker: this broker does not support it; use the command truenext status",
    ),
    "XA transaction": (
        TransactionInfo(7, True, OWN, XATransactionId(1, b"a", b"b"), 0),
        "XAException",
        "XA transactions: this broker does not support them; use local transactions; xaErrorCode:-3",
    ),
    "network connector": (
        BrokerInfo(7, True, is_network_connection=True),
        "JMSException",
        "networks of brokers: this broker does not support it; connect clients only",
    ),
    "subscription of a network": (
        ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=QUEUE, is_network_subscription=True),
        "JMSException",
        "networks of brokers: this broker does not support it; connect clients only",
    ),
    "ControlCommand": (
        ControlCommand(7, True, "shutdown"),
        "JMSException",
        "ControlCommand: this broker does not support it; use the command truenext",
    ),
    "blob": (
        BlobMessage(7, True, message_id=message_id(1), remote_blob_url="http://files/1"),
        "JMSException",
        "BlobMessages: this broker does not support it; send the content as a BytesMessage",
    ),
    "composite consumer": (
        ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=QueueName("a,b")),
        "JMSException",
        "a consumer of several destinations, a,b: this broker does not support it; make a consumer of each",
    ),
    "advisory": (
        ConsumerInfo(7, True, ConsumerId(CONNECTION, 1, 1), destination=TopicName("ActiveMQ.Advisory.Queue")),
        "JMSException",
        "the advisory ActiveMQ.Advisory.Queue: this broker does not support it; only those of temporary destinations "
        "are sent",
    ),
    "send of an advisory": (
        message_with(destination=QueueName("q,topic://ActiveMQ.Advisory.TempQueue")),
        "InvalidDestinationException",
        "send to ActiveMQ.Advisory.TempQueue: only the broker sends advisories",
    ),
    "removal of a queue": (
        DestinationInfo(7, True, OWN, QUEUE, 1),
        "JMSException",
        "commands that create or remove a queue or topic: this broker does not support it; use the command truenext",
    ),
}


@pytest.mark.parametrize("what", NOT_OFFERED)
def test_feature_that_is_not_offered_is_refused_by_name_and_the_text_says_what_to_use(what: str) -> None:
    request_, name, text = NOT_OFFERED[what]
    client = Client()
    client.send(request_)
    ((found, said),) = refusals(client.take_answers())
    assert found.rpartition(".")[2] == name and said == text
    assert [type(command) for command in client.take_commands()] == [InvalidFrame]


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (ConnectionInfo(7, True, OWN), "a second ConnectionInfo on one connection"),
        (ConnectionErrorInfo(7, True), "ConnectionError is not for clients to send"),
    ],
)
def test_command_at_the_wrong_place_is_refused_by_its_name_in_the_protocol(structure: Structure, reason: str) -> None:
    client = Client()
    client.send(structure)
    (refused,) = client.take_commands()
    assert isinstance(refused, InvalidFrame) and refused.reason == reason


def test_message_before_the_login_is_refused_by_its_name_in_the_protocol() -> None:
    client = Client(logs_in=False)
    with pytest.raises(RemoteProtocolError, match=r"^message of OpenWire before ConnectionInfo"):
        client.send(message_with(destination=QUEUE))


def test_recover_finds_no_prepared_transaction() -> None:
    client = Client()
    client.send(TransactionInfo(7, True, OWN, None, 5))
    assert client.take_answers() == [DataArrayResponse(correlation_id=7, data=())]


@pytest.mark.parametrize("version", [12, 13, 2**31 - 1])
def test_later_version_tight_encoding_and_cache_are_negotiated_away(version: int) -> None:
    session = OpenWireSession(session_id="s", identity="b", server_name="x")
    wanted = dict.fromkeys(("TightEncodingEnabled", "CacheEnabled", "StackTraceEnabled"), TypedValue(Tag.BOOLEAN, True))
    assert list(session.receive(encode_frame(WireFormatInfo(version, encode_map(wanted))))) == []
    offered = decode_structure(FieldReader(bytes(session.outgoing[4:])))
    assert isinstance(offered, WireFormatInfo) and offered.version == 12 and offered.properties is not None
    properties = FieldReader(offered.properties).read_map() or {}
    assert all(properties[name].value is False for name in wanted)


def test_xa_exception_ends_with_its_code() -> None:
    client = Client()
    client.send(TransactionInfo(7, True, OWN, XATransactionId(1, b"a", b"b"), 1))
    ((name, text),) = refusals(client.take_answers())
    assert name == "javax.transaction.xa.XAException" and text.endswith("xaErrorCode:-3")


def test_connection_ends_with_its_removal_and_shutdown() -> None:
    client = Client()
    client.consume()
    client.send(RemoveInfo(7, True, OWN, 3))
    assert client.take_commands() == [Disconnect([], 3)]
    assert not client.session.is_closed
    client.send(SessionInfo(8, False, SessionId(CONNECTION, 1)))
    assert client.take_answers() == [Response(correlation_id=7)], "nothing is done after the end"
    client.send(ShutdownInfo(9))
    assert client.session.is_closed


def test_request_after_the_end_of_its_connection_is_refused() -> None:
    client = Client()
    client.send(RemoveInfo(7, True, OWN, 3))
    client.take_answers()
    client.take_commands()
    client.send(ConnectionInfo(8, True, OWN))
    client.send(text_message(command_id=9, response_required=True))
    refused = client.take_answers()
    assert [answer.correlation_id for answer in refused if isinstance(answer, ExceptionResponse)] == [8, 9]
    assert refusals(refused) == 2 * [
        ("javax.jms.IllegalStateException", "the client has ended this connection; make a new one")
    ]
    assert client.take_commands() == []


def test_shutdown_without_removal_leaves_a_lost_connection() -> None:
    client = Client()
    client.send(ShutdownInfo(9))
    assert not client.session.is_closed


def test_end_of_a_session_ends_its_consumers_in_one_step_and_forgets_its_producers() -> None:
    client = Client()
    client.consume(value=1, session=1)
    client.consume(value=2, session=1)
    client.consume(value=1, session=2)
    client.send(ProducerInfo(7, False, ProducerId(CONNECTION, 1, 1), QUEUE))
    client.send(ProducerInfo(7, False, ProducerId(CONNECTION, 1, 2), QUEUE))
    client.take_commands()
    client.send(RemoveInfo(7, True, SessionId(CONNECTION, 1), 5))
    assert client.take_commands() == [Close(["1:1", "1:2"], 5), ForgetProducers([f"{CONNECTION}:1:1"])]
    client.send(RemoveInfo(7, True, SessionId(CONNECTION, 2), -2))
    assert client.take_commands() == [Close(["2:1"], None), ForgetProducers([f"{CONNECTION}:2:1"])]


@pytest.mark.parametrize("split", [1, 3, 64])
def test_split_of_the_bytes_changes_nothing(split: int) -> None:
    client = Client()
    data = b"".join(map(encode_frame, REQUESTS[:4]))
    for at in range(0, len(data), split):
        client.write(data[at : at + split])
    assert len(client.take_answers()) == 4
    assert [type(command) for command in client.take_commands()] == [Subscribe, Credit], "the producer is known"


@settings(max_examples=150)
@given(st.lists(st.sampled_from([each for each in COMMANDS if each != 11]).flatmap(structures), max_size=5))
def test_any_commands_are_answered_once_each_if_they_ask_for_it(commands: list[Structure]) -> None:
    # One of the ids of the examples.
    client = Client(connection="ID:b-1:2")
    for number, command in enumerate(commands, 100):
        if isinstance(command, RemoveInfo) and isinstance(command.object_id, ConnectionId):
            continue
        if isinstance(command, WireCommand):
            command = replace(command, command_id=number)
        try:
            client.send(command)
        except RemoteProtocolError as error:
            # A message without what each has: the connection ends.
            assert error.code is Code.MALFORMED_FRAME
            return
        answered = [each.correlation_id for each in client.take_answers() if isinstance(each, Response)]
        asks = isinstance(command, WireCommand) and command.response_required and not isinstance(command, KeepAliveInfo)
        assert answered == [number] * asks


# ---- Messages ----


def text_message(**options: Any) -> TextMessage:
    sequence = options.pop("sequence", 1)
    producer_id = options.pop("producer_id", ProducerId(CONNECTION, 1, 1))
    options.setdefault("destination", QUEUE)
    options.setdefault("command_id", 7)
    options.setdefault("content", b"\0\0\0\1a")
    return TextMessage(producer_id=producer_id, message_id=MessageId(None, producer_id, sequence), **options)


def sent(client: Client) -> Send:
    (send,) = client.take_commands()
    assert isinstance(send, Send)
    return send


def test_persistent_message_of_a_fault_tolerant_client_has_a_number() -> None:
    client = Client()
    client.send(text_message(is_persistent=True, response_required=True, sequence=12))
    send = sent(client)
    assert (send.producer, send.number, send.transaction) == (f"{CONNECTION}:1:1", 12, None)
    assert send.destination.name == "q" and send.message.form == OPENWIRE_FORM
    assert client.take_answers() == [Response(correlation_id=7)]


def test_transient_message_and_message_in_a_transaction_have_no_number() -> None:
    client = Client()
    client.send(text_message())
    assert sent(client).producer is None
    client.control(0)
    client.take_commands()
    client.send(text_message(is_persistent=True, transaction_id=client.transaction()))
    send = sent(client)
    assert (send.producer, send.transaction) == (None, "1")


def test_equal_destinations_of_messages_are_one_object() -> None:
    client = Client()
    client.send(text_message())
    first = sent(client)
    client.send(text_message(sequence=2))
    assert sent(client).destination is first.destination


def test_plain_messages_of_one_read_are_sent_as_a_run() -> None:
    client = Client()
    messages = [text_message(sequence=number) for number in range(3)]
    client.send(*messages, text_message(destination=QueueName("b")))
    first, run, send = client.take_commands()
    assert isinstance(first, Send) and isinstance(run, SendRun) and len(run) == 2 and isinstance(send, Send)
    assert (run.destination.name, send.destination.name) == ("q", "b")


def test_run_that_the_engine_does_not_accept_is_sent_one_by_one() -> None:
    client = Client()
    client.executes_runs = False
    client.refuses = lambda command: isinstance(command, Send) and command.message.priority == 2
    client.send(text_message())
    client.take_commands()
    client.send(*[text_message(sequence=number, priority=number) for number in range(4)])
    run, *sends = client.take_commands()
    assert isinstance(run, SendRun) and [send.message.priority for send in sends if isinstance(send, Send)] == [0, 1, 3]
    assert len(refusals(client.take_answers())) == 1


def test_messages_of_one_read_in_a_transaction_are_sent_in_it() -> None:
    client = Client()
    client.control(0)
    client.take_commands()
    client.refuses = lambda command: isinstance(command, Send) and command.message.priority == 2
    transaction = client.transaction()
    client.send(*[text_message(sequence=each, priority=each, transaction_id=transaction) for each in range(5)])
    sends = [command for command in client.take_commands() if isinstance(command, Send)]
    assert [(send.message.priority, send.transaction) for send in sends] == [(each, "1") for each in (0, 1, 3, 4)]
    assert len(refusals(client.take_answers())) == 1


def test_messages_of_one_read_in_a_transaction_of_another_connection_are_refused_alone() -> None:
    client = Client()
    transaction = LocalTransactionId(1, ConnectionId("ID:other-1:1"))
    client.send(*[text_message(sequence=number, transaction_id=transaction) for number in range(3)])
    assert [type(command) for command in client.take_commands()] == 3 * [InvalidFrame]


SIZES_OF_LARGE_MESSAGES = {
    "announced": OPENWIRE_MESSAGE_BYTES_MAX + 1000,
    "beyond": OPENWIRE_FRAME_BYTES_MAX + 1000,
    "far beyond": 2 * OPENWIRE_FRAME_BYTES_MAX,
}


@pytest.mark.parametrize("cut", [5, 60, 70_000, OPENWIRE_FRAME_BYTES_MAX + 500, None])
@pytest.mark.parametrize("size", SIZES_OF_LARGE_MESSAGES.values(), ids=SIZES_OF_LARGE_MESSAGES)
def test_message_that_is_too_large_is_refused_alone_with_its_id(size: int, cut: int | None) -> None:
    client = Client()
    frame = encode_frame(text_message(response_required=True, content=bytes(size)))
    client.write(frame[:cut])
    assert len(client.session.pending) <= OPENWIRE_FRAME_BYTES_MAX
    client.write(frame[cut or len(frame) :] + encode_frame(text_message(sequence=2)))
    (answer,) = client.take_answers()
    assert isinstance(answer, ExceptionResponse) and answer.correlation_id == text_message().command_id
    ((name, text),) = refusals([answer])
    assert name == "javax.jms.ResourceAllocationException" and f"at most {OPENWIRE_MESSAGE_BYTES_MAX}" in text
    assert [type(command) for command in client.take_commands()] == [InvalidFrame, Send]


def test_message_that_is_too_large_dooms_its_transaction() -> None:
    client = Client()
    client.control(transactions.BEGIN)
    client.send(text_message(transaction_id=client.transaction(), content=bytes(2 * OPENWIRE_FRAME_BYTES_MAX)))
    assert [command.transaction for command in client.take_commands() if isinstance(command, InvalidFrame)] == ["1"]


def test_run_to_a_destination_that_is_refused_is_refused_for_each_message() -> None:
    client = Client()
    client.send(*[text_message(sequence=number, destination=QueueName("a.*")) for number in range(3)])
    assert [type(command) for command in client.take_commands()] == 3 * [InvalidFrame]


@pytest.mark.parametrize(
    "options",
    [
        {"response_required": True},
        {"is_persistent": True},
        {"reply_to": QueueName("r")},
        {"group_id": "g"},
        {"expiration": 2**40},
    ],
)
def test_message_with_more_than_a_place_is_sent_for_itself(options: dict[str, Any]) -> None:
    client = Client()
    client.send(text_message(**options), text_message(sequence=2, **options))
    assert [type(command) for command in client.take_commands()] == [Send, Send]


@pytest.mark.parametrize(
    "options",
    [
        {"destination": TopicName("ActiveMQ.Advisory.Queue")},
        {"destination": QueueName("a,topic://ActiveMQ.Advisory.Queue")},
        {"destination": QueueName("a.*")},
        {"producer_id": ProducerId("ID:other-1:1", 1, 1)},
        {"marshalled_properties": encode_map({"AMQ_SCHEDULED_DELAY": TypedValue(Tag.LONG, 5)})},
    ],
)
def test_refused_message_in_a_transaction_is_named_with_it(options: dict[str, Any]) -> None:
    client = Client()
    client.control(0)
    client.take_commands()
    client.send(text_message(transaction_id=client.transaction(), **options))
    (command,) = client.take_commands()
    assert isinstance(command, InvalidFrame) and command.transaction == "1"


def test_content_that_looks_like_a_schedule_is_sent() -> None:
    client = Client()
    client.send(replace(text_message(), content=b"AMQ_SCHEDULED_DELAY"))
    assert sent(client).message.form == OPENWIRE_FORM


def test_message_without_an_answer_widens_its_producers_window() -> None:
    client = Client()
    producer_id = ProducerId(CONNECTION, 1, 1)
    client.send(ProducerInfo(6, False, producer_id, None, window_size=5000))
    properties = encode_map({"a": TypedValue(Tag.LONG, 5)})
    client.send(text_message(marshalled_properties=properties))
    assert client.take_answers() == [ProducerAck(producer_id=producer_id, size=1024 + 5 + len(properties))]
    client.send(text_message(response_required=True))
    assert client.take_answers() == [Response(correlation_id=7)]


def test_producers_of_a_connection_are_limited_and_a_known_one_is_not_counted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producers, "JMS_PRODUCERS_MAX", 3)
    client = Client()
    infos = [ProducerInfo(7, True, ProducerId(CONNECTION, number, 1), QUEUE) for number in range(4)]
    client.send(*infos[:3])
    assert client.take_answers() == 3 * [Response(correlation_id=7)]
    client.take_commands()
    client.send(infos[1])
    assert client.take_answers() == [Response(correlation_id=7)] and client.take_commands() == []
    client.send(infos[3])
    ((name, text),) = refusals(client.take_answers())
    assert (name, text) == (
        "javax.jms.ResourceAllocationException",
        "this connection has 3 producers, the most allowed: close some",
    )
    client.send(RemoveInfo(7, True, infos[0].producer_id), infos[3])
    assert client.take_answers() == 2 * [Response(correlation_id=7)]


def test_consumers_sessions_and_transactions_that_the_engine_refuses_take_no_memory_of_the_session() -> None:
    client = Client()
    client.refuses = lambda _: True
    for number in range(3):
        consumer_id, session_id = ConsumerId(CONNECTION, 1, number), SessionId(CONNECTION, number)
        client.send(ConsumerInfo(7, True, consumer_id, destination=QUEUE), SessionInfo(7, True, session_id))
        client.control(0, number)
    session = client.session
    assert session._consumers.by_subscription == {} and session._transactions._open == {}
    assert len(refusals(client.take_answers())) == 6
    client.refuses = lambda _: False
    client.consume(0)
    client.refuses = lambda _: True
    for _ in range(3):
        client.send(MessagePull(7, False, client.consumer_id(), QUEUE, 0))
    assert client.session._consumers.by_subscription["1:1"].requested == 0


def test_commit_of_another_connections_transaction_ends_none_of_the_same_number() -> None:
    client = Client()
    client.control(0)
    client.send(TransactionInfo(7, True, OWN, LocalTransactionId(1, ConnectionId("ID:other-1:1")), 2))
    assert [type(command) for command in client.take_commands()] == [Begin, InvalidFrame]


def test_refused_command_of_a_temporary_destination_changes_nothing() -> None:
    client = Client()
    own = client.session._advisories._own
    client.refuses = lambda command: isinstance(command, CreateTemporary | RemoveTemporary)
    client.send(DestinationInfo(7, True, OWN, TEMPORARY, 0))
    assert not own
    client.refuses = lambda _: False
    client.send(DestinationInfo(7, True, OWN, TEMPORARY, 0))
    client.refuses = lambda command: isinstance(command, CreateTemporary | RemoveTemporary)
    client.send(DestinationInfo(7, True, OWN, TEMPORARY, 1))
    assert len(own) == 1


def test_refused_pull_and_producer_change_nothing() -> None:
    client = Client(is_reconnect=True)
    client.consume(0)
    client.refuses = lambda command: isinstance(command, Credit | OpenProducer)
    client.send(MessagePull(7, False, client.consumer_id()), ProducerInfo(8, True, ProducerId(CONNECTION, 1, 1), QUEUE))
    assert client.session._consumers.by_subscription["1:1"].requested == 0
    assert not client.session._recovery._producers
