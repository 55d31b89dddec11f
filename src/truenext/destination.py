"""Where a message is sent to, and the names it may have.

Addresses as clients write them:

    /queue/NAME                        a queue, made on first use; to subscribe to, also a pattern (pattern.py)
    /topic/NAME                        a topic; to subscribe to, also a pattern (pattern.py)
    /temp-queue/NAME                   a reply queue of the connection that says it
    /remote-temp-queue/SESSION/NAME    the same queue, as everybody else must say it
    /temp-topic/NAME                   a topic of the connection that says it
    /remote-temp-topic/SESSION/NAME    the same topic, as everybody else must say it
    /queue/a,/topic/b                  several of these at once, to be sent to
    /subscription/CLIENT,NAME          a durable subscription, to be browsed
    /control/VERB                      a question to the broker itself
"""

from enum import Enum
from functools import lru_cache

import msgspec

from truenext.errors import RemoteProtocolError
from truenext.limits import COMPOSITE_MAX, DESTINATION_LENGTH_MAX
from truenext.pattern import fault_of_pattern, is_pattern

DEAD_LETTER_PREFIX = "DLQ."
"""A queue of this prefix holds what could not be handled; what fails there stays there."""

SUBSCRIPTION_PREFIX = "subscription,"
"""The queue of a durable subscription is called so, with client, name and topic behind it and commas between, and its
selector last if it has one. No name in a client's address has a comma."""

ENDED_PREFIX = "ended,"
"""Before the name of a durable subscription that has ended, until nothing of it is left; and from the beginning before
what the store calls a subscription that ends with its connection."""

DURABLE_ADDRESS_PREFIX = "/subscription/"
TEMPORARY_PREFIX = "/temp-queue/"
REMOTE_TEMPORARY_PREFIX = "/remote-temp-queue/"
TEMPORARY_TOPIC_PREFIX = "/temp-topic/"
REMOTE_TEMPORARY_TOPIC_PREFIX = "/remote-temp-topic/"

_LATER = {"/dsub/": "durable subscriptions by such an address", "/exchange/": "exchanges"}


class Kind(Enum):
    QUEUE = "queue"
    TEMPORARY = "temporary queue"
    """Also what waits for a subscriber to a topic whose subscription ends with its connection."""
    TOPIC = "topic"
    PATTERN = "topics"
    """All topics whose names match a pattern; only to subscribe to."""
    QUEUES = "queues"
    """All queues whose names match a pattern; only to subscribe to."""
    COMPOSITE = "composite"
    """Several of the others; only to send to."""
    DURABLE = "subscription"
    """A durable subscription, whose key is the name; only to browse."""
    CONTROL = "control"


_ONE_OF = {Kind.PATTERN: Kind.TOPIC, Kind.QUEUES: Kind.QUEUE}


