"""Commands of a client to the broker, independent of the client's protocol.

Each frame becomes a command. So that this is quick, commands are structs without garbage collection.
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
    """CONNECT: user, and the options that only a truenext client has (docs/protocol.md, "Login")."""

    number: int = 0
    """Number of this connection, which rises with each connection of a truenext client; 0 for any other client."""
    secret: str = ""
    """Secret of the connection to take over; "" if there is none."""
    user: str = ""
    """Name of the user; "" if the client names none."""
    passcode: str = ""
    is_jms_client: bool = False
    """True for a JMS client (docs/contract.md, "JMS clients")."""
    connection_id: str = ""
    """Id that a JMS client has given its connection, and by which it names its temporary queues and topics; "" for any
    other client."""

    def __repr__(self) -> str:
        # Without secret, user and passcode: this text may be printed with a traceback.
        return f"Login(number={self.number})"

    @property
    def is_truenext_client(self) -> bool:
        """True if the client has sent `truenext-client`: such a client reports the messages that its program has
        started, and gets frames that only truenext defines."""
        return self.number > 0


class AckMode(Enum):
    AUTO = "auto"
    """A message counts as acknowledged once the socket has taken its bytes."""
    CLIENT = "client"
    """An ACK acknowledges the message that it names, and all earlier messages of the subscription."""
    INDIVIDUAL = "client-individual"
    """An ACK acknowledges only the message that it names."""


class Send(msgspec.Struct, gc=False):
    destination: Destination
    message: SentMessage
    transaction: str | None = None
    producer: str | None = None
    """Name of the producer. Name and `number` tell the broker whether the SEND is a repeat (C18.5)."""
    number: int = 0
    schedule: Schedule | None = None
    """Times at which the message is sent; None sends it now."""
    ttl_ms: int = 0
    """Milliseconds from acceptance until the message expires. 0 if the message itself states its expiry, if it never
    expires, or if `schedule` has the time to live."""
    is_gapless: bool = False
    """True if the producer's numbers have no gaps."""
    names_destinations: bool = False
    """True if headers name other destinations than `destination`: a reply-to, or those in `failure_destinations`."""
    failure_destinations: tuple[Destination, ...] = ()
    """Destination of reports, and handlers, which get messages if the message fails (C11.7, C11.8)."""
    rejected_for: str | None = None
    """Cause for which the message becomes a dead letter of its queue at once (C11.13); "" if none is stated, None if
    the message arrives in its queue."""
    is_repeat: bool = False
    """True if the number was used before, so that the message was not accepted again; set by the engine."""
    is_unknown: bool = False
    """True if the frame counts as a repeat only because its number is below the producer's highest one: the broker does
    not know whether this number was ever used. Set by the engine."""
    ahead: Any = None
    """Queues of the message, if they were found before the SEND is executed (engine.queues.topics.RouteAhead); set by
    the engine."""


class OpenProducer(msgspec.Struct, gc=False):
    """Say that messages will be sent to a destination. The command does nothing: it is refused if the client may not
    send there."""

    destination: Destination


class SendRun(msgspec.Struct, gc=False):
    """Consecutive SENDs of one read of a socket, to one destination, without headers that need special treatment."""

    destination: Destination
    messages: list[SentMessage]
    """Messages of the run: two or more, all of them persistent or all transient."""
    executed: int = 0
    """Number of messages, from the first on, that were accepted as a run; the others follow as single commands. Set by
    the engine."""

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
    """Consumer priority, -127 to 127. If several consumers have credit, the highest priority gets a message."""
    is_exclusive: bool = False
    """True for an exclusive consumer (C4.12)."""
    has_express: bool = False
    """True if a more urgent message may be dispatched beyond the window (C4.13)."""
    is_pulling: bool = False
    """True if the subscription gets only messages that it requests by Credit."""
    durable_key: str = ""
    """Key of the durable subscription to resume or create (`destination.durable_key`); "" if it is not durable."""
    selector: Selector | None = None
    """Condition on messages; None matches all."""


