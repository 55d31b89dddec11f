"""Bundles: rows of one batch as Arrow data, in one message of a task's own queue.

A bundle has every column, and has bodies as bytes. So a repeated batch has the same rows even if the options have
changed.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from truenext.client.core.message import STOMP_HEADERS
from truenext.errors import RemoteProtocolError, TruenextError
from truenext.wire.stomp.frame import Frame

BUNDLE_BYTES = 1 << 20
"""Bytes of bodies at which a bundle is complete. The last row may exceed this number."""
BUNDLE_ROWS = 5_000
BODY_BYTES_MAX = 15 << 20
"""Largest number of bytes of one body. With its columns it must fit into one message of the broker."""
SEVERAL_BYTES_MAX = 3 << 20
"""Largest size of a bundle with several messages, columns included. It fits into a message even if each character takes
four bytes."""
EXPIRES_MAX_MS = 253_402_214_400_000
"""Last day of the year 9999, in milliseconds since the epoch. It is a valid time of Python in every time zone."""

_TIME = pa.timestamp("us", tz="UTC")
_HEADERS = pa.map_(pa.string(), pa.string())
ARROW_SCHEMA = pa.schema(
    [
        ("queue", pa.string()),
        ("sequence", pa.int64()),
        ("priority", pa.int32()),
        ("persistent", pa.bool_()),
        ("group", pa.string()),
        ("correlation_id", pa.string()),
        ("reply_to", pa.string()),
        ("content_type", pa.string()),
        ("deliveries", pa.int32()),
        ("attempts", pa.int32()),
        ("timestamp", _TIME),
        ("expires", _TIME),
        ("headers", _HEADERS),
        ("body", pa.binary()),
    ]
)
_BROKER_HEADERS = STOMP_HEADERS | {"JMSXGroupID", "JMSXGroupFirstForConsumer"}
"""Headers that have their own column, or that describe one delivery only."""


class TooLargeForBundle(TruenextError):
    """Error of a message whose body is too large for a bundle."""


class BundleRows:
    """Messages for one bundle, in the order of their dispatch."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self.bytes = 0
        """Bytes of the messages' bodies."""
        self.last_acks: dict[str, str] = {}
        """Ack id of the last message of each subscription. An ACK with this id acknowledges all messages of the
        subscription up to this one."""
        self._total_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        return self.bytes >= BUNDLE_BYTES or len(self._rows) >= BUNDLE_ROWS

    def add(self, frame: Frame) -> bool:
        """Add a message. Return False if the message does not fit into this bundle any more, and must go into the next
        one.

        Raises: TooLargeForBundle if the message does not fit even alone
        """
        if len(frame.body) > BODY_BYTES_MAX:
            sequence = frame.headers.get("truenext-sequence")
            raise TooLargeForBundle(
                f"message {sequence} has a body of {len(frame.body)} bytes, and a source of Spark reads "
                f"{BODY_BYTES_MAX} at most: move it to another queue, for example with "
                f"`truenext move --id {sequence}`"
            )
        headers = frame.headers
        size = len(frame.body) + sum(map(len, headers)) + sum(map(len, headers.values())) + 8 * len(headers)
        if self._rows and self._total_bytes + size > SEVERAL_BYTES_MAX:
            return False
        self._total_bytes += size
        self._rows.append(row_of(frame))
        self.bytes += len(frame.body)
        self.last_acks[headers["subscription"]] = headers["ack"]
        return True

    def record_batch(self) -> pa.RecordBatch:
        return record_batch(self._rows)


def record_batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    """Return rows made by `row_of` as a batch with `ARROW_SCHEMA`."""
    columns = list(zip(*rows, strict=True)) or [()] * len(ARROW_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, ARROW_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)


def row_of(frame: Frame) -> tuple[Any, ...]:
    """Return a message as a row, with its columns in the order of `ARROW_SCHEMA`."""
    headers = frame.headers
    get = headers.get
    timestamp, expires = get("timestamp"), get("expires", "0")
    return (
        get("destination", "").removeprefix("/queue/"),
        int(headers["truenext-sequence"]),
        int(get("priority", "4")),
        get("persistent") == "true",
        get("JMSXGroupID") or None,
        get("correlation-id"),
        get("reply-to"),
        get("content-type"),
        int(headers["truenext-deliveries"]),
        int(headers["truenext-attempts"]),
        None if timestamp is None else int(timestamp) * 1000,
        None if expires == "0" else min(int(expires), EXPIRES_MAX_MS) * 1000,
        [
            (name, value)
            for name, value in headers.items()
            if name not in _BROKER_HEADERS and not name.startswith("truenext-")
        ],
        frame.body,
    )


def encode_bundle(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


def decode_bundle(body: bytes) -> pa.RecordBatch:
    """Decode the rows of a bundle.

    Raises: RemoteProtocolError if `body` was not made by `encode_bundle`
    """
    try:
        with pa.ipc.open_stream(body) as stream:
            batch: pa.RecordBatch = stream.read_next_batch()
    except (pa.ArrowInvalid, StopIteration) as error:
        raise RemoteProtocolError(f"a bundle cannot be read: {error}") from error
    if batch.schema != ARROW_SCHEMA:
        raise RemoteProtocolError(
            f"a bundle has the columns [{_columns(batch.schema)}] instead of [{_columns(ARROW_SCHEMA)}]"
        )
    return batch


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
