"""Tests that a log gets its space back, also with fewer rows than a partition has."""

from __future__ import annotations

import os
from typing import Any

import psycopg

from tests.contract.disk import key
from tests.contract.postgresql.conftest import OpenWriter
from tests.contract.postgresql.log_writer import LogWriter, url_of
from tests.contract.postgresql.test_log import wait_until
from tests.stages.postgres import PostgresServer
from truenext.model.batch import Batch
from truenext.model.disk_level import DiskLevel
from truenext.store.changes import encode_batch
from truenext.store.log import LogPosition, Relation
from truenext.store.postgresql.check import check_log

LIMIT = 10_000_000


def fill(writer: LogWriter) -> None:
    """Append messages up to the limit of the database."""
    for number in range(10):
        batch = Batch(1)
        batch.puts = {key(number): os.urandom(1_000_000)}
        writer.append(b"".join(encode_batch(batch, None)))


def consume(writer: LogWriter) -> None:
    for number in range(10):
        batch = Batch(1)
        batch.removes = [key(number)]
        writer.append(b"".join(encode_batch(batch, None)))


def test_full_log_has_space_again_when_its_messages_are_consumed(
    open_writer: OpenWriter, log_server: PostgresServer, schema: str
) -> None:
    """C27.11"""
    writer = open_writer(database_limit=LIMIT)
    first = writer.position
    fill(writer)
    consume(writer)
    writer.log.start()
    wait_until(lambda: writer.log.disk_level is DiskLevel.NONE)
    wait_until(lambda: writer.log.disk_level is DiskLevel.PLENTY)
    assert writer.log.disk_level_bytes["database_used"] < LIMIT / 10
    assert writer.log.relation(writer.position) is Relation.PREFIX
    assert writer.log.relation(first) is Relation.OLD
    consume_nothing(writer, 1)
    writer.log.close()
    damages = list[str]()
    check_log(url_of(log_server), schema, lambda *damage: damages.append(str(damage)), lambda *_: None)
    assert not damages


def test_full_log_has_space_again_when_a_reader_has_ended_though_an_old_message_waits(
    open_writer: OpenWriter, admin: psycopg.Connection[Any], schema: str
) -> None:
    # C24.19
    writer = open_writer(database_limit=LIMIT)
    old = Batch(1)
    old.puts = {key(100): b"old"}
    writer.append(b"".join(encode_batch(old, None)))
    fill(writer)
    consume(writer)
    with admin.transaction():
        admin.execute(f"SELECT count(*) FROM {schema}.log")
        writer.log.start()
        wait_until(lambda: writer.log.status.position == writer.position.number)
        consume_nothing(writer, 30)
    wait_until(lambda: writer.log.disk_level is DiskLevel.PLENTY)
    assert writer.append()


def consume_nothing(writer: LogWriter, count: int) -> None:
    """Append rows for a while."""
    for _ in range(count):
        assert writer.append(b"".join(encode_batch(Batch(1), None)))


def test_rows_that_are_not_compacted_stay_in_a_log_that_shrinks(open_writer: OpenWriter) -> None:
    writer = open_writer(database_limit=LIMIT)
    fill(writer)
    consume(writer)
    writer.log.start()
    positions = list[LogPosition]()
    while writer.log.disk_level is not DiskLevel.PLENTY or writer.log.status.position < 20:
        consume_nothing(writer, 1)
        positions.append(writer.position)
    compacted = writer.log.status.position
    for position in positions:
        if position.number > compacted:
            assert writer.log.relation(position) is Relation.PREFIX
    assert len(list(writer.log.rows_after(positions[-1]))) == 0
