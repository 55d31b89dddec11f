"""Tests of offsets: they survive the checkpoint, and have the queues, numbers and shares of a batch."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truenext.errors import ConfigurationError
from truenext.spark.source.offset import BUNDLE_BITS, START, Offset, parse_offset

OFFSET = Offset(
    store="s1", queue="orders", space="main", id="0123456789abcdef", batch=7, partitions=3, rows=100, bytes=1000
)


def test_an_offset_is_the_same_again_behind_the_checkpoint() -> None:
    assert parse_offset(json.loads(json.dumps(OFFSET.as_dict()))) == OFFSET


def test_the_start_is_no_offset() -> None:
    assert parse_offset(json.loads(json.dumps(START))) is None


@pytest.mark.parametrize("version", [2, "1", None])
def test_an_offset_of_another_version_is_refused_by_name(version: object) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_offset({**OFFSET.as_dict(), "v": version})
    assert str(raised.value) == (
        f"the checkpoint has offsets of version {version!r}, and this truenext reads version 1: run the query with "
        "the truenext that wrote it, or with a new checkpoint"
    )


def test_the_queues_of_a_query_are_called_after_its_space_and_id() -> None:
    assert OFFSET.mark_queue == "Spark.source.main.0123456789abcdef"
    assert OFFSET.bundle_queue(2) == "Spark.source.main.0123456789abcdef.2"
    assert OFFSET.producer(2) == "spark/0123456789abcdef/2"


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 42), st.integers(0, (1 << BUNDLE_BITS) - 1)), min_size=2, max_size=2, unique=True
    )
)
def test_numbers_rise_from_bundle_to_bundle_and_from_batch_to_batch(places: list[tuple[int, int]]) -> None:
    (batch, bundle), (next_batch, next_bundle) = sorted(places)
    number, next_number = (
        replace(OFFSET, batch=batch).number(bundle),
        replace(OFFSET, batch=next_batch).number(next_bundle),
    )
    assert number < next_number < 1 << 63


def test_too_many_bundles_are_refused_and_say_what_to_do() -> None:
    with pytest.raises(OverflowError, match="lower maxRowsPerTrigger"):
        OFFSET.number(1 << BUNDLE_BITS)


@given(st.integers(1, 64), st.integers(1, 1 << 40), st.integers(1, 1 << 50))
def test_the_shares_of_all_tasks_are_the_rows_of_the_batch(partitions: int, rows: int, size: int) -> None:
    offset = replace(OFFSET, partitions=partitions, rows=rows, bytes=size)
    shares = [offset.share(partition) for partition in range(partitions)]
    assert sum(count for count, _ in shares) == rows
    assert max(count for count, _ in shares) - min(count for count, _ in shares) <= 1
    assert all(1 <= share <= max(1, size) for _, share in shares)
