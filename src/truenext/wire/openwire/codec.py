"""Decoder: makes commands from the bytes of an OpenWire connection, version 12 in loose encoding.

The decoder takes bytes as they arrive, in parts of any size, and returns the commands of all frames that are whole. If
the bytes are no frame, it raises RemoteProtocolError, and must not be used afterwards. It keeps nothing of a frame
whose size exceeds the limit.

    frame = size (4 bytes), type (1 byte), fields

Messages, acknowledgements and transactions are decoded by functions that read the usual fields in a row; if anything
is unusual or wrong, these functions return None, and the frame is decoded by its table (fields.py). Results are the
same. Ids and destinations that a connection repeats are the same objects.

Most frames differ from the one before in a few fields only. Such frames become one command, a run: the messages of one
producer to one destination, or the acknowledgements of one consumer.
"""

from collections.abc import Callable
from struct import Struct
from struct import error as StructError
from typing import NamedTuple, TypeVar

import msgspec

from truenext.errors import RemoteProtocolError
from truenext.model.header_lines import SCHEDULE_PREFIX
from truenext.model.limits import (
    LOGIN_BYTES_MAX,
    NAME_LENGTH_MAX,
    OPENWIRE_FRAME_BYTES_MAX,
    OPENWIRE_MESSAGE_BYTES_MAX,
    PROPERTY_VALUES_MAX,
)
from truenext.model.loose_fields import FieldReader, encode_bytes, encode_string, malformed
from truenext.model.message import OPENWIRE_FORM, SentMessage
from truenext.model.openwire_message import (
    BODY_HEAD,
    COMPRESSED,
    DROPPABLE,
    OpenWireSlices,
    group_of_message,
    growth_of,
    has_too_many_properties,
)
from truenext.model.order import PRIORITY_MAX
from truenext.wire.openwire.fields import LAYOUTS, MAGIC, decode_structure, encode_nested, encode_structure
from truenext.wire.openwire.structures import (
    BlobMessage,
    ConnectionId,
    ConsumerId,
    JmsMessage,
    KeepAliveInfo,
    LocalTransactionId,
    MessageAck,
    MessageId,
    PhysicalDestination,
    ProducerId,
    Structure,
    TransactionId,
    TransactionInfo,
)

_INT = Struct(">i")
_LONG = Struct(">q")
_COMMAND = Struct(">xi?")
"""Type, which is known, command id, response required."""
_NULL_COMMAND = 0
_OPENING = b"\1" + MAGIC
"""Type and first bytes of the first frame."""
_UNCOUNTED_BYTES = 3 * PROPERTY_VALUES_MAX
"""Bytes of properties that can have no more values than they may have, apart from maps and lists."""
_FRAMES_MAX = 256
"""Runs and other frames that one call of `receive` decodes."""
_KNOWN_MAX = 256
_KNOWN_BYTES_MAX = 512
"""Number and length of the ids and destinations that a connection keeps, so that equal ones are one object."""

# Parts of messages. The first ends with the length of the connection's id.
_MESSAGE_START = Struct(">xi?BBBH")
_TYPE_BEFORE = 8
"""Bytes from the type of the message to the fields of the producer's id."""
_PLAIN_FIELDS = Struct(">qq7s?qbBqB")
"""Two numbers of the id; no original transaction, group and correlation id; persistent, expiration, priority; reply-to
is there; time; type is there."""
_NO_GROUP = bytes(7)
_BROKER_OWNED = Struct(">?qb")
_NESTED_STRING = Struct(">BBBH")
"""Presence, type, presence of the string, and length."""
_SMALL_TAIL = bytes(37)
"""Fields after the properties, as clients send them: none is set."""
_COMPRESSED_TAIL = b"\0\0\1" + bytes(34)

