"""Tests of `initiate(session)`: a flow begins if the program's own transaction commits, and never without. Source:
docs/stages-database.md, "In a transaction of your own" """

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.stages.flows import Number, Text, run, until
from truenext import testing
from truenext.errors import ConfigurationError, LocalProtocolError
from truenext.model.limits import BODY_BYTES_MAX
from truenext.stage import Flow, FlowError, Service
from truenext.stage.outbox import relay
from truenext.stage.sql import apply_schema
from truenext.stage.sql.outbox_table import Outbox
from truenext.stage.sql.session_outbox import SessionOutbox
from truenext.testing.stages import Stages

PATIENCE_S = 30
UNSENT = "SELECT count(*) FROM truenext_outbox"
DEAD_PRODUCER = (
    "INSERT INTO truenext_producers (name, service, owner, number, used_ms) VALUES ('dead', 'shop', 'dead', 1, 0)"
)


class Shop:
    def __init__(self) -> None:
        self.app = app = Service("shop", exactly_once=True)
        self.received: list[int] = []

        @app.terminator("take", Number)
        async def take(number: Number) -> None:
            self.received.append(number.n)

        self.take = take


@pytest.fixture
def session(database: str) -> Iterator[Session]:
    """A session of a program that shares only the database with the service."""
    apply_schema(database)
    engine = create_engine(database)
    with Session(engine) as session:
        session.execute(text("CREATE TABLE orders (n INTEGER)"))
        session.commit()
        yield session
    engine.dispose()


