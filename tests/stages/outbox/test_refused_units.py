"""Tests of units that the broker does not accept: they are split, wait or go to the refused queue, and others pass
them.

Source: docs/stages-database.md, "For operators"
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from tests.integration.broker_process import BrokerProcess
from tests.stages.flows import Number, Text, run, until
from truenext.engine.queues.queues import Queues
from truenext.engine.queues.unused import no_memory_error
from truenext.model.destination import Destination
from truenext.stage import Service
from truenext.stage.outbox import relay
from truenext.stage.outbox.relay import OutboxRelay
from truenext.stage.sql import apply_schema
from truenext.stage.sql.outbox_table import StoredUnit
from truenext.testing.stages import Stages

PATIENCE_S = 60
KIB = 1024
UNSENT = "SELECT coalesce(sum(messages), 0) FROM truenext_outbox"


@pytest.fixture
def session(database: str) -> Iterator[Session]:
    apply_schema(database)
    engine = create_engine(database)
    with Session(engine) as session:
        yield session
    engine.dispose()


class Shop:
    def __init__(self) -> None:
        self.app = app = Service("shop", exactly_once=True)
        self.received: Counter[int] = Counter()

        @app.terminator("take", Text)
        async def take(text: Text) -> None:
            self.received[len(text.text)] += 1

        self.take = take

    def initiation(self, session: Session, *sizes: int) -> None:
        """Initiate flows, which are one unit."""
        self.write(session, *sizes)
        session.commit()

    def write(self, session: Session, *sizes: int) -> None:
        with self.app.initiate(session) as initiation:
            for size in sizes:
                initiation.send(self.take, Text("x" * size), trace="order")


class SmallBroker:
    """A broker with a low limit of the size of transactions."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._file = folder / "small.toml"
        self._set(bytes_max)
        self.process = BrokerProcess(folder, ["--config", str(self._file)])
        self.process.start()

    def _set(self, bytes_max: int) -> None:
        self._file.write_text(f"[broker]\ntransaction_bytes_max = {bytes_max}\n")

    def start_again(self, bytes_max: int) -> None:
        port = self.process.port
        self.process.stop()
        self._set(bytes_max)
        self.process.start(port)

    @asynccontextmanager
    async def runs(self, app: Service, database: str) -> AsyncIterator[None]:
        app.broker, app.database = (f"stomp://127.0.0.1:{self.process.port}",), database
        async with asyncio.timeout(PATIENCE_S), app.running():
            yield


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallBroker]:
    folder = tmp_path / "broker"
    folder.mkdir()
    broker = SmallBroker(folder, 64 * KIB)
    yield broker
    broker.process.stop()
    broker.process.clean_up()


def test_units_too_large_together_are_sent_in_smaller_parts(
    session: Session, database: str, small: SmallBroker
) -> None:
    """Fixed: a thousand units shared one number, and the broker accepted no more than three at once: nothing was
    sent."""
    shop = Shop()
    sizes = range(20 * KIB, 20 * KIB + 50)
    for size in sizes:
        shop.initiation(session, size)

    async def work() -> None:
        async with small.runs(shop.app, database):
            await until(lambda: len(shop.received) == len(sizes))

    asyncio.run(work())
    assert shop.received == Counter(sizes)
    assert session.execute(text(UNSENT)).scalar() == 0


def test_parts_of_a_split_unit_are_sent_before_the_next_check(
    session: Session, database: str, small: SmallBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "CHECK_INTERVAL_S", 2.0 * PATIENCE_S)
    shop = Shop()
    sizes = range(40 * KIB, 40 * KIB + 2)

    def start_together() -> None:
        for size in sizes:
            shop.write(session, size)
        session.commit()

    async def work() -> None:
        async with small.runs(shop.app, database):
            await asyncio.to_thread(start_together)
            await until(lambda: len(shop.received) == len(sizes))

    asyncio.run(work())
    assert shop.received == Counter(sizes)