# Parts of frames in runs.
_RUN_START = Struct(">iB")
"""Size and type. Behind it are the command id, and bytes that are the same in the whole run."""
_SAME_AT = 9
"""Bytes from the size of a frame to those that are the same in its run."""
_RUN_FIELDS = Struct(">q8x8sqbB8xHi")
"""Fields of _PLAIN_FIELDS, with the byte of persistence behind the nulls, and without the time; presence of type and
content, length of the content."""
_CONTENT_ALONE = 1
"""Presence of the content, and no type."""
_RUN_HEAD = Struct(">BBq20sI")
"""Fields of BODY_HEAD, with the ends of all slices but the last as bytes."""
SCHEDULE = SCHEDULE_PREFIX.encode()
"""Beginning of properties that no message in a run has."""
_STANDARD = 2
"""Type of the acknowledgements in a run."""
_ACK_END = b"\0\0\0\1\0"
"""One message, and no cause."""

_Known = TypeVar("_Known", bound=Structure)


class ProducedMessage(msgspec.Struct, gc=False):
    """Message of a producer, with the fields that its session needs."""

    command_id: int
    response_required: bool
    producer_id: ProducerId
    sequence: int
    """Producer's number of the message."""
    destination: PhysicalDestination
    transaction_id: TransactionId | None
    message: SentMessage
    """Message in OpenWire form. `arrived_ms` is not set."""
    has_reply_to: bool


class ProducedRun(msgspec.Struct, gc=False):
    """Messages of a producer that need nothing but their place in a queue, or in one transaction: they ask for no
    answer, and have no reply-to, group, expiry and schedule."""

    producer_id: ProducerId
    destination: PhysicalDestination
    transaction_id: TransactionId | None
    messages: list[SentMessage]
    """One message or more, all persistent or all transient, as in a ProducedMessage."""

    def single(self, number: int) -> ProducedMessage:
        """Return one of the messages as a command, without its id, which only an answer needs."""
        message = self.messages[number]
        sequence = BODY_HEAD.unpack_from(message.body)[2]
        return ProducedMessage(
            0, False, self.producer_id, sequence, self.destination, self.transaction_id, message, False
        )


class AckedRun(msgspec.Struct, gc=False):
    """Acknowledgements of one message each, outside transactions, that ask for no answer."""

    consumer_id: ConsumerId
    sequences: list[int]
    """Sequences of one message or more."""

    def single(self, number: int) -> MessageAck:
        """Return one of the acknowledgements as a command, without what no session needs."""
        acked = MessageId(broker_sequence_id=self.sequences[number])
        return MessageAck(0, False, None, None, self.consumer_id, _STANDARD, acked, acked, 1)


class RefusedMessage(msgspec.Struct, gc=False):
    """Message of a producer that exceeds a limit. It is refused alone: if the connection ended, a client on `failover:`
    would send it again for ever."""

    command_id: int
    response_required: bool
    transaction_id: TransactionId | None
    error: str


Decoded = Structure | ProducedMessage | RefusedMessage | ProducedRun | AckedRun


class _ProducerBytes(NamedTuple):
    """Bytes that are the same in all messages of one producer to one destination, and what they mean."""

    start: bytes
    """Fields of the producer's id, and the destination."""
    id_start: bytes
    """No original destination, and the beginning of the message id."""
    producer_id: ProducerId
    destination: PhysicalDestination
    slices: bytes
    """Slices of the body up to the group."""
    ends: tuple[int, int, int]
    """Positions in the body at which these slices end."""
    run_slices: bytes
    """Slices of the body of a message in a run, up to the fields before the content."""
    run_ends: bytes
    """Positions in that body, up to the beginning of the content, as in BODY_HEAD."""


class _MessageBytes(NamedTuple):
    """Bytes that are the same in all messages of a run."""

    producer: _ProducerBytes
    transaction_id: TransactionId | None
    same: bytes
    """Bytes from the demand for an answer on, to the producer's id in the message id."""


class _AckBytes(NamedTuple):
    """Bytes that are the same in all acknowledgements of a run. Between them is the id's last part, twice."""

    frame_bytes: int
    start: bytes
    """Bytes from the demand for an answer on, to the first number of the message id."""
    middle: bytes
    consumer_id: ConsumerId


