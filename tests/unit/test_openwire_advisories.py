"""Tests of advisories: which connections the broker tells of a temporary destination, and when (C26.16)."""

from collections.abc import Callable

import pytest

from tests.unit.openwire_client import Client, Delivered, refusals
from truenext.model.limits import ADVISORY_CONSUMERS_MAX
from truenext.model.loose_fields import FieldReader
from truenext.model.message import SentMessage
from truenext.model.openwire_message import TEMPORARY_QUEUE, PhysicalName
from truenext.wire.openwire import advisories
from truenext.wire.openwire.advisories import AdvisoryBoard
from truenext.wire.openwire.codec import produced_message
from truenext.wire.openwire.deliveries import AdvisoryEncoder
from truenext.wire.openwire.fields import decode_structure, encode_frame, encode_nested
from truenext.wire.openwire.structures import (
    ConnectionId,
    ConsumerId,
    ConsumerInfo,
    DestinationInfo,
    JmsMessage,
    MessageDispatch,
    MessageId,
    ProducerId,
    QueueName,
    RemoveInfo,
    Structure,
    TemporaryQueueName,
    TemporaryTopicName,
    TextMessage,
    TopicName,
)

OWNER = "ID:owner-1-1:1"
REPLIES = TemporaryQueueName(f"{OWNER}:7")
TOPICS = TopicName("ActiveMQ.Advisory.TempQueue,ActiveMQ.Advisory.TempTopic")


def request(reply_to: TemporaryQueueName = REPLIES) -> SentMessage:
    producer_id = ProducerId(OWNER, 1, 1)
    return produced_message(
        TextMessage(
            producer_id=producer_id,
            destination=QueueName("q"),
            message_id=MessageId(None, producer_id, 1),
            reply_to=reply_to,
        )
    ).message


def subscribed(connection: str, board: AdvisoryBoard, *, user: str = "") -> Client:
    client = Client(connection=connection, board=board, user=user)
    client.send(ConsumerInfo(2, False, client.consumer_id(1, -1), destination=TOPICS, prefetch_size=1000))
    return client


def told(client: Client) -> list[tuple[str, int]]:
    """Return the temporary destinations of which a client was told, with the operation."""
    found = []
    for answer in client.take_answers():
        info = getattr(getattr(answer, "message", None), "data_structure", None)
        if isinstance(info, DestinationInfo):
            assert isinstance(answer, MessageDispatch) and answer.consumer_id == client.consumer_id(1, -1)
            assert info.destination is not None and info.destination.name is not None
            found.append((info.destination.name, info.operation))
    return found


ADDED = [(REPLIES.name, 0)]
REMOVED = [(REPLIES.name, 1)]


def get_request(client: Client, message: SentMessage | None = None) -> None:
    client.deliver(1, message=message or request())


@pytest.fixture
def board() -> AdvisoryBoard:
    return AdvisoryBoard()


def test_process_of_the_owner_is_told_when_it_subscribes_to_advisories_later(board: AdvisoryBoard) -> None:
    owner = Client(connection=OWNER, board=board)
    owner.send(DestinationInfo(3, False, ConnectionId(OWNER), REPLIES))
    first, other = subscribed("ID:owner-1-2:1", board), subscribed("ID:b-1-1:1", board)
    assert (told(first), told(other)) == (ADDED, [])
    owner.send(DestinationInfo(4, False, ConnectionId(OWNER), REPLIES, 1))
    assert told(first) == REMOVED
    assert told(subscribed("ID:owner-1-3:1", board)) == []


def test_client_is_told_once_and_before_the_message(board: AdvisoryBoard) -> None:
    client = subscribed("ID:b-1-1:1", board)
    client.consume()
    get_request(client)
    advisory, message = client.answers
    assert isinstance(advisory, MessageDispatch) and isinstance(message, MessageDispatch)
    assert isinstance(message.message, TextMessage)
    assert told(client) == ADDED
    get_request(client)
    assert told(client) == []


def test_advisory_is_sent_apart_from_the_messages_that_may_be_cancelled(board: AdvisoryBoard) -> None:
    client = subscribed("ID:b-1-1:1", board)
    client.consume()
    parts: list[bytes] = []
    other = request(TemporaryQueueName(f"{OWNER}:8"))
    client.session.replies.encode_deliveries("1:1", [Delivered(1, request()), Delivered(2, other)], parts)
    assert told(client) == [*ADDED, (f"{OWNER}:8", 0)]
    client.read(b"".join(parts))
    assert len(parts) == 2 and told(client) == []


def test_request_of_a_stomp_client_is_told_too(board: AdvisoryBoard) -> None:
    client = subscribed("ID:b-1-1:1", board)
    client.consume()
    header = b"destination:/queue/q\nreply-to:/remote-temp-queue/1f/b\n"
    get_request(client, SentMessage(4, True, 0, header, b""))
    assert told(client) == [("1f/b", 0)]


