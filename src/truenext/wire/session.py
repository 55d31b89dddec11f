"""Wire session: the protocol of a connection, as far as the server uses it. StompSession implements it for STOMP.

bytes ──▶ receive ──▶ commands        deliveries, answers ──▶ replies ──▶ bytes
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from truenext.model.answers import ErrorAnswer, Receipt
from truenext.model.commands import Command, Login
from truenext.model.destination import Destination
from truenext.model.message import SentMessage


class DeliveryCauses(Protocol):
    """First and last cause of a message's failures."""

    @property
    def first(self) -> str: ...
    @property
    def last(self) -> str: ...


class Delivery(Protocol):
    """Fields of a dispatch that the client gets with the message."""

    @property
    def sequence(self) -> int: ...
    @property
    def message(self) -> SentMessage | None: ...
    @property
    def deliveries(self) -> int: ...
    @property
    def was_never_started(self) -> bool:
        """True if earlier dispatches of the message ended before any program can have received it."""

    @property
    def attempts(self) -> int: ...
    @property
    def was_lost(self) -> bool:
        """True if the last attempt ended with a lost connection. Without an attempt it says nothing."""

    @property
    def redelivery_count(self) -> int:
        """Number of attempts; at least 1 if a connection that held the message was lost."""

    @property
    def causes(self) -> DeliveryCauses | None: ...
    @property
    def is_first_of_group(self) -> bool: ...
    @property
    def address(self) -> str:
        """Address of the queue."""


class WireReplies(Protocol):
    """Encoder that makes the bytes of messages and answers to one client."""

    @property
    def parts_per_message(self) -> int:
        """Number of byte strings that `encode_deliveries` adds for each message."""

    @property
    def heart_beat(self) -> bytes:
        """Bytes of a heart-beat."""

    def encode_deliveries(
        self,
        subscription: str,
        deliveries: Sequence[Delivery],
        parts: list[bytes],
        round_number: int = 0,
        *,
        is_browse: bool = False,
    ) -> None:
        """Encode the messages of a subscription's dispatches, and add the bytes to `parts`. `round_number` is the
        release count. If `is_browse`, the messages are only shown to a browser, and count no delivery."""

    def encode_end_of_browse(self, subscription: str, destination: Destination) -> bytes: ...

    def encode_end_of_pull_request(
        self, subscription: str, destination: Destination, unused: int, correlation: str | None
    ) -> bytes:
        """Encode the end of a pull request. `unused` is the number of messages that were requested and will not
        come."""

    def encode_receipt(self, receipt: Receipt) -> bytes: ...

    def encode_fault(self, fault: ErrorAnswer) -> bytes: ...


class WireSession(Protocol):
    """Broker's side of a protocol, on one connection."""

    @property
    def replies(self) -> WireReplies: ...

    @property
    def pending(self) -> bytearray:
        """Beginning of an incomplete frame. This is always the same object; the connection clears it when input
        ends."""

    @property
    def client_id(self) -> str: ...

    @property
    def is_connected(self) -> bool:
        """True once the client has sent its login."""

    @property
    def is_closed(self) -> bool:
        """True once the client has ended the session, as by DISCONNECT."""

    @property
    def last_receipt(self) -> str | None:
        """Receipt that the last frame has requested; None if it requests none. If the frame is refused, the ERROR names
        this receipt."""

    @property
    def send_interval_ms(self) -> int:
        """Agreed heart-beat interval from broker to client, in milliseconds; 0 is none."""

    @property
    def receive_interval_ms(self) -> int:
        """Agreed heart-beat interval from client to broker, in milliseconds; 0 is none."""

    def receive(self, data: bytes) -> Iterator[Command]:
        """Yield the commands in `data`, decoded one after the other. The caller must execute each command before it
        takes the next one.

        Raises: RemoteProtocolError at an invalid frame; OtherProtocolError if the client speaks another protocol
        """

    def accept_last(self) -> None:
        """Note that the command that was yielded last is executed. Taking the next command from `receive` implies this
        call."""

    def mark_refused(self) -> int:
        """Note that the last frame was refused, and drop its remaining commands. Returns the number of the frame."""

    def encode_connected(self, login: Login, secret: str, *, is_takeover: bool, is_checked: bool) -> bytes:
        """Encode the answer to an accepted login. `secret` is "" for a client other than truenext's.
        `is_checked` is False if the broker has no users, so that login and passcode were ignored."""
