"""Deliveries and answers: encodes what the broker sends to a JMS client as OpenWire frames.

A message to a consumer is made of slices of the message's own bytes (model/openwire_message.py), joined once with the
fields of the broker. All other frames are rare, and encoded by their fields.
"""

from struct import Struct

from truenext.model.message import SentMessage
from truenext.model.openwire_message import BODY_HEAD, COMPRESSED, DROPPABLE, openwire_message
from truenext.wire.openwire.fields import encode_frame, encode_nested, encode_structure
from truenext.wire.openwire.structures import (
    ConnectionControl,
    ConnectionErrorInfo,
    ConnectionId,
    ConsumerId,
    DataArrayResponse,
    ExceptionResponse,
    JmsMessage,
    KeepAliveInfo,
    MessageDispatch,
    MessageId,
    PhysicalDestination,
    ProducerAck,
    ProducerId,
    Response,
    Throwable,
    TopicName,
)

_SIZE = Struct(">i")
SIZE_BYTES = _SIZE.size
"""Bytes of the size before each frame, which does not count itself."""
_ID_NUMBERS = Struct(">qqB")
"""Producer's number, broker's number, no original transaction."""
_BROKER_OWNED = Struct(">?qB")
"""Persistent, expiration, priority."""
_TAIL = Struct(">xx?ixqxx?xqq?i")
"""No data structure and target; compressed, redeliveries, no broker path; arrival, no user, no bridge, droppable, no
cluster; times of arrival and dispatch, first of its group; redeliveries of the dispatch."""
_BROKER_BYTES = _ID_NUMBERS.size + _BROKER_OWNED.size + _TAIL.size
_ENDS_AT, _TEXT_END_AT = 10, 22
"""Positions in BODY_HEAD: of the ends of a body's first three slices, and of the end of its fourth."""
_ID_START = b"\1%c" % MessageId.TYPE
_PRODUCER_START = b"\1%c" % ProducerId.TYPE
_LARGE_BYTES = 16 * 1024
"""Bytes from which on a slice is joined without a copy before."""

KEEP_ALIVE = encode_frame(KeepAliveInfo())
_ADVISORY_TYPE = "Advisory"
ADVISORY_TOPICS = ("ActiveMQ.Advisory.TempQueue", "ActiveMQ.Advisory.TempTopic")
"""Topics of advisories of temporary queues, and of temporary topics."""
_NUMBER_PAIR = Struct(">qq")
_MARK = 2**62 - 1
"""Number that is replaced by that of an advisory."""


class DispatchEncoder:
    """Encoder of messages to one consumer from one destination, with the bytes that all its frames have."""

    __slots__ = ("_arrived_ms", "_destination", "_head", "_identity", "_producer_head", "_producer_key", "_tail")

    def __init__(self, consumer_id: ConsumerId, destination: PhysicalDestination, identity: str) -> None:
        """`destination` is that in which the messages stand, and no pattern. `identity` is that of the broker."""
        self._destination = encode_nested(destination)
        head = encode_structure(MessageDispatch(0, False, consumer_id, destination))
        # Without the message, which is null, and the redeliveries.
        self._head = head[: -1 - _SIZE.size] + b"\1"
        self._identity = identity
        self._producer_key: tuple[int, bytes] = (0, b"")
        """Type of the last message, and its slices up to the text of its id, with their ends."""
        self._producer_head = b""
        """Fields of its frame that follow from these."""
        self._arrived_ms = -1
        """Time of arrival for which `_tail` was made."""
        self._tail = b""

    def encode(
        self,
        message: SentMessage,
        sequence: int,
        redeliveries: int,
        now_ms: int,
        *,
        is_first_of_group: bool = False,
    ) -> bytes:
        """Return the frame of a dispatch. `sequence` is that of the message, and `redeliveries` the redelivery counter
        of the dispatch."""
        if not message.form or message.header:
            message = openwire_message(message, sequence, self._identity)
        body = message.body
        kind, flags, number, producer_end, destination_end, text_end, group_end, _, _ = BODY_HEAD.unpack_from(body)
        key = (kind, body[_ENDS_AT:_TEXT_END_AT] + body[BODY_HEAD.size : text_end])
        if key != self._producer_key:
            self._producer_key = key
            self._producer_head = self._encode_producer(body, kind, producer_end, destination_end, text_end)
        head = self._producer_head
        arrived_ms = message.arrived_ms
        if redeliveries or flags or is_first_of_group or now_ms != arrived_ms:
            tail = _TAIL.pack(
                flags & COMPRESSED != 0,
                redeliveries,
                arrived_ms,
                flags & DROPPABLE != 0,
                arrived_ms,
                now_ms,
                is_first_of_group,
                redeliveries,
            )
        else:
            if arrived_ms != self._arrived_ms:
                self._arrived_ms = arrived_ms
                self._tail = _TAIL.pack(False, 0, arrived_ms, False, arrived_ms, arrived_ms, False, 0)
            tail = self._tail
        size = len(body)
        return b"".join(
            (
                _SIZE.pack(len(head) + size - text_end + _BROKER_BYTES),
                head,
                _ID_NUMBERS.pack(number, sequence, 0),
                body[text_end:group_end],
                _BROKER_OWNED.pack(message.persistent, message.expires_ms, message.priority),
                body[group_end:] if size < _LARGE_BYTES else memoryview(body)[group_end:],
                tail,
            )
        )

    def _encode_producer(self, body: bytes, kind: int, producer_end: int, destination_end: int, text_end: int) -> bytes:
        """Return the fields of a message that are the same for all of its producer to one destination."""
        producer, original = body[BODY_HEAD.size : producer_end], body[producer_end:destination_end]
        return b"".join(
            (
                self._head,
                b"%c\0\0\0\0\0" % kind,
                _PRODUCER_START,
                producer,
                self._destination,
                b"\0",
                b"\0" if original == self._destination else original,
                _ID_START,
                body[destination_end:text_end],
                _PRODUCER_START,
                producer,
            )
        )


