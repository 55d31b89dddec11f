"""Encoding of the frames that a client writes. Source: docs/protocol.md"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from truenext.model.header_lines import encode_header_lines, escape, must_escape
from truenext.model.limits import HEADER_BYTES_MAX, HEADERS_MAX
from truenext.wire.stomp.frame import UNESCAPED_COMMANDS, Frame, Version, encode

_OWN_HEADERS_MAX = 16
_OWN_HEADER_BYTES_MAX = 1024
"""Bytes that are reserved for the client's own headers. The program's headers may use the rest."""


def check_headers(headers: Mapping[str, str]) -> None:
    """Check that headers fit into a frame. The broker would end the connection because of an invalid frame.

    Raises: ValueError if a header is invalid, or if there are too many headers or bytes
    """
    size = 0
    for name, value in headers.items():
        if not name or "\0" in name or "\0" in value:
            raise ValueError(
                f"header {name!r} with value {value!r} is invalid: the name must not be empty, and name and value must "
                "not contain a NUL"
            )
        size += len(escape(name).encode()) + len(escape(value).encode()) + 2
    if len(headers) > HEADERS_MAX - _OWN_HEADERS_MAX:
        raise ValueError(
            f"{len(headers)} headers are too many, including the destination and the headers of options: at most "
            f"{HEADERS_MAX - _OWN_HEADERS_MAX}"
        )
    if size > HEADER_BYTES_MAX - _OWN_HEADER_BYTES_MAX:
        raise ValueError(f"{size} bytes of headers are too many: at most {HEADER_BYTES_MAX - _OWN_HEADER_BYTES_MAX}")


def encode_frame(command: str, headers: dict[str, str]) -> bytes:
    """Encode a frame without a body."""
    if command in UNESCAPED_COMMANDS:
        return encode(Frame(command, headers), Version.V1_2)
    lines = "".join([f"{escape_value(name)}:{escape_value(value)}\n" for name, value in headers.items()])
    return f"{command}\n{lines}\n\0".encode()


def encode_head(command: str, headers: dict[str, str]) -> bytes:
    """Encode the first part of a frame, after which more header lines may follow."""
    return f"{command}\n".encode() + encode_header_lines(headers)


def add_receipt_header(data: bytes, receipt: str) -> bytes:
    """Add a receipt header to an encoded frame that has none."""
    end = data.index(b"\n") + 1
    return b"".join((data[:end], f"receipt:{receipt}\n".encode(), memoryview(data)[end:]))


def escape_value(text: str) -> str:
    """Escape a header name or value if it contains characters that need it."""
    return escape(text) if must_escape(text) else text


# Ack ids were unescaped when they arrived, so they are escaped again.


def encode_ack(ack_id: str) -> bytes:
    return f"ACK\nid:{escape_value(ack_id)}\n\n\0".encode()


def encode_ack_and_started(ack_id: str, started: str) -> bytes:
    """Encode an ACK of one message that also reports another message, `started`, as started."""
    return f"ACK\nid:{escape_value(ack_id)}\ntruenext-started:{escape_value(started)}\n\n\0".encode()


def add_started_header(ack: bytes, started: str) -> bytes:
    """Let an encoded ACK also report the next message as started."""
    return ack[: -len(b"\n\0")] + f"truenext-started:{escape_value(started)}\n\n\0".encode()


def encode_ack_with_receipt(ack_id: str, receipt: str, started: str | None) -> bytes:
    header = "" if started is None else f"truenext-started:{escape_value(started)}\n"
    return f"ACK\nid:{escape_value(ack_id)}\n{header}receipt:{receipt}\n\n\0".encode()


def encode_ack_in_transaction(transaction: str, ack_id: str) -> bytes:
    return f"ACK\nid:{escape_value(ack_id)}\ntransaction:{transaction}\n\n\0".encode()


def encode_started(ack_id: str) -> bytes:
    return f"SEND\ndestination:/control/started\nid:{escape_value(ack_id)}\n\n\0".encode()


def encode_credit(subscription: str, messages: int, correlation: str, *, waits: bool) -> bytes:
    """Encode a pull request for a number of messages. With 0 messages, the frame withdraws an earlier pull request."""
    wait = "" if waits else "wait:false\n"
    return (
        f"SEND\ndestination:/control/credit\nid:{subscription}\nmessages:{messages}\n{wait}"
        f"correlation-id:{correlation}\n\n\0"
    ).encode()


def encode_wake(subscription: str) -> bytes:
    return f"SEND\ndestination:/control/wake\nid:{subscription}\n\n\0".encode()


def encode_release(
    subscriptions: Sequence[str],
    *,
    keep: Sequence[str] = (),
    suspend: bool = False,
    abort: str | None = None,
    counts_all: bool = True,
) -> bytes:
    body: dict[str, object] = {"subscriptions": subscriptions}
    if keep:
        body["keep"] = keep
    if suspend:
        body["suspend"] = True
    if abort is not None:
        body["abort"] = abort
        if not counts_all:
            body["count_attempts"] = "nacked"
    return b"SEND\ndestination:/control/release\n\n" + msgspec.json.encode(body) + b"\0"
