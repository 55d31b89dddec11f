"""Request shapes: make commands directly from the bytes of SEND, ACK and SEND to /control/started, which come for each
message.

The command equals the one that requests.py makes from the same frame. Frames that need more checks (an address that
only its connection may use, a reply-to, a schedule, a priority of 12) have no shape here, or their shape does not read
them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from re import Match
from typing import Any

from truenext.errors import RemoteProtocolError
from truenext.model.commands import Ack, AckRun, Send, SendRun, Started
from truenext.model.destination import Destination, DestinationKind, parse_address
from truenext.model.failure_headers import FAILURE_HEADERS, ON_FAILURE, REPORT_ID, REPORT_TO, failure_destinations
from truenext.model.header_lines import ADDED_HEADERS, HOP_BY_HOP_HEADERS, SCHEDULE_PREFIX
from truenext.model.limits import HEADER_BYTES_MAX, NAME_LENGTH_MAX, PRODUCER_NUMBER_MAX
from truenext.model.message import SentMessage
from truenext.model.order import PRIORITY_DEFAULT
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.headers import OWN_PREFIX
from truenext.wire.stomp.shapes import (
    FrameShape,
    Shape,
    ShapeCache,
    character_pattern,
    header_pattern,
    is_utf8,
    line_pattern,
)
from truenext.wire.stomp.speedups import SPEEDUPS

ShapedCommand = Send | SendRun | Ack | AckRun | Started | tuple[Send | Ack, str]
"""Command; or a command and the receipt that its frame requests. A run (SendRun, AckRun) stands for several frames."""

DEFAULT_PRIORITY_LINE = f"priority:{PRIORITY_DEFAULT}\n".encode()

_DESTINATION_CACHE_SIZE = 16_384
"""Number of addresses whose destinations are kept, so that they are not parsed for each SEND."""
_PRIORITIES = {str(priority).encode(): priority for priority in range(10)}
_HOP_BY_HOP = {
    "receipt": rb"%%b{0,%d}+" % NAME_LENGTH_MAX,
    "transaction": rb"%b*+",
    "truenext-producer": rb"%%b{1,%d}+" % NAME_LENGTH_MAX,
    "truenext-number": rb"\d{1,19}+",
    "truenext-gapless": rb"true|false",
}
"""Headers of a SEND that are not forwarded, each with the pattern of the values that a shape reads. In a pattern, %b
stands for the pattern of one character."""
_FORWARDED = {
    "destination": rb"%v",
    "content-length": rb"\d{1,9}+",
    "priority": rb"\d",
    "persistent": rb"true|false",
    "expires": rb"\d{1,18}+",
    "JMSXGroupID": _HOP_BY_HOP["receipt"],
    **dict.fromkeys(FAILURE_HEADERS, rb"%v"),
}
"""Headers of a SEND that are forwarded and also read, each with the pattern of the values that a shape reads. In a
pattern, %v stands for the pattern of any value."""
_ACK_ID = rb"\d{1,19}+)(\.\d{1,10}+|)@(%%b{0,%d}+" % NAME_LENGTH_MAX
"""Pattern of sequence, dispatch and subscription. A pair of parentheses around it makes three groups."""
_STARTED = "truenext-started"
_ACK_HEADERS = {
    "id": _ACK_ID,
    "receipt": _HOP_BY_HOP["receipt"],
    "transaction": _HOP_BY_HOP["receipt"],
    _STARTED: _ACK_ID,
}
_OTHER_ACK_LENGTH_MAX = 1000
_OTHER_ACK_VALUE = rb"%%b{0,%d}+" % _OTHER_ACK_LENGTH_MAX
"""Pattern of the values of other headers of an ACK. Only short values match, so that the frame is within the limits."""
_SLOW_PATH = (HOP_BY_HOP_HEADERS - _HOP_BY_HOP.keys()) | ADDED_HEADERS | {"reply-to"}
_NOT_IN_C = frozenset({*_HOP_BY_HOP, "expires", "JMSXGroupID"})
"""Headers of SENDs and ACKs that only Python reads: most frames have none of them."""
_SHARED_KINDS = frozenset({DestinationKind.QUEUE, DestinationKind.TOPIC, DestinationKind.TEMPORARY})
"""Kinds of destinations whose address means the same on all connections, and to which clients can send."""


class SendShape:
    """Shape that makes a Send of each SEND with a content-length."""

    def __init__(self, version: Version, names: tuple[str, ...]) -> None:
        value = character_pattern(version) + b"*+"
        character = character_pattern(version, is_ascii=True)
        lines = b""
        groups: dict[str, int] = {}
        forwarded: list[int] = []
        count = 0
        is_forwarded = False
        for name in names:
            if is_forwarded is (name in _HOP_BY_HOP):
                # Consecutive forwarded headers become one group, to copy as few pieces as possible.
                is_forwarded = not is_forwarded
                lines += b"(" if is_forwarded else b")"
                if is_forwarded:
                    forwarded.append(count)
                    count += 1
            pattern = _HOP_BY_HOP.get(name) or _FORWARDED.get(name)
            if pattern is None:
                lines += line_pattern(name, value)
            else:
                groups[name] = count
                count += 1
                lines += line_pattern(name, b"(%b)" % pattern.replace(b"%b", character).replace(b"%v", value))
        self.match = header_pattern("SEND", lines + (b")" if is_forwarded else b""))
        self.uses = 0
        self._forwarded = tuple(forwarded)
        self._destination = groups.pop("destination")
        self._length = groups.pop("content-length")
        self._priority = groups.pop("priority", None)
        self._persistent = groups.pop("persistent", None)
        self._receipt = groups.pop("receipt", None)
        self._optional = groups
        """Number of the expression's group that has the value, for each header that most SENDs lack."""
        self._has_optional = bool(groups)

    def read(self, data: bytes, start: int, into: list[Frame | ShapedCommand], body_bytes_max: int) -> int:
        match = self.match
        at_destination, at_length = self._destination, self._length
        at_priority, at_persistent, at_receipt = self._priority, self._persistent, self._receipt
        first, *others = self._forwarded
        has_optional = self._has_optional
        is_plain = not has_optional and at_receipt is None
        size = len(data)
        # Messages of the run that is being read; None before its second message.
        run: list[SentMessage] | None = None
        run_destination, is_run_persistent = None, False
        while start < size and (found := match(data, start)) is not None:
            groups = found.groups()
            body_start = found.end()
            length = int(groups[at_length])
            body_end = body_start + length
            if (
                body_end >= size
                or data[body_end]
                or length > body_bytes_max
                or body_start - start > HEADER_BYTES_MAX
                or (destination := _destination(groups[at_destination])) is None
            ):
                break
            header = groups[first]
            if others:
                header = b"".join([groups[group] for group in self._forwarded])
            # Like `is_utf8`, without a call for ASCII.
            if not header.isascii() and not is_utf8(header):
                break
            if at_priority is None:
                header = DEFAULT_PRIORITY_LINE + header
                priority = PRIORITY_DEFAULT
            else:
                priority = _PRIORITIES[groups[at_priority]]
            persistent = at_persistent is not None and groups[at_persistent] == b"true"
            message = SentMessage(priority, persistent, 0, header, data[body_start:body_end])
            start = body_end + 1
            if is_plain:
                if destination is not run_destination or persistent is not is_run_persistent:
                    run, run_destination, is_run_persistent = None, destination, persistent
                    into.append(first_send := Send(destination, message))
                elif run is None:
                    run = [first_send.message, message]
                    into[-1] = SendRun(destination, run)
                else:
                    run.append(message)
                continue
            send = Send(destination, message)
            if has_optional and not self._set_optional_headers(send, groups):
                return found.start()
            into.append(send if at_receipt is None else (send, groups[at_receipt].decode()))
        return start

    def _set_optional_headers(self, send: Send, groups: tuple[bytes, ...]) -> bool:
        """Set the fields of a SEND from its optional headers. Returns False if a value is invalid, so that requests.py
        must read the frame and report the error."""
        for name, at in self._optional.items():
            value = groups[at]
            match name:
                case "expires":
                    send.message.expires_ms = int(value)
                case "JMSXGroupID":
                    send.message.group = value.decode()
                case "transaction":
                    send.transaction = value.decode()
                case "truenext-producer":
                    send.producer = value.decode()
                case "truenext-gapless":
                    send.is_gapless = value == b"true"
                case _:
                    send.number = int(value)
                    if send.number > PRODUCER_NUMBER_MAX:
                        return False
        return True


