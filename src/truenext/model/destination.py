"""Destinations of messages: reads addresses, and decides which names are valid.

Addresses as clients write them:

    NAME                               the same as /queue/NAME, for a name without / and :
    /queue/NAME                        a queue, created on first use; in a subscription also a pattern (pattern.py)
    /topic/NAME                        a topic; in a subscription also a pattern (pattern.py)
    /temp-queue/NAME                   a reply queue of the connection that uses this address
    /remote-temp-queue/SESSION/NAME    the same queue, as other connections address it
    /temp-topic/NAME                   a topic of the connection that uses this address
    /remote-temp-topic/SESSION/NAME    the same topic, as other connections address it
    /queue/a,/topic/b                  several destinations at once; only to send to
    /subscription/CLIENT,NAME          a durable subscription; only to browse
    /control/VERB                      a control request to the broker

ActiveMQ's clients write options after an address in SUBSCRIBE: /queue/NAME?consumer.prefetchSize=10. So the character ?
is not allowed in names.
"""

import re
from enum import Enum
from functools import lru_cache
from urllib.parse import unquote_plus

import msgspec

from truenext.errors import Code, RemoteProtocolError
from truenext.model.limits import COMPOSITE_MAX, DESTINATION_LENGTH_MAX, DURABLE_LENGTH_MAX
from truenext.model.pattern import fault_of_pattern, is_pattern

DEAD_LETTER_PREFIX = "DLQ."
"""Prefix of dead-letter queues. A message that fails in such a queue stays there."""

SPARK_PREFIX = "Spark."
"""Prefix of queues in which Spark's queries keep their bundles, marks and decisions."""

SPARK_CLIENT_ID = "Spark"
"""Client id of all connections of Spark's queries. They may do everything during a drain, since each task of a query
opens a connection."""

_PROGRESS_QUEUE = re.compile(r"Spark\.(source|sink)\.[^.]+\.[^.]+")

SUBSCRIPTION_PREFIX = "subscription,"
"""Prefix of the queue of a durable subscription. Client id, name and topic follow, separated by commas, and last the
selector if there is one. Clients cannot name such a queue, as a comma separates the parts of a composite
destination."""

ENDED_PREFIX = "ended,"
"""Prefix of the stored name of an ended durable subscription, until all its messages are removed. The queue of a
subscription that ends with its connection is stored under this prefix from the start."""

SCHEDULED_PREFIX = "/scheduled/"
"""Prefix of a hidden queue, in which the scheduled sends to one queue wait. The name of that queue follows."""

DURABLE_ADDRESS_PREFIX = "/subscription/"
TEMPORARY_PREFIX = "/temp-queue/"
TEMPORARY_TOPIC_PREFIX = "/temp-topic/"
REMOTE_PREFIX = "/remote-temp-"
"""Prefix of the addresses by which other connections name temporary queues and topics."""
REMOTE_TEMPORARY_PREFIX = f"{REMOTE_PREFIX}queue/"
REMOTE_TEMPORARY_TOPIC_PREFIX = f"{REMOTE_PREFIX}topic/"

_FOREIGN_PREFIXES = {
    "/amq/queue/": "here it is '/queue/{name}', whichever client created it",
    "/exchange/": "there are no exchanges here; use /topic/NAME for all subscribers, /queue/NAME for one consumer",
    "/reply-queue/": "here a reply is sent to the destination in the MESSAGE's reply-to",
    "/dsub/": "here a durable subscription is a SUBSCRIBE to its /topic/NAME with durable:true",
    "queue://": "here it is '/queue/{name}'",
    "topic://": "here it is '/topic/{name}'",
    "temp-queue://": "here it is '/temp-queue/{name}'",
    "temp-topic://": "here it is '/temp-topic/{name}'",
    "queue/": "here it is '/queue/{name}'",
    "topic/": "here it is '/topic/{name}'",
}
"""Prefixes of addresses of other brokers, each with a hint how truenext writes the address."""


def destination_error(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(reason, Code.DESTINATION)


_NO_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})").search


class DestinationKind(Enum):
    QUEUE = "queue"
    TEMPORARY = "temporary queue"
    """Temporary queue, or queue of a topic subscription that ends with its connection."""
    TOPIC = "topic"
    TOPIC_PATTERN = "topics"
    """Pattern of names of topics; only for SUBSCRIBE."""
    QUEUE_PATTERN = "queues"
    """Pattern of names of queues; only for SUBSCRIBE."""
    COMPOSITE = "composite"
    """Several destinations in one address; only for SEND."""
    DURABLE = "subscription"
    """Durable subscription, with its key as name; only for a browser."""
    CONTROL = "control"


