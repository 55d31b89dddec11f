"""Tests of columns after the options of the source."""

import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from tests.spark.source.test_bundle import FULL, PLAIN
from truenext.spark.source.bundle import record_batch, row_of
from truenext.spark.source.columns import apply_options, spark_schema
from truenext.spark.source.options import parse_options
from truenext.wire.stomp.frame import Frame

BODIES = [b"abc", "grün".encode(), b"", b"ab\xff", b"\xe2\x82"]


def columns(bodies: list[bytes], **options: str) -> dict[str, list[object]]:
    batch = record_batch([row_of(Frame("MESSAGE", PLAIN | FULL, body)) for body in bodies])
    parsed = parse_options({"url": "stomp://127.0.0.1:1", "queue": "orders", **options})
    made = apply_options(batch, parsed)
    assert made.schema.names == spark_schema(parsed).names
    found: dict[str, list[object]] = made.to_pydict()
    return found


def test_a_body_is_bytes_if_nothing_is_said() -> None:
    found = columns(BODIES)
    assert found["body"] == BODIES
    assert "error" not in found


def test_a_body_that_is_no_text_is_null_and_the_error_says_where() -> None:
    found = columns(BODIES, body="string")
    assert found["body"] == ["abc", "grün", "", None, None]
    assert found["error"] == [
        *(None, None, None),
        "the body is not UTF-8: invalid start byte at byte 2",
        "the body is not UTF-8: unexpected end of data at byte 0",
    ]


def test_bodies_that_are_all_text_have_no_error() -> None:
    assert columns(BODIES[:3], body="string")["error"] == [None] * 3


def test_batch_without_rows_has_all_columns() -> None:
    assert columns([], body="string")["error"] == []


def test_headers_can_be_left_out() -> None:
    assert "headers" not in columns(BODIES, headers="false")
    assert columns(BODIES[:1])["headers"] == [[("JMSXGroupSeq", "-1"), ("colour", "rot und grün"), ("empty", "")]]


@pytest.mark.parametrize("body", ["binary", "string"])
@pytest.mark.parametrize("headers", ["true", "false"])
def test_types_are_those_that_spark_is_told(body: str, headers: str) -> None:
    options = parse_options({"url": "stomp://127.0.0.1:1", "queue": "orders", "body": body, "headers": headers})
    made = apply_options(record_batch([row_of(Frame("MESSAGE", FULL, b"x"))]), options)
    told = to_arrow_schema(spark_schema(options), timezone="UTC")
    assert [field.type for field in made.schema] == [field.type for field in told]
