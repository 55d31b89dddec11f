"""Header rules of SUBSCRIBE, UNSUBSCRIBE and NACK, for headers of truenext, ActiveMQ, ActiveMQ's successor and
RabbitMQ; and for the options that ActiveMQ's clients write after a destination.

A header that one of these brokers knows is treated in one of three ways:

    understood    the functions below read it
    accepted      it asks for what truenext does in any case (SUBSCRIBE_RULES)
    refused       any other value (SUBSCRIBE_RULES); also if two headers for the same option disagree

Names of headers must match exactly, not only by a prefix. Any other header is the user's, because gateways pass on
headers that browsers add. On SEND all headers of other brokers are the user's. If such a header would have an effect in
another broker and has none here, the log warns (INEFFECTIVE_HEADERS).

Headers with OWN_PREFIX are truenext's own. Such a header on a frame that may not have it is a mistake, and is refused
(`check_own_headers`). On SEND such a header may be the user's, and causes a warning (`report_unknown_header`).

Source: docs/decisions/0038-other-brokers-headers.md
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import TypeVar

from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import AckMode, Subscribe
from truenext.model.destination import DEAD_LETTER_PREFIX, Destination, DestinationKind, destination_error
from truenext.model.failure_headers import ON_FAILURE, REPORT_ID, REPORT_TO
from truenext.model.header_lines import ADDED_HEADERS, HOP_BY_HOP_HEADERS, SCHEDULE_HEADERS
from truenext.model.limits import CAUSE_BYTES_MAX, CONSUMER_PRIORITY_MAX, DELAY_MS_MAX, SEQUENCE_MAX, WINDOW_MAX
from truenext.model.numerals import are_digits
from truenext.model.order import PRIORITY_MAX, rank
from truenext.wire.stomp.values import read_boolean, read_number

_Value = TypeVar("_Value")

WINDOW = ("activemq.prefetchSize", "prefetch-count", "consumer.prefetchSize")
PRIORITY = ("activemq.priority", "consumer.priority")
EXCLUSIVE = ("activemq.exclusive", "consumer.exclusive")
EXCLUSIVE_ON_QUEUE = (*EXCLUSIVE, "exclusive")
"""Headers that ask for an exclusive consumer of a queue that is not temporary: ActiveMQ's and RabbitMQ's."""
SELECTOR = ("selector", "consumer.selector")
DURABLE = ("durable", "persistent")
DURABLE_NAME = (
    *("activemq.subscriptionName", "activemq.subcriptionName"),
    *("durable-subscription-name", "durable-subscriber-name"),
)
"""Headers with the name of a durable subscription: ActiveMQ's header and its old misspelling, and the present and the
former header of ActiveMQ's successor."""
_REJECT = "truenext-reject"
REJECT = (_REJECT, "requeue")

OPTIONS = (
    *("consumer.prefetchSize", "consumer.priority", "consumer.exclusive", "consumer.selector"),
    *("consumer.dispatchAsync", "consumer.maximumPendingMessageLimit", "consumer.noLocal", "consumer.retroactive"),
)
"""Options that ActiveMQ's clients write after the ? of a destination."""


OWN_PREFIX = "truenext-"
"""Prefix of truenext's own headers."""

SEQUENCE = "truenext-sequence"
"""Header of a MESSAGE with the sequence of the message."""

CAUSE, FIRST_CAUSE, LAST_CAUSE = "truenext-cause", "truenext-first-cause", "truenext-last-cause"

BROKER_HEADERS = ADDED_HEADERS | {SEQUENCE, "truenext-deliveries", "truenext-attempts", FIRST_CAUSE, LAST_CAUSE}
"""Headers of a message that only the broker sets."""

AFTER, COUNT = BROWSE_OPTIONS = ("truenext-after", "truenext-count")
"""Headers of a browser's SUBSCRIBE: where to begin, and after how many messages to end."""

