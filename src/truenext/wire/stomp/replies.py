"""Replies: encodes messages and answers of the broker as STOMP frames."""

from collections.abc import Sequence
from typing import Any

from truenext.model import header_lines
from truenext.model.answers import ErrorAnswer, Receipt
from truenext.model.commands import AckMode, Login
from truenext.model.destination import Destination
from truenext.model.header_lines import FIRST_OF_GROUP, HOP_BY_HOP_HEADERS
from truenext.model.limits import NAME_LENGTH_MAX
from truenext.model.message import SentMessage
from truenext.model.openwire_message import stomp_message
from truenext.wire.session import Delivery, DeliveryCauses
from truenext.wire.stomp.frame import BROKER_FRAME_END, Frame, Version, header_line
from truenext.wire.stomp.headers import FIRST_CAUSE, LAST_CAUSE
from truenext.wire.stomp.protocol import ProtocolState, StompProtocol
from truenext.wire.stomp.request_shapes import ShapedCommand
from truenext.wire.stomp.speedups import SPEEDUPS

PARTS_PER_MESSAGE = 5
"""Number of byte strings of which one MESSAGE frame consists."""

_SET_BY_BROKER = ("content-length", "priority")
"""Headers of a stored message that the broker has set or corrected."""
_ENCODER: Any = None if SPEEDUPS is None else SPEEDUPS.MessageEncoder(SentMessage, b"\n", BROKER_FRAME_END)
"""Encoder in C of usual dispatches; None if there is none."""


