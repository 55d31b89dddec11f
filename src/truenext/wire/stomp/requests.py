"""Requests: makes commands from a client's frames.

Headers of ActiveMQ are understood (`persistent`, `priority`, `expires`, `reply-to`, `activemq.prefetchSize`). Headers
that truenext does not support are refused by name, instead of being ignored (headers.py)."""

from collections import Counter
from collections.abc import Callable

from truenext.errors import Code, RemoteProtocolError
from truenext.model import header_lines
from truenext.model.commands import (
    Abort,
    Ack,
    AckMode,
    Begin,
    Browse,
    Command,
    Commit,
    ControlRequest,
    Disconnect,
    Nack,
    Send,
    Started,
    Subscribe,
    Unsubscribe,
    decode_client_json,
)
from truenext.model.destination import (
    TEMPORARY_PREFIX,
    TEMPORARY_TOPIC_PREFIX,
    Destination,
    DestinationKind,
    destination_error,
    durable_key,
    parse_address,
    split_options,
)
from truenext.model.failure_headers import FAILURE_HEADERS, ON_FAILURE, REPORT_ID, REPORT_TO, failure_destinations
from truenext.model.header_lines import HOP_BY_HOP_HEADERS, SCHEDULE_HEADERS, SCHEDULE_PREFIX
from truenext.model.limits import CONTROL_REQUEST_BYTES_MAX, PRODUCER_NUMBER_MAX, SCHEDULE_TIME_MAX, TTL_MS_MAX
from truenext.model.message import SentMessage
from truenext.model.numerals import are_digits
from truenext.model.order import PRIORITY_DEFAULT, clamp_priority
from truenext.model.schedule import FOR_EVER, Schedule, check_schedule
from truenext.model.selector import compile_selector
from truenext.wire.stomp.actions import ACTION_PARSERS
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.headers import (
    BROWSE_OPTIONS,
    INEFFECTIVE_HEADERS,
    OWN_PREFIX,
    durable_name,
    parse_browse_options,
    parse_cause,
    parse_counts_all,
    parse_nack_options,
    parse_rejection,
    parse_subscribe_options,
)
from truenext.wire.stomp.replies import ReplyEncoder
from truenext.wire.stomp.request_shapes import DEFAULT_PRIORITY_LINE
from truenext.wire.stomp.values import read_ack_id, read_boolean, read_name, read_number, require_header

_NOT_FORWARDED = HOP_BY_HOP_HEADERS | header_lines.ADDED_HEADERS
"""Headers of a SEND that are not stored. Those that only the broker may add to a message are among them."""
_SCHEDULED_OR_INEFFECTIVE = SCHEDULE_HEADERS | INEFFECTIVE_HEADERS["SEND"].keys()
_UNUSUAL_SEND = _NOT_FORWARDED | _SCHEDULED_OR_INEFFECTIVE | {"reply-to", "JMSXGroupID"} | FAILURE_HEADERS
_MESSAGE_ONLY = SCHEDULE_HEADERS | {"reply-to"}
"""Headers that are refused on a SEND to an action of /control/, such as /control/release: an action is done at once,
and has no answer."""
# A name is cheaper to look up than a member of an enumeration; every message needs this one.
_QUEUE = DestinationKind.QUEUE
_SCHEDULE_PREFIX = SCHEDULE_PREFIX.encode()
_PRIORITIES = {str(priority): priority for priority in range(10)}
_SEQUENCE_DIGITS = 19


