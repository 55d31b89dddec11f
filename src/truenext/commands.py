"""What a client asks of the broker, whatever protocol it speaks.

Made once per frame on the hot path, hence structs without garbage collection.
"""

from enum import Enum

import msgspec

from truenext.destination import Destination
from truenext.message import Message
from truenext.schedule import Schedule
from truenext.selector import Selector


class AckMode(Enum):
    AUTO = "auto"
    """Acknowledged once the socket has taken the bytes."""
    CLIENT = "client"
    """An acknowledgement covers everything dispatched to the subscription up to the message it names."""
    INDIVIDUAL = "client-individual"
    """An acknowledgement covers the message it names."""


class Send(msgspec.Struct, gc=False):
    destination: Destination
    message: Message
    transaction: str | None = None
    producer: str | None = None
    """With `number`, makes a repeat recognisable (guarantee L5)."""
    number: int = 0
    schedule: Schedule | None = None
    """None is now."""
    is_repeat: bool = False
    """Its number was used before, and it was not accepted again; noted by the engine."""


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
    durable: str = ""
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
    durable: str = ""
    """The durable subscription that is to end, with what waits in it; "" is none."""


class Ack(msgspec.Struct, gc=False):
    """The message was handled. `subscription` None: whichever of the connection's holds it (STOMP 1.0)."""

    subscription: str | None
    sequence: int
    transaction: str | None = None


class Nack(msgspec.Struct, gc=False):
    """The consumer failed with the message."""

    subscription: str | None
    sequence: int
    transaction: str | None = None
    delay_ms: int | None = None
    """Milliseconds until the next try; None leaves it to the policy."""
    is_poison: bool = False
    """There is to be no next try."""


class Begin(msgspec.Struct, gc=False):
    transaction: str


class Commit(msgspec.Struct, gc=False):
    transaction: str
    producer: str | None = None
    number: int = 0
    is_repeat: bool = False
    """As of a Send: the transaction, if it was open, has ended as by an Abort."""


class Abort(msgspec.Struct, gc=False):
    transaction: str


class Disconnect(msgspec.Struct, gc=False):
    """The client takes its leave; whatever it holds goes back without an attempt."""


class Confirm(msgspec.Struct, gc=False):
    """Answer once everything this connection asked for so far is as durable as it is going to be."""

    receipt: str
    numbered: Send | Commit | None = None
    """What it is about, if that can be a repeat; the answer says whether it was."""


class Control(msgspec.Struct, gc=False):
    """A question to the broker itself; the answer is a message to `reply_to`."""

    verb: str
    body: bytes
    reply_to: Destination
    correlation: str | None = None


Command = Send | Subscribe | Browse | Unsubscribe | Ack | Nack | Begin | Commit | Abort | Disconnect | Confirm | Control