class ReplyEncoder:
    """Encoder of messages and answers to one client as STOMP frames."""

    parts_per_message = PARTS_PER_MESSAGE
    heart_beat = b"\n"

    def __init__(self, protocol: StompProtocol[ShapedCommand], message_id_prefix: str) -> None:
        """A message id is `message_id_prefix` and the sequence of the message."""
        self._protocol = protocol
        self._message_id_prefix = message_id_prefix
        self._version = Version.V1_0
        self._heads: dict[str, tuple[str, str]] = {}
        """Two constant parts of the MESSAGE frames of each subscription: the bytes before the first sequence, and the
        bytes between the first sequence and the second. Without an `ack` header, a frame has one sequence, in its
        message id, and the second part is empty."""
        self._is_truenext_client = False
        """True for a truenext client: its MESSAGEs state the release count and a lost attempt, and their `ack` headers
        the dispatch."""
        self._pattern_subscriptions: set[str] = set()
        """Subscriptions to patterns of queues. A MESSAGE of such a subscription has the name of the queue as
        destination."""

    def on_connected(self, version: Version, login: Login) -> None:
        """Note the agreed version, and whether the client is a truenext client."""
        self._version = version
        self._is_truenext_client = login.is_truenext_client

    def add_subscription(self, subscription: str, mode: AckMode, *, has_id: bool, has_pattern: bool) -> None:
        """Add a subscription. `has_id` is False if a client of STOMP 1.0 has given it no id; `subscription` is then its
        destination."""
        version = self._version
        start = "MESSAGE\n"
        if has_id:
            start += header_line("subscription", subscription, version)
        message_id = f"message-id:{self._message_id_prefix}"
        if mode is not AckMode.AUTO and version is Version.V1_2:
            acknowledged_as = header_line("ack", f"@{subscription}", version).removeprefix("ack:")
            head = (f"{start}ack:", f"{acknowledged_as}{message_id}")
        else:
            head = (f"{start}{message_id}", "")
        self._heads[subscription] = head
        if has_pattern:
            self._pattern_subscriptions.add(subscription)

    def remove_subscription(self, subscription: str) -> None:
        self._heads.pop(subscription, None)
        self._pattern_subscriptions.discard(subscription)

    def encode_end_of_browse(self, subscription: str, destination: Destination) -> bytes:
        """Encode the frame that tells a browser that no more messages follow, as ActiveMQ does."""
        return self._encode_end(subscription, destination, "browser:end\n")

    def encode_end_of_pull_request(
        self, subscription: str, destination: Destination, unused: int, correlation: str | None
    ) -> bytes:
        """Encode the frame that ends a pull request. `unused` is the number of messages that were requested and will
        not come."""
        lines = f"truenext-unused:{unused}\n"
        if correlation is not None:
            lines += header_line("correlation-id", correlation, self._version)
        return self._encode_end(subscription, destination, lines)

    def _encode_end(self, subscription: str, destination: Destination, lines: str) -> bytes:
        """Encode a MESSAGE frame that has no message: it has no `ack` header, and the sequence 0 in its message id."""
        head, middle = self._heads[subscription]
        if middle:
            head = f"{head.removesuffix('ack:')}message-id:{self._message_id_prefix}"
        address = header_line("destination", destination.address, self._version)
        return f"{head}0\n{address}{lines}content-length:0\n\n".encode() + BROKER_FRAME_END

    def encode_deliveries(
        self,
        subscription: str,
        deliveries: Sequence[Delivery],
        parts: list[bytes],
        round_number: int = 0,
        *,
        is_browse: bool = False,
    ) -> None:
        """Encode a subscription's dispatches as MESSAGE frames, and add each frame to `parts` as PARTS_PER_MESSAGE byte
        strings.

        `round_number` is the release count. If `is_browse`, the messages are only shown to a browser, and count no
        delivery.
        """
        head, middle = self._heads[subscription]
        first_count = 0 if is_browse else 1
        is_newest = self._version is Version.V1_2
        has_pattern = subscription in self._pattern_subscriptions
        is_truenext_client = self._is_truenext_client
        plain = f"truenext-round:{round_number}\n" if is_truenext_client else ""
        if _ENCODER is not None and is_newest and not has_pattern:
            done = _ENCODER.encode(deliveries, parts, head, middle, plain, first_count, is_truenext_client)
            deliveries = deliveries[done:]
        marks_lost = is_truenext_client and not is_browse
        add = parts.extend
        for delivery in deliveries:
            message = delivery.message
            assert message is not None, "what was just dispatched is in memory"
            sequence = str(delivery.sequence)
            count = delivery.deliveries
            if is_truenext_client and middle:
                identity = f"{sequence}.{count}{middle}{sequence}"
            else:
                identity = f"{sequence}{middle}{sequence}" if middle else sequence
            is_first = count == first_count or delivery.was_never_started
            flags = plain if is_first else f"redelivered:true\n{plain}"
            if marks_lost and delivery.was_lost and delivery.attempts:
                flags += "truenext-lost:true\n"
            if delivery.causes is not None:
                flags += self._causes(delivery.causes)
            if delivery.is_first_of_group and not is_browse:
                flags += f"{FIRST_OF_GROUP}:true\n"
            header, body = message.header, message.body
            if message.form:
                header, body = stomp_message(message)
            if has_pattern:
                header = _with_destination(header, delivery.address)
            if not is_newest:
                header = self._for_older_version(header)
            add(
                (
                    f"{head}{identity}\ntruenext-sequence:{sequence}\ntruenext-deliveries:{count}\n"
                    f"truenext-attempts:{delivery.attempts}\n{flags}timestamp:{message.arrived_ms}\n".encode(),
                    header,
                    b"\n",
                    body,
                    BROKER_FRAME_END,
                )
            )

    def _causes(self, causes: DeliveryCauses) -> str:
        version = self._version
        return header_line(FIRST_CAUSE, causes.first, version) + header_line(LAST_CAUSE, causes.last, version)

    def _for_older_version(self, header: bytes) -> bytes:
        version = self._version
        if version is Version.V1_1:
            if b"\\" not in header:
                return header
            headers = header_lines.decode_header_lines(header)
        else:
            headers = _headers_for_v1_0(header_lines.decode_header_lines(header))
        return "".join(header_line(name, value, version) for name, value in headers.items()).encode()

    def encode_receipt(self, receipt: Receipt) -> bytes:
        text = receipt.receipt
        if not receipt.is_repeat and header_lines.must_escape(text) is None:
            # A shortcut: clients that send one message at a time get a RECEIPT for each.
            return b"RECEIPT\nreceipt-id:%b\n\n%b" % (text.encode(), BROKER_FRAME_END)
        headers = {"receipt-id": text}
        if receipt.is_repeat:
            headers["truenext-repeat"] = "true"
        if receipt.is_unknown:
            headers["truenext-outcome"] = "unknown"
        return self._protocol.send(Frame("RECEIPT", headers))

    def encode_fault(self, fault: ErrorAnswer) -> bytes:
        headers = {"message": fault.summary, "truenext-code": fault.code.value, "content-type": "text/plain"}
        if self._protocol.state is ProtocolState.CONNECTING:
            # Before the version is known a backslash may be an escape or not.
            headers["message"] = fault.summary.replace("\\", "/")
            headers["version"] = ",".join(version.value for version in Version)
        else:
            if fault.receipt is not None and len(fault.receipt) <= NAME_LENGTH_MAX:
                # Nothing of a frame before the login is repeated.
                headers["receipt-id"] = fault.receipt
            if fault.frame_number:
                headers["truenext-frame"] = str(fault.frame_number)
        return self._protocol.send(Frame("ERROR", headers, (fault.detail or fault.summary).encode()))


def _with_destination(header: bytes, address: str) -> bytes:
    """Return header lines whose `destination` is this queue, in place of the destination that the SEND has named."""
    line = f"\n{header_line('destination', address, Version.V1_2)}".encode()
    if line in b"\n" + header:
        return header
    return header_lines.encode_header_lines(header_lines.decode_header_lines(header) | {"destination": address})


def _headers_for_v1_0(headers: dict[str, str]) -> dict[str, str]:
    """Return headers for a client of STOMP 1.0, which may strip blanks from names. A header is left out if without its
    blanks it would look like a header that only the broker sets."""
    trimmed = {name: headers[name] for name in _SET_BY_BROKER if name in headers}
    for untrimmed, value in headers.items():
        name = untrimmed.strip()
        read_as = name.partition(":")[0].strip()
        is_imitation = read_as in header_lines.ADDED_HEADERS and read_as != untrimmed
        if read_as not in ("", *HOP_BY_HOP_HEADERS) and not is_imitation:
            trimmed.setdefault(name, value)
    return trimmed
