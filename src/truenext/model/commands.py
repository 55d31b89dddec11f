"""What a client asks of the broker, whatever protocol it speaks.

Made once per frame on the hot path, hence structs without garbage collection.
"""

from enum import Enum
from typing import TypeVar

import msgspec

from truenext.errors import Code, RemoteProtocolError
from truenext.model.destination import Destination
from truenext.model.message import SentMessage
from truenext.model.schedule import Schedule
from truenext.model.selector import Selector


class Login(msgspec.Struct, gc=False):
    """What a client asks for when it connects, beside STOMP's own (docs/stomp.md)."""

    has_rounds: bool = False
    """Its messages say their round, and what it acknowledges is a dispatch: it may give back."""
    names_begun: bool = False
    """It says what it begins."""
    keeps_open: bool = False
    """What is refused does not end the connection."""
    number: int = 0
    """Rises from one connection of this client to the next; 0 is not said: then nobody takes over."""
    secret: str = ""
    """Of the connection that is to be taken over; "" is none."""
    is_blameless: bool = False
    """Nothing of that one is charged."""

    @property
    def has_extensions(self) -> bool:
        """It asks for anything at all."""
        return self.has_rounds or self.names_begun or self.keeps_open or self.number > 0


class AckMode(Enum):
    AUTO = "auto"
    """Acknowledged once the socket has taken the bytes."""
    CLIENT = "client"
    """An acknowledgement covers everything dispatched to the subscription up to the message it names."""
    INDIVIDUAL = "client-individual"
    """An acknowledgement covers the message it names."""


class Send(msgspec.Struct, gc=False):
    destination: Destination
    message: SentMessage
    transaction: str | None = None
    producer: str | None = None
    """With `number`, makes a repeat recognisable (guarantee L5)."""
    number: int = 0
    schedule: Schedule | None = None
    """None is now."""
    ttl_ms: int = 0
    """Milliseconds from when it is accepted until it expires; 0 if the message says when, or never does. A schedule has
    its own."""
    is_gapless: bool = False
    """The numbers of its producer have no gaps."""
    is_repeat: bool = False
    """Its number was used before, and it was not accepted again; noted by the engine."""
    is_unknown: bool = False
    """It counts as a repeat, and whether its number was ever used is not known; noted by the engine."""


class Subscribe(msgspec.Struct, gc=False):
    subscription: str
    destination: Destination
    mode: AckMode
    window: int | None = None
    """Messages; None leaves it to the broker."""
    priority: int = 0
    """Consumer priority, -127 to 127: while several have credit, a message goes to the highest."""
    is_exclusive: bool = False
    """While it is there nobody else gets messages of the queue."""
    has_express: bool = False
    """It sorts what it holds: something more urgent may come to it beyond its window."""
    is_pulling: bool = False
    """It gets what it asks for (Credit), and nothing else."""
    durable_key: str = ""
    """The durable subscription that it takes up (destination.durable_key); "" is none."""
    selector: Selector | None = None
    """Which messages are wanted; None is all."""


class Browse(msgspec.Struct, gc=False):
    """Show what waits, and leave it as it is. Ends like a subscription."""

    subscription: str
    destination: Destination
    selector: Selector | None = None
    """Which messages are wanted; None is all."""


class Unsubscribe(msgspec.Struct, gc=False):
    subscription: str
    durable_key: str = ""
    """The durable subscription that is to end, with what waits in it; "" is none."""


class Started(msgspec.Struct, gc=False):
    """The client's program has this message now."""

    subscription: str
    sequence: int
    dispatch: int


class Ack(msgspec.Struct, gc=False):
    """The message was handled. `subscription` None: whichever of the connection's holds it (STOMP 1.0)."""

    subscription: str | None
    sequence: int
    transaction: str | None = None
    dispatch: int = 0
    """Which of its dispatches, counted as deliveries are; 0 does not say."""
    started: Started | None = None
    """What the client's program has next, if it says so here."""


class Nack(msgspec.Struct, gc=False):
    """The consumer failed with the message."""

    subscription: str | None
    sequence: int
    transaction: str | None = None
    delay_ms: int | None = None
    """Milliseconds until the next try; None leaves it to the policy."""
    is_rejected: bool = False
    """There is to be no next try."""
    dispatch: int = 0
    """As of an Ack."""
    cause: str = ""
    """Why the consumer failed; empty is not said."""


class Credit(msgspec.Struct, gc=False):
    """A subscription that pulls asks for more."""

    subscription: str
    messages: int
    """So many more; 0 withdraws what was asked for and has not come."""
    waits: bool = True
    """Until they are there; else it ends when no message is ready."""
    correlation: str | None = None


class Wake(msgspec.Struct, gc=False):
    """A subscription that rests goes on."""

    subscription: str


class Release(msgspec.Struct):
    """What subscriptions hold comes back without an attempt, in one step."""

    subscriptions: list[str]
    kept: list[tuple[str, int, int]]
    """But for these: subscription, sequence and dispatch of each."""
    suspends: bool = False
    """Then they rest."""
    transaction: str | None = None
    """It is aborted in the same step."""
    counts_all: bool = True
    """As of an Abort."""


class Begin(msgspec.Struct, gc=False):
    transaction: str
    counts_all: bool = True
    """An end that is no COMMIT counts an attempt for all that it acknowledged or refused; else for what it refused,
    whatever the frame that ends it says."""


class Commit(msgspec.Struct, gc=False):
    transaction: str
    producer: str | None = None
    number: int = 0
    is_gapless: bool = False
    counts_all: bool = True
    """As of an Abort, if it is a repeat."""
    is_repeat: bool = False
    """As of a Send: the transaction, if it was open, has ended as by an Abort."""
    is_unknown: bool = False
    """As of a Send."""


class Abort(msgspec.Struct, gc=False):
    transaction: str
    counts_all: bool = True
    """An attempt counts for all that it acknowledged or refused; else for what it refused."""


class Disconnect(msgspec.Struct, gc=False):
    """The client takes its leave; whatever it holds goes back without an attempt."""

    forgotten_producers: list[str] = []
    """Producers that are to be forgotten."""


class ReceiptRequest(msgspec.Struct, gc=False):
    """Answer once everything this connection asked for so far is as durable as it is going to be."""

    receipt: str
    numbered_command: Send | Commit | None = None
    """What it is about, if that can be a repeat; the answer says whether it was."""


class ControlRequest(msgspec.Struct, gc=False):
    """A question to the broker itself; the answer is a message to `reply_to`."""

    verb: str
    body: bytes
    reply_to: Destination
    correlation: str | None = None


class InvalidFrame(msgspec.Struct, gc=False):
    """A frame that means nothing, on a connection that goes on.

    What is wrong with it, and not the exception: that knows the frame, body and all, until a collection of garbage.
    """

    reason: str
    code: Code
    transaction: str | None


Command = (
    Login
    | InvalidFrame
    | Send
    | Subscribe
    | Browse
    | Unsubscribe
    | Ack
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


# ---- What a client asks in JSON, read; what is wrong with it is the client's fault, whatever it is ----

_Value = TypeVar("_Value")


def decode_client_json(what: str, body: bytes | str, shape: type[_Value], code: Code = Code.CONTROL_REQUEST) -> _Value:
    """`body` as one of these; `what` is named where it is none.

    Raises: RemoteProtocolError
    """
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        # A text that is no UTF-8 is no error of msgspec's own, nor are lists in lists in lists.
        raise RemoteProtocolError(f"{what}: {error}", code) from error
