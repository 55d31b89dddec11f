"""Replies: encodes the messages and answers to one JMS client as OpenWire frames."""

from collections.abc import Callable, Sequence

from truenext.errors import Code
from truenext.model.answers import ErrorAnswer, Receipt
from truenext.model.destination import Destination
from truenext.model.limits import OPENWIRE_FRAME_BYTES_MAX
from truenext.wire.openwire.advisories import Advisories
from truenext.wire.openwire.consumers import PULL, Consumer, Consumers
from truenext.wire.openwire.deliveries import (
    KEEP_ALIVE,
    SIZE_BYTES,
    encode_connection_error,
    encode_end,
    encode_exception,
    encode_response,
)
from truenext.wire.openwire.refusals import exception_class
from truenext.wire.openwire.structures import ConnectionId
from truenext.wire.session import Delivery


class OpenWireReplies:
    """Encoder of messages and answers to one client."""

    parts_per_message = 1
    heart_beat = KEEP_ALIVE

    def __init__(self, consumers: Consumers, advisories: Advisories) -> None:
        self._consumers = consumers
        self._advisories = advisories
        self.frame_bytes_max = OPENWIRE_FRAME_BYTES_MAX
        """Bytes of the largest frame that the client takes, without the four bytes of its size."""
        self.on_too_large: Callable[[str], None] = lambda _: None
        """Function that is called for a message whose frame is larger, with a text about it."""
        self.is_negotiated = False
        """True once the client has sent its WireFormatInfo. Nothing may be sent before."""
        self.connection_id: ConnectionId | None = None
        """Id of the connection; None before its login was accepted."""

    def encode_deliveries(
        self,
        subscription: str,
        deliveries: Sequence[Delivery],
        parts: list[bytes],
        round_number: int = 0,
        *,
        is_browse: bool = False,
    ) -> None:
        consumer = self._consumers.by_subscription[subscription]
        encode = consumer.encoder.encode
        held, order, bytes_max = consumer.held, consumer.order, self.frame_bytes_max
        self._advisories.announce_reply_to(deliveries)
        consumer.on_dispatched(len(deliveries))
        for delivery in deliveries:
            message = delivery.message
            assert message is not None, "what was just dispatched is in memory"
            sequence = delivery.sequence
            held[sequence] = len(order)
            order.append(sequence)
            frame = encode(
                message,
                sequence,
                delivery.redelivery_count,
                message.arrived_ms,
                is_first_of_group=delivery.is_first_of_group and not is_browse,
            )
            if len(frame) - SIZE_BYTES > bytes_max:
                parts.append(self._reject(consumer, sequence, len(frame) - SIZE_BYTES))
                continue
            parts.append(frame)

    def _reject(self, consumer: Consumer, sequence: int, size: int) -> bytes:
        """Reject a message that the client cannot take: it would end the connection, and get the message again on the
        next one. Returns what is sent in its place."""
        reason = (
            f"message {sequence} for {consumer.destination.name} makes a frame of {size} bytes, and the client takes "
            f"{self.frame_bytes_max}: increase wireFormat.maxFrameSize in the client's URL"
        )
        self._consumers.reject(consumer, sequence, reason)
        self.on_too_large(reason)
        # The client waits for the message that it has pulled, or for this.
        return b"" if consumer.prefetch or consumer.is_browser else encode_end(consumer.id)

    def encode_end_of_browse(self, subscription: str, destination: Destination) -> bytes:
        return encode_end(self._consumers.by_subscription[subscription].id)

    def encode_end_of_pull_request(
        self, subscription: str, destination: Destination, unused: int, correlation: str | None
    ) -> bytes:
        consumer = self._consumers.by_subscription.get(subscription)
        if consumer is None:
            return b""
        consumer.requested -= unused
        return encode_end(consumer.id) if correlation == PULL else b""

    def encode_receipt(self, receipt: Receipt) -> bytes:
        return encode_response(int(receipt.receipt))

    def encode_fault(self, fault: ErrorAnswer) -> bytes:
        """Encode an ExceptionResponse to the command whose number the receipt is, or without a receipt a
        ConnectionError. The result is empty before the client's WireFormatInfo, and if the broker is too busy for a
        login: then the client must see a lost connection, after which `failover:` tries again."""
        if not self.is_negotiated or (fault.code is Code.BUSY and self.connection_id is None):
            return b""
        name = exception_class(fault)
        if fault.receipt is None:
            return encode_connection_error(self.connection_id, name, fault.detail)
        return encode_exception(int(fault.receipt), name, fault.detail)