class AdvisoryEncoder:
    """Encoder of advisories to one consumer, with the bytes that all its frames have."""

    __slots__ = ("_pieces",)

    def __init__(self, consumer_id: ConsumerId, producer_id: ProducerId) -> None:
        """`producer_id` and a number are the id of each advisory."""
        self._pieces = [_advisory_pieces(consumer_id, producer_id, TopicName(name)) for name in ADVISORY_TOPICS]
        """Bytes of an advisory before its numbers, before its command, and after it, for queues and for topics."""

    def encode(self, number: int, command: bytes, *, is_topic: bool) -> bytes:
        """Return the frame that tells a nested DestinationInfo: that a temporary queue or topic was added or
        removed."""
        head, middle, end = self._pieces[is_topic]
        size = len(head) + _NUMBER_PAIR.size + len(middle) + len(command) + len(end)
        return b"".join((_SIZE.pack(size), head, _NUMBER_PAIR.pack(number, number), middle, command, end))


def _advisory_pieces(consumer_id: ConsumerId, producer_id: ProducerId, topic: TopicName) -> tuple[bytes, bytes, bytes]:
    message = JmsMessage(
        producer_id=producer_id,
        destination=topic,
        message_id=MessageId(None, producer_id, _MARK, _MARK),
        jms_type=_ADVISORY_TYPE,
        target_consumer_id=consumer_id,
    )
    encoded = encode_structure(MessageDispatch(0, False, consumer_id, topic, message))
    # Behind the consumer all fields are 0, and before it the command is null.
    command_at = encoded.rindex(encode_nested(consumer_id)) - 1
    # Between numbers and command no field is the client's.
    numbers_at = encoded.rindex(_NUMBER_PAIR.pack(_MARK, _MARK), 0, command_at)
    middle_at = numbers_at + _NUMBER_PAIR.size
    return encoded[:numbers_at], encoded[middle_at:command_at], encoded[command_at + 1 :]


def encode_end(consumer_id: ConsumerId) -> bytes:
    """Return the frame that ends a browse, or a pull request without a message."""
    return encode_frame(MessageDispatch(consumer_id=consumer_id))


def encode_response(correlation_id: int) -> bytes:
    """Return the frame that says that a request is done."""
    return _RESPONSE.pack(10, Response.TYPE, 0, False, correlation_id)


_RESPONSE = Struct(">iBi?i")


def encode_exception(correlation_id: int, class_name: str, reason: str) -> bytes:
    """Return the frame that refuses a request with a Java exception."""
    return encode_frame(ExceptionResponse(correlation_id=correlation_id, exception=Throwable(class_name, reason)))


def encode_connection_error(connection_id: ConnectionId | None, class_name: str, reason: str) -> bytes:
    """Return the frame that tells an error of a command that has asked for no answer."""
    return encode_frame(ConnectionErrorInfo(exception=Throwable(class_name, reason), connection_id=connection_id))


CONNECTION_CONTROL = encode_frame(ConnectionControl())
"""Frame that controls nothing, as ActiveMQ sends it to each client that can be managed."""


def encode_producer_ack(producer_id: ProducerId, size: int) -> bytes:
    """Return the frame that widens a producer's window by a size."""
    return encode_frame(ProducerAck(producer_id=producer_id, size=size))


def encode_empty_array(correlation_id: int) -> bytes:
    """Return the frame that answers a request with an array of nothing. The client does not expect null."""
    frame = encode_frame(DataArrayResponse(correlation_id=correlation_id))
    body = frame[_SIZE.size : -1] + b"\1\0\0"
    return _SIZE.pack(len(body)) + body
