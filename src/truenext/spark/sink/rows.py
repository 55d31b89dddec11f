"""Rows as SEND frames, ready to be published.

A bundle of the sink consists of such frames. The driver writes them unchanged, in the transaction that they name. A
frame is at least as long as the broker's record of its message in one queue. So publishing a bundle frees as much space
as it needs, and works even if the disk is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from truenext.client.core.send_options import SendOptions, encode_send
from truenext.errors import ConfigurationError, RemoteProtocolError, TruenextError
from truenext.model.header_lines import encode_header_lines
from truenext.model.order import PRIORITY_DEFAULT
from truenext.spark.sink.options import SinkOptions, sink_destination
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.protocol import Side, StompProtocol
from truenext.wire.stomp.replies import ReplyEncoder
from truenext.wire.stomp.request_shapes import DEFAULT_PRIORITY_LINE, REQUEST_SHAPES
from truenext.wire.stomp.requests import FRAME_INTERPRETERS, FrameInterpreter
from truenext.wire.stomp.shapes import FRAME_SHAPES

TRANSACTION = "publish"
"""Name of the transaction in the frames of a bundle."""
BUNDLE_BYTES = 1 << 20
"""Largest number of bytes of a bundle. A larger row has a bundle of its own."""
BUNDLE_ROWS = 5_000
BODY_BYTES_MAX = 15 << 20
"""Largest number of bytes of a row's body. With its headers such a row still fits into one message of the broker."""

_TTL_DIGITS_MIN = 10
"""Smallest number of digits of a time to live. So the header line is at least as long as the line `expires` that the
broker stores instead."""
_FACTS_BYTES = 1536
"""Bytes of the headers that say of a dead letter and of its report why there are, without the cause."""
_TRANSACTION_LINE = f"transaction:{TRANSACTION}\n".encode()
_INTERPRETER = FrameInterpreter("", "", ReplyEncoder(StompProtocol(Side.SERVER, REQUEST_SHAPES), ""))
"""Interpreter for a connection without subscriptions, such as the driver's."""

_WHOLE_NUMBER = (ByteType, ShortType, IntegerType, LongType)
_TYPES: dict[str, tuple[type[DataType], ...]] = {
    "body": (StringType, BinaryType),
    "queue": (StringType,),
    "priority": _WHOLE_NUMBER,
    "persistent": (BooleanType,),
    "group": (StringType,),
    "correlation_id": (StringType,),
    "reply_to": (StringType,),
    "content_type": (StringType,),
    "expires": (TimestampType,),
    "ttl_ms": _WHOLE_NUMBER,
    "delay_ms": _WHOLE_NUMBER,
    "report_to": (StringType,),
    "report_id": (StringType,),
    "on_failure": (StringType,),
    "reject": (StringType,),
    "headers": (MapType,),
}
_HEADERS = "map<string,string>"
_PASSED_OVER = frozenset({"sequence", "deliveries", "attempts", "timestamp", "error"})
"""Columns of the source that describe a received message. The sink ignores them."""


