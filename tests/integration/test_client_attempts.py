"""Tests of the errors and losses that count as a delivery attempt.

Source of what is expected: docs/attempts.md.
"""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess, dying_with_us
from tests.integration.client_here import on_a_connection, remaining
from truenext.client.tasks.connection import Connection, Message, Session, connect
from truenext.errors import ClosedError, Code, ConnectionLost, InDoubt, Refused, RolledBack
from truenext.testing.local import LocalBroker

PATIENCE_S = 60.0
PREFETCHES = one_of("prefetch", [0, 1, 10, None], ["prefetch 0", "prefetch 1", "prefetch 10", "default prefetch"])


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def with_context(error: Exception, context: BaseException) -> Exception:
    error.__context__ = context
    return error


COUNTED = [ValueError("x"), Refused("x", Code.DESTINATION), TimeoutError("x"), OSError("x")]
NOT_COUNTED: list[BaseException] = [
    asyncio.CancelledError(),
    *(ConnectionLost("x"), RolledBack("x"), InDoubt("x", ""), ClosedError("x"), Refused("x", Code.NO_SPACE)),
    *(
        caused(ValueError("x"), ConnectionLost("x")),
        with_context(ValueError("x"), caused(OSError("x"), RolledBack("x"))),
    ),
]
ERRORS = pytest.mark.parametrize(
    ("error", "counts"),
    [*((error, True) for error in COUNTED), *((error, False) for error in NOT_COUNTED)],
    ids=lambda each: type(each).__name__ if isinstance(each, BaseException) else None,
)