_NUMBERED = ("truenext-number", "truenext-producer", "truenext-gapless")
OWN_HEADERS: Mapping[str, tuple[str, ...]] = {
    "SEND": (*_NUMBERED, "truenext-ttl", REPORT_TO, REPORT_ID, ON_FAILURE, _REJECT, CAUSE),
    "SUBSCRIBE": ("truenext-express", "truenext-pull", *BROWSE_OPTIONS),
    "ACK": ("truenext-started",),
    "NACK": ("truenext-delay", _REJECT, CAUSE),
    "BEGIN": ("truenext-count-attempts",),
    "COMMIT": (*_NUMBERED, "truenext-count-attempts"),
    "ABORT": ("truenext-count-attempts",),
    "DISCONNECT": ("truenext-forget",),
}
"""Headers with OWN_PREFIX that a frame may have, by command. Other such headers of a SEND are the user's."""

IGNORED_HEADERS: Mapping[str, frozenset[str]] = {
    "UNSUBSCRIBE": frozenset(OWN_HEADERS["SUBSCRIBE"]),
    "ACK": BROKER_HEADERS,
    "NACK": BROKER_HEADERS,
}
"""Headers with OWN_PREFIX that are ignored, by command. Some clients copy the headers of a SUBSCRIBE into the
UNSUBSCRIBE, and those of a MESSAGE into the ACK or NACK."""


class SubscribeTarget(Enum):
    """Kind of destination that a SUBSCRIBE names."""

    QUEUE = "a queue"
    TEMPORARY = "a temporary queue"
    TOPIC = "a topic"
    """Topic; the subscription ends with its connection."""
    DURABLE = "a topic, durable"


@dataclass(frozen=True, slots=True)
class HeaderValueRule:
    accepted: frozenset[str] | None
    """Accepted values, in lower case. They request what truenext does anyway. None accepts all values."""
    why: str
    """Reason why other values are refused, and what the client can do instead."""


def _refuse(why: str) -> dict[SubscribeTarget, HeaderValueRule]:
    return _accept_only(why=why)


def _accept_only(*values: str, why: str) -> dict[SubscribeTarget, HeaderValueRule]:
    return dict.fromkeys(SubscribeTarget, HeaderValueRule(frozenset(values), why))


_ACCEPT_ANY = dict.fromkeys(SubscribeTarget, HeaderValueRule(None, ""))
_NO_LOCAL = _accept_only(
    "false",
    why="subscriptions without one's own messages are not supported yet; leave this header out, and exclude your "
    "own messages by a header and a selector",
)
_RETROACTIVE = _accept_only(
    "false",
    why="retroactive consumers are not supported yet; leave this header out, a consumer of a queue also "
    "gets messages that were sent before",
) | dict.fromkeys(
    (SubscribeTarget.TOPIC, SubscribeTarget.DURABLE),
    HeaderValueRule(
        frozenset({"false"}),
        "retroactive consumers are not supported yet; leave this header out, or use durable:true to miss nothing "
        "from now on",
    ),
)
_DURABLE_QUEUE = _accept_only("true", "false", why="") | {
    SubscribeTarget.TEMPORARY: HeaderValueRule(
        frozenset({"false"}), "a temporary queue ends with its connection; leave this header out, or use a /queue/"
    )
}
_LENGTH = _refuse(
    "a queue has no limit of its own for its length; leave this header out, the broker's disk limit "
    "is for all queues together"
)
_DEAD_LETTERS = _refuse(
    "dead letters go to the queue DLQ.NAME, or to dead_letters of the policy of the queue NAME; leave this header out"
)
_STREAMS = _refuse("there are no streams; leave this header out, or use browser:true to see the messages that wait")
_FILTER = _refuse("there are no streams; use the header selector")