def test_unit_that_the_broker_does_not_accept_waits_and_later_units_are_sent(
    session: Session, database: str, small: SmallBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Fixed: later units got no number."""
    shop = Shop()
    shop.initiation(session, 40 * KIB, 40 * KIB + 1)
    for size in range(20):
        shop.initiation(session, size)

    def start_more(sizes: range) -> None:
        for size in sizes:
            shop.initiation(session, size)

    async def work() -> None:
        async with small.runs(shop.app, database):
            await until(lambda: len(shop.received) == 20)
            await asyncio.to_thread(start_more, range(20, 40))
            await until(lambda: len(shop.received) == 40)
            assert set(shop.received) == set(range(40))
            assert "and is skipped" in caplog.text
            # The operator allows more.
            await asyncio.to_thread(small.start_again, 256 * KIB)
            await until(lambda: len(shop.received) == 42)

    asyncio.run(work())
    # While the broker stopped some may have begun that ran again.
    assert set(shop.received) == {*range(40), 40 * KIB, 40 * KIB + 1}
    assert session.execute(text(UNSENT)).scalar() == 0


def test_a_queue_for_which_the_broker_has_no_room_holds_up_nothing_else(
    session: Session, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: all units with the same number, and all later ones, waited for space for one queue."""
    shop = Shop()
    full = shop.app.remote("full", Number)
    can_make = Queues._check_can_create
    is_full = True

    def unless_full(queues: Queues, destination: Destination) -> bool:
        if is_full and destination.name == "full":
            raise no_memory_error(len(queues.by_name), queues._memory)
        return can_make(queues, destination)

    monkeypatch.setattr(Queues, "_check_can_create", unless_full)

    def initiation(sizes: range) -> None:
        for size in sizes:
            shop.initiation(session, size)
            if size % 10 == 5:
                with shop.app.initiate(session) as initiation:
                    initiation.send(full, Number(size), trace="order")
                session.commit()

    initiation(range(50))

    async def work(t: Stages) -> None:
        nonlocal is_full
        await until(lambda: len(shop.received) == 50)
        await asyncio.to_thread(initiation, range(50, 60))
        await until(lambda: len(shop.received) == 60)
        is_full = False
        async with asyncio.timeout(PATIENCE_S):
            while len((await t.broker.queue("full")).messages) < 6:
                await asyncio.sleep(0.05)
        assert set(shop.received.values()) == {1}

    run(shop.app, work, database=database)
    assert session.execute(text(UNSENT)).scalar() == 0


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[[OutboxRelay], Awaitable[bool]]:
    """Return the relay's check of the outbox, and disable it in relays: the test calls it."""
    check = OutboxRelay._check_outbox

    async def nothing(relay: OutboxRelay) -> None:
        pass

    monkeypatch.setattr(OutboxRelay, "_check_outbox", nothing)
    return check


class ManualRelay:
    """A relay whose steps the test calls, with one unit of ten flows of the shop."""

    def __init__(self, t: Stages, session: Session, check: Callable[[OutboxRelay], Awaitable[bool]]) -> None:
        once = t._service_run.exactly_once
        assert once is not None
        self.relay, self.outbox = once._relay, once._outbox
        self._session = session
        self._check = check

    async def numbered(self) -> StoredUnit:
        self._producer = await self.relay.borrow_producer()
        unit = await self.outbox.number_units(self._producer)
        assert unit is not None
        return unit

    async def check_until_all_sent(self) -> None:
        self.relay._mark_in_doubt(self._producer)
        while await asyncio.to_thread(self._session.scalar, text(UNSENT)):
            await asyncio.to_thread(self._session.rollback)
            await self._check(self.relay)


@pytest.fixture
def shop_of_ten(session: Session) -> Shop:
    shop = Shop()
    for size in range(10):
        shop.initiation(session, size)
    return shop


def test_split_unit_is_not_sent_by_a_reader_of_the_original(
    shop_of_ten: Shop, session: Session, database: str, check: Callable[[OutboxRelay], Awaitable[bool]]
) -> None:
    """The reader stalls meanwhile. If the unit were sent twice, or not at all, the shop would receive too many
    flows, or too few."""
    received = shop_of_ten.received

    async def work(t: Stages) -> None:
        by_hand = ManualRelay(t, session, check)
        unit = await by_hand.numbered()
        assert await by_hand.relay._split_unit(unit)
        # The answer of the database was lost, and it is said again.
        assert not await by_hand.outbox.split_into_unnumbered(unit)
        assert await by_hand.relay._send_unit(unit)
        assert not received
        await by_hand.check_until_all_sent()
        await until(lambda: len(received) == 10)

    run(shop_of_ten.app, work, database=database)
    assert received == Counter(range(10))


def test_unit_whose_number_was_resolved_before_its_process_died_is_split_by_another_process(
    shop_of_ten: Shop, session: Session, database: str, check: Callable[[OutboxRelay], Awaitable[bool]]
) -> None:
    """The broker counts the number as used: a process that took the unit for sent would lose it."""
    received = shop_of_ten.received

    async def work(t: Stages) -> None:
        by_hand = ManualRelay(t, session, check)
        unit = await by_hand.numbered()
        assert await by_hand.relay._resolve(unit) == "rolled back"
        await by_hand.check_until_all_sent()
        await until(lambda: len(received) == 10)

    run(shop_of_ten.app, work, database=database)
    assert received == Counter(range(10))
