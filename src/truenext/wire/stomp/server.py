"""What a client's frames ask for, and what the broker's answers look like to it: the server side of STOMP.

Frames become commands, deliveries and answers become bytes. ActiveMQ's headers are understood (`persistent`,
`priority`, `expires`, `reply-to`, `activemq.prefetchSize`); what is not there yet is refused by name, never ignored
(headers.py).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol as Shape

from truenext import envelope
from truenext.answers import Fault, Receipt
from truenext.commands import (
    Abort,
    Ack,
    AckMode,
    Begin,
    Browse,
    Command,
    Commit,
    Confirm,
    Control,
    Disconnect,
    Nack,
    Send,
    Subscribe,
    Unsubscribe,
)
from truenext.destination import (
    TEMPORARY_PREFIX,
    TEMPORARY_TOPIC_PREFIX,
    Destination,
    Kind,
    durable_key,
    parse,
    split_options,
)
from truenext.errors import RemoteProtocolError
from truenext.limits import HEART_BEAT_MS_MIN, PRODUCER_NUMBER_MAX
from truenext.message import Message
from truenext.order import PRIORITY_DEFAULT, clamp_priority
from truenext.schedule import FOR_EVER, Schedule, checked
from truenext.selector import selector
from truenext.wire.stomp.frame import BROKER_FRAME_END, Frame, Version, header_line
from truenext.wire.stomp.headers import check_login, check_ours, durable_name, nack_wishes, wishes
from truenext.wire.stomp.protocol import Protocol, Side, State, choose_version, parse_heart_beat
from truenext.wire.stomp.values import read_boolean, read_name, read_number

PARTS_PER_MESSAGE = 5
"""Pieces of bytes that one MESSAGE frame is written in."""

_SCHEDULE_HEADERS = frozenset(
    {"AMQ_SCHEDULED_DELAY", "AMQ_SCHEDULED_PERIOD", "AMQ_SCHEDULED_REPEAT", "AMQ_SCHEDULED_CRON"}
)
_FIRST_OF_GROUP = "JMSXGroupFirstForConsumer"
_HOP_HEADERS = _SCHEDULE_HEADERS | frozenset(
    {
        # What concerns the SEND alone, and what only the broker may say of a message.
        "receipt",
        "transaction",
        "browser",
        "truenext-producer",
        "truenext-number",
        "message-id",
        "subscription",
        "ack",
        "redelivered",
        "timestamp",
        "truenext-sequence",
        "truenext-deliveries",
        "truenext-attempts",
        _FIRST_OF_GROUP,
    }
)
_NUMBERED = (Send, Commit)
"""What may be repeated."""
_NOT_FORWARDED = _HOP_HEADERS | envelope.DEAD_LETTER_HEADERS
"""Of a SEND. What a dead letter says of itself stands in a Message, where the broker alone has put it."""
_UNUSUAL_SEND = _NOT_FORWARDED | {"reply-to", "JMSXGroupID"}
# A member of an enumeration costs more to look up than a name; this one is asked for with every message.
_QUEUE = Kind.QUEUE
_SAID_BY_BROKER = ("content-length", "priority")
"""Headers of a message that are right, whatever its producer said."""
_PRIORITIES = {str(priority): priority for priority in range(10)}
_DEFAULT_PRIORITY_LINE = f"priority:{PRIORITY_DEFAULT}\n".encode()


class Delivery(Shape):
    """What a MESSAGE frame says of a message."""

    @property
    def sequence(self) -> int: ...
    @property
    def message(self) -> Message | None: ...
    @property
    def deliveries(self) -> int: ...
    @property
    def attempts(self) -> int: ...
    @property
    def is_first_of_group(self) -> bool: ...
    @property
    def address(self) -> str:
        """Of the queue from which it is."""


class StompServer:
    """One client's connection as its frames and ours."""

    def __init__(self, *, session_id: str, identity: str, server_name: str) -> None:
        """`identity` makes message ids of this broker unlike those of any other."""
        self._session_id = session_id
        self._message_id_prefix = f"truenext-{identity}-"
        self._server_name = server_name
        self._protocol = Protocol(Side.SERVER)
        self.client_id = ""
        """What the client calls itself, whichever of its connections it is."""
        self._version = Version.V1_0
        """The agreed one, once there is one."""
        self._heads: dict[str, tuple[str, str]] = {}
        """Per subscription how its MESSAGE frames begin: up to the sequence, and, where an ACK needs an id that holds
        the sequence too, from there to the sequence of the message id."""
        self._of_many: set[str] = set()
        """Subscriptions to patterns of queues: their MESSAGEs say from which queue they are."""
        self._to_queues: set[str] = set()
        """Subscriptions to queues: that they are durable asks for nothing."""
        self.receipt_in_question: str | None = None
        """The receipt asked for by the frame that was read last; a refusal names it."""
        self.connected: bytes | None = None
        """The CONNECTED frame, once, as soon as it is due. Taken by the caller."""
        self.sends_every_ms = 0
        """Agreed heart-beat from us to the client; 0 is none."""
        self.expects_every_ms = 0
        """Agreed heart-beat from the client to us; 0 is none."""
        self.has_unchecked_login = False
        """The client has said who it is, and nobody knows whether that is true."""

    @property
    def is_connected(self) -> bool:
        return self._protocol.state is not State.CONNECTING

    @property
    def is_closed(self) -> bool:
        """The client has said DISCONNECT."""
        return self._protocol.state is State.CLOSED

    # ---- From the client ----

    def receive(self, data: bytes) -> Iterator[Command]:
        """What `data` asks for, one command after the other; do each before asking for the next.

        Raises: RemoteProtocolError at the frame that may not be, or means nothing; all before it stands.
        """
        protocol = self._protocol
        requests = REQUESTS
        steady = protocol.steady
        self.receipt_in_question = None
        while frames := protocol.receive_with_acks(data):
            data = b""
            for frame in frames:
                if isinstance(frame, Ack):
                    self.receipt_in_question = None
                    if "ACK" not in steady:
                        protocol.check(Frame("ACK", {}))
                    yield frame
                    continue
                receipt = self.receipt_in_question = frame.headers.get("receipt")
                if frame.command not in steady:
                    protocol.check(frame)
                    steady = protocol.steady
                    if frame.command not in requests:
                        self._connect(frame)
                        steady = protocol.steady
                        continue
                if frame.command != "SEND":
                    check_ours(frame.command, frame.headers)
                command = requests[frame.command](self, frame)
                yield command
                if receipt is not None:
                    numbered = command if isinstance(command, _NUMBERED) and command.producer is not None else None
                    yield Confirm(read_name("receipt", receipt), numbered)
            # What may be wrong behind these is no frame that asked for anything.
            self.receipt_in_question = None

    def _connect(self, frame: Frame) -> None:
        headers = frame.headers
        version = choose_version(headers.get("accept-version"))
        check_login(headers)
        if "receipt" in headers:
            raise RemoteProtocolError(f"{frame.command} cannot ask for a receipt: CONNECTED is the answer")
        can, wants = parse_heart_beat(headers.get("heart-beat", "0,0"))
        self.sends_every_ms = max(wants, HEART_BEAT_MS_MIN) if wants else 0
        self.expects_every_ms = max(can, HEART_BEAT_MS_MIN) if can else 0
        self.client_id = headers.get("client-id", "")
        self._protocol.agree(version)
        self._version = version
        answer = {
            "version": version.value,
            # Not what we could do, but what is agreed: the same to a client that compares it with what it has said, and
            # right for one that takes it as it stands (decision 42).
            "heart-beat": f"{self.sends_every_ms},{self.expects_every_ms}",
            "session": self._session_id,
            "server": self._server_name,
        }
        if headers.get("login", "").strip() or headers.get("passcode", "").strip():
            self.has_unchecked_login = True
            answer["truenext-login"] = "unchecked"
        self.connected = self._protocol.send(Frame("CONNECTED", answer))

    def _send(self, frame: Frame) -> Command:
        headers = frame.headers
        address = headers.get("destination")
        if address is None:
            raise RemoteProtocolError("SEND without a destination")
        destination = parse(address, self._session_id)
        kind = destination.kind
        if kind is not _QUEUE:
            if kind is Kind.CONTROL:
                return self._control(frame, destination)
            if kind is Kind.PATTERN or kind is Kind.QUEUES:
                raise RemoteProtocolError(f"{address} is a pattern: it can only be subscribed to")
            if kind is Kind.DURABLE:
                raise RemoteProtocolError(f"{address} is a durable subscription: send to its topic")
        said = headers.get("priority")
        priority = PRIORITY_DEFAULT
        if said is not None:
            known = _PRIORITIES.get(said)
            priority = _priority(said) if known is None else known
        header = frame.lines
        producer = None
        number = 0
        schedule = None
        group = ""
        if not _UNUSUAL_SEND.isdisjoint(headers):
            if not _SCHEDULE_HEADERS.isdisjoint(headers):
                schedule = _schedule(headers, destination)
            producer, number = _numbered(headers)
            text = headers.get("JMSXGroupID")
            group = "" if text is None else read_name("JMSXGroupID", text)
            header = self._forwarded(frame, priority)
        elif not header or "content-length" not in headers:
            header = self._forwarded(frame, priority)
        elif said is None:
            header = _DEFAULT_PRIORITY_LINE + header
        elif said not in _PRIORITIES:
            header = self._forwarded(frame, priority)
        text = headers.get("persistent")
        persistent = text is not None and (text == "true" or read_boolean("persistent", text))
        text = headers.get("expires")
        expires_ms = 0 if text is None else _expires(text)
        message = Message(priority, persistent, expires_ms, header, frame.body)
        if group:
            message.group = group
        return Send(destination, message, headers.get("transaction"), producer, number, schedule)

    def _forwarded(self, frame: Frame, priority: int) -> bytes:
        """The header lines that go on to the consumer; they say the priority as it is counted."""
        headers = frame.headers
        said = headers.get("priority")
        is_right = said is None or said in _PRIORITIES
        if frame.lines and is_right and "content-length" in headers and "reply-to" not in headers:
            # Nothing is escaped: leaving lines out is enough.
            kept = b"\n" + frame.lines
            for name in _NOT_FORWARDED.intersection(headers):
                before, _, behind = kept.partition(f"\n{name}:".encode())
                kept = before + behind[behind.index(b"\n") :]
            return kept[1:] if said is not None else _DEFAULT_PRIORITY_LINE + kept[1:]
        headers = {name: value for name, value in headers.items() if name not in _NOT_FORWARDED}
        headers["priority"] = str(priority)
        headers["content-length"] = str(len(frame.body))
        reply_to = headers.get("reply-to", "")
        if reply_to.startswith((TEMPORARY_PREFIX, TEMPORARY_TOPIC_PREFIX)):
            # A name that only this connection understands becomes one that everybody does.
            headers["reply-to"] = parse(reply_to, self._session_id).address
        return envelope.write_header(headers)

    def _control(self, frame: Frame, destination: Destination) -> Control:
        reply_to = parse(_required(frame, "reply-to"), self._session_id)
        if reply_to.kind is not Kind.TEMPORARY or reply_to.session != self._session_id:
            raise RemoteProtocolError("the answer to a question goes to a /temp-queue/ of the connection that asks")
        if "transaction" in frame.headers:
            raise RemoteProtocolError("a question to the broker cannot be part of a transaction")
        return Control(destination.name, frame.body, reply_to, frame.headers.get("correlation-id"))

    def _subscribe(self, frame: Frame) -> Subscribe | Browse:
        headers = frame.headers
        is_browse = read_boolean("browser", headers.get("browser", "false"))
        address, options = split_options(_required(frame, "destination"))
        destination = parse(address, self._session_id)
        if destination.kind is Kind.CONTROL:
            raise RemoteProtocolError(f"{address} is for questions; subscribe to the queue that the answers go to")
        if destination.kind is Kind.COMPOSITE:
            raise RemoteProtocolError(f"subscriptions to composite destinations are not supported yet: {address!r}")
        if is_browse and destination.kind in (Kind.TOPIC, Kind.PATTERN):
            raise RemoteProtocolError(
                "browser:true is for queues, and for a durable subscription as /subscription/CLIENT,NAME: "
                "nothing waits in a topic"
            )
        if is_browse and destination.kind is Kind.QUEUES:
            raise RemoteProtocolError(f"browser:true with {address}: one queue is browsed at a time, name it")
        if destination.kind is Kind.DURABLE and not is_browse:
            raise RemoteProtocolError(f"{address} is to browse; to use it subscribe to its topic, durable")
        subscription = self._subscription_id(frame)
        asked = wishes(headers, options, destination, subscription)
        durable = self._durable_key(asked.durable)
        if durable and is_browse:
            raise RemoteProtocolError("browser:true with a durable subscription: a browser keeps nothing")
        ack = headers.get("ack", "auto")
        try:
            mode = AckMode(ack)
        except ValueError as error:
            raise RemoteProtocolError(f"ack mode {ack!r} is not auto, client or client-individual") from error
        if is_browse:
            # Nothing of it is acknowledged, whatever was asked for.
            mode = AckMode.AUTO
        has_express = read_boolean("truenext-express", headers.get("truenext-express", "false"))
        if has_express and destination.kind is Kind.QUEUES:
            raise RemoteProtocolError(
                f"truenext-express with {address}: an express lane is one queue's; subscribe to that by its name"
            )
        if has_express and mode is not AckMode.INDIVIDUAL:
            raise RemoteProtocolError("truenext-express is for ack:client-individual: what it brings comes out of turn")
        if asked.is_exclusive and is_browse:
            raise RemoteProtocolError("activemq.exclusive with browser:true: a browser takes no messages")
        wanted = selector(asked.selector) if asked.selector else None
        version = self._version
        start = "MESSAGE\n"
        if "id" in headers:
            start += header_line("subscription", subscription, version)
        message_id = f"message-id:{self._message_id_prefix}"
        if mode is not AckMode.AUTO and version is Version.V1_2:
            acknowledged_as = header_line("ack", f"@{subscription}", version).removeprefix("ack:")
            head = (f"{start}ack:", f"{acknowledged_as}{message_id}")
        else:
            head = (f"{start}{message_id}", "")
        self._heads.setdefault(subscription, head)
        if destination.kind is Kind.QUEUES:
            self._of_many.add(subscription)
        if destination.kind is not Kind.TOPIC and destination.kind is not Kind.PATTERN:
            self._to_queues.add(subscription)
        if is_browse:
            return Browse(subscription, destination, wanted)
        return Subscribe(
            subscription,
            destination,
            mode,
            asked.window,
            priority=asked.priority,
            is_exclusive=asked.is_exclusive,
            has_express=has_express,
            selector=wanted,
            durable=durable,
        )

    def _unsubscribe(self, frame: Frame) -> Unsubscribe:
        subscription = self._subscription_id(frame)
        self._heads.pop(subscription, None)
        self._of_many.discard(subscription)
        by_id = None if subscription in self._to_queues else subscription
        self._to_queues.discard(subscription)
        return Unsubscribe(subscription, self._durable_key(durable_name(frame.headers, by_id)))

    def _durable_key(self, name: str | None) -> str:
        """Of the client's durable subscription of this name; "" if None is meant."""
        if name is None:
            return ""
        if not self.client_id:
            raise RemoteProtocolError("a durable subscription needs a client-id, which CONNECT did not name")
        return durable_key(self.client_id, name)

    def _subscription_id(self, frame: Frame) -> str:
        """STOMP 1.0 lets a subscription be known by its destination."""
        subscription = frame.headers.get("id")
        if subscription is None and self._version is Version.V1_0:
            subscription = frame.headers.get("destination")
            if subscription is not None:
                subscription, _ = split_options(subscription)
        if subscription is None:
            raise RemoteProtocolError(f"{frame.command} without an id")
        return read_name("id", subscription)

    def _ack(self, frame: Frame) -> Ack:
        subscription, sequence = self._acknowledged(frame)
        return Ack(subscription, sequence, frame.headers.get("transaction"))

    def _nack(self, frame: Frame) -> Nack:
        if self._version is Version.V1_0:
            raise RemoteProtocolError("STOMP 1.0 has no NACK")
        subscription, sequence = self._acknowledged(frame)
        delay_ms, is_poison = nack_wishes(frame.headers)
        return Nack(subscription, sequence, frame.headers.get("transaction"), delay_ms, is_poison)

    def _acknowledged(self, frame: Frame) -> tuple[str | None, int]:
        """Subscription and sequence that an ACK or NACK names."""
        headers = frame.headers
        if self._version is Version.V1_2:
            ack = _required(frame, "id")
            digits, at, subscription = ack.partition("@")
            if not at or not _is_sequence(digits):
                raise RemoteProtocolError(
                    f"{frame.command} with the id {ack[:100]!r}, which is no ack header of a MESSAGE of this broker"
                )
            return subscription, int(digits)
        message_id = _required(frame, "message-id")
        digits = message_id.removeprefix(self._message_id_prefix)
        if digits == message_id or not _is_sequence(digits):
            raise RemoteProtocolError(f"{frame.command} of message {message_id[:100]!r}, which this broker never sent")
        if self._version is Version.V1_1:
            return _required(frame, "subscription"), int(digits)
        return headers.get("subscription"), int(digits)

    def _begin(self, frame: Frame) -> Begin:
        return Begin(read_name("transaction", _required(frame, "transaction")))

    def _commit(self, frame: Frame) -> Commit:
        producer, number = _numbered(frame.headers)
        return Commit(_required(frame, "transaction"), producer, number)

    def _abort(self, frame: Frame) -> Abort:
        return Abort(_required(frame, "transaction"))

    def _disconnect(self, _: Frame) -> Disconnect:
        return Disconnect()

    # ---- To the client ----

    def encode_end_of_browse(self, subscription: str, destination: Destination) -> bytes:
        """The frame that tells a browser that this was all, as ActiveMQ's."""
        head, _ = self._heads[subscription]
        address = header_line("destination", destination.address, self._version)
        return f"{head}0\n{address}browser:end\ncontent-length:0\n\n".encode() + BROKER_FRAME_END

    def encode_deliveries(
        self, subscription: str, deliveries: Iterable[Delivery], parts: list[bytes], *, is_browse: bool = False
    ) -> None:
        """Add the MESSAGE frames of what was dispatched to a subscription, PARTS_PER_MESSAGE parts each.

        What is only shown to it (`is_browse`) is no delivery, and not counted as one.
        """
        head, middle = self._heads[subscription]
        own = 0 if is_browse else 1
        is_newest = self._version is Version.V1_2
        is_of_many = subscription in self._of_many
        add = parts.extend
        for delivery in deliveries:
            message = delivery.message
            assert message is not None, "what was just dispatched is in memory"
            sequence = str(delivery.sequence)
            identity = f"{sequence}{middle}{sequence}" if middle else sequence
            count = delivery.deliveries
            flags = "" if count == own else "redelivered:true\n"
            if delivery.is_first_of_group and not is_browse:
                flags += f"{_FIRST_OF_GROUP}:true\n"
            header = message.header
            if is_of_many:
                header = _of_queue(header, delivery.address)
            if not is_newest:
                header = self._for_older_version(header)
            add(
                (
                    f"{head}{identity}\ntruenext-sequence:{sequence}\ntruenext-deliveries:{count}\n"
                    f"truenext-attempts:{delivery.attempts}\n{flags}timestamp:{message.arrived_ms}\n".encode(),
                    header,
                    b"\n",
                    message.body,
                    BROKER_FRAME_END,
                )
            )

    def _for_older_version(self, header: bytes) -> bytes:
        version = self._version
        if version is Version.V1_1:
            if b"\\" not in header:
                return header
            headers = envelope.read_header(header)
        else:
            headers = _trimmed(envelope.read_header(header))
        return "".join(header_line(name, value, version) for name, value in headers.items()).encode()

    def encode_receipt(self, receipt: Receipt) -> bytes:
        headers = {"receipt-id": receipt.receipt}
        if receipt.is_repeat:
            headers["truenext-repeat"] = "true"
        return self._protocol.send(Frame("RECEIPT", headers))

    def encode_fault(self, fault: Fault) -> bytes:
        headers = {"message": fault.summary, "content-type": "text/plain"}
        if not self.is_connected:
            # Nobody knows yet whether a backslash would be an escape.
            headers["message"] = fault.summary.replace("\\", "/")
            headers["version"] = ",".join(version.value for version in Version)
        elif fault.receipt is not None:
            # Nothing of a frame before the login is repeated to anybody.
            headers["receipt-id"] = fault.receipt
        return self._protocol.send(Frame("ERROR", headers, (fault.detail or fault.summary).encode()))


