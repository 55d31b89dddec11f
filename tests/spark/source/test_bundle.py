"""Tests of bundles: they contain every message whole, and messages or bundles that cannot be written or read are
refused."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.spark.source.small_query import SmallQuery, client, send
from truenext.errors import RemoteProtocolError
from truenext.model.spark_queues import BundleHead, BundleOrigin, bundle_headers, parse_bundle_head
from truenext.spark.source.bundle import (
    ARROW_SCHEMA,
    BUNDLE_BYTES,
    BundleRows,
    TooLargeForBundle,
    decode_bundle,
    encode_bundle,
    record_batch,
    row_of,
)
from truenext.testing import BlockingBroker
from truenext.wire.stomp.frame import Frame

HEAD = BundleHead(batch=3, bundle=0, rows=7, bytes=1000, is_last=True, task_rows=7)
PLAIN = {
    "destination": "/queue/orders",
    "ack": "1",
    "message-id": "m",
    "subscription": "rows",
    "priority": "4",
    "persistent": "true",
    "timestamp": "1700000000123",
    "truenext-sequence": "5",
    "truenext-deliveries": "1",
    "truenext-attempts": "0",
}
FULL = PLAIN | {
    "priority": "9",
    "persistent": "false",
    "JMSXGroupID": "g",
    "JMSXGroupFirstForConsumer": "true",
    "JMSXGroupSeq": "-1",
    "correlation-id": "c",
    "reply-to": "/queue/answers",
    "content-type": "text/plain",
    "content-length": "3",
    "redelivered": "true",
    "expires": "1800000000456",
    "truenext-round": "1",
    "colour": "rot und grün",
    "empty": "",
}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)


def round_trip(*frames: Frame) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = decode_bundle(
        encode_bundle(record_batch([row_of(each) for each in frames]))
    ).to_pylist()
    return rows


def test_columns_of_a_message_survive_the_round_trip_through_a_bundle() -> None:
    plain, full = round_trip(Frame("MESSAGE", PLAIN, b""), Frame("MESSAGE", FULL, b"\xff\0"))
    assert plain == {
        "queue": "orders",
        "sequence": 5,
        "priority": 4,
        "persistent": True,
        "group": None,
        "correlation_id": None,
        "reply_to": None,
        "content_type": None,
        "deliveries": 1,
        "attempts": 0,
        "timestamp": datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC),
        "expires": None,
        "headers": [],
        "body": b"",
    }
    assert full == plain | {
        "priority": 9,
        "persistent": False,
        "group": "g",
        "correlation_id": "c",
        "reply_to": "/queue/answers",
        "content_type": "text/plain",
        "expires": datetime(2027, 1, 15, 8, 0, 0, 456_000, UTC),
        "headers": [("JMSXGroupSeq", "-1"), ("colour", "rot und grün"), ("empty", "")],
        "body": b"\xff\0",
    }


# The first example imports pandas.
@settings(deadline=None)
@given(st.lists(st.tuples(st.dictionaries(texts.map(lambda name: f"x-{name}"), texts), texts, st.binary()), max_size=5))
def test_drawn_messages_survive_the_round_trip_through_a_bundle(
    messages: list[tuple[dict[str, str], str, bytes]],
) -> None:
    rows = round_trip(*(Frame("MESSAGE", PLAIN | own | {"correlation-id": text}, body) for own, text, body in messages))
    assert [(dict(row["headers"]), row["correlation_id"], row["body"]) for row in rows] == messages


def test_a_bundle_without_rows_has_its_columns() -> None:
    assert decode_bundle(encode_bundle(BundleRows().record_batch())).schema == ARROW_SCHEMA


@pytest.mark.parametrize("is_last", [True, False])
def test_bundle_head_survives_the_round_trip_through_its_headers(is_last: bool) -> None:
    head = HEAD._replace(is_last=is_last)
    assert parse_bundle_head(bundle_headers(head, BundleOrigin("orders", "", "q", "12"))) == head


def test_a_bundle_of_another_format_is_refused_by_name() -> None:
    headers = bundle_headers(HEAD, BundleOrigin("orders", "", "", "")) | {"spark_format": "2"}
    with pytest.raises(RemoteProtocolError, match=r"^a bundle has format 2, and this truenext reads 1: run the query"):
        parse_bundle_head(headers)


@pytest.mark.parametrize("headers", [{}, bundle_headers(HEAD, BundleOrigin("", "", "", "")) | {"spark_rows": "many"}])
def test_a_message_that_is_no_bundle_is_refused_by_name(headers: dict[str, str]) -> None:
    with pytest.raises(RemoteProtocolError, match=r"^a message in a queue of the source is not a bundle"):
        parse_bundle_head(headers)


def test_a_body_that_is_no_bundle_is_refused_by_name() -> None:
    whole = encode_bundle(record_batch([row_of(Frame("MESSAGE", PLAIN, b"x"))]))
    for broken in (b"", b"nothing", whole[: len(whole) // 2]):
        with pytest.raises(RemoteProtocolError, match=r"^a bundle cannot be read"):
            decode_bundle(broken)
    other = pa.RecordBatch.from_pydict({"a": [1]})
    with pytest.raises(RemoteProtocolError, match=r"^a bundle has the columns \[a int64\] instead of \[queue string, "):
        decode_bundle(encode_bundle(other))


def test_rows_are_acknowledged_by_their_last_one() -> None:
    rows = BundleRows()
    assert (len(rows), rows.last_acks, rows.is_full) == (0, {}, False)
    for number in range(3):
        rows.add(Frame("MESSAGE", PLAIN | {"ack": f"a{number}"}, b"ab"))
    rows.add(Frame("MESSAGE", PLAIN | {"ack": "b", "subscription": "other"}, b"ab"))
    assert (len(rows), rows.bytes, rows.last_acks) == (4, 8, {PLAIN["subscription"]: "a2", "other": "b"})


def test_a_body_above_15_mib_is_refused_and_says_what_to_do() -> None:
    rows = BundleRows()
    rows.add(Frame("MESSAGE", PLAIN, bytes(15 << 20)))
    with pytest.raises(TooLargeForBundle) as raised:
        rows.add(Frame("MESSAGE", PLAIN, bytes((15 << 20) + 1)))
    assert str(raised.value) == (
        "message 5 has a body of 15728641 bytes, and a source of Spark reads 15728640 at most: move it to another "
        "queue, for example with `truenext move --id 5`"
    )


def test_a_body_above_15_mib_ends_a_batch_by_name_and_stays_with_the_others(
    here: BlockingBroker, query: SmallQuery
) -> None:
    send(here, b"before")
    send(here, bytes((15 << 20) + 1))
    send(here, b"behind")
    reader = query.reader()
    planned = query.plan(reader)
    for _ in range(2):
        with pytest.raises(TooLargeForBundle, match="message 2 has a body of 15728641 bytes"):
            query.finish(reader, planned)
    taker = client(here)
    taker.subscribe("orders", prefetch=2)
    taker.ack(taker.messages(2)[1], confirmed=True)
    taker.disconnect()
    assert query.finish(reader, planned) + query.run_to_end(reader) == ["before", "behind"]


def test_a_body_of_15_mib_comes_behind_a_bundle_that_is_nearly_full(here: BlockingBroker, query: SmallQuery) -> None:
    """With this body a bundle reaches its largest size, and must fit into one message of the broker."""
    producer = client(here)
    for _ in range(4000):
        producer.send("orders", bytes((BUNDLE_BYTES - 4000) // 4000), persistent=True)
    producer.send("orders", bytes(15 << 20), persistent=True, confirmed=True)
    producer.disconnect()
    rows = query.run_to_end(query.reader())
    assert [len(each) for each in rows] == [261] * 4000 + [15 << 20]


def test_rows_with_long_headers_are_in_bundles_that_fit_into_a_message(here: BlockingBroker, query: SmallQuery) -> None:
    """Their bodies alone do not fill the bundles."""
    send(here, *(str(number) for number in range(600)), headers={f"x{i}": "h" * 10_000 for i in range(6)})
    assert query.run_to_end(query.reader()) == [str(number) for number in range(600)]


def test_message_that_expires_beyond_the_calendar_is_read(here: BlockingBroker, query: SmallQuery) -> None:
    """JMS programs set such a time for messages that never expire."""
    send(here, "first", headers={"expires": "253402300799999"})
    send(here, "second", headers={"expires": "9" * 18})
    assert query.run_to_end(query.reader()) == ["first", "second"]