class FrameInterpreter:
    """Interpreter that makes commands from the frames of one client, after its login."""

    def __init__(
        self,
        session_id: str,
        message_id_prefix: str,
        replies: ReplyEncoder,
        on_ineffective_header: Callable[[str, str, str], None] = lambda *_: None,
    ) -> None:
        """`replies` is notified of each subscription. `on_ineffective_header` is called once for each header in
        INEFFECTIVE_HEADERS, with the command, the header, and what to use instead."""
        self._session_id = session_id
        self._message_id_prefix = message_id_prefix
        self._replies = replies
        self._on_ineffective_header = on_ineffective_header
        self._reported: frozenset[str] = frozenset()
        self._unusual_send = _UNUSUAL_SEND
        """Headers of a SEND that need more than copying, without those that were reported already."""
        self._version = Version.V1_0
        self._queue_by_subscription: dict[str, str] = {}
        """Name of the queue of each subscription to a queue. On the UNSUBSCRIBE of such a subscription the header
        `durable` has no effect."""
        self._reply_queues: Counter[str] = Counter()
        """Number of subscriptions that consume from each temporary queue."""
        self.client_id = ""
        """Value of `client-id` on CONNECT; "" if the client has sent none."""

    def on_connected(self, version: Version, client_id: str) -> None:
        self._version = version
        self.client_id = client_id

    def _parse_send(self, frame: Frame) -> Command:
        headers = frame.headers
        address = headers.get("destination")
        if address is None:
            raise RemoteProtocolError("SEND without a destination")
        destination = parse_address(address, self._session_id)
        kind = destination.kind
        if kind is not _QUEUE:
            if kind is DestinationKind.CONTROL:
                return self._parse_control(frame, destination)
            if kind is DestinationKind.TOPIC_PATTERN or kind is DestinationKind.QUEUE_PATTERN:
                raise destination_error(
                    f"{address} is a pattern, which is for SUBSCRIBE only: send to a queue or topic"
                )
            if kind is DestinationKind.DURABLE:
                raise destination_error(f"{address} is a durable subscription: send to its topic")
        priority_text = headers.get("priority")
        priority = PRIORITY_DEFAULT
        if priority_text is not None:
            known = _PRIORITIES.get(priority_text)
            priority = _priority(priority_text) if known is None else known
        header = frame.lines
        # Only plain frames have `lines`; the headers of other frames must be checked.
        if _SCHEDULE_PREFIX in header or not header:
            _check_schedule_names(headers)
        producer = None
        number = 0
        is_gapless = False
        schedule = None
        group = ""
        ttl_ms = 0
        names_destinations = False
        failures: tuple[Destination, ...] = ()
        rejected_for = None
        if not self._unusual_send.isdisjoint(headers):
            ttl_ms = _ttl(headers)
            # One check for both, as neither is usual.
            if not _SCHEDULED_OR_INEFFECTIVE.isdisjoint(headers):
                self._report_ineffective_headers(frame)
                if not SCHEDULE_HEADERS.isdisjoint(headers):
                    schedule = _schedule(headers, destination, ttl_ms)
                    ttl_ms = 0
            producer, number, is_gapless = _numbered(headers)
            text = headers.get("JMSXGroupID")
            group = "" if text is None else read_name("JMSXGroupID", text)
            header = self._forwarded(frame, priority)
            names_destinations = "reply-to" in headers
            if not FAILURE_HEADERS.isdisjoint(headers):
                failures = failure_destinations(
                    destination, headers.get(REPORT_TO), headers.get(REPORT_ID), headers.get(ON_FAILURE)
                )
                names_destinations = True
            rejected_for = parse_rejection(destination, headers)
        elif not header or "content-length" not in headers:
            header = self._forwarded(frame, priority)
        elif priority_text is None:
            header = DEFAULT_PRIORITY_LINE + header
        elif priority_text not in _PRIORITIES:
            header = self._forwarded(frame, priority)
        text = headers.get("persistent")
        persistent = text is not None and (text == "true" or read_boolean("persistent", text))
        text = headers.get("expires")
        # Some clients send -1 for never.
        expires_ms = 0 if text is None or text == "-1" else read_number("expires", text)
        message = SentMessage(priority, persistent, expires_ms, header, frame.body)
        if "content-length" not in headers:
            message.is_text = True
        if group:
            message.group = group
        transaction = headers.get("transaction")
        return Send(
            destination,
            message,
            transaction,
            producer,
            number,
            schedule,
            ttl_ms,
            is_gapless,
            names_destinations=names_destinations,
            failure_destinations=failures,
            rejected_for=rejected_for,
        )

    def _report_ineffective_headers(self, frame: Frame) -> None:
        # A shape may read later frames with these names; the first one of a connection always comes here.
        known = INEFFECTIVE_HEADERS[frame.command]
        found = (known.keys() & frame.headers.keys()) - self._reported
        if found:
            self._reported |= found
            self._unusual_send -= found
            for name in sorted(found):
                self._on_ineffective_header(frame.command, name, known[name])

    def _forwarded(self, frame: Frame, priority: int) -> bytes:
        """Return the header lines that are stored and sent to the consumer. In these lines the priority is from 0 to 9,
        and a reply-to is an address that is valid on all connections."""
        headers = frame.headers
        priority_text = headers.get("priority")
        is_canonical = priority_text is None or priority_text in _PRIORITIES
        if frame.lines and is_canonical and "content-length" in headers and "reply-to" not in headers:
            # No header is escaped: leaving lines out is enough.
            lines = b"\n" + frame.lines
            for name in _NOT_FORWARDED.intersection(headers):
                before, _, after = lines.partition(f"\n{name}:".encode())
                lines = before + after[after.index(b"\n") :]
            return lines[1:] if priority_text is not None else DEFAULT_PRIORITY_LINE + lines[1:]
        headers = {name: value for name, value in headers.items() if name not in _NOT_FORWARDED}
        headers["priority"] = str(priority)
        headers["content-length"] = str(len(frame.body))
        reply_to = headers.get("reply-to", "")
        if reply_to.startswith((TEMPORARY_PREFIX, TEMPORARY_TOPIC_PREFIX)):
            # An address that only this connection may use becomes one for all connections.
            destination = parse_address(reply_to, self._session_id)
            if destination.kind is DestinationKind.TEMPORARY and destination.name not in self._reply_queues:
                # RabbitMQ subscribes for its client here; a client that relies on that would wait in silence.
                raise RemoteProtocolError(
                    f"reply-to {reply_to[:100]}: this connection has no subscription to it, and a SEND makes none; "
                    "SUBSCRIBE to it first",
                    Code.NOT_FOUND,
                )
            headers["reply-to"] = destination.address
        return header_lines.encode_header_lines(headers)

    def _parse_control(self, frame: Frame, destination: Destination) -> Command:
        if "transaction" in frame.headers:
            raise RemoteProtocolError("a SEND to /control/ cannot be part of a transaction")
        own = next((name for name in frame.headers if name.startswith(OWN_PREFIX)), None)
        if own is not None:
            # On other SENDs such a header may be the user's, and is forwarded. Here nothing is forwarded.
            raise RemoteProtocolError(f"{own[:50]} on a SEND to /control/ has no effect; leave the header out")
        if destination.name in ACTION_PARSERS:
            if not _MESSAGE_ONLY.isdisjoint(frame.headers):
                raise RemoteProtocolError(
                    f"SEND to /control/{destination.name} has no answer and is done at once; leave out "
                    f"{', '.join(sorted(_MESSAGE_ONLY.intersection(frame.headers)))}"
                )
            return ACTION_PARSERS[destination.name](frame)
        reply_to = parse_address(require_header(frame.command, frame.headers, "reply-to"), self._session_id)
        if reply_to.kind is not DestinationKind.TEMPORARY or reply_to.session != self._session_id:
            raise RemoteProtocolError(
                "reply-to of a control request must be a /temp-queue/ of the same connection", Code.CONTROL_REQUEST
            )
        if len(frame.body) > CONTROL_REQUEST_BYTES_MAX:
            raise RemoteProtocolError(
                f"{destination.name}: the body of the control request has more than {CONTROL_REQUEST_BYTES_MAX} bytes",
                Code.CONTROL_REQUEST,
            )
        return ControlRequest(destination.name, frame.body, reply_to, frame.headers.get("correlation-id"))

    def _parse_subscribe(self, frame: Frame) -> Subscribe | Browse:
        headers = frame.headers
        is_browse = read_boolean("browser", headers.get("browser", "false"))
        address, options = split_options(require_header(frame.command, frame.headers, "destination"))
        destination = parse_address(address, self._session_id)
        _check_subscribe_destination(address, destination, is_browse=is_browse)
        subscription = self._subscription_id(frame)
        subscribe, selector, durable_as = parse_subscribe_options(headers, options, destination, subscription)
        subscribe.durable_key = self._durable_key(durable_as)
        if subscribe.durable_key and is_browse:
            raise RemoteProtocolError(
                "browser:true and a durable subscription are both requested: leave out one of them"
            )
        ack = headers.get("ack", "auto")
        try:
            mode = AckMode(ack)
        except ValueError as error:
            raise RemoteProtocolError(f"ack mode {ack!r} is not auto, client or client-individual") from error
        if is_browse:
            # A browser acknowledges nothing, whatever mode it requests.
            mode = AckMode.AUTO
        has_express = read_boolean("truenext-express", headers.get("truenext-express", "false"))
        if has_express and destination.kind is DestinationKind.QUEUE_PATTERN:
            raise RemoteProtocolError(
                f"truenext-express with {address}: express dispatch is for one queue; subscribe to a queue by its name"
            )
        if has_express and mode is not AckMode.INDIVIDUAL:
            raise RemoteProtocolError(
                "truenext-express is for ack:client-individual, as express messages come out of turn"
            )
        if subscribe.is_pulling and (is_browse or mode is AckMode.AUTO or has_express):
            raise RemoteProtocolError(
                "truenext-pull is for ack:client and client-individual, without truenext-express and browser",
                Code.NOT_SUPPORTED,
            )
        if subscribe.is_exclusive and is_browse:
            raise RemoteProtocolError(
                "an exclusive consumer with browser:true: a browser consumes no messages; leave out one of them"
            )
        subscribe.selector = compile_selector(selector) if selector else None
        self._report_ineffective_headers(frame)
        if is_browse:
            after, count = parse_browse_options(headers)
            return Browse(subscription, destination, subscribe.selector, after=after, count=count)
        if option := next((each for each in BROWSE_OPTIONS if each in headers), None):
            raise RemoteProtocolError(f"{option} is for browser:true: leave it out")
        subscribe.mode, subscribe.has_express = mode, has_express
        return subscribe

    def _parse_unsubscribe(self, frame: Frame) -> Unsubscribe:
        subscription = self._subscription_id(frame)
        by_id = None if subscription in self._queue_by_subscription else subscription
        return Unsubscribe(subscription, self._durable_key(durable_name(frame.headers, by_id)))

    def on_accepted(self, frame: Frame, command: Command) -> None:
        """Note a SUBSCRIBE or UNSUBSCRIBE that was accepted. Must be called before a message is encoded for the
        client."""
        if isinstance(command, Subscribe | Browse):
            destination = command.destination
            kind = destination.kind
            mode = command.mode if isinstance(command, Subscribe) else AckMode.AUTO
            self._replies.add_subscription(
                command.subscription,
                mode,
                has_id="id" in frame.headers,
                has_pattern=kind is DestinationKind.QUEUE_PATTERN,
            )
            if kind is not DestinationKind.TOPIC and kind is not DestinationKind.TOPIC_PATTERN:
                self._queue_by_subscription[command.subscription] = destination.name
                if kind is DestinationKind.TEMPORARY and isinstance(command, Subscribe):
                    self._reply_queues[destination.name] += 1
        elif isinstance(command, Unsubscribe):
            self._replies.remove_subscription(command.subscription)
            queue = self._queue_by_subscription.pop(command.subscription, "")
            if queue in self._reply_queues:
                self._reply_queues[queue] -= 1
                if not self._reply_queues[queue]:
                    del self._reply_queues[queue]

    def _durable_key(self, name: str | None) -> str:
        """Return the key of the client's durable subscription with this name; "" if the name is None."""
        if name is None:
            return ""
        if not self.client_id:
            raise RemoteProtocolError("a durable subscription needs a client-id, which CONNECT did not name")
        return durable_key(self.client_id, name)

    def _subscription_id(self, frame: Frame) -> str:
        """Return the id of the subscription that a frame names. In STOMP 1.0 the destination may be used as id."""
        subscription = frame.headers.get("id")
        if subscription is None and self._version is Version.V1_0:
            subscription = frame.headers.get("destination")
            if subscription is not None:
                subscription, _ = split_options(subscription)
        if subscription is None:
            raise RemoteProtocolError(f"{frame.command} without an id")
        return read_name("id", subscription)

    def _parse_ack(self, frame: Frame) -> Ack:
        subscription, sequence, dispatch = self._parse_ack_id(frame)
        ack = Ack(subscription, sequence, frame.headers.get("transaction"), dispatch)
        next_one = frame.headers.get("truenext-started")
        if next_one is not None:
            if ack.transaction is not None:
                raise RemoteProtocolError(
                    "truenext-started is not allowed on an ACK inside a transaction, whose messages count as started "
                    "anyway; leave it out"
                )
            ack.started = Started(*read_ack_id("truenext-started", next_one))
        return ack

    def _parse_nack(self, frame: Frame) -> Nack:
        if self._version is Version.V1_0:
            raise RemoteProtocolError("STOMP 1.0 has no NACK", Code.COMMAND)
        subscription, sequence, dispatch = self._parse_ack_id(frame)
        delay_ms, is_rejected = parse_nack_options(frame.headers)
        return Nack(
            subscription,
            sequence,
            frame.headers.get("transaction"),
            delay_ms,
            is_rejected,
            dispatch,
            parse_cause(frame.headers),
        )

    def _parse_ack_id(self, frame: Frame) -> tuple[str | None, int, int]:
        """Return subscription, sequence and dispatch that an ACK or NACK names. The dispatch is 0 if the frame does not
        state it."""
        headers = frame.headers
        if self._version is Version.V1_2:
            return read_ack_id(frame.command, require_header(frame.command, frame.headers, "id"))
        message_id = require_header(frame.command, frame.headers, "message-id")
        digits = message_id.removeprefix(self._message_id_prefix)
        if digits == message_id or not are_digits(digits, _SEQUENCE_DIGITS):
            raise RemoteProtocolError(
                f"{frame.command} of message {message_id[:100]!r}, which this broker never sent", Code.NOT_HELD
            )
        if self._version is Version.V1_1:
            return require_header(frame.command, frame.headers, "subscription"), int(digits), 0
        return headers.get("subscription"), int(digits), 0

    def _parse_begin(self, frame: Frame) -> Begin:
        name = read_name("transaction", require_header(frame.command, frame.headers, "transaction"))
        return Begin(name, parse_counts_all(frame.headers))

    def _parse_commit(self, frame: Frame) -> Commit:
        producer, number, is_gapless = _numbered(frame.headers)
        counts = parse_counts_all(frame.headers)
        transaction = require_header(frame.command, frame.headers, "transaction")
        return Commit(transaction, producer, number, is_gapless, counts_all=counts)

    def _parse_abort(self, frame: Frame) -> Abort:
        return Abort(require_header(frame.command, frame.headers, "transaction"), parse_counts_all(frame.headers))

    def _parse_disconnect(self, frame: Frame) -> Disconnect:
        text = frame.headers.get("truenext-forget", "[]")
        names = decode_client_json("truenext-forget is not a JSON list of names", text, list[str], Code.HEADER)
        return Disconnect([read_name("a name in truenext-forget", name) for name in names])


