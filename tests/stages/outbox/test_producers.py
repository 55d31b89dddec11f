"""Tests of producers, their numbers and their unsent units, on a real database of each kind.

Source: docs/stages-database.md, "Producers"; decision 67
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
from sqlalchemy import text

from truenext.errors import ConfigurationError
from truenext.flows.message_ids import inbox_id
from truenext.stage.core.outbox_unit import CommitNumber, EncodedMessage, OutboxProducer, OutboxUnit
from truenext.stage.outbox.counters import ExactlyOnceCounters
from truenext.stage.outbox.exactly_once import BorrowedProducer
from truenext.stage.outbox.housekeeping import GATHER_S, OutboxConfirmer, PeriodicTask
from truenext.stage.outbox.relay import OutboxRelay
from truenext.stage.pool import PriorityPool
from truenext.stage.sql import Database, apply_schema, outbox_report
from truenext.stage.sql.errors import AlreadyProcessed, DatabaseUnavailable, ProducerLost
from truenext.stage.sql.outbox_table import ALIVE_MS, PRODUCER_UNUSED_MS, Outbox, StoredUnit
from truenext.stage.sql.tables import VERSION
from truenext.stage.sql.work import AsyncSqlWork

UNIT = OutboxUnit([EncodedMessage("/queue/a", b"x", "id", 4, True)], False)


def new_relay(outbox: Outbox) -> OutboxRelay:
    """Return a relay without a broker."""
    return OutboxRelay(outbox, cast("PriorityPool", None), "shop", ExactlyOnceCounters(), OutboxConfirmer(outbox))


class Processes:
    """Outboxes of two processes of one service, on one database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.first = database.outbox("shop", "first", "shop on a")
        self.second = database.outbox("shop", "second", "shop on b")
        self._messages = 0

    async def write(self, number: CommitNumber, message: str = "") -> AsyncSqlWork:
        """Execute all of a transaction except its COMMIT."""
        self._messages += 1
        id = inbox_id("shop", "q", message or str(self._messages))
        work = self.database.new_async_work(inbox_id=id)
        try:
            await work.complete("shop", number, UNIT)
        except BaseException:
            await work.rollback()
            raise
        return work

    async def commit(self, number: CommitNumber, message: str = "") -> None:
        await (await self.write(number, message)).commit()

    async def execute(self, statement: str) -> None:
        work = self.database.new_async_work()
        await work.session.execute(text(statement))
        await work.commit()

    def literal(self, content: bytes) -> str:
        """Return bytes as SQL."""
        return f"x'{content.hex()}'" if str(self.database).startswith("sqlite") else f"'\\x{content.hex()}'"

    async def dies(self, owner: str) -> None:
        await self.execute(
            f"UPDATE truenext_owners SET alive_until_ms = alive_until_ms - {ALIVE_MS} WHERE name = '{owner}'"
        )


@asynccontextmanager
async def processes(url: str) -> AsyncIterator[Processes]:
    apply_schema(url)
    database = Database(url, interactive=1, others=4)
    try:
        await database.open()
        both = Processes(database)
        await both.first.register_owner()
        await both.second.register_owner()
        yield both
    finally:
        await database.close()


