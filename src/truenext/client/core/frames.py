"""The bytes of the frames that a client writes. Source: docs/stomp.md"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from truenext.envelope import escape, must_escape, write_header
from truenext.limits import HEADER_BYTES_MAX, HEADERS_MAX
from truenext.wire.stomp.frame import UNESCAPED_COMMANDS, Frame, Version, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_OUR_HEADERS = 16
_OUR_HEADER_BYTES = 1024
"""Room for what a frame says beside what its caller asks for."""


def check(headers: Mapping[str, str]) -> None:
    """What is no frame ends the connection, and would end the next one when it is said again.

    Raises: ValueError if no frame can say so
    """
    size = 0
    for name, said in headers.items():
        if not name or "\0" in name or "\0" in said:
            raise ValueError(f"header {name!r} is {said!r}: a header has a name, and no NUL in it")
        size += len(escape(name).encode()) + len(escape(said).encode()) + 2
    if len(headers) > HEADERS_MAX - _OUR_HEADERS:
        raise ValueError(
            f"{len(headers)} headers are too many, with the destination and those of options: at most "
            f"{HEADERS_MAX - _OUR_HEADERS}"
        )
    if size > HEADER_BYTES_MAX - _OUR_HEADER_BYTES:
        raise ValueError(f"{size} bytes of headers are too many: at most {HEADER_BYTES_MAX - _OUR_HEADER_BYTES}")


def frame(command: str, headers: dict[str, str]) -> bytes:
    """A frame without a body."""
    if command in UNESCAPED_COMMANDS:
        return encode(Frame(command, headers), Version.V1_2)
    lines = "".join([f"{value(name)}:{value(said)}\n" for name, said in headers.items()])
    return f"{command}\n{lines}\n\0".encode()


def head(command: str, headers: dict[str, str]) -> bytes:
    """The beginning of a frame, to which other header lines may be added."""
    return f"{command}\n".encode() + write_header(headers)


def with_receipt(data: bytes, receipt: str) -> bytes:
    """A frame that asks for none asks for this one, too."""
    end = data.index(b"\n") + 1
    return b"".join((data[:end], f"receipt:{receipt}\n".encode(), memoryview(data)[end:]))


def value(text: str) -> str:
    """A name or value as it stands in a header line."""
    return escape(text) if must_escape(text) else text


# An ack id is handed back as it came, and what came was unescaped.


def ack(ack_id: str) -> bytes:
    return f"ACK\nid:{value(ack_id)}\n\n\0".encode()


def ack_and_start(ack_id: str, started: str) -> bytes:
    """One message is done, and the program has the next one."""
    return f"ACK\nid:{value(ack_id)}\ntruenext-started:{value(started)}\n\n\0".encode()


def ack_confirmed(ack_id: str, receipt: str, started: str | None) -> bytes:
    header = "" if started is None else f"truenext-started:{value(started)}\n"
    return f"ACK\nid:{value(ack_id)}\n{header}receipt:{receipt}\n\n\0".encode()


def ack_in(transaction: str, ack_id: str) -> bytes:
    return f"ACK\nid:{value(ack_id)}\ntransaction:{transaction}\n\n\0".encode()


def started(ack_id: str) -> bytes:
    return f"SEND\ndestination:/control/started\nid:{value(ack_id)}\n\n\0".encode()


def credit(subscription: str, messages: int, correlation: str, *, waits: bool) -> bytes:
    """Ask for messages; of 0 what was asked for is withdrawn."""
    wait = "" if waits else "wait:false\n"
    return (
        f"SEND\ndestination:/control/credit\nid:{subscription}\nmessages:{messages}\n{wait}"
        f"correlation-id:{correlation}\n\n\0"
    ).encode()


def wake(subscription: str) -> bytes:
    return f"SEND\ndestination:/control/wake\nid:{subscription}\n\n\0".encode()


def release(
    subscriptions: Sequence[str],
    *,
    keep: Sequence[str] = (),
    suspend: bool = False,
    abort: str | None = None,
    counts_all: bool = True,
) -> bytes:
    said: dict[str, object] = {"subscriptions": subscriptions}
    if keep:
        said["keep"] = keep
    if suspend:
        said["suspend"] = True
    if abort is not None:
        said["abort"] = abort
        if not counts_all:
            said["count_attempts"] = "nacked"
    return b"SEND\ndestination:/control/release\n\n" + msgspec.json.encode(said) + b"\0"