FRAME_INTERPRETERS: dict[str, Callable[[FrameInterpreter, Frame], Command]] = {
    "SEND": FrameInterpreter._parse_send,
    "ACK": FrameInterpreter._parse_ack,
    "NACK": FrameInterpreter._parse_nack,
    "SUBSCRIBE": FrameInterpreter._parse_subscribe,
    "UNSUBSCRIBE": FrameInterpreter._parse_unsubscribe,
    "BEGIN": FrameInterpreter._parse_begin,
    "COMMIT": FrameInterpreter._parse_commit,
    "ABORT": FrameInterpreter._parse_abort,
    "DISCONNECT": FrameInterpreter._parse_disconnect,
}
"""Functions that parse a client's frame after the login, by command. The values are functions of the class, not bound
methods: bound methods in an attribute of their own object would form a reference cycle, which keeps the last frame
alive."""


def _numbered(headers: dict[str, str]) -> tuple[str | None, int, bool]:
    """Return producer and number of a SEND or COMMIT, and whether the producer's numbers have no gaps. Without a
    producer the result is None, 0, False."""
    producer = headers.get("truenext-producer")
    text = headers.get("truenext-number")
    gapless = headers.get("truenext-gapless")
    if (producer is None) != (text is None):
        raise RemoteProtocolError("truenext-producer and truenext-number must be set together")
    if producer is None or text is None:
        if gapless is not None:
            raise RemoteProtocolError("truenext-gapless needs truenext-producer and truenext-number")
        return None, 0, False
    if not producer:
        raise RemoteProtocolError("truenext-producer is empty")
    return (
        read_name("truenext-producer", producer),
        read_number("truenext-number", text, PRODUCER_NUMBER_MAX),
        gapless is not None and read_boolean("truenext-gapless", gapless),
    )