class UnsendableRow(TruenextError):
    """Error of a row that cannot become a message."""


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Check that the sink can make messages from these columns.

    Raises: ConfigurationError otherwise; its text names the column, and what to do
    """
    names = [field.name.lower() for field in schema.fields]
    for name, field in zip(names, schema.fields, strict=True):
        if name in _PASSED_OVER:
            continue
        if name not in _TYPES:
            raise ConfigurationError(
                f"column {field.name} is unknown; the columns are {', '.join(_TYPES)}. Put other columns into the "
                f"body, for example to_json(struct(*)) AS body"
            )
        if names.count(name) > 1:
            raise ConfigurationError(f"there is more than one column {name}")
        if not isinstance(field.dataType, _TYPES[name]) or (
            name == "headers" and field.dataType.simpleString() != _HEADERS
        ):
            allowed = _HEADERS if name == "headers" else " or ".join(t().simpleString() for t in _TYPES[name])
            raise ConfigurationError(f"column {name} is {field.dataType.simpleString()}, and must be {allowed}")
    if "body" not in names:
        raise ConfigurationError("the column 'body' is missing: add it, for example with to_json(struct(*)) AS body")
    if "queue" not in names and options.destination is None:
        raise ConfigurationError('the queue is missing: set .option("queue", "billed"), or add a column queue')
    if "queue" in names and options.destination is not None:
        raise ConfigurationError("there are both an option queue and a column queue: leave one of them out")
    if "ttl_ms" in names and "expires" in names:
        raise ConfigurationError("columns ttl_ms and expires both set the expiry: leave one of them out")


def encode_rows(batch: pa.RecordBatch, destination: str | None) -> Iterator[bytes]:
    """Yield the frame of each row.

    Raises: UnsendableRow if a row cannot become a message; its text names the column and the value
    """
    names = [name.lower() for name in batch.schema.names]
    columns = {name: column for name, column in zip(names, batch.columns, strict=True) if name in _TYPES}
    if "expires" in columns:
        columns["expires"] = columns["expires"].cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64())
    lists = {name: column.to_pylist() for name, column in columns.items()}
    bodies = lists.pop("body")
    others = list(zip(*lists.values(), strict=True)) if lists else [()] * len(bodies)
    for body, values in zip(bodies, others, strict=True):
        yield encode_row(body, dict(zip(lists, values, strict=True)), destination)


def encode_row(body: bytes | str | None, row: dict[str, Any], destination: str | None) -> bytes:
    """Return the frame of one row. `row` has the other columns, by name.

    Raises: UnsendableRow if it cannot become a message; its text names the column and the value
    """
    if body is None:
        others = f" in a row with {row}" if row else ""
        raise UnsendableRow(f"column body is null{others}: use an empty body instead")
    if isinstance(body, str):
        body = body.encode()
    if len(body) > BODY_BYTES_MAX:
        raise UnsendableRow(f"column body has {len(body)} bytes, and a message from Spark has {BODY_BYTES_MAX} at most")
    options: SendOptions = {}
    headers = {}
    try:
        if destination is None:
            if row["queue"] is None:
                raise ValueError("column queue is null")
            destination = sink_destination(row["queue"])
        for name, value in row.items():
            if value is None or name == "queue":
                continue
            if name == "headers":
                headers = _headers(value)
            elif name in ("delay_ms", "ttl_ms"):
                if value < 1:
                    raise ValueError(f"column {name} is {value}, and must be 1 or more")
                options["delay" if name == "delay_ms" else "ttl"] = value / 1000
            elif name == "on_failure":
                options["on_failure"] = value.split(" ")
            elif name not in ("expires", "reject"):
                options[name] = value  # type: ignore[literal-required]
        expires = row.get("expires")
        if expires is not None:
            headers["expires"] = str(expires)
        if headers:
            options["headers"] = headers
        head = encode_send(destination, options).head
        if options.get("priority", PRIORITY_DEFAULT) == PRIORITY_DEFAULT:
            head += DEFAULT_PRIORITY_LINE
        if row.get("ttl_ms") is not None:
            head += f"truenext-ttl:{row['ttl_ms']:0{_TTL_DIGITS_MIN}}\n".encode()
        reject = row.get("reject")
        if reject is not None:
            head += encode_header_lines({"truenext-reject": "true", "truenext-cause": reject})
        head += _TRANSACTION_LINE
        _check_send(head)
    except (ValueError, TypeError, RemoteProtocolError) as error:
        raise UnsendableRow(f"a row cannot be sent as a message: {error}; the row has {row}") from error
    frame = b"".join((head, f"content-length:{len(body)}\n\n".encode(), body, b"\0"))
    # Between frames, line ends mean nothing. Here they keep the room for the facts in a dead letter and in its report.
    return frame if reject is None else frame + b"\n" * (len(head) + 4 * len(reject.encode()) + _FACTS_BYTES)


@lru_cache(maxsize=1000)
def _check_send(head: bytes) -> None:
    """Check the beginning of a SEND as the broker does. After the decision a refusal by the broker would be too late.

    Raises: RemoteProtocolError if the broker would refuse the SEND
    """
    stomp: StompProtocol[Frame] = StompProtocol(Side.SERVER, FRAME_SHAPES)
    stomp.set_version(Version.V1_2)
    (frame,) = stomp.receive(head + b"content-length:0\n\n\0")
    FRAME_INTERPRETERS["SEND"](_INTERPRETER, frame)


def _headers(pairs: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    headers = {}
    for name, value in pairs:
        if value is None:
            raise ValueError(f"header {name} is null")
        headers[name] = value
    return headers


@dataclass(slots=True)
class SinkBundle:
    frames: bytes
    rows: int


def bundles(frames: Iterable[bytes]) -> Iterator[SinkBundle]:
    """Join frames to bundles, in their order."""
    gathered: list[bytes] = []
    size = 0
    for frame in frames:
        if gathered and (size + len(frame) > BUNDLE_BYTES or len(gathered) >= BUNDLE_ROWS):
            yield SinkBundle(b"".join(gathered), len(gathered))
            gathered, size = [], 0
        gathered.append(frame)
        size += len(frame)
    if gathered:
        yield SinkBundle(b"".join(gathered), len(gathered))