class OpenWireDecoder:
    """Decoder of the bytes that the client of one connection sends."""

    __slots__ = (
        "_ack",
        "_connection_field",
        "_fault",
        "_known",
        "_login_bytes",
        "_message",
        "_missing_bytes",
        "_producers",
        "_skipped_bytes",
        "_undecoded",
        "_undecoded_at",
        "_was_opened",
        "has_more",
        "is_connected",
        "pending",
    )

    def __init__(self) -> None:
        self.pending = bytearray()
        """Beginning of an incomplete frame. This is always the same object; a caller that stops reading may clear
        it."""
        self.is_connected = False
        """True once the client has sent its ConnectionInfo; the caller sets it. Until then `receive` returns one
        command at a time, and the client may only send as many bytes as a login needs, keep-alives apart."""
        self.has_more = False
        """True if the caller must call `receive(b"")` now: further frames may be whole, or the returned commands are
        followed by an error."""
        self._undecoded = b""
        self._undecoded_at = 0
        """Bytes of which the last call has left frames, which may be whole, and where these begin."""
        self._missing_bytes = 0
        """Number of bytes that must still come before `pending` can have a whole frame."""
        self._skipped_bytes = 0
        """Number of bytes that must still come of a frame that is skipped. Until then `pending` is empty."""
        self._login_bytes = 0
        """Bytes of the frames before the login."""
        self._was_opened = False
        """True once the first frame has come."""
        self._fault: RemoteProtocolError | None = None
        self._known: dict[bytes, Structure] = {}
        self._producers: dict[bytes, _ProducerBytes] = {}
        self._connection_field: tuple[ConnectionId, bytes] = (ConnectionId(), b"")
        """Last id of a connection in a transaction, and its bytes: usually that of this connection."""
        self._message: _MessageBytes | None = None
        """Bytes of the last message that could be in a run; None if the last one asks for an answer."""
        self._ack: _AckBytes | None = None
        """Bytes of the last acknowledgement that could be in a run."""

    def receive(self, data: bytes) -> list[Decoded]:
        """Return the commands that `data` completes.

        Raises: RemoteProtocolError if the bytes are not OpenWire, or exceed a limit. Commands before the fault are
        returned, and the next call raises. So the result does not depend on how the bytes are split.
        """
        if self._fault is not None:
            raise self._fault
        commands: list[Decoded] = []
        try:
            self._decode(data, commands)
            while self._undecoded and not commands:
                self._decode(b"", commands)
        except RemoteProtocolError as error:
            if not commands:
                raise
            self._fault = error
        self.has_more = bool(commands) and (not self.is_connected or self._undecoded != b"" or self._fault is not None)
        return commands

    def _decode(self, data: bytes, commands: list[Decoded]) -> None:
        start = 0
        if self._skipped_bytes:
            skipped = min(self._skipped_bytes, len(data))
            self._skipped_bytes -= skipped
            data = data[skipped:]
        if self._undecoded:
            data, start = self._undecoded + data, self._undecoded_at
            self._undecoded = b""
        elif self.pending:
            self.pending += data
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                self._check_opening(self.pending)
                return
            data = bytes(self.pending)
            self.pending.clear()
        size = len(data)
        if not self._was_opened:
            self._check_opening(data)
        is_connected, frame_bytes_max = self.is_connected, OPENWIRE_FRAME_BYTES_MAX
        for _ in range(_FRAMES_MAX):
            at = start + _INT.size
            if at > size:
                self._missing_bytes = at - size
                break
            frame_bytes: int = _INT.unpack_from(data, start)[0]
            if not is_connected or not 0 < frame_bytes <= frame_bytes_max:
                if is_connected and frame_bytes > frame_bytes_max and (at == size or data[at] in _MESSAGES):
                    head_end = at + (_HEAD_BYTES if at < size else 1)
                    if head_end > size:
                        self._missing_bytes = head_end - size
                        break
                    commands.append(_skipped_message(data[at:head_end], frame_bytes))
                    start = min(at + frame_bytes, size)
                    self._skipped_bytes = at + frame_bytes - start
                    continue
                self._check_size(frame_bytes)
            end = at + frame_bytes
            if end > size:
                self._missing_bytes = end - size
                break
            self._was_opened = True
            kind = data[at]
            run_end = start
            if kind == _ACK:
                if self._ack is not None:
                    run_end = self._read_acks(self._ack, data, start, commands)
            elif self._message is not None and kind in _MESSAGES:
                run_end = self._read_messages(self._message, data, start, commands)
            if run_end > start:
                # A run follows a frame of its kind, so the login is done.
                start = run_end
                continue
            start = end
            decode = _FAST.get(kind)
            command: Decoded | None = None
            if decode is not None:
                try:
                    command = decode(self, data, at, end)
                except (StructError, IndexError, RemoteProtocolError):
                    # decode_structure decides whether the frame is wrong.
                    command = None
            elif frame_bytes == 1 and kind == _NULL_COMMAND:
                continue
            if command is None:
                command = _decode_frame(data[at:end])
            commands.append(command)
            if not is_connected:
                if not isinstance(command, KeepAliveInfo):
                    self._login_bytes += _INT.size + frame_bytes
                # The rest can only be decoded once the caller knows whether this was the login.
                self._missing_bytes = 0
                break
        else:
            if start < size:
                self._undecoded, self._undecoded_at = data, start
            return
        if start < size:
            self.pending += memoryview(data)[start:]

    def _check_opening(self, data: bytes | bytearray) -> None:
        """Check the first bytes of a connection, however few have come.

        Raises: RemoteProtocolError if they are no WireFormatInfo
        """
        if not self._was_opened and not _OPENING.startswith(data[_INT.size : _INT.size + len(_OPENING)]):
            raise malformed("the first frame is no WireFormatInfo: the client does not speak OpenWire")

    def _check_size(self, frame_bytes: int) -> None:
        if not frame_bytes:
            raise malformed("OpenWire frame without a type")
        if not 0 < frame_bytes <= OPENWIRE_FRAME_BYTES_MAX:
            raise malformed(f"OpenWire frame of {frame_bytes} bytes; at most {OPENWIRE_FRAME_BYTES_MAX}")
        if not self.is_connected and self._login_bytes + frame_bytes > LOGIN_BYTES_MAX:
            raise malformed(f"more than {LOGIN_BYTES_MAX} bytes before ConnectionInfo is complete")

    # ---- Runs. Each function returns the position after the frames that it has read. ----

    def _read_messages(self, message: _MessageBytes, data: bytes, start: int, commands: list[Decoded]) -> int:
        size = len(data)
        producer, transaction_id, same = message
        slices, same_bytes = producer.run_slices, len(same)
        ends, content_at = producer.run_ends, BODY_HEAD.size + len(slices) + _FIELDS_BEFORE_CONTENT
        kind = data[start + _INT.size]
        is_persistent: bytes | None = None
        persistent = False
        messages: list[SentMessage] = []
        while start + _SAME_AT < size:
            frame_bytes, other = _RUN_START.unpack_from(data, start)
            end = start + _INT.size + frame_bytes
            fields_at = start + _SAME_AT + same_bytes
            if (
                other != kind
                or not fields_at + _RUN_FIELDS.size <= end <= size
                or frame_bytes > OPENWIRE_MESSAGE_BYTES_MAX
                or not data.startswith(same, start + _SAME_AT)
            ):
                break
            sequence, flags, expiration, priority, has_reply_to, presence, length = _RUN_FIELDS.unpack_from(
                data, fields_at
            )
            properties_at = fields_at + _RUN_FIELDS.size + length
            if (
                (flags != is_persistent if messages else flags[:-1] != _NO_GROUP)
                or expiration > 0
                or has_reply_to
                or presence != _CONTENT_ALONE
                or not 0 <= priority <= PRIORITY_MAX
                or not 0 <= length < frame_bytes
                or properties_at >= end
            ):
                break
            tail_at = end - len(_SMALL_TAIL)
            properties_bytes = tail_at - properties_at
            if properties_bytes != 1 and (
                properties_bytes < 5
                or properties_bytes > _UNCOUNTED_BYTES
                or _INT.unpack_from(data, properties_at + 1)[0] != properties_bytes - 5
                or data.find(SCHEDULE, properties_at, tail_at) >= 0
            ):
                break
            if data[properties_at] != (properties_bytes != 1) or not data.endswith(_SMALL_TAIL, tail_at, end):
                break
            if is_persistent is None:
                is_persistent = flags
                persistent = flags[-1] != 0
            body = b"".join(
                (
                    _RUN_HEAD.pack(kind, 0, sequence, ends, content_at + 5 + length),
                    slices,
                    data[fields_at + _BEFORE_CONTENT : tail_at],
                )
            )
            messages.append(SentMessage(priority, persistent, 0, b"", body, 0, "", "", OPENWIRE_FORM))
            start = end
        if messages:
            commands.append(ProducedRun(producer.producer_id, producer.destination, transaction_id, messages))
        return start

    def _read_acks(self, ack: _AckBytes, data: bytes, start: int, commands: list[Decoded]) -> int:
        size = len(data)
        frame_bytes, first, middle, consumer_id = ack
        id_at = _SAME_AT + len(first)
        middle_at = id_at + _TWO_LONGS.size
        again_at = middle_at + len(middle)
        step = _INT.size + frame_bytes
        sequences: list[int] = []
        while start + step <= size:
            numbers = data[start + id_at : start + middle_at]
            if (
                _RUN_START.unpack_from(data, start) != (frame_bytes, _ACK)
                or not data.startswith(first, start + _SAME_AT)
                or not data.startswith(middle, start + middle_at)
                or not data.startswith(numbers, start + again_at)
                or not data.endswith(_ACK_END, start, start + step)
            ):
                break
            sequences.append(_TWO_LONGS.unpack(numbers)[1])
            start += step
        if sequences:
            commands.append(AckedRun(consumer_id, sequences))
        return start

    # ---- Usual frames. Each function returns None if the frame is unusual or wrong. ----

    def _decode_message(self, data: bytes, at: int, end: int) -> ProducedMessage | None:
        start = at
        command_id, required, mark, kind, has_text, length = _MESSAGE_START.unpack_from(data, at)
        producer_at = at + 8
        producer_end = producer_at + 19 + length
        producer = self._producers.get(data[producer_at:producer_end])
        if mark != 1 or kind != ProducerId.TYPE or has_text != 1:
            return None
        if producer is None or not data.startswith(producer.start, producer_at):
            producer = self._add_producer(data, producer_at, producer_end)
        at = producer_at + len(producer.start)
        transaction_id: TransactionId | None = None
        if data[at]:
            transaction_id, at = self._transaction(data, at)
        else:
            at += 1
        if not data.startswith(producer.id_start, at):
            return None
        at += len(producer.id_start)
        sequence, _, nulls, persistent, expiration, priority, has_reply_to, _, has_type = _PLAIN_FIELDS.unpack_from(
            data, at
        )
        group_at = at + 17
        has_group = False
        if nulls == _NO_GROUP and not has_reply_to and not has_type:
            # A shortcut: no group, correlation id, reply-to and type.
            self._message = None if required else _MessageBytes(producer, transaction_id, data[start + 5 : at])
            group_end = group_at + 6
            before_at = group_end + 10
            at = before_at + 10
        else:
            # No original transaction. Group, number in it, correlation id.
            if nulls[0]:
                return None
            at = group_at
            has_group = data[at] != 0
            at = (_ascii_end(data, at) if has_group else at + 1) + 4
            group_end = at = _ascii_end(data, at) if data[at] else at + 1
            persistent, expiration, priority = _BROKER_OWNED.unpack_from(data, at)
            # Reply-to, time, type.
            before_at = at = at + 10
            has_reply_to = data[at]
            at = self._destination(data, at)[1] if has_reply_to else at + 1
            at += 8
            at = _ascii_end(data, at) if data[at] else at + 1
        content_at = at
        at = content_end = _bytes_end(data, at) if data[at] else at + 1
        at = _bytes_end(data, at) if data[at] else at + 1
        if at - content_end > _UNCOUNTED_BYTES and has_too_many_properties(data, content_end, at):
            return None
        tail = data[at:end]
        if tail == _SMALL_TAIL:
            flags = 0
        elif tail == _COMPRESSED_TAIL:
            flags = COMPRESSED
        else:
            return None
        first, second, third = producer.ends
        fourth = third + group_end - group_at
        body = b"".join(
            (
                BODY_HEAD.pack(
                    data[producer_at - _TYPE_BEFORE],
                    flags,
                    sequence,
                    first,
                    second,
                    third,
                    fourth,
                    fourth + content_at - before_at,
                    fourth + content_end - before_at,
                ),
                producer.slices,
                data[group_at:group_end],
                data[before_at:at],
            )
        )
        if not 0 <= priority <= PRIORITY_MAX or len(body) > OPENWIRE_MESSAGE_BYTES_MAX:
            return None
        message = SentMessage(
            priority, persistent, expiration if expiration > 0 else 0, b"", body, 0, "", "", OPENWIRE_FORM
        )
        if flags:
            message.growth = growth_of(message)
        if has_group:
            message.group = group_of_message(message)
            if len(message.group) > NAME_LENGTH_MAX:
                return None
        return ProducedMessage(
            command_id,
            required,
            producer.producer_id,
            sequence,
            producer.destination,
            transaction_id,
            message,
            has_reply_to != 0,
        )

    def _add_producer(self, data: bytes, producer_at: int, producer_end: int) -> _ProducerBytes:
        producer_id = self._nested(ProducerId, data, producer_at - 2, producer_end)
        destination, at = self._destination(data, producer_end)
        fields = data[producer_at:producer_end]
        slices = (fields, data[producer_end:at], b"\0")
        first = BODY_HEAD.size + len(fields)
        second = first + at - producer_end
        group_end = second + len(_NO_GROUP)
        producer = _ProducerBytes(
            start=data[producer_at:at],
            id_start=b"\0\1%c\0\1%c%b" % (MessageId.TYPE, ProducerId.TYPE, fields),
            producer_id=producer_id,
            destination=destination,
            slices=b"".join(slices),
            ends=(first, second, second + 1),
            run_slices=b"".join((*slices, _NO_GROUP[1:])),
            run_ends=_RUN_ENDS.pack(first, second, second + 1, group_end, group_end + _FIELDS_BEFORE_CONTENT),
        )
        if len(producer.start) <= _KNOWN_BYTES_MAX:
            if len(self._producers) >= _KNOWN_MAX:
                self._producers.clear()
            self._producers[fields] = producer
        return producer

    def _decode_acknowledgement(self, data: bytes, at: int, end: int) -> MessageAck | None:
        start = at
        command_id, required = _COMMAND.unpack_from(data, at)
        destination, at = self._destination(data, at + 6)
        transaction_id: TransactionId | None = None
        if data[at]:
            transaction_id, at = self._transaction(data, at)
        else:
            at += 1
        consumer_id, at = self._id(ConsumerId, data, at)
        ack_type = data[at]
        first_at = at + 1
        first, at = self._message_id(data, first_at) if data[first_at] else (None, first_at + 1)
        if first is not None and data.startswith(data[first_at:at], at):
            last: MessageId | None = first
            at += at - first_at
        else:
            last, at = self._message_id(data, at) if data[at] else (None, at + 1)
        count = _INT.unpack_from(data, at)[0]
        if at + 5 != end or data[at + 4] or ack_type > 127:
            return None
        if ack_type == _STANDARD and count == 1 and first is last is not None and not (required or transaction_id):
            last_at = (first_at + at) // 2
            same = data[start + _SAME_AT - _INT.size : last_at - _TWO_LONGS.size]
            self._ack = _AckBytes(end - start, same, data[last_at : at - _TWO_LONGS.size], consumer_id)
        return MessageAck(command_id, required, destination, transaction_id, consumer_id, ack_type, first, last, count)

    def _decode_transaction_info(self, data: bytes, at: int, end: int) -> TransactionInfo | None:
        command_id, required = _COMMAND.unpack_from(data, at)
        connection_id, at = self._connection(data, at + 6)
        transaction_id, at = self._transaction(data, at)
        if at + 1 != end or data[at] > 127:
            return None
        return TransactionInfo(command_id, required, connection_id, transaction_id, data[at])

    # ---- Fields of usual frames. IndexError: they are unusual. ----

    def _nested(self, kind: type[_Known], data: bytes, at: int, end: int) -> _Known:
        """Return the structure in a nested field of these bytes: the same object if it has come before."""
        key = data[at:end]
        found = self._known.get(key)
        if found is None:
            reader = FieldReader(key, 1)
            found = decode_structure(reader)
            if reader.left or len(key) != end - at:
                raise IndexError
            if len(key) <= _KNOWN_BYTES_MAX:
                if len(self._known) >= _KNOWN_MAX:
                    self._known.clear()
                self._known[key] = found
        if not isinstance(found, kind):
            raise IndexError
        return found

    def _destination(self, data: bytes, at: int) -> tuple[PhysicalDestination, int]:
        mark, kind, has_text, length = _NESTED_STRING.unpack_from(data, at)
        if mark != 1 or not 100 <= kind <= 103 or has_text != 1:
            raise IndexError
        end = at + 5 + length
        return self._nested(PhysicalDestination, data, at, end), end

    def _id(self, kind: type[_Known], data: bytes, at: int) -> tuple[_Known, int]:
        """Return the id of a consumer or producer: connection and two numbers."""
        mark, number, has_text, length = _NESTED_STRING.unpack_from(data, at)
        if mark != 1 or number != kind.TYPE or has_text != 1:
            raise IndexError
        end = at + 5 + length + 16
        return self._nested(kind, data, at, end), end

    def _message_id(self, data: bytes, at: int) -> tuple[MessageId, int]:
        if data[at : at + 3] != _MESSAGE_ID_START:
            raise IndexError
        producer_id, at = self._id(ProducerId, data, at + 3)
        sequence, broker_sequence = _TWO_LONGS.unpack_from(data, at)
        return MessageId(None, producer_id, sequence, broker_sequence), at + 16

    def _transaction(self, data: bytes, at: int) -> tuple[LocalTransactionId, int]:
        """Return a local transaction, and the position after it."""
        mark, kind, value = _TRANSACTION.unpack_from(data, at)
        if mark != 1 or kind != LocalTransactionId.TYPE:
            raise IndexError
        connection_id, end = self._connection(data, at + 10)
        return LocalTransactionId(value, connection_id), end

    def _connection(self, data: bytes, at: int) -> tuple[ConnectionId, int]:
        connection_id, field = self._connection_field
        if field and data.startswith(field, at):
            return connection_id, at + len(field)
        mark, kind, has_text, length = _NESTED_STRING.unpack_from(data, at)
        if mark != 1 or kind != ConnectionId.TYPE or has_text != 1:
            raise IndexError
        end = at + 5 + length
        connection_id = self._nested(ConnectionId, data, at, end)
        self._connection_field = (connection_id, data[at:end])
        return connection_id, end


