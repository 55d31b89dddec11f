"""Tests of connections that cannot be used any more: closed, in another event loop, in a forked process, after an error
of their own.

Source of what is expected: docs/client.md, "Cancelled calls".
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from unittest.mock import patch

import pytest

from tests.integration.broker_process import dying_with_us
from truenext import testing
from truenext.client.core.client import Client
from truenext.client.core.send_buffer import SendBuffer
from truenext.client.tasks.connection import Connection, Message, Session, connect
from truenext.errors import ClosedError, TruenextError

PATIENCE_S = 60.0


async def handle(message: Message, session: Session) -> None:
    pass


async def everything(connection: Connection) -> dict[str, Callable[[], Coroutine[Any, Any, Any]]]:
    """Return all calls that a program can make, by their names."""
    consumer = await connection.consumer("/queue/none", ack="individual")
    other = await connection.consumer("/queue/q", ack="individual", prefetch=1)
    session = await connection.session(transacted=True)
    await session.consumer("/queue/none")
    message = await other.receive(PATIENCE_S)
    assert message is not None

    async def send_nowait() -> None:
        connection.send_nowait("/queue/q", "x")

    async def browse() -> None:
        await anext(aiter(connection.browse("/queue/q")))

    async def subscribe() -> None:
        await connection.consumer("/queue/q")

    async def open_session() -> None:
        await connection.session()

    return {
        "send": lambda: connection.send("/queue/q", "x"),
        "send_many": lambda: connection.send_many("/queue/q", ["x"]),
        "send_nowait": send_nowait,
        "request": lambda: connection.request("/queue/q", "x"),
        "ask": lambda: connection.control_request("queues"),
        "browse": browse,
        "consumer": subscribe,
        "session": open_session,
        "consume": lambda: connection.consume("/queue/q", handle),
        "unsubscribe": lambda: connection.unsubscribe("x"),
        "receive": consumer.receive,
        "receive_many": lambda: consumer.receive_many(3),
        "session.receive": session.receive,
        "session.send": lambda: session.send("/queue/q", "x"),
        "commit": session.commit,
    }


async def message_calls(connection: Connection) -> dict[str, Callable[[], Coroutine[Any, Any, Any]]]:
    consumer = await connection.consumer("/queue/q", ack="individual", prefetch=1)
    message = await consumer.receive(PATIENCE_S)
    assert message is not None
    session = await connection.session(transacted=True)
    return {
        "ack": message.ack,
        "nack": message.nack,
        "reject": message.reject,
        "release": message.release,
        "session.flush": session.flush,
        "pause": consumer.pause,
        "resume": consumer.resume,
        "rollback": session.rollback,
        "session.close": session.close,
        "consumer.close": consumer.close,
        "flush": connection.flush,
        "close": connection.close,
    }


async def expect_refusal(name: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    try:
        await asyncio.wait_for(call(), PATIENCE_S)
    except ClosedError:
        return
    raise AssertionError(f"{name} has raised no ClosedError")


def test_calls_after_close_raise_closed_error_at_once() -> None:
    async def main() -> None:
        async with testing.broker() as broker:
            connection = await connect(broker.url)
            await connection.send_many("/queue/q", ["0", "1"])
            calls = await everything(connection)
            await connection.close()
            for name, call in calls.items():
                await expect_refusal(name, call)
            await connection.close()

    asyncio.run(main())


def test_calls_in_another_event_loop_raise_closed_error_and_touch_nothing() -> None:
    async def elsewhere(calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]]) -> None:
        for name, call in calls.items():
            await expect_refusal(name, call)

    async def main() -> None:
        async with testing.broker() as broker, connect(broker.url) as connection:
            await connection.send_many("/queue/q", ["0", "1", "2"])
            calls = await everything(connection) | await message_calls(connection)
            await asyncio.to_thread(lambda: asyncio.run(elsewhere(calls)))
            assert connection.health().reconnects == 0
            contents = await broker.queue("q")
            assert contents.unacknowledged == 2 and contents.waiting == 1

    asyncio.run(main())


FORKS = """
import asyncio, os, sys
from truenext.client.tasks.connection import connect
from truenext.errors import ClosedError

COUNT = 3000

