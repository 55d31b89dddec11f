"""Wire session: a connection's protocol as the server uses it. StompSession is the one that there is.

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
    """Fields of a dispatch that its message states."""

    @property
    def sequence(self) -> int: ...
    @property
    def message(self) -> SentMessage | None: ...
    @property
    def deliveries(self) -> int: ...
    @property
    def was_never_started(self) -> bool:
        """True if there was an earlier dispatch, and no program can have received the message."""

    @property
    def attempts(self) -> int: ...
    @property
    def was_lost(self) -> bool:
        """True if the last attempt was a lost connection."""

    @property
    def causes(self) -> DeliveryCauses | None: ...
    @property
    def is_first_of_group(self) -> bool: ...
    @property
    def address(self) -> str:
        """Address of the queue."""


class WireReplies(Protocol):
    """Bytes of deliveries and answers to one client."""

    @property
    def parts_per_message(self) -> int:
        """Byte strings that `encode_deliveries` adds for each message."""

    @property
    def heart_beat(self) -> bytes:
        """Bytes that only show that the broker is there."""

    def encode_deliveries(
        self,
        subscription: str,
        deliveries: Sequence[Delivery],
        parts: list[bytes],
        round_number: int = 0,
        *,
        is_browse: bool = False,
    ) -> None:
        """Add the messages of a subscription's dispatches to `parts`. `round_number` is the release count. A browsed
        message (`is_browse`) does not count as a delivery."""

    def encode_end_of_browse(self, subscription: str, destination: Destination) -> bytes: ...

    def encode_end_of_pull_request(
        self, subscription: str, destination: Destination, unused: int, correlation: str | None
    ) -> bytes:
        """Encode the end of a pull request, with the number of its messages that have not come."""

    def encode_receipt(self, receipt: Receipt) -> bytes: ...

    def encode_fault(self, fault: ErrorAnswer) -> bytes: ...


class WireSession(Protocol):
    """Broker's side of a protocol on one connection."""

    @property
    def replies(self) -> WireReplies: ...

    @property
    def pending(self) -> bytearray:
        """Beginning of an incomplete frame; always the same object. The connection clears it when input ends."""

    @property
    def client_id(self) -> str: ...

    @property
    def is_connected(self) -> bool:
        """Whether the client has sent its login."""

    @property
    def is_closed(self) -> bool:
        """Whether the client has ended the session."""

    @property
    def last_receipt(self) -> str | None:
        """Receipt that the last frame requested; a refusal names it."""

    @property
    def send_interval_ms(self) -> int:
        """Agreed heart-beat interval from broker to client, in milliseconds; 0 is none."""

    @property
    def receive_interval_ms(self) -> int:
        """Agreed heart-beat interval from client to broker, in milliseconds; 0 is none."""

    def receive(self, data: bytes) -> Iterator[Command]:
        """Yield the commands in `data`; execute each before requesting the next.

        Raises: RemoteProtocolError at an invalid frame; OtherProtocolError if the client speaks another protocol
        """

    def accept_last(self) -> None:
        """Note that the command yielded last was executed; needed only if the next is not requested at once."""

    def mark_refused(self) -> int:
        """Drop the rest of the last frame's commands, and return the number of the frame."""

    def encode_connected(self, login: Login, secret: str, *, is_takeover: bool, is_checked: bool) -> bytes:
        """Encode the answer to an accepted login; see `Peer.send_connected`."""