def _ttl(headers: dict[str, str]) -> int:
    """Return the time to live that a SEND states, in milliseconds; 0 if it states none."""
    text = headers.get("truenext-ttl")
    if text is None:
        return 0
    if "expires" in headers:
        raise RemoteProtocolError("truenext-ttl and expires both set when the message expires; use one of them")
    ttl_ms = read_number("truenext-ttl", text, TTL_MS_MAX, " milliseconds (100 years)")
    if ttl_ms == 0:
        raise RemoteProtocolError("truenext-ttl of 0; the least is 1, and without it the message does not expire")
    return ttl_ms


def _check_schedule_names(headers: dict[str, str]) -> None:
    """Check that all headers with the prefix of a schedule are known. If an unknown header were ignored, the message
    might be sent at once.

    Raises: RemoteProtocolError at an unknown header
    """
    for name in headers:
        if name.startswith(SCHEDULE_PREFIX) and name not in SCHEDULE_HEADERS:
            raise RemoteProtocolError(
                f"unknown header {name[:50]!r} of SEND; known: {', '.join(sorted(SCHEDULE_HEADERS))}; leave it out"
            )


def _schedule(headers: dict[str, str], destination: Destination, ttl_ms: int) -> Schedule:
    """Return the schedule that the headers of a SEND state.

    Raises: RemoteProtocolError if a header is invalid, or a part of the destination is temporary
    """
    for part in destination.parts or (destination,):
        if part.session:
            raise destination_error(
                f"{part.address} is temporary, and may have ended when a scheduled send is due: use another address"
            )
    if headers.get("AMQ_SCHEDULED_CRON") == "":
        raise RemoteProtocolError("AMQ_SCHEDULED_CRON is empty: leave it out, or set five fields, such as 0 8 * * 1-5")
    if headers.get("AMQ_SCHEDULED_ZONE") == "":
        raise RemoteProtocolError(
            "AMQ_SCHEDULED_ZONE is empty: leave it out for UTC, or set a name such as Europe/Oslo"
        )
    repeat = headers.get("AMQ_SCHEDULED_REPEAT", "0")
    delay_ms, period_ms = (
        read_number(name, headers.get(name, "0")) for name in ("AMQ_SCHEDULED_DELAY", "AMQ_SCHEDULED_PERIOD")
    )
    return check_schedule(
        Schedule(
            delay_ms=delay_ms,
            period_ms=period_ms,
            repeat=FOR_EVER if repeat == str(FOR_EVER) else read_number("AMQ_SCHEDULED_REPEAT", repeat),
            cron=headers.get("AMQ_SCHEDULED_CRON", ""),
            zone=headers.get("AMQ_SCHEDULED_ZONE", ""),
            ttl_ms=ttl_ms,
            due_ms=read_number(
                "AMQ_SCHEDULED_TIME",
                headers.get("AMQ_SCHEDULED_TIME", "0"),
                SCHEDULE_TIME_MAX,
                " milliseconds since 1970 (the year 2169)",
            ),
        )
    )