async def main():
    loop = asyncio.get_running_loop()
    async with connect(sys.argv[1], heart_beat=0.3) as connection:
        await connection.send_many("/queue/q", [str(number) for number in range(COUNT)])
        async with connection.consumer("/queue/q") as consumer, connection.session(transacted=True) as session:
            async with session.transaction():
                await session.send("/queue/done", "x")
                message = await consumer.receive()
                connection.send_nowait("/queue/other", "x" * 1000)
                child = os.fork()
                if not child:
                    for call in (lambda: connection.send("/queue/q", "child"), consumer.receive, message.release,
                                 session.commit, connection.close):
                        try:
                            await call()
                        except ClosedError:
                            continue
                        os._exit(1)
                    # Its copy of the loop goes on for some heart-beats.
                    over = loop.create_future()
                    loop.call_later(0.5, over.set_result, None)
                    await over
            if child:
                for number in range(1, COUNT):
                    assert (await consumer.receive()).text == str(number)
    if not child:
        os._exit(0)
    _, status = await loop.run_in_executor(None, os.waitpid, child, 0)
    assert status == 0, status
    assert connection.health().reconnects == 0
    return 0

sys.exit(asyncio.run(main()))
"""


def test_calls_in_a_forked_child_raise_closed_error_and_the_parent_goes_on() -> None:
    with testing.blocking_broker() as broker:
        done = subprocess.run(
            dying_with_us([sys.executable, "-W", "error::RuntimeWarning", "-c", FORKS, broker.url]),
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert broker.queue("q").bodies == []
        assert broker.queue("done").bodies == [b"x"]
        assert broker.queue("other").bodies == [b"x" * 1000]


# ---- An error in the client itself ----


class Bug(Exception):
    pass


@pytest.mark.parametrize("where", ["received", "tick", "writing"])
def test_an_error_in_the_client_itself_is_raised_in_all_waiting_calls(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise Bug

    async def main() -> None:
        async with testing.broker() as broker:
            connection = await connect(broker.url, heart_beat=0.25)
            consumer = await connection.consumer("/queue/q")
            other = await connection.consumer("/queue/q", prefetch=0)
            session = await connection.session(transacted=True)
            await session.send("/queue/done", "x")
            broker.slow_disk(1000)
            connection.send_nowait("/queue/new", "x")
            calls: dict[str, Awaitable[Any]] = {
                "receive": consumer.receive(),
                "pull": other.receive(),
                "send": connection.send("/queue/new", "x"),
                "flush": connection.flush(),
                "request": connection.request("/queue/q2", "x"),
                "consume": connection.consume("/queue/q3", handle, concurrency=3),
                "commit": session.commit(),
            }
            waiting = {name: asyncio.ensure_future(call) for name, call in calls.items()}
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in waiting.values())
            owner, method = {
                "received": (Client, "receive_data"),
                "tick": (Client, "run_due_calls"),
                "writing": (SendBuffer, "pump"),
            }[where]
            with patch.object(owner, method, fails):
                if where == "writing":
                    connection.send_nowait("/queue/new", "x")
                _, pending = await asyncio.wait(waiting.values(), timeout=PATIENCE_S)
            assert not pending, [name for name, task in waiting.items() if task in pending]
            for name, task in waiting.items():
                error = task.exception()
                assert isinstance(error, TruenextError), (name, error)
            with pytest.raises(TruenextError, match="internal error"):
                await connection.send("/queue/new", "x")
            await connection.close()
            broker.slow_disk(0)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert "internal error of the client" in caplog.messages


def test_ctrl_c_ends_a_program_and_counts_no_attempt() -> None:
    program = """
import asyncio, sys
from truenext.client.tasks.connection import connect

async def main():
    async with connect(sys.argv[1]) as connection:
        async with connection.consumer("/queue/q") as consumer:
            await consumer.receive()
            print("has it", flush=True)
            await consumer.receive_many(5, 60) and await asyncio.sleep(60)

asyncio.run(main())
"""
    with testing.blocking_broker() as broker:

        async def send() -> None:
            async with connect(broker.url) as connection:
                await connection.send_many("/queue/q", ["0", "1"])

        asyncio.run(send())
        with subprocess.Popen(
            dying_with_us([sys.executable, "-c", program, broker.url]), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"has it\n"
            os.kill(process.pid, signal.SIGINT)
            _, stderr = process.communicate(timeout=10)
            assert stderr.rstrip().endswith(b"KeyboardInterrupt"), stderr
        assert [
            (each.body, each.headers["truenext-attempts"]) for each in broker.queue("q").messages if each.body != b"0"
        ] == [(b"1", "0")]