SUBSCRIBE_RULES: Mapping[str, Mapping[SubscribeTarget, HeaderValueRule]] = {
    # Headers of ActiveMQ.
    "activemq.dispatchAsync": _ACCEPT_ANY,
    "consumer.dispatchAsync": _ACCEPT_ANY,
    "activemq.maximumPendingMessageLimit": _ACCEPT_ANY,
    "consumer.maximumPendingMessageLimit": _ACCEPT_ANY,
    "transformation": _ACCEPT_ANY,
    "no-local": _NO_LOCAL,
    "activemq.noLocal": _NO_LOCAL,
    "consumer.noLocal": _NO_LOCAL,
    "activemq.retroactive": _RETROACTIVE,
    "consumer.retroactive": _RETROACTIVE,
    "activemq.selector": _refuse("use the header selector"),
    "activemq.browser": _refuse("use the header browser"),
    # Headers of its successor.
    "consumer-window-size": _refuse("a window is counted in messages; use activemq.prefetchSize"),
    "subscription-type": _accept_only(
        "anycast", why="a queue is anycast; leave this header out, or subscribe to a /topic/"
    )
    | dict.fromkeys(
        (SubscribeTarget.TOPIC, SubscribeTarget.DURABLE),
        HeaderValueRule(
            frozenset({"multicast"}), "a topic is multicast; leave this header out, or subscribe to a /queue/"
        ),
    ),
    # Headers of RabbitMQ.
    "durable": _DURABLE_QUEUE,
    "persistent": _DURABLE_QUEUE,
    "auto-delete": {
        # An empty and unused queue is removed anyway; messages are never dropped for this header.
        SubscribeTarget.QUEUE: HeaderValueRule(
            frozenset({"true", "false"}), "this header must be true or false, and has no effect; leave it out"
        ),
        SubscribeTarget.TEMPORARY: HeaderValueRule(
            frozenset({"true"}), "a temporary queue ends with its connection; leave this header out, or use a /queue/"
        ),
        SubscribeTarget.TOPIC: HeaderValueRule(
            frozenset({"true"}),
            "the subscription ends with its connection; leave this header out, or use durable:true as well",
        ),
        SubscribeTarget.DURABLE: HeaderValueRule(
            frozenset({"false"}), "the subscription stays until an UNSUBSCRIBE ends it; leave this header out"
        ),
    },
    "exclusive": {
        SubscribeTarget.QUEUE: HeaderValueRule(None, ""),
        **dict.fromkeys(
            (SubscribeTarget.TEMPORARY, SubscribeTarget.TOPIC),
            HeaderValueRule(
                frozenset({"true", "false"}),
                "such a subscription belongs to one connection anyway; leave this header out",
            ),
        ),
        SubscribeTarget.DURABLE: HeaderValueRule(
            frozenset({"false"}), "the subscription outlives its connection; leave this header out"
        ),
    },
    "x-queue-type": _accept_only(
        "classic", "quorum", why="there is one type of queue, and no streams; leave this header out"
    ),
    "x-max-priority": _ACCEPT_ANY,
    "x-queue-name": _refuse(
        "a queue is named by its address; to share a topic among several readers call it VirtualTopic.NAME, and "
        "subscribe to /queue/Consumer.READERS.VirtualTopic.NAME"
    ),
    "x-message-ttl": _refuse("producers set when messages expire; leave this header out, and set expires on SEND"),
    "x-expires": _refuse("a queue is deleted only when it is empty; leave this header out"),
    "x-max-length": _LENGTH,
    "x-max-length-bytes": _LENGTH,
    "x-overflow": _LENGTH,
    "x-dead-letter-exchange": _DEAD_LETTERS,
    "x-dead-letter-routing-key": _DEAD_LETTERS,
    "x-delivery-limit": _refuse("attempts_max of the queue's policy sets the limit; leave it out"),
    "x-single-active-consumer": _refuse("use activemq.exclusive:true"),
    "x-priority": _refuse("use activemq.priority"),
    "x-cancel-on-ha-failover": _refuse("there is no failover; leave it out"),
    "x-max-age": _STREAMS,
    "x-stream-offset": _STREAMS,
    "x-stream-filter": _FILTER,
    "x-stream-match-unfiltered": _FILTER,
    "x-stream-filter-size-bytes": _STREAMS,
    "x-stream-max-segment-size-bytes": _STREAMS,
}
"""Rules for headers of a SUBSCRIBE that no function reads, by header and target. `durable` and `persistent` are read
for topics, and `exclusive` for queues; for these targets the rule refuses no valid value."""

_PERSISTENT = "use persistent:true; without it the message is transient, and lost if the broker crashes"
_PRIORITY = "use priority, from 0 to 9"
_BACKOFF = "use backoff of the queue's policy"
_JITTER = "use jitter of the queue's policy"