class Destination(msgspec.Struct, frozen=True, gc=False):
    """A parsed address. `name` is unique among queues and temporary queues together: only the latter begin with /, and
    those that belong to subscriptions have // behind the session. So it is among topics."""

    kind: Kind
    name: str
    session: str = ""
    """The connection that owns a temporary queue or topic."""
    parts: "tuple[Destination, ...]" = ()
    """Of a composite one."""
    topic: str = ""
    """The topic, or the pattern of topics, whose messages are copied to this queue of a subscription."""
    selector: str = ""
    """What of these is copied; "" is all."""

    is_spread: bool = False
    """A message sent to it stands in any number of queues. Told by its kind; kept, as every send asks for it."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "is_spread", self.kind is Kind.TOPIC or self.kind is Kind.COMPOSITE)

    @property
    def address(self) -> str:
        """How any client may write it."""
        if self.kind is Kind.COMPOSITE:
            return ",".join(part.address for part in self.parts)
        if self.kind is Kind.TEMPORARY:
            return f"/remote-temp-queue{self.name}"
        if self.kind is Kind.TOPIC and self.session:
            return f"/remote-temp-topic{self.name}"
        return f"/{_ONE_OF.get(self.kind, self.kind).value}/{self.name}"


@lru_cache(maxsize=4096)
def parse(address: str, session: str) -> Destination:
    """The destination a client of `session` means.

    >>> parse("/queue/orders", "s1").name
    'orders'
    >>> parse("/temp-queue/replies", "s1").address
    '/remote-temp-queue/s1/replies'

    Raises: RemoteProtocolError if there is no such destination, or none yet.
    """
    if address.startswith(DURABLE_ADDRESS_PREFIX):
        client, _, name = address[len(DURABLE_ADDRESS_PREFIX) :].partition(",")
        return Destination(Kind.DURABLE, durable_key(client, name))
    if "," in address:
        return _composite(address, session)
    if address.startswith("/queue/"):
        name = address[7:]
        if is_pattern(name):
            return Destination(Kind.QUEUES, _checked_pattern(name, address))
        return Destination(Kind.QUEUE, _checked(name, address))
    if address.startswith("/topic/"):
        name = address[7:]
        if is_pattern(name):
            return Destination(Kind.PATTERN, _checked_pattern(name, address))
        return Destination(Kind.TOPIC, _checked(name, address))
    if address.startswith(TEMPORARY_PREFIX):
        name = _checked(address[len(TEMPORARY_PREFIX) :], address)
        return Destination(Kind.TEMPORARY, f"/{session}/{name}", session)
    if address.startswith(REMOTE_TEMPORARY_PREFIX):
        owner, name = _owned(address, REMOTE_TEMPORARY_PREFIX)
        return Destination(Kind.TEMPORARY, name, owner)
    if address.startswith(TEMPORARY_TOPIC_PREFIX):
        name = _checked(address[len(TEMPORARY_TOPIC_PREFIX) :], address)
        return Destination(Kind.TOPIC, f"/{session}/{name}", session)
    if address.startswith(REMOTE_TEMPORARY_TOPIC_PREFIX):
        owner, name = _owned(address, REMOTE_TEMPORARY_TOPIC_PREFIX)
        return Destination(Kind.TOPIC, name, owner)
    if address.startswith("/control/"):
        return Destination(Kind.CONTROL, _checked(address[9:], address))
    for prefix, feature in _LATER.items():
        if address.startswith(prefix):
            raise RemoteProtocolError(f"{feature} are not supported yet: {address!r}")
    raise RemoteProtocolError(
        f"unknown destination {address!r}: it must begin with /queue/, /topic/, /temp-queue/, /temp-topic/, "
        "/remote-temp-queue/, /remote-temp-topic/ or /control/"
    )


def queue_called(name: str) -> Destination:
    """The queue that clients may make under this name.

    Raises: RemoteProtocolError if they may not.
    """
    address = f"/queue/{name}"
    if "," in name:
        raise RemoteProtocolError(f"{address!r} is no queue: its name has a comma")
    if is_pattern(name):
        raise RemoteProtocolError(f"{address!r} is a pattern: it can only be subscribed to")
    return parse(address, "")


def _composite(address: str, session: str) -> Destination:
    addresses = address.split(",")
    if len(addresses) > COMPOSITE_MAX:
        raise RemoteProtocolError(f"a composite destination of {len(addresses)} parts; at most {COMPOSITE_MAX}")
    parts = tuple(parse(each.strip(), session) for each in addresses)
    for part in parts:
        if part.kind is Kind.CONTROL:
            raise RemoteProtocolError(f"{part.address} is for questions; it cannot be part of a composite destination")
        if part.kind is Kind.PATTERN or part.kind is Kind.QUEUES:
            raise RemoteProtocolError(f"{part.address} is a pattern: it can only be subscribed to")
    return Destination(Kind.COMPOSITE, address, session, parts)


def _owned(address: str, prefix: str) -> tuple[str, str]:
    """The session that owns a temporary queue or topic, and its name."""
    owner, _, name = address[len(prefix) :].partition("/")
    return owner, f"/{_checked(owner, address)}/{_checked(name, address)}"


def dead_letter_name(queue: str) -> str:
    """The queue that takes what could not be handled in this one."""
    if queue.startswith(SUBSCRIPTION_PREFIX):
        _, client, name, _ = queue.split(",", 3)
        return f"{DEAD_LETTER_PREFIX}subscription.{client}.{name}"
    return DEAD_LETTER_PREFIX + queue


def durable_key(client: str, name: str) -> str:
    """What a durable subscription is known by.

    Raises: RemoteProtocolError if its dead-letter queue could not be named after it.
    """
    for what, text in (("client-id", client), ("name of a durable subscription", name)):
        if not text or not text.isprintable() or "," in text or is_pattern(text):
            raise RemoteProtocolError(f"{what} {text[:100]!r} is empty, or has characters that it must not have")
    length = len(dead_letter_name(f"{SUBSCRIPTION_PREFIX}{client},{name},"))
    if length > DESTINATION_LENGTH_MAX:
        raise RemoteProtocolError(f"client-id and name of a durable subscription of {len(client + name)} characters")
    return f"{client},{name}"


def durable_subscription(key: str, topic: str, selector: str = "") -> Destination:
    """Its queue.

    >>> durable_subscription("billing,orders", "orders.>", "total > 99").name
    'subscription,billing,orders,orders.>,total > 99'
    """
    name = f"{SUBSCRIPTION_PREFIX}{key},{topic}"
    return Destination(Kind.QUEUE, f"{name},{selector}" if selector else name, topic=topic, selector=selector)


def stored_queue(name: str) -> Destination:
    """The queue that the store knows by a name, without the prefix of an ended subscription.

    >>> stored_queue("/1a2b,77").kind
    <Kind.TEMPORARY: 'temporary queue'>
    """
    if name.startswith("/"):
        return Destination(Kind.TEMPORARY, name, name[1:].partition(",")[0])
    if not name.startswith(SUBSCRIPTION_PREFIX):
        return Destination(Kind.QUEUE, name)
    _, client, subscription, topic, *selector = name.split(",", 4)
    return durable_subscription(f"{client},{subscription}", topic, *selector)


def may_be_named(number_of: str | None, name: str) -> bool:
    """A queue's number may stand for a name from here on, if it stood for `number_of`.

    >>> may_be_named(None, "a"), may_be_named("a", "b"), may_be_named("a", "ended,a"), may_be_named("ended,a", "b")
    (True, False, True, True)
    """
    if number_of is None or name == ENDED_PREFIX + number_of:
        return True
    return number_of.startswith(ENDED_PREFIX) and number_of != name


def durable_key_of(subscription: Destination) -> str:
    """The inverse of `durable_subscription`."""
    return ",".join(subscription.name.split(",", 3)[1:3])


def _checked(name: str, address: str) -> str:
    if not name or name.startswith("/"):
        raise RemoteProtocolError(f"destination {address!r} has no name, or one that begins with /")
    length_max = DESTINATION_LENGTH_MAX
    if not name.startswith(DEAD_LETTER_PREFIX):
        # The name of its dead-letter queue must be one too.
        length_max -= len(DEAD_LETTER_PREFIX)
    if len(name) > length_max:
        raise RemoteProtocolError(f"destination name of {len(name)} characters; at most {length_max}")
    if is_pattern(name):
        raise RemoteProtocolError(f"{address!r}: * and > are for subscriptions to /queue/ and /topic/")
    if not name.isprintable():
        raise RemoteProtocolError(f"destination {address!r} has characters that cannot be printed")
    return name


def _checked_pattern(pattern: str, address: str) -> str:
    fault = fault_of_pattern(pattern)
    if fault is not None:
        raise RemoteProtocolError(f"pattern {address!r}: {fault}")
    _checked(pattern.replace("*", "_").replace(">", "_"), address)
    return pattern