async def raises(error: BaseException, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except BaseException as raised:
        assert raised is error, raised
    else:
        raise AssertionError(f"{error!r} was swallowed")


@ERRORS
@PREFETCHES
def test_an_error_outside_transactions_counts_an_attempt_of_its_message_at_most(
    error: BaseException, counts: bool, prefetch: int | None
) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async def of_a_message() -> None:
            async with connection.consumer("/queue/q", ack="individual", prefetch=prefetch) as consumer:
                message = await consumer.receive(PATIENCE_S)
                assert message is not None
                async with message.process():
                    raise error

        await raises(error, of_a_message)
        assert await remaining(broker) == [("0", int(counts)), ("1", 0), ("2", 0), ("3", 0)]

        async def of_a_consumer() -> None:
            async with connection.consumer("/queue/q", prefetch=prefetch) as consumer:
                assert await consumer.receive(PATIENCE_S)
                assert await consumer.receive(PATIENCE_S)
                raise error

        await raises(error, of_a_consumer)
        assert await remaining(broker) == [("1", int(counts)), ("2", 0), ("3", 0)]

    on_a_connection(work, waiting="0123")


@ERRORS
@pytest.mark.parametrize(
    ("ack", "prefetch"),
    # Two messages are in hand at once, which a prefetch of 1 counts if they are acknowledged at the commit.
    [*(("receive", prefetch) for prefetch in (0, 1, 10, None)), *(("commit", prefetch) for prefetch in (0, 2, None))],
)
@pytest.mark.parametrize("names", ["nobody", "by process", "by failed"])
def test_an_error_in_a_transaction_counts_an_attempt_of_the_named_messages_or_of_all(
    error: BaseException, counts: bool, ack: str, prefetch: int | None, names: str
) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async def block() -> None:
            async with (
                connection.session(transacted=True, ack=ack) as session,
                session.consumer("/queue/q", prefetch=prefetch),
                session.transaction() as transaction,
            ):
                first = await session.receive(PATIENCE_S)
                second = await session.receive(PATIENCE_S)
                assert first is not None and second is not None
                await session.send("/queue/done", "x")
                if names == "by failed" and counts:
                    transaction.mark_failed(second)
                if names == "by process":
                    async with second.process():
                        raise error
                raise error

        await raises(error, block)
        first = int(counts and names == "nobody")
        assert await remaining(broker) == [("0", first), ("1", int(counts)), ("2", 0), ("3", 0)]
        assert await remaining(broker, "done") == []

    on_a_connection(work, waiting="0123")


@ERRORS
@pytest.mark.parametrize(("transacted", "ack"), [(False, "receive"), (True, "receive"), (True, "commit")])
def test_a_handler_that_raises_counts_the_same_attempts_as_its_code_without_a_handler(
    error: BaseException, counts: bool, transacted: bool, ack: str
) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        attempts: list[int] = []
        ended = asyncio.Event()

        async def handle(message: Message, session: Session) -> None:
            if message.text == "1":
                attempts.append(message.attempts)
                if len(attempts) == 1:
                    raise error
            else:
                await asyncio.sleep(0.02)
            if message.text == "3":
                ended.set()

        consuming = asyncio.create_task(
            connection.consume("/queue/q", handle, transacted=transacted, ack=ack, concurrency=8, prefetch=10)
        )
        await asyncio.wait_for(ended.wait(), PATIENCE_S)
        consuming.cancel()
        await asyncio.wait({consuming})
        assert attempts == [0, int(counts)]
        assert await remaining(broker) == []

    on_a_connection(work, waiting="0123")


@PREFETCHES
def test_settling_one_message_counts_no_attempt_of_another(prefetch: int | None) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.consumer("/queue/q", ack="individual", prefetch=prefetch) as consumer:
            for how, text, attempts in (("release", "0", 0), ("nack", "0", 0), ("reject", "0", 1), ("ack", "1", 0)):
                message = await consumer.receive(PATIENCE_S)
                assert message is not None and (message.text, message.attempts) == (text, attempts)
                await getattr(message, how)()
        assert await remaining(broker) == [("2", 0), ("3", 0)]
        assert [body for body, _ in await remaining(broker, "DLQ.q")] == ["0"]

    on_a_connection(work, waiting="0123")


# ---- Several at once ----


@PREFETCHES
def test_receive_many_hands_out_each_message_once(prefetch: int | None) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/many", [f"{number}" for number in range(50)])
        start = 0
        for ack in ("auto", "individual"):
            seen: list[str] = []
            async with connection.consumer("/queue/many", ack=ack, prefetch=prefetch) as consumer:
                while len(seen) < 20 and (got := await consumer.receive_many(7, PATIENCE_S)):
                    seen += [message.text for message in got]
                    for message in got:
                        if ack == "individual":
                            await message.ack()
            assert seen == [f"{start + number}" for number in range(len(seen))]
            start += len(seen)
        assert await remaining(broker, "many") == [(f"{number}", 0) for number in range(start, 50)]

    on_a_connection(work, waiting="0123")


@one_of("mode", ["auto", "receive", "commit"], ids=["auto", "receive", "commit"])
@PREFETCHES
def test_poison_message_of_a_batch_is_the_only_one_dead_lettered(mode: str, prefetch: int | None) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/batch", ["a", "b", "poison", "c", "d"])
        done: list[str] = []
        most = 0

        async def handle(batch: list[Message]) -> None:
            nonlocal most
            most = max([most, *(message.attempts for message in batch if message.text != "poison")])
            if any(message.text == "poison" for message in batch):
                raise ValueError("poison")

        for _ in range(40):
            await broker.advance(seconds=400)
            try:
                if mode == "auto":
                    async with connection.consumer("/queue/batch", prefetch=prefetch) as consumer:
                        batch = await consumer.receive_many(5, 0.05)
                        await handle(batch)
                else:
                    async with (
                        connection.session(transacted=True, ack=mode) as session,
                        session.consumer("/queue/batch", prefetch=prefetch),
                        session.transaction(),
                    ):
                        batch = await session.receive_many(5, 0.05)
                        await handle(batch)
            except ValueError:
                continue
            done += [message.text for message in batch]
            if len(done) == 4 and await remaining(broker, "DLQ.batch"):
                break
        assert sorted(done) == ["a", "b", "c", "d"]
        assert most <= 1
        assert [body for body, _ in await remaining(broker, "DLQ.batch")] == ["poison"]

    on_a_connection(work, waiting="0123")


HANDLER_THAT_DIES = """
import asyncio, json, os, signal, sys
from truenext.client.tasks.connection import connect

url, how, ack = sys.argv[1:]
options = {} if ack == "individual" else {"transacted": True, "ack": ack}

async def main():
    async with connect(url) as connection:
        async def handle(message, session):
            await asyncio.sleep(0.02)
            if message.text == "poison":
                os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(1)
            await asyncio.sleep(0.02)
            await session.send("/queue/done", message.body)

        consuming = asyncio.create_task(
            connection.consume("/queue/q", handle, concurrency=8, **options)
        )
        empty = 0
        # What the transactions of a process that has died had comes back a second later.
        while empty < 15:
            queues = json.loads(await connection.control_request("queues"))
            has_any = any(each["name"] == "q" and each["waiting"] + each["unacknowledged"] for each in queues)
            empty = 0 if has_any else empty + 1
            await asyncio.sleep(0.1)
        consuming.cancel()
        await asyncio.wait({consuming})

asyncio.run(main())
"""
ATTEMPTS_MAX = 3


@pytest.mark.alternates("messages that kill")
@pytest.mark.parametrize(("how", "ack"), [("kill", "individual"), ("exit", "receive"), ("kill", "commit")])
def test_message_that_kills_its_process_is_the_only_one_of_eight_handled_at_once_dead_lettered(
    tmp_path: Path, how: str, ack: str
) -> None:
    broker = BrokerProcess(tmp_path, policy={"delay_ms": 0, "attempts_max": ATTEMPTS_MAX})
    try:
        broker.start()
        url = f"stomp://127.0.0.1:{broker.port}"

        async def send() -> None:
            async with connect(url) as connection:
                await connection.send_many("/queue/q", [f"{n}" if n != 4 else "poison" for n in range(24)])

        asyncio.run(send())
        deaths = 0
        while subprocess.run(
            dying_with_us([sys.executable, "-c", HANDLER_THAT_DIES, url, how, ack]),
            timeout=20,
            check=False,
        ).returncode:
            deaths += 1
            assert deaths <= ATTEMPTS_MAX, "it is no dead letter"
        assert deaths == ATTEMPTS_MAX
        assert [frame.body for frame in broker.remaining_messages("DLQ.q")] == [b"poison"]
        done = [int(frame.body) for frame in broker.remaining_messages("done")]
        assert set(done) == set(range(24)) - {4}
        if ack != "individual":
            assert len(done) == 23
        broker.stop()
    finally:
        broker.clean_up()
