"""Tests of programs and services that keep running while their broker is restored from an older copy.

Source: docs/stages-database.md, "For operators"; docs/client.md; docs/contract.md, C29.14
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess
from tests.integration.log_broker import delete_folder
from tests.stages.flows import Number, until
from truenext import blocking
from truenext.errors import RolledBack
from truenext.stage import Service
from truenext.stage.sql import apply_schema
from truenext.store.renewal import renew

PATIENCE_S = 60
RENEWED = one_of("is_renewed", [True, False], ids=["another identity", "the same identity"])


class Copied:
    """A broker with a copy of its data."""

    def __init__(self, broker: BrokerProcess, folder: Path) -> None:
        self._broker = broker
        self._copy = folder / "copy"

    def copy(self) -> None:
        port = self._broker.port
        self._broker.stop()
        shutil.copytree(self._broker.data, self._copy)
        self._broker.start(port)

    def restore(self, *, is_renewed: bool) -> None:
        """Go on with the copy. With `is_renewed` its folder gets a new identity, as by `truenext restore`."""
        port = self._broker.port
        self._broker.stop()
        delete_folder(self._broker.data)
        shutil.copytree(self._copy, self._broker.data)
        if is_renewed:
            renew(self._broker.data)
        self._broker.start(port)


@RENEWED
def test_a_session_goes_on_after_its_broker_has_lost_numbers(
    broker: BrokerProcess, tmp_path: Path, is_renewed: bool
) -> None:
    """Fixed: all later transactions of the session were rolled back."""
    copied = Copied(broker, tmp_path)
    lost = 0
    with (
        blocking.connect(f"stomp://127.0.0.1:{broker.port}") as connection,
        connection.session(transacted=True) as session,
    ):

        def sends(n: int) -> None:
            with session.transaction():
                session.send("/queue/take", str(n))

        for n in range(3):
            sends(n)
        copied.copy()
        for n in range(3, 6):
            sends(n)
        copied.restore(is_renewed=is_renewed)
        for n in range(6, 12):
            try:
                sends(n)
            except RolledBack:
                lost += 1
        assert lost <= (not is_renewed)
        received = [int(each.body) for each in connection.browse("/queue/take")]
        assert received[:3] == [0, 1, 2] and received[3:] == list(range(6 + lost, 12))


@pytest.mark.alternates("lost numbers")
@pytest.mark.parametrize("happens_once", [True, False])
@RENEWED
def test_a_service_goes_on_after_its_broker_has_lost_numbers(
    broker: BrokerProcess, tmp_path: Path, database: str, happens_once: bool, is_renewed: bool
) -> None:
    """Fixed: each worker released its message for ever, and without `exactly_once` repeated its effects each time."""
    copied = Copied(broker, tmp_path)
    apply_schema(database)
    engine = create_engine(database)
    app = Service("shop", broker=f"stomp://127.0.0.1:{broker.port}", database=database, exactly_once=happens_once)
    received: Counter[int] = Counter()

    @app.terminator("take", Number)
    async def take(number: Number, sql: AsyncSession) -> None:
        await sql.execute(text("INSERT INTO orders VALUES (:n)"), {"n": number.n})
        received[number.n] += 1

    def is_marking() -> bool:
        with Session(engine) as session:
            found = session.execute(text("SELECT count(*) FROM truenext_inbox WHERE acknowledged_ms IS NULL"))
            return bool(found.scalar_one())

    def are_committed(numbers: range) -> bool:
        with Session(engine) as session:
            return set(session.execute(text("SELECT n FROM orders")).scalars()) >= set(numbers)

    async def work() -> None:
        async with asyncio.timeout(PATIENCE_S), app.running():

            async def sends(numbers: range) -> None:
                for n in numbers:
                    await app.send(take, Number(n), trace="order")
                await until(lambda: all(received[n] for n in numbers))
                # The restored broker does not have these messages: a stage that it interrupts would not run again.
                while not await asyncio.to_thread(are_committed, numbers):
                    await asyncio.sleep(0.05)
                # What was refused is not held by a transaction that nobody ends.
                while happens_once and await asyncio.to_thread(is_marking):
                    await asyncio.sleep(0.05)

            await sends(range(20))
            await asyncio.to_thread(copied.copy)
            await sends(range(20, 60))
            await asyncio.to_thread(copied.restore, is_renewed=is_renewed)
            await sends(range(60, 160))

    with Session(engine) as session:
        session.execute(text("CREATE TABLE orders (n INTEGER)"))
        session.commit()
    asyncio.run(work())
    with Session(engine) as session:
        rows = Counter(session.execute(text("SELECT n FROM orders")).scalars())
    engine.dispose()
    assert rows.keys() == set(range(160))
    if happens_once:
        assert set(rows.values()) == {1}
    else:
        # What each worker had when the broker had lost its number.
        assert sum(rows.values()) < 200