def test_other_connections_of_the_process_and_user_are_told(board: AdvisoryBoard) -> None:
    client = subscribed("ID:b-1-1:1", board, user="ann")
    same = subscribed("ID:b-1-1:2", board, user="ann")
    other_process = subscribed("ID:b-2-1:1", board, user="ann")
    other_user = subscribed("ID:b-1-1:3", board, user="bob")
    silent = Client(connection="ID:b-1-1:4", board=board, user="ann")
    client.consume()
    get_request(client)
    assert told(client) == told(same) == ADDED
    assert told(other_process) == told(other_user) == told(silent) == []
    later = subscribed("ID:b-1-1:5", board, user="ann")
    assert told(later) == ADDED


def test_client_that_watches_no_advisories_gets_none(board: AdvisoryBoard) -> None:
    client = Client(board=board)
    client.consume()
    get_request(client)
    assert told(client) == []


def owner_of_replies(board: AdvisoryBoard) -> Client:
    owner = Client(connection=OWNER, board=board)
    owner.send(DestinationInfo(3, False, ConnectionId(OWNER), REPLIES, 0))
    return owner


ENDS: list[Callable[[Client], None]] = [
    lambda owner: owner.send(DestinationInfo(4, False, ConnectionId(OWNER), REPLIES, 1)),
    lambda owner: owner.send(RemoveInfo(4, False, ConnectionId(OWNER), 0)),
    lambda owner: owner.session.detach(),
]


@pytest.mark.parametrize("end", ENDS, ids=["removed", "connection removed", "connection lost"])
def test_process_told_of_a_destination_is_told_of_its_end(board: AdvisoryBoard, end: Callable[[Client], None]) -> None:
    owner = owner_of_replies(board)
    client, same = subscribed("ID:b-1-1:1", board), subscribed("ID:b-1-1:2", board)
    other = subscribed("ID:b-2-1:1", board)
    client.consume()
    get_request(client)
    told(client)
    told(same)
    end(owner)
    assert told(client) == told(same) == REMOVED
    assert told(other) == []
    get_request(client)
    assert told(client) == ADDED, "a message may come late"


def test_process_told_of_an_end_is_told_again_if_the_owner_connects_again(board: AdvisoryBoard) -> None:
    owner = owner_of_replies(board)
    client, other = subscribed("ID:b-1-1:1", board), subscribed("ID:b-2-1:1", board)
    client.consume()
    get_request(client)
    owner.session.detach()
    assert told(client) == ADDED + REMOVED
    owner_of_replies(board)
    assert told(client) == ADDED and told(other) == []


def test_process_of_the_owner_is_told_from_the_start(board: AdvisoryBoard) -> None:
    same, other = subscribed("ID:owner-1-1:2", board), subscribed("ID:b-1-1:1", board)
    owner = owner_of_replies(board)
    assert told(same) == ADDED and told(other) == told(owner) == []


def test_refused_removal_is_not_told(board: AdvisoryBoard) -> None:
    owner = owner_of_replies(board)
    client = subscribed("ID:b-1-1:1", board)
    client.consume()
    get_request(client)
    told(client)
    owner.refuses = lambda _: True
    owner.send(DestinationInfo(4, False, ConnectionId(OWNER), REPLIES, 1))
    assert told(client) == []


def test_board_forgets_a_process_with_its_last_connection(board: AdvisoryBoard) -> None:
    clients = [subscribed(f"ID:b-1-1:{number}", board) for number in range(2)]
    clients[0].consume()
    get_request(clients[0])
    for client in clients:
        client.session.detach()
    assert told(subscribed("ID:b-1-1:9", board)) == []


def test_board_remembers_a_limited_number(board: AdvisoryBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advisories, "ANNOUNCED_MAX", 2)
    client = subscribed("ID:b-1-1:1", board)
    client.consume()
    for number in (1, 2, 3, 1):
        get_request(client, request(TemporaryQueueName(f"{OWNER}:{number}")))
    assert told(client) == [(f"{OWNER}:{number}", 0) for number in (1, 2, 3, 1)]


def test_board_remembers_a_limited_number_for_all_processes(
    board: AdvisoryBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advisories, "ALL_ANNOUNCED_MAX", 1)
    one, two = subscribed("ID:b-1-1:1", board), subscribed("ID:c-1-1:1", board)
    for client in (one, two, one):
        client.consume()
        get_request(client)
        assert told(client) == ADDED, "the other one is forgotten"


def test_name_that_is_too_long_for_a_destination_is_not_told(board: AdvisoryBoard) -> None:
    client = subscribed("ID:b-1-1:1", board)
    client.consume()
    get_request(client, request(TemporaryQueueName(f"{OWNER}:{'7' * 600}")))
    assert told(client) == []