async def until_received(shop: Shop, t: Stages, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(shop.received) < count:
            await asyncio.sleep(0.01)
    await t.wait_until_ended()


def place_order(shop: Shop, session: Session, n: int, key: str | None = None) -> str:
    session.execute(text("INSERT INTO orders VALUES (:n)"), {"n": n})
    with shop.app.initiate(session, key=key) as initiation:
        return initiation.send(shop.take, Number(n), trace=f"order {n}")


def test_initiation_is_sent_after_a_commit_and_not_after_a_rollback(session: Session, database: str) -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        await asyncio.to_thread(place_order, shop, session, 1)
        await asyncio.to_thread(session.commit)
        await asyncio.to_thread(place_order, shop, session, 2)
        await asyncio.to_thread(session.rollback)
        await until_received(shop, t, 1)
        await asyncio.to_thread(place_order, shop, session, 3)
        await asyncio.sleep(1.5)
        assert shop.received == [1]
        await asyncio.to_thread(session.commit)
        await until_received(shop, t, 2)
        assert shop.received == [1, 3]

    run(shop.app, work, database=database)


@pytest.mark.alternates("stages without a broker")
def test_initiation_without_broker_or_connection_is_sent_by_a_later_run_of_the_service(
    session: Session, database: str
) -> None:
    shop = Shop()
    for n in range(500):
        place_order(shop, session, n)
        session.commit()
    assert session.execute(text(UNSENT)).scalar() == 500
    session.commit()

    async def work(t: Stages) -> None:
        await until_received(shop, t, 500)
        assert sorted(shop.received) == list(range(500))

    run(shop.app, work, database=database)
    assert session.execute(text(UNSENT)).scalar() == 0
    session.commit()


def test_async_session_initiates_flows_in_its_transaction(session: Session, database: str) -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        url = database.replace("sqlite:", "sqlite+aiosqlite:")
        engine = create_async_engine(url)
        async with AsyncSession(engine) as own:
            await own.execute(text("INSERT INTO orders VALUES (1)"))
            async with shop.app.initiate(own) as initiation:
                initiation.send(shop.take, Number(1), trace="order 1")
                initiation.send(shop.take, Number(2), trace="order 2", interactive=True)
            await own.commit()
        await engine.dispose()
        await until_received(shop, t, 2)
        assert sorted(shop.received) == [1, 2]

    run(shop.app, work, database=database)


def test_a_key_makes_a_repeated_call_one_flow_and_another_content_is_an_error(session: Session, database: str) -> None:
    shop = Shop()
    first = place_order(shop, session, 1, "order 1")
    session.commit()
    again = place_order(shop, session, 1, "order 1")
    session.commit()
    assert again == first
    with pytest.raises(FlowError, match="other flows began"):
        place_order(shop, session, 2, "order 1")
    session.rollback()
    assert place_order(shop, session, 2, "order 2") != first
    session.commit()

    async def work(t: Stages) -> None:
        await until_received(shop, t, 2)
        assert sorted(shop.received) == [1, 2]

    run(shop.app, work, database=database)


def test_a_repeated_call_begins_nothing_after_the_first_was_sent_either(session: Session, database: str) -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        await asyncio.to_thread(place_order, shop, session, 1, "order 1")
        await asyncio.to_thread(session.commit)
        await until_received(shop, t, 1)
        await asyncio.to_thread(place_order, shop, session, 1, "order 1")
        await asyncio.to_thread(session.commit)
        await asyncio.sleep(1.5)
        assert shop.received == [1]

    run(shop.app, work, database=database)


def test_a_key_that_was_forgotten_begins_another_flow(session: Session, database: str) -> None:
    """Fixed: the flow's ids were derived from the key alone, so the inbox, which still had them, skipped the flow."""
    shop = Shop()
    weeks = 8 * 86_400_000
    ids: list[str] = []

    async def work(t: Stages) -> None:
        once = t._service_run.exactly_once
        assert once is not None
        for n in (1, 1, 2):
            if n == 2:
                async with t.sql() as sql:
                    await sql.execute(text(f"UPDATE truenext_keys SET started_ms = started_ms - {weeks}"))
                await once._outbox.delete_expired()
            ids.append(await asyncio.to_thread(place_order, shop, session, n, "order"))
            await asyncio.to_thread(session.commit)
        await until_received(shop, t, 2)
        assert shop.received == [1, 2]
        assert ids[0] == ids[1] != ids[2]

    run(shop.app, work, database=database)


def test_a_block_under_a_key_that_raises_leaves_the_key_free(session: Session, database: str) -> None:
    shop = Shop()
    with pytest.raises(KeyError), shop.app.initiate(session, key="order") as initiation:
        initiation.send(shop.take, Number(1), trace="order 1")
        raise KeyError
    session.commit()
    first = place_order(shop, session, 2, "order")
    with pytest.raises(FlowError, match="other flows began"):
        place_order(shop, session, 3, "order")
    assert place_order(shop, session, 2, "order") == first
    session.commit()

    async def work(t: Stages) -> None:
        await until_received(shop, t, 1)
        assert shop.received == [2]

    run(shop.app, work, database=database)


@pytest.mark.parametrize("what", ["savepoint", "transaction"])
def test_a_block_under_a_key_in_which_all_is_rolled_back_begins_nothing_and_says_so(
    session: Session, what: str
) -> None:
    shop = Shop()
    savepoint = session.begin_nested() if what == "savepoint" else session
    with pytest.raises(FlowError, match="rolled back"), shop.app.initiate(session, key="order") as initiation:
        initiation.send(shop.take, Number(1), trace="order 1")
        savepoint.rollback()
    session.commit()
    assert session.execute(text(UNSENT)).scalar() == 0
    place_order(shop, session, 1, "order")
    session.commit()
    assert session.execute(text(UNSENT)).scalar() == 1


@pytest.mark.parametrize("key", [None, "order"])
@pytest.mark.parametrize("is_used", [True, False], ids=["used", "unused"])
def test_a_commit_inside_of_a_block_is_refused_and_commits_nothing(
    session: Session, key: str | None, is_used: bool
) -> None:
    shop = Shop()
    if is_used:
        session.execute(text("INSERT INTO orders VALUES (0)"))
    with pytest.raises(FlowError, match="commit after the block"), shop.app.initiate(session, key=key) as initiation:
        session.execute(text("INSERT INTO orders VALUES (1)"))
        initiation.send(shop.take, Number(1), trace="order 1")
        session.commit()
    session.rollback()
    assert session.execute(text("SELECT count(*) FROM orders")).scalar() == 0
    assert session.execute(text(UNSENT)).scalar() == 0
    place_order(shop, session, 2, key)
    session.commit()
    assert session.execute(text(UNSENT)).scalar() == 1


def test_a_transaction_that_ends_inside_of_a_block_of_an_async_session_is_refused(
    session: Session, database: str
) -> None:
    shop = Shop()

    async def main() -> None:
        engine = create_async_engine(database.replace("sqlite:", "sqlite+aiosqlite:"))
        with pytest.raises(FlowError, match="commit after the block"):
            async with AsyncSession(engine) as own, shop.app.initiate(own) as initiation, own.begin():
                await own.execute(text("INSERT INTO orders VALUES (1)"))
                initiation.send(shop.take, Number(1), trace="order 1")
        with pytest.raises(FlowError, match="after the block"):
            async with AsyncSession(engine) as own, shop.app.initiate(own) as initiation:
                await own.execute(text("INSERT INTO orders VALUES (1)"))
                initiation.send(shop.take, Number(1), trace="order 1")
                await own.close()
        await engine.dispose()

    asyncio.run(main())
    assert session.execute(text("SELECT count(*) FROM orders")).scalar() == 0
    assert session.execute(text(UNSENT)).scalar() == 0


@pytest.mark.parametrize("key", [None, "order"])
@pytest.mark.parametrize("ending", ["rollback", "close", "invalidate", "outer savepoint", "savepoint"])
def test_a_block_that_outlives_its_transaction_begins_nothing_and_says_so(
    session: Session, key: str | None, ending: str
) -> None:
    shop = Shop()
    end = getattr(session, ending, None)
    if end is None:
        session.execute(text("INSERT INTO orders VALUES (0)"))
        outer = session.begin_nested()
        end = (session.begin_nested() if ending == "savepoint" else outer).rollback
        if ending != "savepoint":
            session.begin_nested()
    with pytest.raises(FlowError, match="after the block"), shop.app.initiate(session, key=key) as initiation:
        session.execute(text("INSERT INTO orders VALUES (1)"))
        initiation.send(shop.take, Number(1), trace="order 1")
        end()
        # The program goes on, in another transaction.
        session.execute(text("INSERT INTO orders VALUES (2)"))
    session.rollback()
    assert session.execute(text(UNSENT)).scalar() == 0
    place_order(shop, session, 3, key)
    session.commit()
    assert session.execute(text(UNSENT)).scalar() == 1


def test_savepoints_that_end_inside_of_a_block_are_the_programs_own(session: Session) -> None:
    shop = Shop()
    released = session.begin_nested()
    with shop.app.initiate(session) as initiation:
        released.commit()
        with session.begin_nested():
            session.execute(text("INSERT INTO orders VALUES (1)"))
        undone = session.begin_nested()
        session.execute(text("INSERT INTO orders VALUES (2)"))
        undone.rollback()
        initiation.send(shop.take, Number(1), trace="order 1")
    session.commit()
    assert session.execute(text("SELECT n FROM orders")).scalars().all() == [1]
    assert session.execute(text(UNSENT)).scalar() == 1


def test_initiation_cancelled_at_random_leaves_the_database_unlocked(session: Session, database: str) -> None:
    """Fixed: on SQLite the key's statement stayed open, which locked the file for all writers."""
    shop = Shop()
    url = database.replace("sqlite:", "sqlite+aiosqlite:")
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    drawn = random.Random(seed)

    async def one(engine: AsyncEngine, n: int) -> None:
        async with AsyncSession(engine) as own, own.begin():
            async with shop.app.initiate(own, key=f"order {n % 10}") as initiation:
                initiation.send(shop.take, Number(n % 10), trace="order")
            await asyncio.sleep(drawn.random() * 0.01)

    async def main() -> None:
        for _ in range(10):
            engine = create_async_engine(url, pool_size=20)
            tasks = [asyncio.ensure_future(one(engine, n)) for n in range(20)]
            for each in tasks:
                await asyncio.sleep(drawn.random() * 0.005)
                if drawn.random() < 0.5:
                    each.cancel()
            await asyncio.wait(tasks)
            await engine.dispose()

    async def with_time() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main()

    asyncio.run(with_time())
    session.rollback()
    place_order(shop, session, 100, "another order")
    session.commit()


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "repeated"])
def test_cancellation_during_any_statement_of_a_key_leaves_the_database_unlocked(
    session: Session, database: str, is_first: bool
) -> None:
    """Fixed: on SQLite a SELECT with unread rows stayed open, and its connection kept the lock."""
    shop = Shop()
    url = database.replace("sqlite:", "sqlite+aiosqlite:")

    async def cancelled_at(count: int) -> bool:
        """Cancel the initiation at a statement; False if it has fewer statements."""
        engine = create_async_engine(url)
        texts: list[str] = []

        async def started() -> None:
            async with AsyncSession(engine) as own, own.begin(), shop.app.initiate(own, key="order") as initiation:
                initiation.send(shop.take, Number(1), trace="order 1")

        @event.listens_for(engine.sync_engine, "before_cursor_execute")
        def cancel(_: object, __: object, statement: str, *___: object) -> None:
            if "truenext_" in statement:
                texts.append(statement)
                if len(texts) == count:
                    task.cancel()

        task = asyncio.ensure_future(started())
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
        # What happened is looked at while the task is still known, and with it where it was cancelled.
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(place_order, shop, session, count)
            await asyncio.to_thread(session.commit)
        await engine.dispose()
        return task.cancelled()

    async def main() -> int:
        count = 1
        while await cancelled_at(count):
            count += 1
        return count - 1

    if not is_first:
        place_order(shop, session, 1, "order")
        session.commit()
    assert asyncio.run(main()) == (3 if is_first else 4)


