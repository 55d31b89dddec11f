"""Tests that sessions always hand out the true next message, after rollbacks and closes, at any prefetch.

Document 004: five messages, the third of which is rolled back; 650 with random rollbacks; 20, 10 and 5 whose consumers
and sessions are closed instead. Source of what is expected: docs/client.md, "Order and prefetch".

    TRUENEXT_SEED=7 pytest -s tests/integration/test_client_order.py
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.drawing import one_of
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from truenext.client.tasks.connection import Connection, Consumer, Message, Session, connect

SEED = os.environ.get("TRUENEXT_SEED", str(random.randrange(1_000_000)))
MESSAGES = 650
PATIENCE_S = 60.0
PREFETCHES = one_of(
    "prefetch",
    [0, 1, 10, 1000, None],
    ["prefetch 0", "prefetch 1", "prefetch 10", "prefetch 1000", "default prefetch"],
)


@pytest.fixture(scope="module")
def patient_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Broker that dispatches failed messages again at once, without a limit of attempts."""
    broker = BrokerProcess(tmp_path_factory.mktemp("patient"), policy={"delay_ms": 0, "attempts_max": 1_000_000})
    with broker.running():
        yield broker


def on_a_connection(
    broker: BrokerProcess, work: Callable[[Connection, random.Random], Awaitable[None]], name: object
) -> None:
    print(f"TRUENEXT_SEED={SEED}")

    async def main() -> None:
        async with connect(f"stomp://127.0.0.1:{broker.port}") as connection:
            await work(connection, random.Random(f"{SEED} {name}"))

    asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_SECONDS))
    broker.check_log()


class Waiting:
    """Waiting messages by their keys, of one or several queues that the session reads in one order."""

    def __init__(self) -> None:
        self.keys: dict[str, tuple[int, int]] = {}
        """Rank and number by body."""
        self.attempts: dict[str, int] = {}

    async def fill(self, connection: Connection, chance: random.Random, count: int, *queues: str) -> None:
        for number in range(count):
            priority = chance.choice([1, 4, 4, 9])
            body = f"{number}"
            sent = connection.send_nowait(f"/queue/{chance.choice(queues)}", body, priority=priority)
            assert not sent.is_done
            self.keys[body] = (9 - priority, number)
        await connection.flush()

    def next(self) -> str:
        return min(self.keys, key=self.keys.__getitem__)

    def check(self, message: Message | None) -> Message:
        """Check that `message` is the true next message."""
        assert message is not None, f"nothing comes, and {len(self.keys)} wait"
        body = message.text
        assert body == self.next(), f"{body} {self.keys[body]} before {self.next()} {self.keys[self.next()]}"
        assert message.attempts == self.attempts.get(body, 0)
        return message


# ---- Document 004 ----


@PREFETCHES
@pytest.mark.parametrize("is_handler", [False, True])
def test_the_third_of_five_is_rolled_back_and_the_order_is_as_sent(
    patient_broker: BrokerProcess, queue: str, prefetch: int | None, is_handler: bool
) -> None:
    async def work(connection: Connection, chance: random.Random) -> None:
        await connection.send_many(f"/queue/{queue}", list("12345"))
        seen: list[str] = []
        done: list[str] = []
        has_failed = False

        async def handle(message: Message, session: Session) -> None:
            nonlocal has_failed
            seen.append(message.text)
            if message.text == "3" and not has_failed:
                has_failed = True
                await session.rollback()
                return
            done.append(message.text)

        if is_handler:
            consuming = asyncio.create_task(
                connection.consume(f"/queue/{queue}", handle, transacted=True, prefetch=prefetch)
            )
            while len(done) < 5:
                await asyncio.sleep(0.001)
            consuming.cancel()
            await asyncio.wait({consuming})
        else:
            async with (
                connection.session(transacted=True) as session,
                session.consumer(f"/queue/{queue}", prefetch=prefetch) as consumer,
            ):
                while len(done) < 5:
                    message = await consumer.receive(PATIENCE_S)
                    assert message is not None
                    await handle(message, session)
                    await session.commit()
        assert seen == list("123345")
        assert done == list("12345")

    on_a_connection(patient_broker, work, prefetch)