class Browse(msgspec.Struct, gc=False):
    """Show the waiting messages of a queue, which stay in the queue. An Unsubscribe ends the browse early."""

    subscription: str
    destination: Destination
    selector: Selector | None = None
    """Condition on messages; None matches all."""
    is_pulling: bool = False
    """True if the browser is shown only as many messages as `Credit` commands request."""
    after: tuple[int, int] | None = None
    """Rank and sequence of the message after which the browse begins; None begins with the first message."""
    count: int | None = None
    """Number of messages with which the browse ends; None shows all."""


class Unsubscribe(msgspec.Struct, gc=False):
    subscription: str
    durable_key: str = ""
    """Key of the durable subscription to end, so that its waiting messages are removed; "" ends none."""


class Close(msgspec.Struct, gc=False):
    """End subscriptions of a JMS client in one step, and requeue the messages that they hold."""

    subscriptions: list[str]
    last_delivered: int | None = None
    """Sequence of the message that the client's program got last from one of the subscriptions. An attempt counts for
    this message, and for all that its consumer got before and still holds. None counts no attempt."""


class Started(msgspec.Struct, gc=False):
    """Report that the client has passed a message to its program."""

    subscription: str
    sequence: int
    dispatch: int


class Ack(msgspec.Struct, gc=False):
    """Acknowledge a message. If `subscription` is None (STOMP 1.0), the broker finds the subscription that holds the
    message."""

    subscription: str | None
    sequence: int
    transaction: str | None = None
    dispatch: int = 0
    """Number of deliveries that the message had at the acknowledged dispatch; 0 if the frame does not state it."""
    started: Started | None = None
    """Message that the client passes to its program next, if the ACK reports one."""


class AckRun(msgspec.Struct, gc=False):
    """Consecutive ACKs of one read of a socket, for one subscription, without transaction and receipt."""

    subscription: str
    acks: list[Ack]
    executed: int = 0
    """Number of ACKs, from the first on, that were executed as a run; the others follow as single commands. Set by the
    engine."""

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
    """Milliseconds until the next try; None leaves the delay to the policy."""
    is_rejected: bool = False
    """True if the message must not be tried again: it becomes a dead letter."""
    dispatch: int = 0
    """Number of deliveries that the message had at the nacked dispatch; 0 if the frame does not state it."""
    cause: str = ""
    """Reason for the failure; "" if the client states none."""


class Credit(msgspec.Struct, gc=False):
    """Pull request: a subscription requests messages. That of a browser has only the first two fields."""

    subscription: str
    messages: int
    """Number of additional messages; 0 withdraws all open pull requests of the subscription."""
    waits: bool = True
    """True if the request stays open until the messages have come; False ends it when no message is ready."""
    correlation: str | None = None
    wait_ms: int = 0
    """Milliseconds after which the broker withdraws a request that waits; 0 is no limit."""


class Wake(msgspec.Struct, gc=False):
    """Resume a suspended subscription."""

    subscription: str


class Release(msgspec.Struct):
    """Requeue the messages that subscriptions hold, in one step and without an attempt."""

    subscriptions: list[str]
    kept: list[tuple[str, int, int]]
    """Messages that the subscriptions still hold afterwards: subscription, sequence and dispatch of each."""
    suspends: bool = False
    """True if the subscriptions are suspended from then on."""
    transaction: str | None = None
    """Transaction to abort in the same step; None if no transaction is to be aborted."""
    counts_all: bool = True
    """Messages of `transaction` for which the abort counts an attempt: all that it has acknowledged or nacked (True),
    or only those that it has nacked (False)."""


class Begin(msgspec.Struct, gc=False):
    transaction: str
    counts_all: bool = True
    """Messages for which an attempt counts if the transaction ends without COMMIT: all that it has acknowledged or
    nacked (True), or only those that it has nacked (False). With False, the frame that ends the transaction cannot ask
    for all."""


