"""Commands of a client to the broker, independent of its protocol.

One is made per frame on the hot path, therefore structs without garbage collection.
"""

from enum import Enum
from typing import Any, TypeVar

import msgspec

from truenext.errors import Code, RemoteProtocolError
from truenext.model.destination import Destination
from truenext.model.message import SentMessage
from truenext.model.schedule import Schedule
from truenext.model.selector import Selector


class Login(msgspec.Struct, gc=False):
    """Options of a connection beyond those of STOMP (docs/protocol.md, "Login")."""

    number: int = 0
    """Number of this connection among those of a truenext client, rising; 0 is any other client."""
    secret: str = ""
    """Secret of the connection to take over; "" is none."""
    user: str = ""
    """Name; "" is none."""
    passcode: str = ""

    def __repr__(self) -> str:
        # Without what the client has sent, as it may be printed with a traceback.
        return f"Login(number={self.number})"

    @property
    def is_truenext_client(self) -> bool:
        """Whether the client gets all that truenext adds to STOMP on CONNECT, and reports what it has started."""
        return self.number > 0


class AckMode(Enum):
    AUTO = "auto"
    """A message is acknowledged once the socket has taken its bytes."""
    CLIENT = "client"
    """An ACK covers all messages dispatched to the subscription up to the named one."""
    INDIVIDUAL = "client-individual"
    """An ACK covers the named message."""


class Send(msgspec.Struct, gc=False):
    destination: Destination
    message: SentMessage
    transaction: str | None = None
    producer: str | None = None
    """Producer name; with `number` it makes a repeat recognisable (C18.5)."""
    number: int = 0
    schedule: Schedule | None = None
    """Schedule of a scheduled send; None sends now."""
    ttl_ms: int = 0
    """Milliseconds from acceptance until the message expires; 0 if the message states its expiry, or never expires.
    A schedule has its own."""
    is_gapless: bool = False
    """True if the producer's numbers have no gaps."""
    has_reply_to: bool = False
    is_repeat: bool = False
    """True if the number was used before and the message was not accepted again; set by the engine."""
    is_unknown: bool = False
    """True if a repeat's number may in truth never have been used; set by the engine."""
    ahead: Any = None
    """Queues found before the message is accepted (engine.queues.topics.RouteAhead); set by the engine."""


class SendRun(msgspec.Struct, gc=False):
    """Consecutive SENDs of one read to one destination, without headers that need more than a place in the queue."""

    destination: Destination
    messages: list[SentMessage]
    """Two or more, all of them persistent or all transient."""
    executed: int = 0
    """Number of the first messages that were accepted; the others follow as single commands. Set by the engine."""

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, number: int) -> Send:
        """Return the command of one message."""
        return Send(self.destination, self.messages[number])


class Subscribe(msgspec.Struct, gc=False):
    subscription: str
    destination: Destination
    mode: AckMode
    window: int | None = None
    """Number of messages that the consumer may hold; None lets the broker choose."""
    priority: int = 0
    """Consumer priority, -127 to 127: of several consumers with credit the highest gets a message."""
    is_exclusive: bool = False
    """True if no other consumer gets messages of the queue while this one is subscribed."""
    has_express: bool = False
    """True if the client sorts the messages that it holds: a more urgent one may be dispatched beyond its window."""
    is_pulling: bool = False
    """True if the subscription gets only messages that it requests (Credit)."""
    durable_key: str = ""
    """Key of the durable subscription to resume or create (`destination.durable_key`); "" is none."""
    selector: Selector | None = None
    """Filter of messages; None is all."""


class Browse(msgspec.Struct, gc=False):
    """Show waiting messages without consuming them. An Unsubscribe ends it."""

    subscription: str
    destination: Destination
    selector: Selector | None = None
    """Filter of messages; None is all."""


class Unsubscribe(msgspec.Struct, gc=False):
    subscription: str
    durable_key: str = ""
    """Key of the durable subscription to end, together with its waiting messages; "" is none."""


class Started(msgspec.Struct, gc=False):
    """Report that the client's program was handed a message."""

    subscription: str
    sequence: int
    dispatch: int


class Ack(msgspec.Struct, gc=False):
    """Acknowledge a message. `subscription` None is the one that holds the message (STOMP 1.0)."""

    subscription: str | None
    sequence: int
    transaction: str | None = None
    dispatch: int = 0
    """Number of the acknowledged dispatch, counted as deliveries are; 0 is not stated."""
    started: Started | None = None
    """Message that the client's program was handed next, if the ACK reports one."""


