"""Does truenext's own client lose, double or reorder nothing when its connections break, brokers are killed, and its
process is?

Messages are copied from queue to queue in transactions, sent and taken, while the network cuts and freezes connections
at any byte (broken_network.py). In the end every message is where it belongs, once.

    TRUENEXT_CLIENT_MESSAGES=3000 TRUENEXT_SEED=7 pytest -s tests/integration/test_client_breaks.py
"""

import asyncio
import contextlib
import os
import random
from collections import Counter

import msgspec
import pytest

from tests.contract.naive_history import read_folder
from tests.integration.broken_network import Break, Network, broken_network
from tests.integration.broker_process import BrokerProcess
from truenext.client.tasks.connection import Connection, Message, Session, connect
from truenext.errors import RolledBack

MESSAGES = int(os.environ.get("TRUENEXT_CLIENT_MESSAGES", "200"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)
PATIENCE_S = 20.0 + MESSAGES / 10
BREAKS = {Break.AT_BYTES: MESSAGES // 5, Break.AT_FRAMES: MESSAGES // 5, Break.FREEZES: MESSAGES // 25}
HEART_BEAT_S = 0.5
"""A frozen connection is seen after half a second: that is the shortest there is."""


@pytest.fixture
def chance() -> random.Random:
    print(f"TRUENEXT_SEED={SEED}")
    return random.Random(SEED)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits less before it tries again."""
    monkeypatch.setattr("truenext.client.core.attempts.DELAY_FIRST_S", 0.01)
    monkeypatch.setattr("truenext.client.core.client.LOGIN_S", 1.0)


def direct(broker: BrokerProcess) -> str:
    return f"stomp://127.0.0.1:{broker.port}"


async def what_is_in(connection: Connection, queue: str) -> list[str]:
    return [shown.text async for shown in connection.browse(f"/queue/{queue}")]


async def await_empty(broker: BrokerProcess, queue: str) -> None:
    """Wait until nothing waits there, and nobody has anything of it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(OSError):
                async with connect(direct(broker)) as connection:
                    facts = msgspec.json.decode(await connection.ask("queues"))
                    own = [each for each in facts if each["name"] == queue]
                    if own and not own[0]["waiting"] and not own[0]["unacknowledged"]:
                        return
            await asyncio.sleep(0.05)


class Copying:
    """From `in` to `out`, all of a batch or nothing."""

    def __init__(self, connection: Connection, chance: random.Random) -> None:
        self._connection = connection
        self._chance = chance
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        chance = self._chance
        async with self._connection.session(transacted=True) as session:
            consumer = await session.consumer("/queue/in", prefetch=chance.choice([0, 1, 10, None]))
            while True:
                try:
                    async with session.transaction():
                        batch = await consumer.receive_many(chance.choice([1, 5, 50]), 0.2)
                        await self._copy(session, batch)
                    self.outcomes["committed" if batch else "empty"] += 1
                except RolledBack:
                    self.outcomes["rolled back"] += 1

    async def _copy(self, session: Session, batch: list[Message]) -> None:
        assert [(message.rank, message.sequence) for message in batch] == sorted(
            (message.rank, message.sequence) for message in batch
        )
        for message in batch:
            await session.send("/queue/out", message.body, priority=message.priority)
            if self._chance.random() < 0.05:
                await asyncio.sleep(self._chance.choice([0, 0.002]))
        if self._chance.random() < 0.1:
            await session.rollback(failed=False)


async def fill(broker: BrokerProcess, chance: random.Random) -> list[str]:
    async with connect(direct(broker)) as connection:
        for n in range(MESSAGES):
            connection.send_nowait("/queue/in", str(n), priority=chance.randrange(10))
        await connection.flush()
        await connection.send("/queue/out", "-1")
    return ["-1", *map(str, range(MESSAGES))]


async def check_copied(broker: BrokerProcess, expected: list[str]) -> None:
    async with connect(direct(broker)) as connection:
        assert await what_is_in(connection, "in") == []
        assert sorted(await what_is_in(connection, "out")) == sorted(expected)
        dead = [name for name in broker.queues() if name.startswith("DLQ")]
        assert dead == []


async def copying_until_all_is_copied(network: Network, broker: BrokerProcess, chance: random.Random) -> Counter[str]:
    async with connect(network.url, heart_beat=HEART_BEAT_S, timeout=PATIENCE_S) as connection:
        copying = Copying(connection, chance)
        copiers = [asyncio.create_task(copying.run()) for _ in range(2)]
        emptied = asyncio.create_task(await_empty(broker, "in"))
        try:
            done, _ = await asyncio.wait([*copiers, emptied], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
            network.breaks = ()
        finally:
            for each in (*copiers, emptied):
                each.cancel()
            await asyncio.gather(*copiers, emptied, return_exceptions=True)
        print(dict(copying.outcomes), network.breaks_count, "breaks", connection.health().reconnects, "reconnects")
        return copying.outcomes


def check_history(broker: BrokerProcess) -> None:
    """Nobody got anything twice at a time, and what was acknowledged was held, and never comes back."""
    held: dict[tuple[str, int], int] = {}
    done: set[tuple[str, int]] = set()
    for event in sorted(read_folder(broker.data / "history"), key=lambda event: event["event"]):
        key = (event.get("queue", ""), event.get("sequence", 0))
        kind = event["kind"]
        if kind == "started":
            held.clear()
        elif kind == "dispatched":
            assert key not in held and key not in done, event
            held[key] = event["consumer"]
        elif kind == "acknowledged":
            assert key in held and key not in done, event
            del held[key]
            done.add(key)
        elif kind == "returned":
            assert key not in done, event
            held.pop(key, None)
    assert len([key for key in done if key[0] == "in"]) == MESSAGES


@pytest.mark.parametrize("how", Break, ids=lambda how: how.name)
def test_all_is_copied_once_however_connections_break(
    own_broker: BrokerProcess, chance: random.Random, how: Break
) -> None:
    async def run() -> None:
        expected = await fill(own_broker, chance)
        async with broken_network(lambda: own_broker.port, chance) as network:
            network.breaks, network.breaks_max = (how,), BREAKS[how]
            outcomes = await copying_until_all_is_copied(network, own_broker, chance)
            assert network.breaks_count and outcomes["committed"]
        await check_copied(own_broker, expected)

    asyncio.run(run())
    own_broker.stop()
    check_history(own_broker)