def test_session_may_initiate_flows_in_many_transactions(session: Session) -> None:
    """Fixed: each transaction left a listener, which all later ones called."""
    woken: list[int] = []
    transaction = SessionOutbox(session)
    for _ in range(3):
        for _ in range(2):
            session.execute(text("SELECT 1"))
            transaction.call_on_commit(wake := partial(woken.append, 1))
            transaction.call_on_commit(wake)
        session.commit()
    assert len(woken) == 6
    session.execute(text("SELECT 1"))
    session.commit()
    assert len(woken) == 6


def test_the_relay_is_woken_by_the_commit_and_not_by_a_savepoint_before_it(session: Session) -> None:
    woken: list[int] = []
    with session.begin_nested():
        SessionOutbox(session).call_on_commit(partial(woken.append, 1))
    assert not woken
    session.commit()
    assert woken == [1]


def test_a_time_to_live_counts_from_when_each_was_begun_though_they_are_sent_together(
    session: Session, database: str
) -> None:
    app = Service("shop", exactly_once=True)
    take = app.remote("nobody", Number)
    for n, ttl in enumerate((100.0, 10_000.0, None)):
        with app.initiate(session) as initiation:
            if ttl is None:
                initiation.send(take, Number(n), trace="order")
            else:
                initiation.send(take, Number(n), trace="order", ttl=ttl)
        session.commit()
    # The first was begun long ago.
    session.execute(
        text(
            "UPDATE truenext_outbox SET written_ms = written_ms - 90000 "
            "WHERE written_ms = (SELECT min(written_ms) FROM truenext_outbox)"
        )
    )
    session.commit()

    async def work(t: Stages) -> None:
        now_ms = time.time_ns() / 1e6
        async with asyncio.timeout(PATIENCE_S):
            while len(messages := (await t.broker.queue("nobody")).messages) < 3:
                await asyncio.sleep(0.01)
        remaining_ms = [int(each.headers.get("expires", 0)) - now_ms for each in messages]
        assert 0 < remaining_ms[0] < 11_000 and 9_990_000 < remaining_ms[1] < 10_001_000 and remaining_ms[2] < 0

    run(app, work, database=database)