def test_consumers_of_advisories_are_limited(board: AdvisoryBoard) -> None:
    client = subscribed("ID:b-1-1:1", board)
    for value in range(2, ADVISORY_CONSUMERS_MAX + 2):
        client.send(ConsumerInfo(value, True, client.consumer_id(value, -1), destination=TOPICS, prefetch_size=1000))
    assert [name for name, _ in refusals(client.take_answers())] == ["javax.jms.ResourceAllocationException"]


def test_acknowledgements_of_advisories_are_ignored(board: AdvisoryBoard) -> None:
    client = subscribed("ID:b-1-1:1", board)
    client.ack(2, None, 1, 751, consumer_id=client.consumer_id(1, -1), response_required=True)
    answers: list[Structure] = client.take_answers()
    assert len(answers) == 1 and client.take_commands() == []


def test_consumer_of_advisories_that_is_added_again_is_told_nothing(board: AdvisoryBoard) -> None:
    owner_of_replies(board)
    client = Client(connection="ID:owner-1-2:1", board=board)
    info = ConsumerInfo(2, True, client.consumer_id(1, -1), destination=TOPICS, prefetch_size=1000)
    client.send(info)
    assert told(client) == ADDED
    client.send(*[info] * (ADVISORY_CONSUMERS_MAX + 1))
    answers = client.take_answers()
    assert len(answers) == ADVISORY_CONSUMERS_MAX + 1 and refusals(answers) == []


def test_further_consumer_of_advisories_is_told_alone(board: AdvisoryBoard) -> None:
    owner_of_replies(board)
    client = subscribed("ID:owner-1-2:1", board)
    assert told(client) == ADDED
    client.send(ConsumerInfo(2, False, client.consumer_id(2, -1), destination=TOPICS, prefetch_size=1000))
    (advisory,) = client.take_answers()
    assert isinstance(advisory, MessageDispatch) and advisory.consumer_id == client.consumer_id(2, -1)


@pytest.mark.parametrize("make", [TemporaryQueueName, TemporaryTopicName])
@pytest.mark.parametrize(
    "consumer_id",
    [ConsumerId("ID:b-1-1:1", -1, 1), ConsumerId("", 2**62 - 1, 2**62 - 1), ConsumerId("\1z\1", 0, 0)],
    ids=["usual", "largest", "zeros"],
)
def test_advisory_has_all_fields_of_its_table(
    make: type[TemporaryQueueName | TemporaryTopicName], consumer_id: ConsumerId
) -> None:
    producer_id = ProducerId("ID:truenext-b1", 0, -1)
    is_topic = make is TemporaryTopicName
    info = DestinationInfo(0, False, ConnectionId(OWNER), make(f"{OWNER}:7"), 1)
    topic = TopicName(f"ActiveMQ.Advisory.Temp{'Topic' if is_topic else 'Queue'}")
    message = JmsMessage(
        producer_id=producer_id,
        destination=topic,
        message_id=MessageId(None, producer_id, 9, 9),
        jms_type="Advisory",
        data_structure=info,
        target_consumer_id=consumer_id,
    )
    frame = AdvisoryEncoder(consumer_id, producer_id).encode(9, encode_nested(info), is_topic=is_topic)
    expected = MessageDispatch(0, False, consumer_id, topic, message)
    assert frame == encode_frame(expected)
    assert decode_structure(FieldReader(frame[4:])) == expected


# ---- Time ----


def names_of(owner: str, count: int) -> list[PhysicalName]:
    return [PhysicalName(TEMPORARY_QUEUE, f"{owner}:{number}") for number in range(count)]


def test_end_of_temporary_destinations_looks_at_no_process_that_was_told_of_none(
    board: AdvisoryBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []

    class Told(dict[PhysicalName, None]):
        def __contains__(self, name: object) -> bool:
            looked.append(name)
            return super().__contains__(name)

    for number in range(5):
        client = subscribed(f"ID:p{number}-1:1", board)
        client.consume()
        get_request(client, request(TemporaryQueueName(f"{OWNER}:{number}")))
    for process, announced in board._announced.items():
        board._announced[process] = Told(announced)
    board.end(names_of(OWNER, 1))
    assert looked == []


def test_board_forgets_all_that_it_was_told(board: AdvisoryBoard) -> None:
    owner = owner_of_replies(board)
    clients = [subscribed(f"ID:p{number}-1:1", board) for number in range(3)]
    for client in clients:
        client.consume()
        get_request(client)
        get_request(client, request(TemporaryQueueName("ID:nobody-1:1:1")))
    owner.session.detach()
    for client in clients:
        client.session.detach()
    assert not board._processes and not board._announced and not board._members and not board._owned
    assert board._announced_count == 0