INEFFECTIVE_HEADERS: Mapping[str, Mapping[str, str]] = {
    "SEND": {
        "JMSDeliveryMode": _PERSISTENT,
        "delivery-mode": _PERSISTENT,
        "JMSPriority": _PRIORITY,
        "x-priority": _PRIORITY,
        "JMSExpiration": "use expires, in milliseconds since the epoch",
        "expiration": "use truenext-ttl, in milliseconds from now",
        "x-delay": "use AMQ_SCHEDULED_DELAY, in milliseconds",
        "_AMQ_SCHED_DELIVERY": "use AMQ_SCHEDULED_TIME, in milliseconds since the epoch",
    },
    "SUBSCRIBE": {
        "activemq.maximumRedeliveries": "use attempts_max of the queue's policy, which counts the first try, too",
        "activemq.initialRedeliveryDelay": "use first_delay_ms of the queue's policy",
        "activemq.redeliveryDelay": "use delay_ms of the queue's policy",
        "activemq.maximumRedeliveryDelay": "use delay_max_ms of the queue's policy",
        "activemq.useExponentialBackOff": _BACKOFF,
        "activemq.backOffMultiplier": _BACKOFF,
        "activemq.useCollisionAvoidance": _JITTER,
        "activemq.collisionAvoidancePercent": _JITTER,
    },
}
"""Headers that have an effect in other brokers and none here, by command; each with the header or setting that has this
effect here. The frame is accepted, as the header may be the user's own, and the broker logs a warning."""


def parse_subscribe_options(
    headers: Mapping[str, str], options: Mapping[str, str], destination: Destination, subscription: str
) -> tuple[Subscribe, str, str | None]:
    """Parse the headers of a SUBSCRIBE, and the options after its destination.

    Returns the command, the text of the selector ("" if there is none), and the name of the durable subscription (None
    if the subscription is not durable). FrameInterpreter then sets the command's mode, selector and durable
    subscription; until then the mode is `auto`.

    Raises: RemoteProtocolError if a header or option is not supported, or two disagree
    """
    for option in options:
        if option not in OPTIONS:
            raise RemoteProtocolError(
                f"unknown option {option[:50]!r} of a destination; leave it out, or use one of {', '.join(OPTIONS)}"
            )
    # A header with the name of an option is the user's.
    values = {name: value for name, value in headers.items() if name not in OPTIONS} | dict(options)
    is_topic = destination.kind is DestinationKind.TOPIC or destination.kind is DestinationKind.TOPIC_PATTERN
    durable = durable_name(values, subscription if is_topic else None)
    if is_topic:
        target = SubscribeTarget.TOPIC if durable is None else SubscribeTarget.DURABLE
    else:
        target = SubscribeTarget.TEMPORARY if destination.kind is DestinationKind.TEMPORARY else SubscribeTarget.QUEUE
        if durable is not None:
            raise RemoteProtocolError(
                f"{_first_of(values, DURABLE_NAME)} on a SUBSCRIBE to {target.value}: durable subscriptions are to "
                "topics; leave it out, a queue keeps its messages",
                Code.NOT_SUPPORTED,
            )
    for name, value in values.items():
        rule = SUBSCRIBE_RULES[name][target] if name in SUBSCRIBE_RULES else None
        if rule is not None and rule.accepted is not None and value.lower() not in rule.accepted:
            raise RemoteProtocolError(
                f"{name} {value[:50]!r} on a SUBSCRIBE to {target.value}: {rule.why}", Code.NOT_SUPPORTED
            )
    window = _read_any(values, WINDOW, _window)
    is_pulling = _read_any(values, ("truenext-pull",), read_boolean) or False
    if window == 0 and not is_pulling:
        raise RemoteProtocolError(
            f"{_first_of(values, WINDOW)} of 0 (pulling) is not supported without truenext-pull:true; the least is 1",
            Code.NOT_SUPPORTED,
        )
    if window and is_pulling:
        raise RemoteProtocolError(
            f"truenext-pull and {_first_of(values, WINDOW)} of {window} disagree; use one of them"
        )
    subscribe = Subscribe(subscription, destination, AckMode.AUTO, window, is_pulling=is_pulling)
    subscribe.priority = _read_any(values, PRIORITY, _consumer_priority) or 0
    exclusive = EXCLUSIVE_ON_QUEUE if target is SubscribeTarget.QUEUE else EXCLUSIVE
    subscribe.is_exclusive = _read_any(values, exclusive, read_boolean) or False
    return subscribe, _read_any(values, SELECTOR, lambda _, text: text or None) or "", durable


