"""Wire session: the protocol of a connection, as far as the server uses it. StompSession implements it for STOMP.

bytes ──▶ receive ──▶ commands        deliveries, answers ──▶ replies ──▶ bytes
               └────▶ outgoing        bytes that the session itself sends, such as its half of a negotiation

`ProtocolRules` has what is the same for all connections of a protocol.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from truenext.errors import Code
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


class ProtocolRules(NamedTuple):
    """Rules of a protocol for logins and ends, and the words for them in errors and in the log."""

    protocol: str
    """Name of the protocol."""
    opening_seconds_max: float
    """Seconds from the accept of a connection, its TLS handshake included, until its opening must be complete
    (`WireSession.is_opening`)."""
    login_bytes_max: int
    """Bytes of a client that are read at once before its login. The session itself limits their sum."""
    late_opening: str
    """Reason for which a connection ends whose client has not sent its opening in time."""
    unchecked_login: str
    """Reason for which a connection ends whose login was sent in time, but not checked in time; "" if the opening is
    not the login, so that its check has no time limit."""
    closing_seconds: float
    """Seconds that a client has to close its socket, after its login was refused or it has ended the connection; then
    the broker closes it."""
    displaced_login: str
    """Reason for which a connection without a login ends in favour of newer ones. `{newer}` in this text stands for
    their number."""
    plain_text: str
    """Reason for which a client without TLS is refused at a port with TLS."""
    missing_end: str
    """Reason in the log if the client has closed its socket without a command that ends the session."""
    has_takeover: bool
    """True if a client may take over its lost connection, so that a connection may be parked. False: every lost
    connection ends at once."""
    has_control_requests: bool
    """True if clients can send control requests, so that a few more may log in for these when all places are taken."""


class WireSession(Protocol):
    """Broker's side of a protocol, on one connection."""

    rules: ProtocolRules
    """Rules of the protocol, the same for all its sessions."""

    @property
    def replies(self) -> WireReplies:
        """Encoder of messages and answers to the client."""

    @property
    def pending(self) -> bytearray:
        """Beginning of an incomplete frame. This is always the same object; the connection clears it when input
        ends."""

    @property
    def outgoing(self) -> bytearray:
        """Bytes that the session sends on its own, not as the answer to a command. This is always the same object; the
        connection sends its content and clears it after each call of `Broker.execute`, and before the answer to a
        login. It may be filled by `receive`, and before a call of `on_outgoing`."""

    @property
    def client_id(self) -> str:
        """Client id that the client has named; "" before its login, or if it has named none."""

    @property
    def is_opening(self) -> bool:
        """True as long as the client owes its opening, which must be complete within `rules.opening_seconds_max`. If
        the opening is the login itself, this is always True: the time limit then ends when the login is accepted, and
        includes the check of its password."""

    @property
    def is_connected(self) -> bool:
        """True once the client has sent its login. Until then a newer connection may take its place."""

    @property
    def is_closed(self) -> bool:
        """True once the client has ended the session, as by DISCONNECT."""

    @property
    def last_receipt(self) -> str | None:
        """Receipt that the last frame has requested; None if it requests none. If the frame is refused, the ERROR names
        this receipt."""

    @property
    def beat_check_s(self) -> float:
        """Seconds between two checks whether a heart-beat is due; 0 sends no heart-beats. A check sends
        `replies.heart_beat` if nothing was sent since the last check. The connection reads this number when it sends
        `outgoing` or the answer to the login, and ignores later changes once it is not 0."""

    @property
    def silence_limit_s(self) -> float:
        """Seconds without a byte from the client after which the connection is lost; 0 is no limit. Read at the same
        times as `beat_check_s`."""

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

    def attach(self, on_outgoing: Callable[[], None], on_too_large: Callable[[str], None]) -> None:
        """Connect the session with its socket.

        `on_outgoing` sends `outgoing` at once. The session calls it only for bytes that another connection has caused.
        `on_too_large` logs that a message, which the text describes, is too large for the client, and calls `receive`
        without data soon, as the session has a command for that.
        """

    def detach(self) -> None:
        """Note that the connection has ended. The session must not call the functions of `attach` any more."""

    def encode_connected(
        self, login: Login, secret: str, *, is_takeover: bool, is_checked: bool, control_only: Code | None = None
    ) -> bytes:
        """Encode the answer to an accepted login. `secret` is "" for a client other than truenext's.
        `is_checked` is False if the broker has no users, so that login and passcode were ignored. `control_only` is the
        code with which all but control requests are refused; None if the connection may do everything."""


class SessionFactory(Protocol):
    """Function that makes the session of a new connection, such as the class StompSession."""

    def __call__(
        self,
        *,
        session_id: str,
        identity: str,
        server_name: str,
        on_ineffective_header: Callable[[str, str, str], None],
    ) -> WireSession:
        """Make a session. `session_id` is unique among the connections of the broker. `identity` distinguishes this
        broker's message ids from those of any other broker. `on_ineffective_header` is called for a header that has no
        effect here: with the command, the header, and what to use instead."""