def test_units_unreadable_to_a_process_are_skipped_and_delay_no_other_unit(
    session: Session, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop()
    for n in range(4):
        place_order(shop, session, n)
        session.commit()
    some = "WHERE id IN (SELECT id FROM truenext_outbox ORDER BY written_ms, id LIMIT 2)"
    session.execute(text(f"UPDATE truenext_outbox SET unit = :unit {some}"), {"unit": b"\x92\x7f\x90"})
    session.commit()

    async def work(t: Stages) -> None:
        await until(lambda: len(shop.received) == 2)
        # They are still to be sent, if by others.
        with pytest.raises(TimeoutError, match="the outbox has 2 unsent messages"):
            await t.wait_until_ended(timeout=1.5)
        assert sorted(shop.received) == [2, 3]
        texts = [each for each in caplog.records if "only processes of that version" in each.message]
        assert [each.__dict__["units"] for each in texts] == [2]

    run(shop.app, work, database=database)
    assert session.execute(text(UNSENT)).scalar() == 2


def test_an_empty_initiation_and_one_that_raises_leave_nothing(session: Session) -> None:
    shop = Shop()
    with shop.app.initiate(session):
        pass
    with pytest.raises(KeyError), shop.app.initiate(session) as initiation:
        initiation.send(shop.take, Number(1), trace="order 1")
        raise KeyError
    session.commit()
    assert session.execute(text(UNSENT)).scalar() == 0


def test_initiation_above_the_brokers_limits_is_refused_and_writes_no_row(session: Session) -> None:
    app = Service("shop", exactly_once=True)
    take = app.remote("take", Text)
    with pytest.raises(FlowError, match=f"more than {BODY_BYTES_MAX}"), app.initiate(session) as initiation:
        initiation.send(take, Text("x" * BODY_BYTES_MAX), trace="t")
    with pytest.raises(FlowError, match="several initiations"), app.initiate(session) as initiation:
        for _ in range(2):
            initiation.send(take, Text("x" * (BODY_BYTES_MAX // 2)), trace="t")
    session.commit()
    assert session.execute(text(UNSENT)).scalar() == 0


def test_initiate_with_invalid_arguments_is_refused(session: Session) -> None:
    app = Service("shop", exactly_once=True)
    with pytest.raises(ConfigurationError, match="takes a Session"):
        app.initiate("postgresql:///shop")  # type: ignore[call-overload]
    with pytest.raises(FlowError, match="key"):
        app.initiate(session, key="")
    with pytest.raises(FlowError, match="session"):
        app.initiate(key="x")  # type: ignore[call-overload]
    with pytest.raises(FlowError, match="timeout"):
        app.initiate(session, timeout=5)  # type: ignore[call-overload]

    async def asynchronous() -> None:
        async with app.initiate(session):
            pass

    with pytest.raises(LocalProtocolError, match="`with`"):
        asyncio.run(asynchronous())


def test_large_unit_waits_for_transaction_bytes_and_is_not_treated_as_refused(
    session: Session, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fixed: together with a worker's open transactions the unit exceeded the limit of a connection. Each message of
    the unit that was refused alone also went to the refused queue, if it had room by then."""
    app = Service("shop", exactly_once=True)
    received: list[int] = []

    @app.terminator("take", Text)
    async def take(text: Text) -> None:
        received.append(len(text.text))

    def start_one(size: int) -> None:
        with app.initiate(session) as initiation:
            initiation.send(take, Text("x" * size), trace="large")
        session.commit()

    async def work(t: Stages) -> None:
        lane, size = t._service_run._pools[1], 9_000_000
        async with lane.transaction_byte_permits.acquired(size), lane.connection.session(transacted=True) as worker:
            await worker.send("/queue/elsewhere", b"x" * size)
            await worker.flush()
            await asyncio.to_thread(start_one, size)
            await asyncio.sleep(1)
            assert not received
        async with asyncio.timeout(PATIENCE_S):
            while not received:
                await asyncio.sleep(0.05)
        assert received == [size]
        assert "the relay cannot send now" not in caplog.text
        assert not (await t.broker.queue("shop.refused")).messages

    run(app, work, database=database)


@pytest.mark.parametrize("face", ["relay's own", "stage's"])
def test_flows_initiated_right_after_a_stage_has_sent_are_sent(database: str, face: str) -> None:
    """Fixed: they got the number of a sent unit that was not deleted yet, so the broker took them for a repeat, and
    they were lost."""
    app = Service("shop", exactly_once=True)
    received: list[int] = []

    @app.terminator("take", Number, exactly_once=False)
    async def take(number: Number) -> None:
        received.append(number.n)

    @app.terminator("first", Number)
    async def first(number: Number, flow: Flow) -> None:
        flow.send(take, number)

    async def work(t: Stages) -> None:
        once = t._service_run.exactly_once
        assert once is not None
        # What was sent stays in the outbox for as long as this test takes.
        once._confirmer.add = lambda *_, **__: None  # type: ignore[method-assign]
        for n in range(0, 20, 2):
            if face == "stage's":
                await t.send(first, Number(n))
            else:
                async with t.sql() as sql, app.initiate(sql) as initiation:
                    initiation.send(take, Number(n), trace="t")
            async with t.sql() as sql, app.initiate(sql) as initiation:
                initiation.send(take, Number(n + 1), trace="t")
            async with asyncio.timeout(PATIENCE_S):
                while len(received) < n + 2:
                    await asyncio.sleep(0.005)
        await asyncio.sleep(0.2)
        assert sorted(received) == list(range(20))

    run(app, work, database=database)


def test_flow_of_this_process_is_sent_after_one_transaction_of_the_relay(
    session: Session, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller of `ask` under a key waits for each of them."""
    monkeypatch.setattr(relay, "CHECK_INTERVAL_S", 2.0 * PATIENCE_S)
    shop = Shop()
    calls: Counter[str] = Counter()
    transaction = Outbox._transaction

    def counted(outbox: Outbox, *, is_read_only: bool = False) -> AbstractAsyncContextManager[AsyncConnection]:
        calls[sys._getframe(1).f_code.co_name] += 1
        return transaction(outbox, is_read_only=is_read_only)

    async def work(t: Stages) -> None:
        # The relay adds its producer.
        await asyncio.to_thread(start, 0)
        await until_received(shop, t, 1)
        monkeypatch.setattr(Outbox, "_transaction", counted)
        for n in range(1, 21):
            await asyncio.to_thread(start, n)
            async with asyncio.timeout(PATIENCE_S):
                while len(shop.received) <= n:
                    await asyncio.sleep(0.001)

    def start(n: int) -> None:
        place_order(shop, session, n)
        session.commit()

    run(shop.app, work, database=database)
    assert calls["number_units"] == 20
    # Rows of sent units, and acknowledgements, are written together in the background. A worker may need a producer.
    assert set(calls) <= {"number_units", "confirm_rows", "add_producer", "deregister_owner"}


def test_checks_of_the_outbox_go_on_while_this_process_starts_flows_all_the_time(
    session: Session, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "CHECK_INTERVAL_S", 2.0)
    shop = Shop()

    async def work(t: Stages) -> None:
        # A process that has died has numbered a flow, and not sent it.
        with shop.app.initiate(session) as initiation:
            initiation.send(shop.take, Number(-1), trace="order")
        await asyncio.to_thread(session.execute, text("UPDATE truenext_outbox SET producer = 'dead', number = 1"))
        await asyncio.to_thread(session.execute, text(DEAD_PRODUCER))
        await asyncio.to_thread(session.commit)
        n = 0
        async with asyncio.timeout(PATIENCE_S):
            while -1 not in shop.received:
                n += 1
                await asyncio.to_thread(place_order, shop, session, n)
                await asyncio.to_thread(session.commit)
                await asyncio.sleep(0.01)

    run(shop.app, work, database=database)


# ---- Who sends it ----


def test_initiate_in_a_session_without_exactly_once_is_refused(session: Session) -> None:
    app = Service("shop")
    app.remote("take", Number)
    with pytest.raises(ConfigurationError, match="would not be sent"):
        app.initiate(session)


def test_a_service_without_stages_sends_what_it_begins_while_it_is_connected(session: Session, database: str) -> None:
    """No other process would: no stage of the service runs anywhere."""

    async def main() -> None:
        async with testing.broker() as broker, asyncio.timeout(30):
            app = Service("web", broker=broker.url, database=database, exactly_once=True)
            take = app.remote("take", Number)
            async with app.connected():
                with app.initiate(session) as initiation:
                    initiation.send(take, Number(1), trace="t")
                # Never in the loop's own thread: the relay may have the file, and wait for the loop.
                await asyncio.to_thread(session.commit)
                while not (await broker.queue("take")).messages:
                    await asyncio.sleep(0.02)

    asyncio.run(main())


def test_initiation_just_before_the_program_ends_is_sent(session: Session, database: str) -> None:
    """Fixed: it was sent only when the next program connected."""

    async def main() -> None:
        async with testing.broker() as broker, asyncio.timeout(PATIENCE_S):
            app = Service("web", broker=broker.url, database=database, exactly_once=True)
            take = app.remote("take", Number)
            for n in range(8):
                async with app.connected():
                    with app.initiate(session) as initiation:
                        initiation.send(take, Number(n), trace="t")
                    await asyncio.to_thread(session.commit)
                assert len((await broker.queue("take")).messages) == n + 1

    asyncio.run(main())


def test_expired_unit_is_not_delivered_and_delays_no_other_unit(
    session: Session, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fixed: a program without stages failed with it for ever, and a waiting stage received it."""
    received: list[int] = []

    async def main() -> None:
        async with testing.broker() as broker, asyncio.timeout(PATIENCE_S):
            app = Service("web", broker=broker.url, database=database, exactly_once=True)
            shop = Service("shop", broker=broker.url)
            take = app.remote("take", Number)

            @shop.terminator("take", Number)
            async def taking(number: Number) -> None:
                received.append(number.n)

            def initiation(*numbers: int, **options: float) -> None:
                for n in numbers:
                    with app.initiate(session) as initiation:
                        initiation.send(take, Number(n), trace="t", **options)  # type: ignore[arg-type]
                session.commit()

            initiation(1, 2, ttl=0.5)
            initiation(3)
            await asyncio.sleep(0.6)
            async with shop.running(), app.connected():
                await until(lambda: received == [3])
                await asyncio.to_thread(initiation, 4)
                await until(lambda: received == [3, 4])
                assert "the relay cannot send now" not in caplog.text

    asyncio.run(main())


def test_program_without_stages_sends_its_initiations_and_connects_without_its_database(
    session: Session, database: str
) -> None:
    shop = Shop()

    async def main() -> None:
        async with testing.broker() as broker, asyncio.timeout(PATIENCE_S):
            shop.app.broker, shop.app.database = (broker.url,), database
            async with shop.app.connected():
                for n in range(3):
                    await asyncio.to_thread(place_order, shop, session, n)
                    await asyncio.to_thread(session.commit)
                while len((await broker.queue("take")).messages) < 3:
                    await asyncio.sleep(0.02)
            # As often as it likes, and with a database that is not there it is still connected.
            shop.app.database = "sqlite:////no/such/file.db"
            async with shop.app.connected():
                await asyncio.to_thread(place_order, shop, session, 3)
                await asyncio.to_thread(session.commit)
                await shop.app.send(shop.take, Number(4), trace="order 4")

    asyncio.run(main())


def test_a_service_that_only_begins_flows_and_has_no_database_is_told_so() -> None:
    async def main() -> None:
        async with testing.broker() as broker:
            app = Service("web", broker=broker.url, exactly_once=True)
            with pytest.raises(ConfigurationError, match="no database"):
                async with app.connected():
                    pass

    asyncio.run(main())


# ---- What is refused ----


def test_a_session_that_commits_each_statement_is_refused_and_nothing_is_written(
    session: Session, database: str
) -> None:
    shop = Shop()
    engine = create_engine(database, isolation_level="AUTOCOMMIT")
    with (
        Session(engine) as own,
        pytest.raises(ConfigurationError, match="AUTOCOMMIT"),
        shop.app.initiate(own) as initiation,
    ):
        initiation.send(shop.take, Number(1), trace="t")
    engine.dispose()
    assert session.execute(text(UNSENT)).scalar() == 0


def test_a_database_without_the_tables_is_told_what_to_do(database: str) -> None:
    shop = Shop()
    engine = create_engine(database)
    with (
        Session(engine) as own,
        pytest.raises(ConfigurationError, match="stages schema"),
        shop.app.initiate(own) as initiation,
    ):
        initiation.send(shop.take, Number(1), trace="t")
    engine.dispose()


def test_a_key_that_is_no_text_is_refused_by_name(session: Session) -> None:
    with pytest.raises(FlowError, match="key must be"):
        Shop().app.initiate(session, key="\ud800")


def test_a_subscriber_of_a_service_that_is_exactly_once_is_not() -> None:
    app = Service("shop", exactly_once=True)

    @app.subscriber(app.topic("news", Number))
    def note(number: Number) -> None: ...

    [stage] = app.stages.values()
    assert stage.settings.exactly_once is False