_MESSAGES = range(JmsMessage.TYPE, BlobMessage.TYPE)
_HEAD_BYTES = 64 * 1024
"""Bytes of a frame that is skipped from which its command is read."""
_FIELDS_OF_HEAD = JmsMessage.__struct_fields__.index("transaction_id") + 1
_ACK = MessageAck.TYPE
_RUN_ENDS = Struct(">IIIII")
_BEFORE_CONTENT = 33
"""Bytes from the fields in _RUN_FIELDS to those of a body after the group."""
_FIELDS_BEFORE_CONTENT = 10
"""Bytes of these, up to the content: no reply-to, a time, no type."""
_MESSAGE_ID_START = b"\1%c\0" % MessageId.TYPE
_TWO_LONGS = Struct(">qq")
_TRANSACTION = Struct(">BBq")

_FAST: dict[int, Callable[[OpenWireDecoder, bytes, int, int], Structure | ProducedMessage | None]] = {
    **dict.fromkeys(_MESSAGES, OpenWireDecoder._decode_message),
    MessageAck.TYPE: OpenWireDecoder._decode_acknowledgement,
    TransactionInfo.TYPE: OpenWireDecoder._decode_transaction_info,
}


def _skipped_message(head: bytes, frame_bytes: int) -> RefusedMessage:
    """Return the message whose frame begins with these bytes, and is too large.

    Raises: RemoteProtocolError if the bytes are invalid
    """
    reader = FieldReader(head)
    readers = LAYOUTS[reader.read_byte()].readers[:_FIELDS_OF_HEAD]
    command_id, response_required, *_, transaction_id = [read(reader, 0) for read in readers]
    return RefusedMessage(command_id, response_required, transaction_id, _too_large(frame_bytes))