def is_progress_queue(name: str) -> bool:
    """Return whether a query of Spark keeps its progress in the queue of this name: one message, a mark or a decision.

    >>> is_progress_queue("Spark.source.main.1f"), is_progress_queue("Spark.source.main.1f.0")
    (True, False)
    """
    return _PROGRESS_QUEUE.fullmatch(name) is not None


_SINGULAR = {DestinationKind.TOPIC_PATTERN: DestinationKind.TOPIC, DestinationKind.QUEUE_PATTERN: DestinationKind.QUEUE}


class Destination(msgspec.Struct, frozen=True, gc=False):
    """Parsed address. No two queues, temporary or not, have the same `name`, and no two topics. The name of a temporary
    queue or topic begins with / and the id of its connection; for the queue of a topic subscription, // follows the
    id."""

    kind: DestinationKind
    name: str
    session: str = ""
    """Id of the connection that owns a temporary queue or topic, or that sends to a composite destination."""
    parts: "tuple[Destination, ...]" = ()
    """Single destinations of a composite destination."""
    topic: str = ""
    """Topic, or pattern of topics, if this is the queue of a topic subscription: messages to the topic are copied to
    the queue."""
    selector: str = ""
    """Selector that the messages of `topic` must match; "" is none."""

    is_multi_queue: bool = False
    """True if a message to this destination may be copied to several queues. Computed once, as each SEND reads it."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(
            self, "is_multi_queue", self.kind is DestinationKind.TOPIC or self.kind is DestinationKind.COMPOSITE
        )

    @property
    def address(self) -> str:
        """Address that names this destination on every connection."""
        if self.kind is DestinationKind.COMPOSITE:
            return ",".join(part.address for part in self.parts)
        if self.kind is DestinationKind.TEMPORARY:
            return f"/remote-temp-queue{self.name}"
        if self.kind is DestinationKind.TOPIC and self.session:
            return f"/remote-temp-topic{self.name}"
        return f"/{_SINGULAR.get(self.kind, self.kind).value}/{self.name}"


def split_options(address: str) -> tuple[str, dict[str, str]]:
    """Split the address of a SUBSCRIBE into the address itself and the options after it.

    >>> split_options("/queue/a?consumer.priority=7&consumer.selector=b%20IN%20('c','d')")
    ('/queue/a', {'consumer.priority': '7', 'consumer.selector': "b IN ('c','d')"})

    Raises: RemoteProtocolError if the options are not written as ActiveMQ's, or an option has two values.
    """
    if "?" not in address or address.startswith(DURABLE_ADDRESS_PREFIX):
        return address, {}
    address, _, options_text = address.partition("?")
    options: dict[str, str] = {}
    for each in options_text.split("&"):
        name, equals, text = each.partition("=")
        if not equals or not name:
            raise destination_error(
                f"option {each[:50]!r} of a destination is not NAME=VALUE; the character ? is not allowed in names"
            )
        if _NO_ESCAPE(text) is not None:
            raise destination_error(
                f"option {name[:50]!r} of a destination has a % without two hexadecimal digits; a % itself is %25"
            )
        try:
            value = unquote_plus(text, errors="strict")
        except UnicodeDecodeError as error:
            raise destination_error(f"option {name[:50]!r} of a destination is not UTF-8: {error}") from error
        if options.setdefault(name, value) != value:
            raise destination_error(f"option {name[:50]!r} of a destination is set twice, to different values")
    return address, options


@lru_cache(maxsize=4096)
def parse_address(address: str, session: str) -> Destination:
    """Return the destination that an address names on the connection with the id `session`.

    >>> parse_address("/queue/orders", "s1").name
    'orders'
    >>> parse_address("/temp-queue/replies", "s1").address
    '/remote-temp-queue/s1/replies'

    Raises: RemoteProtocolError if the address is invalid, or not supported yet.
    """
    if "?" in address and not address.startswith(DURABLE_ADDRESS_PREFIX):
        option = address.partition("?")[2].partition("=")[0]
        raise destination_error(
            f"option {option[:50]!r} of {address[:100]!r}: options are for SUBSCRIBE, leave it out; "
            "the character ? is not allowed in names"
        )
    return _parse(address, session)


@lru_cache(maxsize=4096)
def parse_stored_address(address: str) -> Destination:
    """Return the destination of an address that the broker has accepted before, perhaps in an earlier version, in which
    the character ? was allowed in names.

    Raises: RemoteProtocolError if no version can have accepted the address
    """
    return _parse(address, "")


def _parse(address: str, session: str) -> Destination:
    if address.startswith(DURABLE_ADDRESS_PREFIX):
        client, _, name = address[len(DURABLE_ADDRESS_PREFIX) :].partition(",")
        return Destination(DestinationKind.DURABLE, durable_key(client, name))
    if "," in address:
        return _parse_composite(address, session)
    if address.startswith("/queue/"):
        name = address[7:]
        if is_pattern(name):
            return Destination(DestinationKind.QUEUE_PATTERN, _check_pattern(name, address))
        return Destination(DestinationKind.QUEUE, _check_name(name, address))
    if address.startswith("/topic/"):
        name = address[7:]
        if is_pattern(name):
            return Destination(DestinationKind.TOPIC_PATTERN, _check_pattern(name, address))
        return Destination(DestinationKind.TOPIC, _check_name(name, address))
    if address.startswith(TEMPORARY_PREFIX):
        name = _check_name(address[len(TEMPORARY_PREFIX) :], address)
        return Destination(DestinationKind.TEMPORARY, f"/{session}/{name}", session)
    if address.startswith(REMOTE_TEMPORARY_PREFIX):
        owner, name = _split_owner(address, REMOTE_TEMPORARY_PREFIX)
        return Destination(DestinationKind.TEMPORARY, name, owner)
    if address.startswith(TEMPORARY_TOPIC_PREFIX):
        name = _check_name(address[len(TEMPORARY_TOPIC_PREFIX) :], address)
        return Destination(DestinationKind.TOPIC, f"/{session}/{name}", session)
    if address.startswith(REMOTE_TEMPORARY_TOPIC_PREFIX):
        owner, name = _split_owner(address, REMOTE_TEMPORARY_TOPIC_PREFIX)
        return Destination(DestinationKind.TOPIC, name, owner)
    if address.startswith("/control/"):
        return Destination(DestinationKind.CONTROL, _check_name(address[9:], address))
    if address and "/" not in address and ":" not in address:
        return _parse(f"/queue/{address}", session)
    for prefix, hint in _FOREIGN_PREFIXES.items():
        if address.startswith(prefix):
            explanation = hint.format(name=address[len(prefix) :][:100])
            raise destination_error(f"unknown destination {address[:100]!r}: {explanation}")
    raise destination_error(
        f"unknown destination {address[:100]!r}: it must begin with /queue/, /topic/, /temp-queue/, /temp-topic/, "
        "/remote-temp-queue/, /remote-temp-topic/ or /control/, or be the plain name of a queue"
    )


def parse_queue_name(name: str) -> Destination:
    """Return the queue with this name.

    Raises: RemoteProtocolError if clients may not create a queue with this name
    """
    address = f"/queue/{name}"
    if "," in name:
        raise destination_error(f"{address!r} is not a queue: its name has a comma")
    if is_pattern(name):
        raise destination_error(f"{address!r} is a pattern, which is for SUBSCRIBE only: send to a queue or topic")
    return parse_address(address, "")


def _parse_composite(address: str, session: str) -> Destination:
    count = address.count(",") + 1
    if count > COMPOSITE_MAX:
        raise destination_error(f"a composite destination of {count} parts; at most {COMPOSITE_MAX}")
    addresses = [each.strip() for each in address.split(",")]
    for each in addresses:
        if not each.startswith("/"):
            # ActiveMQ reads /topic/a,b as two topics.
            raise destination_error(
                f"unknown destination {each[:100]!r}: each part of a composite destination must begin with "
                f"/queue/ or /topic/"
            )
    parts = tuple(_parse(each, session) for each in addresses)
    for part in parts:
        if part.kind is DestinationKind.CONTROL:
            raise destination_error(
                f"{part.address} is for control requests; it cannot be part of a composite destination"
            )
        if part.kind is DestinationKind.TOPIC_PATTERN or part.kind is DestinationKind.QUEUE_PATTERN:
            raise destination_error(
                f"{part.address} is a pattern, which is for SUBSCRIBE only: send to a queue or topic"
            )
    return Destination(DestinationKind.COMPOSITE, address, session, parts)


def _split_owner(address: str, prefix: str) -> tuple[str, str]:
    """Return the id of the connection that owns a temporary queue or topic, and the name of the queue or topic."""
    owner, slash, name = address[len(prefix) :].partition("/")
    if owner and not slash:
        # ActiveMQ's form, which does not name the owner.
        own = f"/{prefix.removeprefix('/remote-')}{owner[:100]}"
        raise destination_error(
            f"unknown destination {address[:100]!r}: use {own!r} for a temporary queue or topic of this "
            f"connection, and the reply-to of a MESSAGE for that of another connection"
        )
    return owner, f"/{_check_name(owner, address)}/{_check_name(name, address)}"


def dead_letter_name(queue: str) -> str:
    """Return the name of a queue's dead-letter queue."""
    if queue.startswith(SUBSCRIPTION_PREFIX):
        _, client, name, _ = queue.split(",", 3)
        return f"{DEAD_LETTER_PREFIX}subscription.{client}.{name}"
    return DEAD_LETTER_PREFIX + queue