@PREFETCHES
def test_messages_come_in_order_whatever_is_rolled_back(
    patient_broker: BrokerProcess, queue: str, prefetch: int | None
) -> None:
    async def work(connection: Connection, chance: random.Random) -> None:
        waiting = Waiting()
        await waiting.fill(connection, chance, MESSAGES, queue)
        async with (
            connection.session(transacted=True) as session,
            session.consumer(f"/queue/{queue}", prefetch=prefetch) as consumer,
        ):
            while waiting.keys:
                unit: dict[str, tuple[int, int]] = {}
                for _ in range(chance.randrange(1, 8)):
                    if not waiting.keys:
                        break
                    if chance.random() < 0.3:
                        got = await consumer.receive_many(chance.randrange(1, 5), PATIENCE_S)
                        assert got
                    else:
                        message = await session.receive(PATIENCE_S)
                        assert message is not None
                        got = [message]
                    for each in got:
                        waiting.check(each)
                        unit[each.text] = waiting.keys.pop(each.text)
                what = chance.random()
                if what < 0.6:
                    await session.commit()
                    continue
                waiting.keys |= unit
                failed = what < 0.9
                await session.rollback(failed=failed)
                for body in unit if failed else ():
                    waiting.attempts[body] = waiting.attempts.get(body, 0) + 1
        assert sum(waiting.attempts.values()) > 50

    on_a_connection(patient_broker, work, prefetch)


@PREFETCHES
def test_two_queues_of_one_session_are_in_one_order(
    patient_broker: BrokerProcess, new_queue: Callable[[], str], prefetch: int | None
) -> None:
    async def work(connection: Connection, chance: random.Random) -> None:
        waiting = Waiting()
        queues = new_queue(), new_queue()
        await waiting.fill(connection, chance, 200, *queues)
        by_queue: dict[str, str] = {}
        async with connection.session(transacted=True) as session:
            consumers = [await session.consumer(f"/queue/{queue}", prefetch=prefetch) for queue in queues]
            last: dict[str, tuple[int, int]] = {}
            while waiting.keys:
                unit: dict[str, tuple[int, int]] = {}
                last.clear()
                for _ in range(chance.randrange(1, 6)):
                    if not waiting.keys:
                        break
                    message = await session.receive(PATIENCE_S)
                    assert message is not None
                    key = waiting.keys[message.text]
                    # Of its own queue it is the true next; of both it is as far as both have come.
                    known = by_queue.setdefault(message.text, message.destination)
                    assert known == message.destination
                    before = last.get(message.destination)
                    assert before is None or before < key
                    last[message.destination] = key
                    assert message.attempts == waiting.attempts.get(message.text, 0)
                    unit[message.text] = waiting.keys.pop(message.text)
                if chance.random() < 0.6:
                    await session.commit()
                    continue
                await session.rollback()
                waiting.keys |= unit
                for body in unit:
                    waiting.attempts[body] = waiting.attempts.get(body, 0) + 1
            for consumer in consumers:
                await consumer.close()

    on_a_connection(patient_broker, work, prefetch)


@PREFETCHES
@pytest.mark.parametrize("rolls_back_another", [False, True])
def test_two_sessions_roll_back_beside_one_another_and_nothing_is_lost_or_counted_twice(
    patient_broker: BrokerProcess, queue: str, prefetch: int | None, rolls_back_another: bool
) -> None:
    async def work(connection: Connection, chance: random.Random) -> None:
        waiting = Waiting()
        await waiting.fill(connection, chance, 300, queue)
        done: set[str] = set()

        async def task(chance: random.Random) -> None:
            async with (
                connection.session(transacted=True) as session,
                session.consumer(f"/queue/{queue}", prefetch=prefetch) as consumer,
            ):
                while len(done) < 300:
                    unit: list[str] = []
                    for _ in range(chance.randrange(1, 6)):
                        message = await consumer.receive(0.2)
                        if message is None:
                            break
                        assert message.text not in done
                        assert message.attempts == waiting.attempts.get(message.text, 0)
                        unit.append(message.text)
                    if chance.random() < 0.7:
                        await session.commit()
                        done.update(unit)
                        continue
                    for body in unit:
                        waiting.attempts[body] = waiting.attempts.get(body, 0) + 1
                    if rolls_back_another and unit:
                        await asyncio.create_task(session.rollback())
                    await session.rollback()

        await asyncio.gather(task(random.Random(chance.random())), task(random.Random(chance.random())))
        assert len(done) == 300

    on_a_connection(patient_broker, work, (prefetch, rolls_back_another))


