"""Tests that tables of the version before are extended while processes of both versions run (C30.9).

There is no such step yet: one is made for these tests, to a version that has one column more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

import pytest
import sqlalchemy as sa

from tests.stages.outbox.test_producers import Processes, made, numbers_of, on
from truenext.errors import ConfigurationError
from truenext.stage.core.outbox_unit import OutboxProducer
from truenext.stage.sql import apply_schema, outbox_report, tables
from truenext.stage.sql.errors import DatabaseUnavailable
from truenext.stage.sql.tables import VERSION
from truenext.stage.sql.url import address_of

ADDITION = "ALTER TABLE truenext_outbox ADD COLUMN note VARCHAR(20)"


@contextmanager
def version(number: int, *additions: str) -> Iterator[None]:
    """Be a process of a later version for the duration of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "VERSION", number)
        patch.setattr(tables, "ADDITIONS", additions)
        yield


async def commit(both: Processes, producer: OutboxProducer) -> None:
    await both.commit(producer.next_commit)
    producer.last_number += 1


def versions_in(url: str) -> list[int]:
    engine = sa.create_engine(address_of(url).for_threads)
    try:
        with engine.connect() as connection:
            return sorted(connection.execute(sa.select(tables.schema.c.version)).scalars())
    finally:
        engine.dispose()


def test_processes_of_both_versions_use_tables_that_were_extended(database: str) -> None:
    async def work(both: Processes) -> None:
        before, after = both.first, both.second
        producer = await made(before)
        await commit(both, producer)
        with version(VERSION + 1, ADDITION):
            with pytest.raises(ConfigurationError, match=r"extend them with `truenext stages schema SERVICE --apply`"):
                await after.check_tables()
            assert (await asyncio.to_thread(apply_schema, database)).is_extended
            assert not (await asyncio.to_thread(apply_schema, database)).is_extended
            await after.check_tables()
            assert await numbers_of(after, producer) == [1]
            newer = await made(after)
            await commit(both, newer)
            assert outbox_report(database, "shop", with_inbox=True) is not None
        await before.check_tables()
        await before.create_tables()
        await commit(both, producer)
        assert await numbers_of(before, producer) == [1, 2]
        assert await numbers_of(before, newer) == [1]
        assert versions_in(database) == [VERSION, VERSION + 1]

    on(database, work)


def test_tables_that_were_extended_twice_refuse_the_first_version(database: str) -> None:
    async def work(both: Processes) -> None:
        with version(VERSION + 1, ADDITION):
            await asyncio.to_thread(apply_schema, database)
        with version(VERSION + 2):
            assert (await asyncio.to_thread(apply_schema, database)).is_extended
        assert versions_in(database) == [VERSION + 1, VERSION + 2]
        match = f"have version {VERSION + 2}, and this truenext works with version {VERSION}: update truenext"
        with pytest.raises(ConfigurationError, match=match):
            await both.first.check_tables()
        with pytest.raises(ConfigurationError, match=match):
            apply_schema(database)

    on(database, work)


def test_tables_of_two_versions_before_are_not_extended(database: str) -> None:
    apply_schema(database)
    with version(VERSION + 2, ADDITION), pytest.raises(ConfigurationError, match="let the version that created them"):
        apply_schema(database)
    assert versions_in(database) == [VERSION]


def test_addition_that_fails_leaves_the_tables_as_they_were(database: str) -> None:
    apply_schema(database)
    failing = "ALTER TABLE truenext_nothing ADD COLUMN note VARCHAR(20)"
    with version(VERSION + 1, ADDITION, failing), pytest.raises(DatabaseUnavailable):
        apply_schema(database)
    assert versions_in(database) == [VERSION]
    with version(VERSION + 1, ADDITION):
        assert apply_schema(database).is_extended


@pytest.mark.parametrize("is_released", [True, False])
def test_addition_does_not_keep_processes_waiting_for_a_long_transaction(
    postgres_url: str, is_released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "LOCK_TIMEOUT_S", 0.1)
    apply_schema(postgres_url)
    engine = sa.create_engine(address_of(postgres_url).for_threads)
    with engine.connect() as long:
        long.execute(sa.select(tables.outbox.c.id)).all()
        timer = Timer(0.25, long.rollback) if is_released else None
        if timer is not None:
            timer.start()
        with version(VERSION + 1, ADDITION):
            if timer is None:
                with pytest.raises(DatabaseUnavailable, match="lock timeout"):
                    apply_schema(postgres_url)
            else:
                assert apply_schema(postgres_url).is_extended
                timer.join()
    engine.dispose()


@pytest.fixture
def postgres_url(postgres: object, postgres_database: str) -> str:
    return postgres.url(postgres_database)  # type: ignore[attr-defined,no-any-return]