def durable_key(client: str, name: str) -> str:
    """Return the key of a durable subscription, from client id and name.

    Raises: RemoteProtocolError if one of them is empty, too long, or has a character that no name of a queue may have
    """
    for what, text in (("client-id", client), ("name of a durable subscription", name)):
        if not text or not text.isprintable() or "," in text or is_pattern(text):
            raise RemoteProtocolError(
                f"{what} {text[:100]!r} is empty, or has a character that is not allowed: a comma, an unprintable one, "
                "or a * or > that would make it a pattern"
            )
    length = len(client + name)
    if length > DURABLE_LENGTH_MAX:
        raise RemoteProtocolError(
            f"client-id and name of a durable subscription of {length} characters together; "
            f"at most {DURABLE_LENGTH_MAX}"
        )
    return f"{client},{name}"


def durable_subscription(key: str, topic: str, selector: str = "") -> Destination:
    """Return the queue of a durable subscription.

    >>> durable_subscription("billing,orders", "orders.>", "total > 99").name
    'subscription,billing,orders,orders.>,total > 99'
    """
    name = f"{SUBSCRIPTION_PREFIX}{key},{topic}"
    return Destination(
        DestinationKind.QUEUE, f"{name},{selector}" if selector else name, topic=topic, selector=selector
    )