@PREFETCHES
@pytest.mark.parametrize("waits", [False, True])
def test_a_rollback_from_another_task_finds_the_true_next_again(
    patient_broker: BrokerProcess, queue: str, prefetch: int | None, waits: bool
) -> None:
    """The first task waits for more messages, or works."""

    async def work(connection: Connection, chance: random.Random) -> None:
        await connection.send_many(f"/queue/{queue}", list("123") if waits else list("12345"))
        async with (
            connection.session(transacted=True) as session,
            session.consumer(f"/queue/{queue}", prefetch=prefetch) as consumer,
        ):
            for expected in "123":
                message = await consumer.receive(PATIENCE_S)
                assert message is not None and message.text == expected

            async def other() -> None:
                await asyncio.sleep(0.02)
                await session.rollback()

            rolling_back = asyncio.create_task(other())
            with pytest.raises(Exception, match="another task"):
                if waits:
                    await consumer.receive(PATIENCE_S)
                else:
                    await rolling_back
                    await session.commit()
            await rolling_back
            if waits:
                await session.rollback()
            for expected in "123":
                message = await consumer.receive(PATIENCE_S)
                assert message is not None and message.text == expected and message.attempts == 1
            await session.commit()

    on_a_connection(patient_broker, work, prefetch)


# ---- Closes instead of rollbacks ----


@PREFETCHES
@pytest.mark.parametrize("count", [20, 10, 5])
@pytest.mark.parametrize("what", ["consumer", "session", "transacted session", "connection"])
def test_messages_released_by_a_close_come_again_in_order(
    patient_broker: BrokerProcess, queue: str, prefetch: int | None, count: int, what: str
) -> None:
    async def work(connection: Connection, chance: random.Random) -> None:
        waiting = Waiting()
        await waiting.fill(connection, chance, count, queue)
        url = f"stomp://127.0.0.1:{patient_broker.port}"

        async def some(consumer: Consumer, session: Session | None) -> None:
            """Handle a few messages, and leave the last of them unsettled."""
            for number in range(chance.randrange(1, 4)):
                if not waiting.keys:
                    return
                message = waiting.check(await consumer.receive(PATIENCE_S))
                if session is not None and what == "transacted session":
                    if number:
                        return
                    await session.commit()
                elif number:
                    return
                else:
                    await message.ack()
                del waiting.keys[message.text]

        while waiting.keys:
            if what == "consumer":
                async with connection.consumer(f"/queue/{queue}", ack="individual", prefetch=prefetch) as consumer:
                    await some(consumer, None)
            elif what == "connection":
                async with connect(url) as other:
                    await some(await other.consumer(f"/queue/{queue}", ack="individual", prefetch=prefetch), None)
            else:
                async with connection.session(transacted=what == "transacted session") as session:
                    consumer = await session.consumer(f"/queue/{queue}", prefetch=prefetch)
                    await some(consumer, session)

    on_a_connection(patient_broker, work, (prefetch, count, what))


@PREFETCHES
def test_two_consumers_that_are_closed_in_turn_lose_nothing(
    patient_broker: BrokerProcess, queue: str, prefetch: int | None
) -> None:
    async def work(connection: Connection, chance: random.Random) -> None:
        await connection.send_many(f"/queue/{queue}", [f"{number}" for number in range(100)])
        seen: list[int] = []

        async def task(chance: random.Random) -> None:
            while len(seen) < 100:
                async with connection.consumer(f"/queue/{queue}", ack="individual", prefetch=prefetch) as consumer:
                    for _ in range(chance.randrange(1, 8)):
                        message = await consumer.receive(0.05)
                        if message is None:
                            break
                        assert message.attempts == 0
                        if chance.random() < 0.7:
                            await message.ack()
                            seen.append(int(message.text))

        await asyncio.gather(task(random.Random(chance.random())), task(random.Random(chance.random())))
        assert sorted(seen) == list(range(100))

    on_a_connection(patient_broker, work, prefetch)


@PREFETCHES
def test_attempts_are_counted_one_by_one(patient_broker: BrokerProcess, queue: str, prefetch: int | None) -> None:
    async def work(connection: Connection, chance: random.Random) -> None:
        await connection.send_many(f"/queue/{queue}", ["fails", "waits", "waits too"])
        async with (
            connection.session(transacted=True) as session,
            session.consumer(f"/queue/{queue}", prefetch=prefetch) as consumer,
        ):
            for attempts in range(12):
                message = await consumer.receive(PATIENCE_S)
                assert message is not None and (message.text, message.attempts) == ("fails", attempts)
                assert message.deliveries > attempts
                assert message.redelivered is (message.deliveries > 1)
                await session.rollback()
            for text in ("fails", "waits", "waits too"):
                message = await consumer.receive(PATIENCE_S)
                assert message is not None and message.text == text
            await session.commit()

    on_a_connection(patient_broker, work, prefetch)