class FailureSendShape(SendShape):
    """Shape that makes a Send of each SEND with failure headers."""

    def __init__(self, version: Version, names: tuple[str, ...]) -> None:
        super().__init__(version, names)
        self._has_optional = True
        report_to, report_id, on_failure = (
            self._optional.pop(name, None) for name in (REPORT_TO, REPORT_ID, ON_FAILURE)
        )
        self._failure_groups = (report_to, report_id, on_failure)
        """Number of each failure header's group in the regular expression; None if SENDs of this shape lack the
        header."""

    def _set_optional_headers(self, send: Send, groups: tuple[bytes, ...]) -> bool:
        values = (None if group is None else groups[group].decode() for group in self._failure_groups)
        try:
            send.failure_destinations = failure_destinations(send.destination, *values)
        except RemoteProtocolError:
            return False
        send.names_destinations = True
        return super()._set_optional_headers(send, groups)


class AckShape:
    """Shape of an ACK of STOMP 1.2 with given header names. A match makes the command `Ack`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        character = character_pattern(Version.V1_2, is_ascii=True)
        lines = b""
        groups: dict[str, int] = {}
        count = 1
        for name in names:
            pattern = _ACK_HEADERS.get(name)
            if pattern is not None:
                groups[name] = count
                count += pattern.count(b")") + 1
                pattern = b"(%b)" % pattern
            lines += line_pattern(name, (pattern or _OTHER_ACK_VALUE).replace(b"%b", character))
        self.match = header_pattern("ACK", lines, rb"\0")
        self.uses = 0
        self._id = groups["id"]
        self._receipt = groups.get("receipt", 0)
        self._transaction = groups.get("transaction", 0)
        self._started = groups.get(_STARTED, 0)

    def read(self, data: bytes, start: int, into: list[Frame | ShapedCommand], body_bytes_max: int) -> int:
        match = self.match
        at_sequence, at_dispatch, at_subscription = self._id, self._id + 1, self._id + 2
        at_receipt, at_transaction, at_started = self._receipt, self._transaction, self._started
        is_plain = not (at_receipt or at_transaction)
        # ACKs of the run that is being read; None before its second ACK.
        run: list[Ack] | None = None
        run_name = None
        while (found := match(data, start)) is not None:
            start = found.end()
            name = found[at_subscription].decode()
            ack = Ack(name, int(found[at_sequence]))
            if dispatch := found[at_dispatch]:
                ack.dispatch = int(dispatch[1:])
            if at_started:
                sequence, which, subscription = found.group(at_started, at_started + 1, at_started + 2)
                other = name if subscription == found[at_subscription] else subscription.decode()
                ack.started = Started(other, int(sequence), int(which[1:]) if which else 0)
            elif at_transaction:
                ack.transaction = found[at_transaction].decode()
            if is_plain:
                if name != run_name:
                    run, run_name = None, name
                    into.append(first := ack)
                elif run is None:
                    run = [first, ack]
                    into[-1] = AckRun(name, run)
                else:
                    run.append(ack)
                continue
            into.append((ack, found[at_receipt].decode()) if at_receipt else ack)
        return start


class StartedShape:
    """Shape that makes a Started of each SEND to /control/started that has no other headers."""

    def __init__(self, version: Version, names: tuple[str, ...]) -> None:
        patterns = {"destination": b"/control/started", "id": b"(%b)" % _ACK_ID}
        character = character_pattern(version, is_ascii=True)
        lines = b"".join(line_pattern(name, patterns[name].replace(b"%b", character)) for name in names)
        self.match = header_pattern("SEND", lines, rb"\0")
        self.uses = 0

    def read(self, data: bytes, start: int, into: list[Frame | ShapedCommand], body_bytes_max: int) -> int:
        match = self.match
        while (found := match(data, start)) is not None:
            start = found.end()
            sequence, dispatch, subscription = found.groups()
            into.append(Started(subscription.decode(), int(sequence), int(dispatch[1:] or 0)))
        return start


class ShapeInC:
    """Shape that reads frames in C (_speed.c), with the same result as SendShape or AckShape. The frames have no header
    of _NOT_IN_C."""

    def __init__(self, reader: Any) -> None:
        self.read: Callable[[bytes, int, list[Frame | ShapedCommand], int], int] = reader.read
        self.match: Callable[[bytes, int], Match[bytes] | None] = lambda data, start: None
        """Function that matches nothing. A reader in C needs no regular expression."""
        self.uses = 0


def _send_shape_in_c(version: Version, names: tuple[str, ...]) -> ShapeInC:
    values = {
        "destination": SPEEDUPS.DESTINATION,
        "content-length": SPEEDUPS.LENGTH,
        "priority": SPEEDUPS.PRIORITY,
        "persistent": SPEEDUPS.BOOLEAN,
    }
    return ShapeInC(
        SPEEDUPS.SendReader(
            lines=_lines_in_c(names, values),
            allows_space=version is not Version.V1_0,
            send=Send,
            send_run=SendRun,
            sent_message=SentMessage,
            find_destination=_destination,
            priority_line=DEFAULT_PRIORITY_LINE,
            priority=PRIORITY_DEFAULT,
            header_bytes_max=HEADER_BYTES_MAX,
        )
    )


def _ack_shape_in_c(names: tuple[str, ...]) -> ShapeInC:
    return ShapeInC(
        SPEEDUPS.AckReader(
            lines=_lines_in_c(names, {"id": SPEEDUPS.ACK_ID, _STARTED: SPEEDUPS.STARTED_ID}),
            ack=Ack,
            ack_run=AckRun,
            started=Started,
            name_length_max=NAME_LENGTH_MAX,
            other_length_max=_OTHER_ACK_LENGTH_MAX,
        )
    )


def _lines_in_c(names: tuple[str, ...], values: dict[str, int]) -> tuple[tuple[bytes, int], ...]:
    """Return for each header line its beginning, and the kind of its value as a constant of SPEEDUPS."""
    return tuple((f"{name}:".encode(), values.get(name, SPEEDUPS.TEXT)) for name in names)


@lru_cache(maxsize=_DESTINATION_CACHE_SIZE)
def _destination(address: bytes) -> Destination | None:
    """Return the destination of an address; None if requests.py must parse it."""
    if b"/temp-" in address:
        return None
    try:
        destination = parse_address(address.decode(), "")
    except (UnicodeDecodeError, RemoteProtocolError):
        return None
    return destination if destination.kind in _SHARED_KINDS else None


def _shape(version: Version, command: str, names: tuple[str, ...]) -> Shape[ShapedCommand]:
    is_in_c = SPEEDUPS is not None and _NOT_IN_C.isdisjoint(names)
    if command == "SEND" and _is_fast_path(set(names)):
        if not FAILURE_HEADERS.isdisjoint(names):
            return FailureSendShape(version, names)
        return _send_shape_in_c(version, names) if is_in_c else SendShape(version, names)
    if command == "SEND" and len(names) == 2 and {"destination", "id"} == set(names):
        return StartedShape(version, names)
    # An ACK may have only this header of truenext, and not in a transaction.
    own = [name for name in names if name.startswith(OWN_PREFIX)]
    is_known = not own or (own == [_STARTED] and "transaction" not in names)
    is_usual = "id" in names and "content-length" not in names and is_known
    if command == "ACK" and version is Version.V1_2 and is_usual:
        return _ack_shape_in_c(names) if is_in_c else AckShape(names)
    return FrameShape[ShapedCommand](version, command, names)


def _is_fast_path(names: set[str]) -> bool:
    """Return whether a SendShape can read SENDs with these headers."""
    return (
        {"destination", "content-length"} <= names
        and names.isdisjoint(_SLOW_PATH)
        and not any(name.startswith(SCHEDULE_PREFIX) for name in names)
        and ("truenext-producer" in names) is ("truenext-number" in names)
        and ("truenext-gapless" not in names or "truenext-number" in names)
    )


REQUEST_SHAPES: ShapeCache[ShapedCommand] = ShapeCache(_shape)
"""Cache of request shapes, for the decoders of a broker. These decoders make commands directly from such frames."""