def parse_browse_options(headers: Mapping[str, str]) -> tuple[tuple[int, int] | None, int | None]:
    """Return the rank and sequence after which a browse begins, and the number of messages with which it ends; None
    where the SUBSCRIBE says nothing.

    Raises: RemoteProtocolError if a value is invalid
    """
    after = count = None
    if AFTER in headers:
        priority, _, sequence = headers[AFTER].partition(",")
        lane = rank(read_number(f"the priority of {AFTER}", priority, PRIORITY_MAX))
        after = lane, read_number(f"the sequence of {AFTER}", sequence, SEQUENCE_MAX)
    if COUNT in headers:
        count = read_number(COUNT, headers[COUNT])
        if not count:
            raise RemoteProtocolError(f"{COUNT} of 0: a browser is shown at least one message; leave it out for all")
    return after, count


def check_own_headers(command: str, headers: Mapping[str, str]) -> None:
    """Check the headers with OWN_PREFIX of a frame that is neither a SEND nor a login.

    Raises: RemoteProtocolError at the first such header that this kind of frame may not have
    """
    for name in headers:
        if (
            name.startswith(OWN_PREFIX)
            and name not in OWN_HEADERS.get(command, ())
            and name not in IGNORED_HEADERS.get(command, ())
        ):
            if BROKER_HEADERS is IGNORED_HEADERS.get(command) and SEQUENCE in headers:
                # The frame repeats a whole MESSAGE, whose producer may have set any header.
                return
            raise RemoteProtocolError(f"unknown header {name[:50]!r} of {command}: {_suggestion(command, name)}")


def report_unknown_header(
    report: Callable[[str, str, str], None], reported: set[str], command: str, headers: Mapping[str, str]
) -> None:
    """Report the first header of a SEND that has OWN_PREFIX and is not truenext's, because the header is probably
    misspelt.

    `report` is called with the command, the header, and what to use instead; the header is added to `reported`. Nothing
    is reported if `reported` has a header already, or if the SEND repeats a whole MESSAGE, whose producer may have set
    any header.
    """
    if command != "SEND" or reported or SEQUENCE in headers:
        return
    known = OWN_HEADERS["SEND"]
    for name in headers:
        if name.startswith(OWN_PREFIX) and name not in (*known, *ADDED_HEADERS, *HOP_BY_HOP_HEADERS):
            reported.add(name)
            near = get_close_matches(
                name.removeprefix(OWN_PREFIX), [each.removeprefix(OWN_PREFIX) for each in known], n=1
            )
            report(command, name, f"use {OWN_PREFIX}{near[0]}" if near else _suggestion(command, name))
            return


def parse_counts_all(headers: Mapping[str, str]) -> bool:
    """Return True if the end of a transaction counts an attempt for all messages that it has acknowledged or nacked;
    False if only for those that it has nacked.

    Raises: RemoteProtocolError if `truenext-count-attempts` is neither `all` nor `nacked`
    """
    text = headers.get("truenext-count-attempts", "all")
    if text not in ("all", "nacked"):
        raise RemoteProtocolError(f"truenext-count-attempts {text[:100]!r} is not all or nacked")
    return text == "all"


def _suggestion(command: str, name: str) -> str:
    commands = [each for each, names in OWN_HEADERS.items() if name in names]
    if commands:
        return f"this header is for {' and '.join(commands)}; leave it out"
    if name in BROKER_HEADERS:
        return "only the broker sets this header; leave it out"
    known = OWN_HEADERS.get(command, ())
    if not known:
        return f"{command} has no header that begins with {OWN_PREFIX}; leave it out"
    return f"{OWN_PREFIX} headers of {command} are {', '.join(known)}: correct the name, or leave the header out"


def durable_name(values: Mapping[str, str], by_id: str | None) -> str | None:
    """Return the name of the durable subscription in a SUBSCRIBE or UNSUBSCRIBE; None if the subscription is not
    durable.

    If the frame has `durable:true` but no name, the name is `by_id`.

    Raises: RemoteProtocolError if two headers disagree
    """
    name = _read_any(values, DURABLE_NAME, _durable_name)
    is_durable = _read_any(values, DURABLE, read_boolean)
    if name is None:
        return by_id if is_durable else None
    if is_durable is False:
        raise RemoteProtocolError(
            f"{_first_of(values, DURABLE_NAME)} names a durable subscription, and {_first_of(values, DURABLE)}:false "
            "forbids one; use one of them"
        )
    return name