class AckRun(msgspec.Struct, gc=False):
    """Consecutive ACKs of one read for one subscription, without transaction and receipt."""

    subscription: str
    acks: list[Ack]
    executed: int = 0
    """Number of the first ACKs that were executed; the others follow as single commands. Set by the engine."""

    def __len__(self) -> int:
        return len(self.acks)

    def __getitem__(self, number: int) -> Ack:
        return self.acks[number]


class Nack(msgspec.Struct, gc=False):
    """Report that the consumer failed with a message."""

    subscription: str | None
    sequence: int
    transaction: str | None = None
    delay_ms: int | None = None
    """Milliseconds until the next retry; None is as the policy says."""
    is_rejected: bool = False
    """True if the message must not be retried."""
    dispatch: int = 0
    """Number of the nacked dispatch, see Ack; 0 is not stated."""
    cause: str = ""
    """Reason for the failure; "" is not stated."""


class Credit(msgspec.Struct, gc=False):
    """Pull request: a subscription requests messages."""

    subscription: str
    messages: int
    """Number of additional messages; 0 withdraws all open pull requests of the subscription."""
    waits: bool = True
    """True if the request stays open until the messages have come; False ends it when no message is ready."""
    correlation: str | None = None


class Wake(msgspec.Struct, gc=False):
    """Resume a suspended subscription."""

    subscription: str


class Release(msgspec.Struct):
    """Requeue messages that subscriptions hold, in one step and without an attempt."""

    subscriptions: list[str]
    kept: list[tuple[str, int, int]]
    """Messages not to requeue: subscription, sequence and dispatch of each."""
    suspends: bool = False
    """True if the subscriptions are then suspended."""
    transaction: str | None = None
    """Transaction to abort in the same step as the release; None is none."""
    counts_all: bool = True
    """True if the abort of `transaction` counts an attempt for acknowledged messages, too; see Abort."""


class Begin(msgspec.Struct, gc=False):
    transaction: str
    counts_all: bool = True
    """Messages for which an end of the transaction other than COMMIT counts an attempt: False is only those that it has
    nacked, whatever the frame that ends it requests; True is also those that it has acknowledged."""


class Commit(msgspec.Struct, gc=False):
    transaction: str
    producer: str | None = None
    number: int = 0
    is_gapless: bool = False
    counts_all: bool = True
    """True if a repeat of this COMMIT counts an attempt for acknowledged messages, too; see Abort."""
    is_repeat: bool = False
    """True if the number was used before; set by the engine. The open transaction has then ended as by an Abort."""
    is_unknown: bool = False
    """True if a repeat's number may in truth never have been used; set by the engine."""


class Abort(msgspec.Struct, gc=False):
    transaction: str
    counts_all: bool = True
    """True counts an attempt for all messages acknowledged or nacked in the transaction, False for nacked ones."""


class Disconnect(msgspec.Struct, gc=False):
    """Close the connection in an orderly way; messages that it holds are requeued without an attempt."""

    forgotten_producers: list[str] = []
    """Producers that the broker is to forget."""


class ReceiptRequest(msgspec.Struct, gc=False):
    """Request an answer once all earlier commands of this connection are as durable as promised."""

    receipt: str
    numbered_command: Send | Commit | None = None
    """Numbered command that the receipt is for; the answer states whether it was a repeat."""


class ControlRequest(msgspec.Struct, gc=False):
    """Query or request to the broker itself; the answer is a message to `reply_to`."""

    verb: str
    body: bytes
    reply_to: Destination
    correlation: str | None = None


class InvalidFrame(msgspec.Struct, gc=False):
    """Frame that cannot be read as a command, on a connection that stays open.

    Holds no exception: that would keep the frame, body included, alive until a garbage collection.
    """

    reason: str
    code: Code
    transaction: str | None


Command = (
    Login
    | InvalidFrame
    | Send
    | SendRun
    | Subscribe
    | Browse
    | Unsubscribe
    | Ack
    | AckRun
    | Nack
    | Started
    | Credit
    | Wake
    | Release
    | Begin
    | Commit
    | Abort
    | Disconnect
    | ReceiptRequest
    | ControlRequest
)


# ---- JSON of a client: any error in it is the client's fault ----

_Value = TypeVar("_Value")


def decode_client_json(what: str, body: bytes | str, shape: type[_Value], code: Code = Code.CONTROL_REQUEST) -> _Value:
    """Decode `body` as JSON of the type `shape`; `what` names it in an error.

    Raises: RemoteProtocolError
    """
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        # Text that is not UTF-8 and lists nested too deeply raise errors that are not msgspec's.
        raise RemoteProtocolError(f"{what}: {error}", code) from error
