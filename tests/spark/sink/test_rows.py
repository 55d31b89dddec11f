"""Tests of rows as SEND frames: columns become headers and body, and invalid rows are refused."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from truenext.engine.lifecycle.redelivery import REJECTED, make_dead_letter, make_report
from truenext.errors import ConfigurationError
from truenext.model.batch import Causes
from truenext.model.commands import Send
from truenext.model.message import with_ttl
from truenext.model.policy import DEFAULT_POLICY
from truenext.model.record import RECORD_OVERHEAD_BYTES
from truenext.spark.sink import rows
from truenext.spark.sink.options import SinkOptions, parse_options
from truenext.spark.sink.rows import UnsendableRow, bundles, check_columns, encode_rows
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.protocol import Side, StompProtocol
from truenext.wire.stomp.requests import FRAME_INTERPRETERS
from truenext.wire.stomp.shapes import FRAME_SHAPES

URL = "stomp://127.0.0.1:61613"


def frames_of(data: bytes) -> list[Frame]:
    stomp: StompProtocol[Frame] = StompProtocol(Side.CLIENT, FRAME_SHAPES)
    stomp.set_version(Version.V1_2)
    return list(stomp.receive(data))


def encode(destination: str | None = "/queue/out", **columns: Any) -> Frame:
    """Encode one row, and return its frame as the broker reads it."""
    batch = pa.RecordBatch.from_pydict(columns)
    (frame,) = frames_of(b"".join(encode_rows(batch, destination)))
    return frame


def options(**given: str) -> SinkOptions:
    return parse_options({"url": URL, **given}, is_streaming=True)


TYPES: dict[str, DataType] = {
    "string": StringType(),
    "binary": BinaryType(),
    "int": IntegerType(),
    "tinyint": ByteType(),
    "bigint": LongType(),
    "date": DateType(),
    "timestamp": TimestampType(),
    "map<string,int>": MapType(StringType(), IntegerType()),
    "map<string,string>": MapType(StringType(), StringType()),
    "map<string,string> without nulls": MapType(StringType(), StringType(), valueContainsNull=False),
}


def check(columns: str, **given: str) -> None:
    """Check columns such as `body string, priority int`."""
    schema = StructType()
    for column in columns.split(", "):
        name, _, kind = column.partition(" ")
        schema.add(name, TYPES[kind])
    check_columns(schema, options(**given))


def test_a_row_with_a_body_alone_is_a_persistent_message_of_priority_4() -> None:
    frame = encode(body=[b"a\0b"])
    assert frame.command == "SEND"
    assert frame.body == b"a\0b"
    assert frame.headers == {
        "destination": "/queue/out",
        "persistent": "true",
        "priority": "4",
        "transaction": "publish",
        "content-length": "3",
    }


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"priority": [4]},
        {"priority": [9]},
        {"persistent": [False]},
        {"ttl_ms": [1]},
        {"ttl_ms": [10**11]},
        {"delay_ms": [1]},
        {"group": ["g"], "reply_to": ["/queue/answers"]},
    ],
    ids=str,
)
def test_frame_of_a_row_is_not_shorter_than_what_the_broker_stores(columns: dict[str, Any]) -> None:
    """Fixed: the broker added a line `priority`, and at a full disk a bundle freed less than its rows needed."""
    (data,) = encode_rows(pa.RecordBatch.from_pydict({"body": [b"b"], **columns}), "/queue/out")
    (frame,) = frames_of(data)
    send = FRAME_INTERPRETERS["SEND"](rows._INTERPRETER, frame)
    assert isinstance(send, Send)
    message = with_ttl(send.message, send.ttl_ms, 1_764_000_000_000) if send.ttl_ms else send.message
    assert len(data) >= len(message.header) + len(message.body) + RECORD_OVERHEAD_BYTES


@pytest.mark.parametrize("cause", ["", "x", ":" * 4096, "é" * 2048])
def test_frame_of_a_rejected_row_is_not_shorter_than_letter_and_report(cause: str) -> None:
    columns = {"report_to": "/topic/" + "r" * 200, "report_id": "i" * 64, "correlation_id": "c" * 32, "reject": cause}
    given = {name: [value] for name, value in {"body": b"b", "queue": "q" * 200, **columns}.items()}
    (data,) = encode_rows(pa.RecordBatch.from_pydict(given), None)
    (frame,) = frames_of(data)
    send = FRAME_INTERPRETERS["SEND"](rows._INTERPRETER, frame)
    assert isinstance(send, Send) and send.rejected_for == cause
    causes, now_ms = Causes(cause, cause), 1_764_000_000_000
    letter = make_dead_letter(
        send.message, "q" * 200, DEFAULT_POLICY, attempts=1, causes=causes, reason=REJECTED, now_ms=now_ms
    )
    report = make_report(letter)
    assert report is not None
    size = sum(len(each.header) + len(each.body) + RECORD_OVERHEAD_BYTES for each in (letter.message, report[1]))
    assert len(data) >= size


def test_a_row_with_all_columns_has_all_headers() -> None:
    frame = encode(
        None,
        body=["grün"],
        queue=["orders"],
        priority=[9],
        persistent=[False],
        group=["g:1"],
        correlation_id=["c"],
        reply_to=["/queue/answers"],
        content_type=["text/plain"],
        expires=pa.array([datetime(2030, 1, 2, 3, 4, 5, 678_900, tzinfo=UTC)], pa.timestamp("us", tz="UTC")),
        delay_ms=[1500],
        headers=pa.array([[("colour", "a\nb")]], pa.map_(pa.string(), pa.string())),
        sequence=[17],
        attempts=[2],
        error=["none"],
    )
    assert frame.body == "grün".encode()
    assert frame.headers == {
        "destination": "/queue/orders",
        "priority": "9",
        "JMSXGroupID": "g:1",
        "correlation-id": "c",
        "reply-to": "/queue/answers",
        "content-type": "text/plain",
        "expires": "1893553445678",
        "AMQ_SCHEDULED_DELAY": "1500",
        "colour": "a\nb",
        "transaction": "publish",
        "content-length": "5",
    }


def test_a_time_to_live_is_counted_from_the_publication() -> None:
    assert encode(body=[b""], ttl_ms=[250]).headers["truenext-ttl"] == "0000000250"


def test_columns_that_are_null_are_left_out() -> None:
    names = ("group", "correlation_id", "reply_to", "content_type")
    columns: dict[str, Any] = {name: pa.array([None], pa.string()) for name in names}
    columns |= {name: pa.array([None], pa.int64()) for name in ("priority", "ttl_ms", "delay_ms")}
    columns |= {"persistent": pa.array([None], pa.bool_()), "expires": pa.array([None], pa.timestamp("us", tz="UTC"))}
    columns["headers"] = pa.array([None], pa.map_(pa.string(), pa.string()))
    assert encode(body=[b""], **columns).headers == encode(body=[b""]).headers


@pytest.mark.parametrize(
    ("queue", "address"),
    [
        ("a", "/queue/a"),
        ("/queue/a", "/queue/a"),
        ("/topic/news", "/topic/news"),
        ("/queue/a,/topic/b", "/queue/a,/topic/b"),
        ("a, b", "/queue/a,/queue/b"),
    ],
)
def test_row_goes_to_the_destination_of_its_column(queue: str, address: str) -> None:
    assert encode(None, body=[b""], queue=[queue]).headers["destination"] == address


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": pa.array([None], pa.string())}, "column body is null"),
        ({"priority": [10]}, "priority must be 0 to 9, not 10; the row has .*'priority': 10"),
        ({"priority": [-1]}, "priority must be 0 to 9"),
        ({"ttl_ms": [0]}, "column ttl_ms is 0, and must be 1 or more"),
        ({"delay_ms": [-5]}, "column delay_ms is -5, and must be 1 or more"),
        ({"reply_to": ["/temp-queue/r"]}, "row cannot be sent as a message: .*subscription"),
        ({"group": ["g" * 300]}, "JMSXGroupID of 300 characters"),
        ({"group": ["a\0"]}, "must not contain a NUL"),
        ({"queue": [None]}, "column queue is null"),
        ({"queue": [""]}, "row cannot be sent as a message"),
        ({"queue": ["orders.*"]}, "row cannot be sent as a message"),
        ({"queue": ["/temp-queue/a"]}, "/temp-queue/a is neither a queue nor a topic"),
        ({"queue": ["/control/purge"]}, "/control/purge is neither a queue nor a topic"),
        ({"queue": ["Spark.source.main.1"]}, r"queues Spark\.\* are reserved for sources and sinks"),
        ({"queue": ["/queue/a,/queue/Spark.x"]}, r"queues Spark\.\* are reserved for sources and sinks"),
    ],
)
def test_a_row_that_can_be_no_message_is_refused_by_column_and_value(columns: dict[str, Any], message: str) -> None:
    columns = {"body": [b"x"], **columns}
    if columns.get("queue") == [None]:
        columns["queue"] = pa.array([None], pa.string())
    with pytest.raises(UnsendableRow, match=message):
        encode(None if "queue" in columns else "/queue/out", **columns)


@pytest.mark.parametrize("name", ["receipt", "transaction", "truenext-ttl", "message-id", "content-length", ""])
def test_a_header_of_stomp_or_the_broker_is_refused(name: str) -> None:
    headers = pa.array([[(name, "x")]], pa.map_(pa.string(), pa.string()))
    with pytest.raises(UnsendableRow, match="row cannot be sent as a message"):
        encode(body=[b""], headers=headers)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expires", "v"),
        ("expires", "99999999999999999999"),
        ("AMQ_SCHEDULED_DELAY", "soon"),
        ("AMQ_SCHEDULED_FOO", "1"),
        ("reply-to", "/temp-queue/r"),
        ("JMSXGroupID", "g" * 300),
    ],
)
def test_a_header_that_the_broker_would_refuse_is_refused_before_the_decision(name: str, value: str) -> None:
    """Fixed: the row was refused when it was published, and then its query was blocked for good."""
    headers = pa.array([[(name, value)]], pa.map_(pa.string(), pa.string()))
    with pytest.raises(UnsendableRow, match="row cannot be sent as a message"):
        encode(body=[b""], headers=headers)


def test_a_header_without_a_value_is_refused() -> None:
    headers = pa.array([[("colour", None)]], pa.map_(pa.string(), pa.string()))
    with pytest.raises(UnsendableRow, match="header colour is null"):
        encode(body=[b""], headers=headers)


def test_a_body_that_no_message_has_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BODY_BYTES_MAX", 3)
    assert encode(body=[b"abc"]).body == b"abc"
    with pytest.raises(UnsendableRow, match="column body has 4 bytes, and a message from Spark has 3 at most"):
        encode(body=[b"abcd"])


@pytest.mark.parametrize(
    ("columns", "given", "message"),
    [
        ("body string, colour string", {"queue": "q"}, "column colour is unknown; .*to_json"),
        ("priority int", {"queue": "q"}, "the column 'body' is missing"),
        ("body string", {}, r'the queue is missing: set \.option\("queue"'),
        ("body string, queue string", {"queue": "q"}, "both an option queue and a column queue"),
        ("body int", {"queue": "q"}, "column body is int, and must be string or binary"),
        ("body string, priority string", {"queue": "q"}, "column priority is string, and must be tinyint or"),
        ("body string, headers map<string,int>", {"queue": "q"}, "must be map<string,string>"),
        ("body string, expires date", {"queue": "q"}, "column expires is date, and must be timestamp"),
        (
            "body string, ttl_ms int, expires timestamp",
            {"queue": "q"},
            "columns ttl_ms and expires both set the expiry",
        ),
    ],
)
def test_columns_that_are_none_of_a_message_are_refused(columns: str, given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check(columns, **given)


def test_columns_of_the_source_and_names_in_any_case_are_taken() -> None:
    check("Body binary, QUEUE string, sequence bigint, deliveries int, attempts int, timestamp timestamp, error string")
    check("body string, headers map<string,string> without nulls, priority tinyint, ttl_ms bigint", queue="q")


def test_bundles_have_their_rows_in_order_and_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BUNDLE_BYTES", 10)
    monkeypatch.setattr(rows, "BUNDLE_ROWS", 3)
    made = list(bundles([b"12345", b"67890", b"a", b"b", b"c", b"d", b"x" * 20, b"e"]))
    assert [(each.frames, each.rows) for each in made] == [
        (b"1234567890", 2),
        (b"abc", 3),
        (b"d", 1),
        (b"x" * 20, 1),
        (b"e", 1),
    ]
    assert list(bundles([])) == []