def _of_queue(header: bytes, address: str) -> bytes:
    """Header lines that name this queue, whatever it was sent to: a composite destination, a topic, another queue."""
    line = f"\n{header_line('destination', address, Version.V1_2)}".encode()
    if line in b"\n" + header:
        return header
    return envelope.write_header(envelope.read_header(header) | {"destination": address})


REQUESTS: dict[str, Callable[[StompServer, Frame], Command]] = {
    "SEND": StompServer._send,
    "ACK": StompServer._ack,
    "NACK": StompServer._nack,
    "SUBSCRIBE": StompServer._subscribe,
    "UNSUBSCRIBE": StompServer._unsubscribe,
    "BEGIN": StompServer._begin,
    "COMMIT": StompServer._commit,
    "ABORT": StompServer._abort,
    "DISCONNECT": StompServer._disconnect,
}
"""What each frame of a connected client asks for. Of the class, not of each connection: bound methods kept by their own
object would be a circle that holds what the connection last received."""


def _required(frame: Frame, name: str) -> str:
    value = frame.headers.get(name)
    if value is None:
        raise RemoteProtocolError(f"{frame.command} without the header {name!r}")
    return value


def _trimmed(headers: dict[str, str]) -> dict[str, str]:
    """Headers for a reader of STOMP 1.0, which may trim names and then take one for the broker's own."""
    trimmed = {name: headers[name] for name in _SAID_BY_BROKER if name in headers}
    for untrimmed, value in headers.items():
        name = untrimmed.strip()
        read_as = name.partition(":")[0].strip()
        is_imitation = read_as in envelope.DEAD_LETTER_HEADERS and read_as != untrimmed
        if read_as not in ("", *_HOP_HEADERS) and not is_imitation:
            trimmed.setdefault(name, value)
    return trimmed


