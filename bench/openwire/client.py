"""Raw OpenWire client of the benchmark, for loads of which a Java program would take too much memory or time."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

from bench import frames
from bench.load import CHUNK, SILENCE
from truenext.model.loose_fields import FieldReader, Tag, TypedValue, encode_map
from truenext.wire.openwire.fields import decode_structure, encode_frame
from truenext.wire.openwire.handshake import encode_wire_format_info
from truenext.wire.openwire.structures import (
    BytesMessage,
    ConnectionId,
    ConnectionInfo,
    ConsumerId,
    ConsumerInfo,
    MessageId,
    PhysicalDestination,
    ProducerId,
    ProducerInfo,
    Response,
    SessionId,
    SessionInfo,
    Structure,
)

_SIZE_BYTES = 4


def login(connection: str) -> bytes:
    """Return the frames by which a client logs in and opens a session, behind its WireFormatInfo."""
    info = ConnectionInfo(1, True, ConnectionId(connection), connection, "bench", "bench")
    return encode_frame(info) + encode_frame(SessionInfo(2, False, SessionId(connection, 1)))


def messages(connection: str, destination: PhysicalDestination, count: int) -> Iterator[bytes]:
    """Return the frames of transient messages of 1 KiB, as the Java client sends them."""
    producer = ProducerId(connection, 1, 1)
    dice = random.Random(1)
    bodies = frames.bodies()
    for number in range(count):
        yield encode_frame(
            BytesMessage(
                10 + number,
                False,
                producer,
                destination,
                message_id=MessageId(None, producer, number + 1),
                priority=dice.randrange(10),
                timestamp=1_700_000_000_000 + number,
                content=bodies[number % len(bodies)],
                marshalled_properties=encode_map({"number": TypedValue(Tag.INTEGER, number)}),
            )
        )


class Connection:
    """Connection with one session."""

    def __init__(self, port: int, number: int) -> None:
        """`number` is unique among the connections to the broker."""
        self.id = f"ID:bench-40000-1700000000000-{number}:1"
        self.sock = socket.create_connection(("127.0.0.1", port), SILENCE)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self.sock.sendall(encode_wire_format_info() + login(self.id))
        self.await_response(1)

    def produce(self, destination: PhysicalDestination) -> None:
        self.sock.sendall(encode_frame(ProducerInfo(3, True, ProducerId(self.id, 1, 1), destination)))
        self.await_response(3)

    def consume(self, destination: PhysicalDestination, number: int, prefetch: int) -> ConsumerId:
        consumer_id = ConsumerId(self.id, 1, number)
        self.sock.sendall(encode_frame(ConsumerInfo(10 + number, True, consumer_id, False, destination, prefetch)))
        self.await_response(10 + number)
        return consumer_id

    def await_response(self, command_id: int) -> None:
        """Read frames until the answer to a command; none but answers may be on their way."""
        while True:
            answer = self._read_frame()
            if isinstance(answer, Response):
                if type(answer) is not Response or answer.correlation_id != command_id:
                    raise ConnectionError(f"command {command_id} is answered by {answer}")
                return

    def _read_frame(self) -> Structure:
        while True:
            end = _SIZE_BYTES + int.from_bytes(self._received[:_SIZE_BYTES], "big")
            if len(self._received) >= max(end, _SIZE_BYTES + 1):
                frame, self._received = self._received[_SIZE_BYTES:end], self._received[end:]
                return decode_structure(FieldReader(frame))
            got = self.sock.recv(CHUNK)
            if not got:
                raise ConnectionError("the broker hung up")
            self._received += got