def on(url: str, work: Callable[[Processes], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), processes(url) as both:
            await work(both)

    asyncio.run(main())


async def made(outbox: Outbox) -> OutboxProducer:
    producer = outbox.new_producer()
    await outbox.add_producer(producer)
    return producer


async def numbers_of(outbox: Outbox, producer: OutboxProducer) -> list[int]:
    return [each.number for each in await outbox.units_of(producer)]


def test_a_process_that_is_alive_keeps_its_producers_and_one_that_is_not_loses_them(database: str) -> None:
    async def work(both: Processes) -> None:
        producer = await made(both.first)
        await both.commit(producer.next_commit)
        assert not (await both.second.heartbeat()).has_ownerless_producers
        assert await both.second.claim(producer.name, owner_is_dead=True) == "another's"
        await both.dies("first")
        assert (await both.second.heartbeat()).has_ownerless_producers
        assert await both.second.ownerless_producers(10) == [producer.name]
        claimed = await both.second.claim(producer.name, owner_is_dead=True)
        assert isinstance(claimed, OutboxProducer)
        assert (claimed.name, claimed.owner, claimed.last_number) == (producer.name, "second", 1)
        assert await numbers_of(both.second, claimed) == [1]
        assert await both.first.claim(producer.name, owner_is_dead=False) == "another's"

    on(database, work)


def test_process_that_lost_a_producer_writes_nothing_under_its_numbers(database: str) -> None:
    async def work(both: Processes) -> None:
        producer = await made(both.first)
        await both.dies("first")
        claimed = await both.second.claim(producer.name, owner_is_dead=True)
        assert isinstance(claimed, OutboxProducer)
        with pytest.raises(ProducerLost):
            await both.commit(producer.next_commit)
        assert await numbers_of(both.second, claimed) == []
        await both.commit(claimed.next_commit)
        assert await numbers_of(both.second, claimed) == [1]

    on(database, work)


def test_a_number_is_used_once_and_none_is_left_out(database: str) -> None:
    async def work(both: Processes) -> None:
        producer = await made(both.first)
        await both.commit(producer.next_commit)
        for number in (1, 3):
            with pytest.raises(ProducerLost):
                await both.commit(CommitNumber(producer, number))
        await both.commit(CommitNumber(producer, 2))
        assert await numbers_of(both.first, producer) == [1, 2]

    on(database, work)


def test_producer_with_an_unanswered_number_is_not_lent_again(database: str) -> None:
    async def work(both: Processes) -> None:
        relay = new_relay(both.first)
        async with BorrowedProducer(relay) as one:
            number = one.use_next_number()
            async with BorrowedProducer(relay) as other:
                assert other.use_next_number().producer.name != number.producer.name

    on(database, work)


def test_a_message_that_was_handled_is_known_and_its_unit_is_found_by_it(database: str) -> None:
    async def work(both: Processes) -> None:
        producer = await made(both.first)
        id = inbox_id("shop", "q", "m")
        assert not await both.first.is_processed(id)
        await both.commit(producer.next_commit, "m")
        assert await both.second.is_processed(id)
        unit = await both.second.find_unit(id)
        assert unit is not None and (unit.producer, unit.number, unit.id) == (producer.name, 1, id)
        with pytest.raises(AlreadyProcessed):
            await both.commit(CommitNumber(producer, 2), "m")
        await both.first.confirm_rows([id], [id])
        assert await both.second.find_unit(id) is None
        assert await both.second.is_processed(id)

    on(database, work)


def test_claim_of_a_producer_waits_for_a_running_transaction_and_sees_its_unit(
    postgres_url: str,
) -> None:
    async def work(both: Processes) -> None:
        producer = await made(both.first)
        await both.commit(producer.next_commit)
        # Its process is taken for dead, and its COMMIT is on its way.
        under_way = await both.write(CommitNumber(producer, 2))
        await both.dies("first")
        assert await both.second.claim(producer.name, owner_is_dead=True) == "busy"
        await under_way.commit()
        claimed = await both.second.claim(producer.name, owner_is_dead=True)
        assert isinstance(claimed, OutboxProducer) and claimed.last_number == 2
        assert await numbers_of(both.second, claimed) == [1, 2]

    on(postgres_url, work)


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue("postgres").url(request.getfixturevalue("postgres_database"))
    return url


def test_units_that_the_broker_does_not_know_get_the_numbers_of_a_new_producer(database: str) -> None:
    async def work(both: Processes) -> None:
        old = await made(both.first)
        for number in range(1, 6):
            await both.commit(CommitNumber(old, number), f"m{number}")
        await both.first.confirm_rows([inbox_id("shop", "q", f"m{number}") for number in (1, 2)], [])
        old.last_number = 5
        units = await both.first.units_of(old)
        new = await both.first.renumber(units, old)
        assert new is not None and new.name != old.name and new.last_number == 3
        moved = await both.first.units_of(new)
        assert [(each.id, each.number) for each in moved] == [
            (each.id, number) for number, each in enumerate(units, start=1)
        ]
        assert await both.first.claim(old.name, owner_is_dead=False) == "another's"
        await both.commit(CommitNumber(new, 4))

    on(database, work)


def test_a_producer_that_was_not_used_for_six_days_goes_if_it_has_nothing_to_send(database: str) -> None:
    async def work(both: Processes) -> None:
        idle, waiting = await made(both.first), await made(both.first)
        await both.commit(CommitNumber(waiting, 1))
        assert not await both.first.unused_producers()
        await both.execute(f"UPDATE truenext_producers SET used_ms = used_ms - {PRODUCER_UNUSED_MS}")
        used = await made(both.first)
        others = await made(both.second)
        unused = await both.first.unused_producers()
        assert sorted(unused) == sorted([idle.name, waiting.name])
        await both.first.drop_producers([*unused, others.name])
        assert sorted(await both.first.owned_producers()) == sorted([waiting.name, used.name])
        assert await both.second.owned_producers() == [others.name]

    on(database, work)


def test_a_process_that_ends_leaves_the_producers_that_have_something_to_send(database: str) -> None:
    async def work(both: Processes) -> None:
        free, doubtful, waiting = [await made(both.first) for _ in range(3)]
        await both.commit(CommitNumber(waiting, 1))
        await both.first.deregister_owner([free.name, waiting.name])
        assert sorted(await both.second.ownerless_producers(10)) == sorted([doubtful.name, waiting.name])

    on(database, work)


def test_the_inbox_forgets_what_was_marked_seven_days_ago_and_nothing_else(database: str) -> None:
    async def work(both: Processes) -> None:
        producer = await made(both.first)
        for number, name in enumerate(("old", "new", "unmarked"), start=1):
            await both.commit(CommitNumber(producer, number), name)
        old, new, unmarked = (inbox_id("shop", "q", each) for each in ("old", "new", "unmarked"))
        await both.first.confirm_rows([], [old])
        days = 7 * 24 * 3600 * 1000
        await both.execute(f"UPDATE truenext_inbox SET acknowledged_ms = acknowledged_ms - {days}")
        await both.first.confirm_rows([], [new])
        assert not await both.first.delete_expired()
        assert [await both.first.is_processed(each) for each in (old, new, unmarked)] == [False, True, True]
        assert not await both.first.delete_expired()
        assert [await both.first.is_processed(each) for each in (old, new, unmarked)] == [False, True, True]

    on(database, work)


def test_numbered_unit_says_whether_others_without_a_number_are_left(database: str) -> None:
    async def work(both: Processes) -> None:
        for n, interactive in enumerate(("true", "false", "false")):
            await both.execute(
                "INSERT INTO truenext_outbox (id, service, interactive, messages, written_ms, unit) VALUES "
                f"('{n:032}', 'shop', {interactive}, 1, 0, {both.literal(UNIT.encode())})"
            )
        left = []
        for _ in range(3):
            unit = await both.first.number_units(await made(both.first), 1)
            assert unit is not None
            left.append(unit.may_have_others)
        assert left == [True, True, False]

    on(database, work)


def test_two_services_in_one_database_see_nothing_of_each_other(database: str) -> None:
    async def work(both: Processes) -> None:
        other = both.database.outbox("bank", "third", "bank on a")
        await other.register_owner()
        await made(both.first)
        await both.dies("first")
        pending = await other.heartbeat()
        assert not pending.has_ownerless_producers and not pending.has_unnumbered_units
        assert await other.ownerless_producers(10) == []
        assert inbox_id("shop", "q", "m") != inbox_id("bank", "q", "m")

    on(database, work)


def test_tables_of_another_version_are_refused_and_missing_ones_too(database: str) -> None:
    async def work(both: Processes) -> None:
        await both.execute("UPDATE truenext_schema SET version = 99")
        with pytest.raises(ConfigurationError, match="version 99"):
            await both.first.check_tables()
        with pytest.raises(ConfigurationError, match="version 99"):
            await both.first.create_tables()
        await both.execute(f"UPDATE truenext_schema SET version = {VERSION}")
        await both.first.check_tables()
        await both.execute("DROP TABLE truenext_keys")
        with pytest.raises(ConfigurationError, match=r"no table truenext_\w+: create the tables with `truenext stages"):
            await both.first.check_tables()
        await both.first.create_tables()
        await both.first.check_tables()
        await both.execute("DELETE FROM truenext_schema")
        with pytest.raises(ConfigurationError, match=r"truenext_schema has no row .* --apply"):
            await both.first.check_tables()
        await both.first.create_tables()
        await both.first.check_tables()
        await both.execute("DROP TABLE truenext_schema")
        with pytest.raises(ConfigurationError, match="stages schema"):
            await both.first.check_tables()

    on(database, work)


def test_tables_of_the_first_version_are_refused_with_what_to_do(database: str) -> None:
    """Columns of the first version have other names, so that they are missing, too."""

    async def work(both: Processes) -> None:
        await both.execute("ALTER TABLE truenext_inbox RENAME COLUMN acknowledged_ms TO marked_ms")
        await both.execute("ALTER TABLE truenext_keys RENAME COLUMN started_ms TO begun_ms")
        await both.execute("UPDATE truenext_schema SET version = 1")
        with pytest.raises(ConfigurationError, match=REFUSED):
            await both.first.check_tables()
        with pytest.raises(ConfigurationError, match=REFUSED):
            await both.first.create_tables()
        with pytest.raises(ConfigurationError, match=REFUSED):
            outbox_report(database, "shop", with_inbox=True)
        with pytest.raises(ConfigurationError, match=REFUSED):
            apply_schema(database)

    on(database, work)


REFUSED = r"have version 1, and this truenext works with version 2: .* drop the tables truenext_\*, and create them"


@pytest.mark.parametrize("has_lost_another", [False, True])
@pytest.mark.parametrize("which", ["claim", "renumber"])
def test_producer_claimed_with_a_lost_answer_is_found_and_its_unit_sent(
    database: str, which: str, has_lost_another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: the unit was not sent before that process ended. A finer search than the one of the tests found it."""

    async def work(both: Processes) -> None:
        old = await made(both.first)
        await both.commit(old.next_commit)
        await both.dies("first")
        relay = new_relay(both.second)
        if has_lost_another:
            # Then as many are known as the database has.
            relay.return_producer(OutboxProducer("another's by now", "second", 0))
        sent: list[str] = []

        async def highest(_: OutboxRelay, name: str) -> int:
            return 0

        async def is_sent(_: OutboxRelay, unit: StoredUnit) -> bool:
            if which == "renumber" and unit.producer == old.name:
                return False
            sent.append(unit.producer)
            return True

        monkeypatch.setattr(OutboxRelay, "_highest_number", highest)
        monkeypatch.setattr(OutboxRelay, "_send_unit", is_sent)
        happens = getattr(both.second, which)
        lost: list[str] = []

        async def unanswered(*arguments: Any, **options: Any) -> Any:
            answer = await happens(*arguments, **options)
            if not lost:
                lost.append(which)
                raise DatabaseUnavailable("no answer")
            return answer

        monkeypatch.setattr(both.second, which, unanswered)
        for _ in range(4):
            # As if a minute went by between two looks.
            relay._deep_check_at = 0.0
            with suppress(DatabaseUnavailable):
                await relay._check_outbox()
        assert lost and len(sent) == 1
        assert sent[0] in [each.name for each in relay._free_producers]
        assert not relay._producers_in_doubt
        assert await both.second._units("1 = 1", {}) == []

    on(database, work)


def test_rows_that_come_while_others_go_are_gathered() -> None:
    """Fixed: if the outbox did not have to wait for its turn, each message had a transaction of its own for that."""

    class Quick:
        """An outbox that has another row to confirm whenever it confirms rows."""

        def __init__(self) -> None:
            self.times = 0

        async def confirm_rows(self, sent: Sequence[str], done: Sequence[str]) -> None:
            self.times += 1
            confirmer.add(str(self.times), was_sent=True, is_acknowledged=True)
            await asyncio.sleep(0)

    quick = Quick()
    confirmer = OutboxConfirmer(cast("Outbox", quick))

    async def work() -> None:
        confirmer.add("first", was_sent=True, is_acknowledged=True)
        confirmer.start()
        await asyncio.sleep(3.5 * GATHER_S)
        await PeriodicTask.stop(confirmer)

    asyncio.run(work())
    assert 2 <= quick.times <= 4