def parse_stored_queue_name(name: str) -> Destination:
    """Return the queue that has this name in the store. The caller has removed ENDED_PREFIX.

    >>> parse_stored_queue_name("/1a2b,77").kind
    <DestinationKind.TEMPORARY: 'temporary queue'>
    """
    if name.startswith("/"):
        return Destination(DestinationKind.TEMPORARY, name, name[1:].partition(",")[0])
    if not name.startswith(SUBSCRIPTION_PREFIX):
        return Destination(DestinationKind.QUEUE, name)
    _, client, subscription, topic, *selector = name.split(",", 4)
    return durable_subscription(f"{client},{subscription}", topic, *selector)


def may_rename(current: str | None, name: str) -> bool:
    """Return whether a batch may rename a queue from `current` to `name`. `current` is None for a new queue; a `name`
    of "" removes the queue.

    >>> may_rename(None, "a"), may_rename("a", "b"), may_rename("a", "ended,a"), may_rename("ended,a", "")
    (True, False, True, True)
    """
    if current is None:
        return name != ""
    return name in ("", ENDED_PREFIX + current)


def durable_key_of(subscription: Destination) -> str:
    """Return the key of the durable subscription that has this queue."""
    return ",".join(subscription.name.split(",", 3)[1:3])


def virtual_topic(queue: str) -> str:
    """Return the virtual topic whose messages are copied to the queue with this name; "" if the name has another form.

    >>> virtual_topic("Consumer.billing.VirtualTopic.orders.new")
    'VirtualTopic.orders.new'
    """
    words = queue.split(".", 3)
    is_virtual = len(words) == 4 and words[0] == "Consumer" and words[2] == "VirtualTopic"
    return f"VirtualTopic.{words[3]}" if is_virtual else ""


def _check_name(name: str, address: str) -> str:
    if not name or name.startswith("/"):
        raise destination_error(f"destination {address!r} has no name, or its name begins with /")
    length_max = DESTINATION_LENGTH_MAX
    if not name.startswith(DEAD_LETTER_PREFIX):
        # The name of its dead-letter queue must be valid, too.
        length_max -= len(DEAD_LETTER_PREFIX)
    if len(name) > length_max:
        raise destination_error(f"destination name of {len(name)} characters; at most {length_max}")
    if is_pattern(name):
        raise destination_error(f"{address!r}: * and > are for subscriptions to /queue/ and /topic/")
    if not name.isprintable():
        raise destination_error(f"destination {address!r} has characters that cannot be printed")
    return name


def _check_pattern(pattern: str, address: str) -> str:
    fault = fault_of_pattern(pattern)
    if fault is not None:
        raise destination_error(f"pattern {address!r}: {fault}")
    _check_name(pattern.replace("*", "_").replace(">", "_"), address)
    return pattern