class Commit(msgspec.Struct, gc=False):
    transaction: str
    producer: str | None = None
    number: int = 0
    is_gapless: bool = False
    counts_all: bool = True
    """Messages for which an attempt counts if this COMMIT is a repeat: all that the open transaction has acknowledged
    or nacked (True), or only those that it has nacked (False)."""
    acks: list[Ack] = []
    """Acknowledgements of a JMS client's transaction, which take effect in one step with this COMMIT. Consumers hold
    the messages until then. Each covers the one message that it names."""
    is_repeat: bool = False
    """True if the number was used before, so that the open transaction was rolled back; set by the engine."""
    is_unknown: bool = False
    """True if the frame counts as a repeat only because its number is below the producer's highest one: the broker does
    not know whether this number was ever used. Set by the engine."""


class Abort(msgspec.Struct, gc=False):
    transaction: str
    counts_all: bool = True
    """Messages for which an attempt counts: all that the transaction has acknowledged or nacked (True), or only those
    that it has nacked (False)."""


class Disconnect(msgspec.Struct, gc=False):
    """End the connection. Messages that the connection holds are requeued, without an attempt but for
    `last_delivered`."""

    forgotten_producers: list[str] = []
    """Names of producers that the broker forgets."""
    last_delivered: int | None = None
    """Sequence of the message that the program of a JMS client got last; see Close."""


class ForgetProducers(msgspec.Struct, gc=False):
    """Forget producers whose ends the client has reported: nothing that they send after that is a repeat."""

    names: list[str]


class CreateTemporary(msgspec.Struct, gc=False):
    """Create a temporary queue or topic of this connection. Nothing happens if there is one."""

    destination: Destination


class RemoveTemporary(msgspec.Struct, gc=False):
    """Remove a temporary queue or topic of this connection, with all its messages. Nothing happens if there is
    none."""

    destination: Destination


class ReceiptRequest(msgspec.Struct, gc=False):
    """Request a receipt, which is sent once the earlier persistent sends and commits of this connection are durable."""

    receipt: str
    numbered_command: Send | Commit | None = None
    """SEND or COMMIT with a number that requested the receipt. The receipt then says whether it was a repeat."""


class Pause(msgspec.Struct, gc=False):
    """Let the broker read the clock. A session yields this after a frame that becomes no other command: thousands of
    such frames may come in one read, and other connections are served only between commands."""


class ControlRequest(msgspec.Struct, gc=False):
    """Query or change of the broker, for example from an operator's command. The answer is a message to `reply_to`."""

    verb: str
    body: bytes
    reply_to: Destination
    correlation: str | None = None


class InvalidFrame(msgspec.Struct, gc=False):
    """Frame that cannot be read as a command, on a connection that stays open.

    It has the text of the decoder's exception. The exception itself would keep the frame and its body in memory until a
    garbage collection.
    """

    reason: str
    code: Code
    transaction: str | None


Command = (
    Login
    | InvalidFrame
    | Send
    | SendRun
    | OpenProducer
    | Subscribe
    | Browse
    | Unsubscribe
    | Close
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
    | ForgetProducers
    | CreateTemporary
    | RemoveTemporary
    | ReceiptRequest
    | Pause
    | ControlRequest
)


# ---- JSON of a client: any error in it is the client's fault ----

_Value = TypeVar("_Value")


def decode_client_json(what: str, body: bytes | str, shape: type[_Value], code: Code = Code.CONTROL_REQUEST) -> _Value:
    """Decode `body` as JSON of the type `shape`; `what` names the body in the text of an error.

    Raises: RemoteProtocolError if `body` is not JSON of this type
    """
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        # Text that is not UTF-8 and lists nested too deeply raise errors that are not msgspec's.
        raise RemoteProtocolError(f"{what}: {error}", code) from error