def _priority(text: str) -> int:
    """Return the priority that a text states. A number below 0 becomes 0, and a number above 9 becomes 9."""
    digits = text.removeprefix("-")
    if not are_digits(digits):
        raise RemoteProtocolError(f"priority {text[:100]!r} is not a number")
    number = int(digits.lstrip("0")[:3] or "0")
    return clamp_priority(number if digits == text else -number)


def _check_subscribe_destination(address: str, destination: Destination, *, is_browse: bool) -> None:
    """Check that a SUBSCRIBE may name the destination.

    Raises: RemoteProtocolError if the destination is not allowed
    """
    if destination.kind is DestinationKind.CONTROL:
        raise destination_error(f"{address} is for control requests; subscribe to the queue in your reply-to")
    if destination.kind is DestinationKind.COMPOSITE:
        raise RemoteProtocolError(
            f"SUBSCRIBE to {address!r}: composite destinations are for SEND; send a SUBSCRIBE for each part, each "
            "with its own id, or one to a pattern, such as /queue/orders.>",
            Code.NOT_SUPPORTED,
        )
    if not is_browse and "#" in destination.address.rpartition("/")[2].split("."):
        raise destination_error(
            f"SUBSCRIBE to {address!r}: # is not a wildcard here; use > as the last word, for one word or more, or "
            "* for one word"
        )
    if is_browse and destination.kind in (DestinationKind.TOPIC, DestinationKind.TOPIC_PATTERN):
        raise destination_error(
            "browser:true is for queues, and for a durable subscription as /subscription/CLIENT,NAME: "
            "no message waits in a topic"
        )
    if is_browse and destination.kind is DestinationKind.QUEUE_PATTERN:
        raise destination_error(f"browser:true with {address}: one queue is browsed at a time: name a single queue")
    if destination.kind is DestinationKind.DURABLE and not is_browse:
        raise destination_error(
            f"{address} is for browser:true only; to consume, subscribe to its topic with durable:true"
        )