def parse_cause(headers: Mapping[str, str]) -> str:
    """Return the cause that a NACK states; "" if it states none.

    Raises: RemoteProtocolError if the cause is too long
    """
    cause = headers.get(CAUSE, "")
    # A character has at most four bytes.
    if len(cause) > CAUSE_BYTES_MAX // 4 and (size := len(cause.encode())) > CAUSE_BYTES_MAX:
        raise RemoteProtocolError(f"{CAUSE} of {size} bytes; at most {CAUSE_BYTES_MAX}")
    return cause


def parse_rejection(destination: Destination, headers: Mapping[str, str]) -> str | None:
    """Return the cause for which a SEND rejects its message; "" if it states none; None if it does not reject.

    Raises: RemoteProtocolError if a header is invalid, or this SEND cannot reject
    """
    text = headers.get(_REJECT)
    if text is None or not read_boolean(_REJECT, text):
        return None
    if "transaction" not in headers:
        raise RemoteProtocolError(
            f"{_REJECT} is for a SEND in a transaction: send BEGIN first, and name its transaction"
        )
    if not SCHEDULE_HEADERS.isdisjoint(headers):
        raise RemoteProtocolError(f"{_REJECT} rejects the message at once, and AMQ_SCHEDULED_… sends it later: use one")
    if destination.kind is not DestinationKind.QUEUE or destination.name.startswith(DEAD_LETTER_PREFIX):
        raise destination_error(
            f"{_REJECT} is for a SEND to one queue whose messages can become dead letters, not to "
            f"{destination.address[:100]!r}: name the queue of the message"
        )
    return parse_cause(headers)


def parse_nack_options(headers: Mapping[str, str]) -> tuple[int | None, bool]:
    """Return the delay of a NACK in milliseconds (None: the policy decides), and whether the NACK rejects the message.

    Raises: RemoteProtocolError if the delay is invalid, or two headers disagree
    """
    delay_ms = None
    text = headers.get("truenext-delay")
    if text is not None:
        delay_ms = read_number("truenext-delay", text, DELAY_MS_MAX, " milliseconds (7 days)")
    is_rejected = (
        _read_any(headers, REJECT, lambda name, text: read_boolean(name, text) is (name == "truenext-reject")) or False
    )
    if is_rejected and delay_ms is not None:
        header = "truenext-reject:true" if "truenext-reject" in headers else "requeue:false"
        raise RemoteProtocolError(
            f"{header} rejects the message, which then has no next try for truenext-delay; use one of them"
        )
    return delay_ms, is_rejected


def _read_any(
    values: Mapping[str, str], names: tuple[str, ...], read: Callable[[str, str], _Value | None]
) -> _Value | None:
    """Read an option that several headers can set, with the function `read`; None if no header sets the option.

    Raises: RemoteProtocolError if two headers set different values
    """
    agreed: _Value | None = None
    first = ""
    for name in names:
        value = read(name, values[name]) if name in values else None
        if value is None:
            continue
        if agreed is not None and value != agreed:
            raise RemoteProtocolError(
                f"{first} {values[first][:50]!r} and {name} {values[name][:50]!r} disagree; use one of them"
            )
        agreed, first = value, first or name
    return agreed


def _first_of(values: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next(name for name in names if name in values)


def _durable_name(name: str, text: str) -> str | None:
    # Some clients always send it.
    return None if name == "durable-subscriber-name" and not text else text


def _window(name: str, text: str) -> int | None:
    size = read_number(name, text, WINDOW_MAX, " messages, the largest window")
    # RabbitMQ's prefetch-count of 0 is no limit.
    return None if size == 0 and name == "prefetch-count" else size


def _consumer_priority(name: str, text: str) -> int:
    digits = text.removeprefix("-")
    if not (are_digits(digits, most=3) and int(digits) <= CONSUMER_PRIORITY_MAX):
        raise RemoteProtocolError(
            f"{name} {text[:100]!r} is not a number from -{CONSUMER_PRIORITY_MAX} to {CONSUMER_PRIORITY_MAX}"
        )
    return int(text)