def _decode_frame(frame: bytes) -> Structure | ProducedMessage | RefusedMessage:
    reader = FieldReader(frame)
    structure = decode_structure(reader)
    if reader.left:
        raise malformed(f"{reader.left} bytes after the fields of {type(structure).__name__}")
    if not isinstance(structure, JmsMessage) or isinstance(structure, BlobMessage):
        return structure
    error = _exceeded_limit(structure)
    if not error:
        try:
            produced = produced_message(structure)
        except ValueError as text_error:
            # A raw NUL takes one byte when it is read, and two when it is written.
            raise malformed(f"{type(structure).__name__} with {text_error}") from text_error
        size = len(produced.message.body)
        if size <= OPENWIRE_MESSAGE_BYTES_MAX:
            return produced
        error = _too_large(size)
    return RefusedMessage(structure.command_id, structure.response_required, structure.transaction_id, error)


def _too_large(size: int) -> str:
    return f"message of {size} bytes with its headers; at most {OPENWIRE_MESSAGE_BYTES_MAX}: send its content in parts"


def _exceeded_limit(message: JmsMessage) -> str:
    """Return the error of a message that is refused alone; "" if it is not refused."""
    group = len(message.group_id or "")
    if group > NAME_LENGTH_MAX:
        return f"JMSXGroupID of {group} characters; at most {NAME_LENGTH_MAX}"
    properties = encode_bytes(message.marshalled_properties)
    if has_too_many_properties(properties, 0, len(properties)):
        return f"message with more than {PROPERTY_VALUES_MAX} properties, and values in these"
    return ""


