"""Tests that truenext's client loses, doubles and reorders nothing when connections break, or the broker or the
client's process is killed.

Messages are copied from queue to queue in transactions, and sent, while the network cuts and freezes connections at any
byte (broken_network.py). In the end every message is where it belongs, once.

    TRUENEXT_CLIENT_MESSAGES=3000 TRUENEXT_SEED=7 pytest -s tests/integration/test_client_breaks.py
"""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.contract.naive_history import read_folder
from tests.integration.broken_network import Break, Network, broken_network
from tests.integration.broker_process import BrokerProcess, dying_with_us
from truenext.client.tasks.connection import Connection, Message, Session, connect
from truenext.errors import RolledBack

MESSAGES = int(os.environ.get("TRUENEXT_CLIENT_MESSAGES", "200"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)
PATIENCE_S = 60.0 + MESSAGES / 10
BREAKS = {Break.AT_BYTES: MESSAGES // 5, Break.AT_FRAMES: MESSAGES // 5, Break.FREEZES: MESSAGES // 25}
KILLS = MESSAGES // 50
HEART_BEAT_S = 0.5
"""Shortest heart-beat interval: a frozen connection is noticed after half a second."""


@pytest.fixture
def chance() -> random.Random:
    print(f"TRUENEXT_SEED={SEED}")
    return random.Random(SEED)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the delays of the client before it connects again."""
    monkeypatch.setattr("truenext.client.core.link.DELAY_FIRST_S", 0.01)
    monkeypatch.setattr("truenext.client.core.link.ATTEMPT_TIMEOUT_S", 1.0)


def direct(broker: BrokerProcess) -> str:
    return f"stomp://127.0.0.1:{broker.port}"


async def bodies_in(connection: Connection, queue: str) -> list[str]:
    return [shown.text async for shown in connection.browse(f"/queue/{queue}")]


async def await_copied(broker: BrokerProcess) -> None:
    """Wait until all copies are in `out`. Counts do not include messages of open transactions."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(OSError):
                async with connect(direct(broker)) as connection:
                    facts = msgspec.json.decode(await connection.control_request("queues"))
                    if any(each["name"] == "out" and each["waiting"] > MESSAGES for each in facts):
                        return
            await asyncio.sleep(0.05)


class Copying:
    """Program that copies batches from `in` to `out` in transactions."""

    def __init__(self, connection: Connection, chance: random.Random) -> None:
        self._connection = connection
        self._chance = chance
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        chance = self._chance
        async with self._connection.session(transacted=True, ack=chance.choice(["receive", "commit"])) as session:
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
        assert await bodies_in(connection, "in") == []
        assert sorted(await bodies_in(connection, "out")) == sorted(expected)
        dead = [name for name in broker.queues() if name.startswith("DLQ")]
        assert dead == []


async def copying_until_all_is_copied(
    network: Network, broker: BrokerProcess, chance: random.Random, killing: asyncio.Task[None] | None = None
) -> Counter[str]:
    async with connect(network.url, heart_beat=HEART_BEAT_S, timeout=PATIENCE_S) as connection:
        copying = Copying(connection, chance)
        copiers = [asyncio.create_task(copying.run()) for _ in range(2)]
        if killing is not None:
            await killing
        copied = asyncio.create_task(await_copied(broker))
        try:
            done, _ = await asyncio.wait([*copiers, copied], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
            network.breaks = ()
        finally:
            for each in (*copiers, copied):
                each.cancel()
            await asyncio.gather(*copiers, copied, return_exceptions=True)
        print(dict(copying.outcomes), network.breaks_count, "breaks", connection.health().reconnects, "reconnects")
        return copying.outcomes


def check_history(broker: BrokerProcess) -> None:
    """Check that no message was held twice at a time, and that each acknowledged message was held and never came
    back."""
    held: dict[tuple[str, int], int] = {}
    done: set[tuple[str, int]] = set()
    for event in sorted(read_folder(broker.data / "history"), key=lambda event: event["event"]):
        key = (event.get("queue", ""), event.get("sequence", 0))
        kind = event["kind"]
        if kind == "run-started":
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
def test_copies_are_made_once_however_connections_break(
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


@pytest.mark.alternates("kills of clients")
def test_copies_are_made_once_over_brokers_that_are_killed(own_broker: BrokerProcess, chance: random.Random) -> None:
    def kill_and_start() -> None:
        own_broker.kill()
        own_broker.start()

    async def kill_again_and_again() -> None:
        for _ in range(KILLS):
            await asyncio.sleep(chance.uniform(0.05, 0.4))
            await asyncio.to_thread(kill_and_start)

    async def run() -> None:
        expected = await fill(own_broker, chance)
        async with broken_network(lambda: own_broker.port, chance) as network:
            network.breaks, network.breaks_max = (Break.AT_BYTES,), BREAKS[Break.AT_BYTES] // 4
            killing = asyncio.create_task(kill_again_and_again())
            outcomes = await copying_until_all_is_copied(network, own_broker, chance, killing)
            assert outcomes["committed"]
        await check_copied(own_broker, expected)

    asyncio.run(run())


COPYING_PROCESS = """
import asyncio, random, sys
from tests.integration.test_client_breaks import Copying
from truenext.client.tasks.connection import connect

async def run():
    async with connect(sys.argv[1]) as connection:
        await Copying(connection, random.Random(int(sys.argv[2]))).run()

asyncio.run(run())
"""


@pytest.mark.alternates("kills of clients")
def test_copies_are_made_once_by_processes_that_are_killed(own_broker: BrokerProcess, chance: random.Random) -> None:
    root = Path(__file__).parents[2]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            dying_with_us([sys.executable, "-c", COPYING_PROCESS, direct(own_broker), str(chance.randrange(10**6))]),
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
        )

    async def run() -> None:
        expected = await fill(own_broker, chance)
        for _ in range(KILLS):
            process = start()
            before = own_broker.queues()["out"].waiting
            deadline = time.monotonic() + PATIENCE_S
            while own_broker.queues()["out"].waiting == before and time.monotonic() < deadline:
                await asyncio.sleep(0.001)
            await asyncio.sleep(chance.uniform(0, 0.02))
            process.kill()
            process.wait()
        process = start()
        try:
            await await_copied(own_broker)
        finally:
            process.kill()
            process.wait()
        await check_copied(own_broker, expected)

    asyncio.run(run())
    own_broker.stop()
    check_history(own_broker)


@pytest.mark.parametrize("how", Break, ids=lambda how: how.name)
def test_sends_are_accepted_once_and_in_order_however_connections_break(
    own_broker: BrokerProcess, chance: random.Random, how: Break
) -> None:
    async def produce(name: str, connection: Connection) -> None:
        n = 0
        while n < MESSAGES:
            count = min(chance.choice([1, 3, 20]), MESSAGES - n)
            bodies = [f"{name} {each}" for each in range(n, n + count)]
            n += count
            if name == "one by one":
                for body in bodies:
                    await connection.send("/queue/sent", body, persistent=chance.random() < 0.5)
            elif name == "many":
                assert await connection.send_many("/queue/sent", bodies) == count
            else:
                for body in bodies:
                    connection.send_nowait("/queue/sent", body)
                await connection.flush()

    async def run() -> None:
        names = ["one by one", "many", "without waiting"]
        async with broken_network(lambda: own_broker.port, chance) as network:
            network.breaks, network.breaks_max = (how,), BREAKS[how]
            async with connect(network.url, heart_beat=HEART_BEAT_S, timeout=PATIENCE_S) as connection:
                await asyncio.wait_for(asyncio.gather(*(produce(name, connection) for name in names)), PATIENCE_S)
            assert network.breaks_count
        async with connect(direct(own_broker)) as connection:
            arrived = await bodies_in(connection, "sent")
        for name in names:
            own = [text for text in arrived if text.startswith(name)]
            assert own == [f"{name} {n}" for n in range(MESSAGES)]

    asyncio.run(run())


def test_sends_that_raised_timeout_error_do_not_arrive_later(own_broker: BrokerProcess, chance: random.Random) -> None:
    async def run() -> None:
        async with (
            broken_network(lambda: own_broker.port, chance) as network,
            connect(network.url, heart_beat=HEART_BEAT_S) as connection,
        ):
            await connection.send("/queue/q", "before")
            network.freeze(delivers=False)
            connection.send_nowait("/queue/q", "lost")
            for sending in (
                connection.send("/queue/q", "lost", timeout=0.1),
                connection.send_many("/queue/q", ["lost", "lost"], timeout=0.1),
                connection.flush(timeout=0.1),
            ):
                with pytest.raises(TimeoutError):
                    await sending
            await connection.send("/queue/q", "after")
            assert connection.health().reconnects == 1
            assert await bodies_in(connection, "q") == ["before", "after"]

    asyncio.run(run())


@pytest.mark.parametrize("way", ["consume", "individual"])
@pytest.mark.parametrize(
    ("is_frozen", "is_done"),
    # Ten that freeze take five seconds.
    [(True, True), (False, True), (False, False)],
    ids=["frozen, and succeeds", "cut, and succeeds", "cut, and fails"],
)
def test_a_handler_that_outlives_ten_connections_has_its_message_alone(
    own_broker: BrokerProcess, chance: random.Random, way: str, is_frozen: bool, is_done: bool
) -> None:
    """A message has fewer attempts than these losses."""
    got: list[str] = []

    async def outlive(network: Network, connection: Connection) -> None:
        for reconnects in range(1, 11):
            if is_frozen:
                network.freeze()
            else:
                network.cut()
            while not (
                connection.health().reconnects == reconnects
                and own_broker_held(await direct_connection.control_request("queues")) == 1
            ):
                await asyncio.sleep(0.01)

    def own_broker_held(answer: bytes) -> int:
        return sum(each["unacknowledged"] for each in msgspec.json.decode(answer) if each["name"] == "q")

    direct_connection: Connection

    async def run() -> None:
        nonlocal direct_connection
        async with (
            connect(direct(own_broker)) as direct_connection,
            broken_network(lambda: own_broker.port, chance) as network,
            connect(network.url, heart_beat=HEART_BEAT_S) as connection,
        ):
            await direct_connection.send("/queue/q", "long")
            if way == "individual":
                async with connection.consumer("/queue/q", ack="individual", prefetch=1) as consumer:
                    message = await consumer.receive()
                    assert message is not None
                    got.append(message.text)
                    await outlive(network, connection)
                    await (message.ack() if is_done else message.nack())
                    again = await consumer.receive(0.3)
                    got.extend([] if again is None else [f"{again.text} {again.attempts}"])
            else:
                ended = asyncio.Event()

                async def handle(message: Message, session: Session) -> None:
                    got.append(message.text if len(got) == 0 else f"{message.text} {message.attempts}")
                    if len(got) == 1:
                        await outlive(network, connection)
                        ended.set()
                        if not is_done:
                            raise ValueError("it fails")

                consuming = asyncio.create_task(connection.consume("/queue/q", handle, concurrency=2))
                await ended.wait()
                await asyncio.sleep(0.3)
                consuming.cancel()
                await asyncio.gather(consuming, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert got == ["long"] if is_done else ["long", "long 1"]
    assert not [name for name in own_broker.queues() if name.startswith("DLQ")]
    own_broker.stop()
    returned = [event for event in read_folder(own_broker.data / "history") if event["kind"] == "returned"]
    assert max(event["attempts"] for event in returned) == (0 if is_done else 1)