def _numbered(headers: dict[str, str]) -> tuple[str | None, int]:
    """Producer and number of a send that may be repeated."""
    producer = headers.get("truenext-producer")
    text = headers.get("truenext-number")
    if (producer is None) != (text is None):
        raise RemoteProtocolError("truenext-producer and truenext-number go together")
    if producer is None or text is None:
        return None, 0
    if not producer:
        raise RemoteProtocolError("truenext-producer is empty")
    return read_name("truenext-producer", producer), read_number("truenext-number", text, PRODUCER_NUMBER_MAX)


def _schedule(headers: dict[str, str], destination: Destination) -> Schedule:
    """When a SEND is to be sent, and how often, in ActiveMQ's words."""
    for part in destination.parts or (destination,):
        if part.session:
            raise RemoteProtocolError(f"{part.address} may be gone when a scheduled send is due")
    repeat = headers.get("AMQ_SCHEDULED_REPEAT", "0")
    delay_ms, period_ms = (
        read_number(name, headers.get(name, "0")) for name in ("AMQ_SCHEDULED_DELAY", "AMQ_SCHEDULED_PERIOD")
    )
    return checked(
        Schedule(
            delay_ms=delay_ms,
            period_ms=period_ms,
            repeat=FOR_EVER if repeat == str(FOR_EVER) else read_number("AMQ_SCHEDULED_REPEAT", repeat),
            cron=headers.get("AMQ_SCHEDULED_CRON", ""),
        )
    )


def _is_sequence(digits: str) -> bool:
    return digits.isdigit() and digits.isascii() and len(digits) < 20


def _expires(text: str) -> int:
    """Milliseconds since the epoch; 0 is never, and so is -1, which some clients say."""
    return 0 if text == "-1" else read_number("expires", text)


def _priority(text: str) -> int:
    """As counted: a number outside is moved to the nearest end, however long it is."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise RemoteProtocolError(f"priority {text[:100]!r} is not a number")
    number = int(digits.lstrip("0")[:3] or "0")
    return clamp_priority(number if digits == text else -number)