def _ascii_end(data: bytes, at: int) -> int:
    """Return the position after a string that is there. IndexError: it is no ASCII."""
    end = at + 3 + (data[at + 1] << 8 | data[at + 2])
    if data[at] != 1 or not data[at + 3 : end].isascii():
        raise IndexError
    return end


def _bytes_end(data: bytes, at: int) -> int:
    """Return the position after a byte string that is there."""
    length: int = _INT.unpack_from(data, at + 1)[0]
    if data[at] != 1 or length < 0:
        raise IndexError
    return at + 5 + length


def produced_message(message: JmsMessage) -> ProducedMessage:
    """Return a decoded message of a producer in the broker's form, without the fields that belong to the broker.

    Raises: RemoteProtocolError if it has no id or no destination; ValueError if a text has more than 65,535 bytes
    """
    message_id, destination = message.message_id, message.destination
    if message_id is None or message_id.producer_id is None or message_id.producer_id.connection_id is None:
        raise malformed(f"{type(message).__name__} without a message id")
    if destination is None or destination.name is None:
        raise malformed(f"{type(message).__name__} without a destination")
    slices = OpenWireSlices(
        type=message.TYPE,
        flags=(COMPRESSED if message.is_compressed else 0) | (DROPPABLE if message.is_droppable else 0),
        sequence=message_id.producer_sequence_id,
        producer_id=encode_structure(message_id.producer_id)[1:],
        destination=encode_nested(message.original_destination or destination),
        text_view=encode_string(message_id.text_view),
        group=encode_string(message.group_id)
        + _INT.pack(message.group_sequence)
        + encode_string(message.correlation_id),
        before_content=encode_nested(message.reply_to)
        + _LONG.pack(message.timestamp)
        + encode_string(message.jms_type),
        content=encode_bytes(message.content),
        properties=encode_bytes(message.marshalled_properties),
    )
    body = slices.join()
    priority = max(0, min(message.priority, PRIORITY_MAX))
    sent = SentMessage(priority, message.is_persistent, max(message.expiration, 0), b"", body, form=OPENWIRE_FORM)
    sent.group = group_of_message(sent)
    sent.growth = growth_of(sent)
    return ProducedMessage(
        message.command_id,
        message.response_required,
        message_id.producer_id,
        message_id.producer_sequence_id,
        destination,
        message.transaction_id,
        sent,
        message.reply_to is not None,
    )
