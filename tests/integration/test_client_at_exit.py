"""Tests of connections that a program does not close before it ends.

Source of what is expected: docs/client.md, "Stop a program".
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess, dying_with_us


def run(broker: BrokerProcess, script: str, *options: str) -> str:
    """Run a program to its end, which must be soon and without failure. Return its standard error."""
    head = f"""
import asyncio, os, signal, sys
import truenext
from truenext import blocking
from truenext.client.threads import driver
url = "stomp://127.0.0.1:{broker.port}"
def freeze():
    os.kill({broker.pid}, signal.SIGSTOP)
"""
    done = subprocess.run(
        dying_with_us([sys.executable, *options, "-c", head + dedent(script)]),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS / 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture
def freezing_broker(own_broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """Broker that programs suspend with `freeze()`, and that is resumed after the test."""
    yield own_broker
    own_broker.send_signal(signal.SIGCONT)


def test_messages_of_send_nowait_arrive_though_a_blocking_program_ends_without_close(
    broker: BrokerProcess, queue: str
) -> None:
    stderr = run(
        broker,
        f"""
        connection = blocking.connect(url)
        for number in range(3000):
            connection.send_nowait("/queue/{queue}", str(number))
        """,
        "-Wdefault",
    )
    assert stderr == ""
    broker.await_facts(queue, waiting=3000)


def test_forked_child_that_ends_waits_for_no_message_of_its_parent(freezing_broker: BrokerProcess) -> None:
    stderr = run(
        freezing_broker,
        """
        driver.EXIT_TIMEOUT_S = 0.1
        connection = blocking.connect(url)
        freeze()
        connection.send_nowait("/queue/q", "1")
        if os.fork():
            _, status = os.wait()
            os._exit(os.waitstatus_to_exitcode(status))
        driver.EXIT_TIMEOUT_S = 600
        """,
    )
    assert stderr == ""


def test_blocking_program_that_ends_waits_for_receipts_for_a_bounded_time_and_reports_losses(
    freezing_broker: BrokerProcess,
) -> None:
    stderr = run(
        freezing_broker,
        """
        driver.EXIT_TIMEOUT_S = 0.1
        connection = blocking.connect(url)
        freeze()
        for number in range(5):
            connection.send_nowait("/queue/q", "1")
        """,
        "-Wdefault",
    )
    lost = f"5 messages to stomp://127.0.0.1:{freezing_broker.port} were not confirmed"
    log, warning, *_ = stderr.splitlines()
    assert log.startswith(lost)
    assert f"ResourceWarning: unclosed connection: {lost}" in warning


@pytest.mark.parametrize(
    ("call", "is_refused"),
    [
        ('connection.send("/queue/q", "1")', True),
        ("connection.flush()", True),
        ("consumer.receive()", True),
        ("blocking.connect(url)", True),
        ("connection.close(timeout=600)", False),
        ("consumer.close()", False),
        ("session.close()", False),
    ],
)
def test_call_of_a_finalizer_at_the_end_of_the_program_returns_at_once(
    broker: BrokerProcess, queue: str, call: str, is_refused: bool
) -> None:
    stderr = run(
        broker,
        f"""
        class Last:
            def __del__(self, sys=sys, blocking=blocking, url=url):
                assert sys.is_finalizing()
                connection, session, consumer = self.used
                {call}

        last = Last()
        connection = blocking.connect(url)
        session = connection.session(transacted=True)
        last.used = (connection, session, session.consumer("/queue/{queue}"))
        del connection, session
        """,
    )
    assert ("ClosedError: the connection ends with the program" in stderr) is is_refused
    if not is_refused:
        assert stderr == ""


def test_finally_of_a_generator_that_is_left_at_the_end_of_the_program_returns_at_once(
    broker: BrokerProcess, queue: str
) -> None:
    stderr = run(
        broker,
        f"""
        def messages():
            connection = blocking.connect(url)
            with connection.session(transacted=True) as session, session.consumer("/queue/{queue}") as consumer:
                try:
                    with session.transaction():
                        session.send("/queue/{queue}", "1")
                        yield 1
                finally:
                    connection.close(timeout=600)

        left = messages()
        next(left)
        """,
    )
    assert stderr == ""


@pytest.mark.parametrize("destination", ["local", "global"])
def test_event_loop_that_ends_with_unconfirmed_messages_warns_of_them(
    freezing_broker: BrokerProcess, destination: str
) -> None:
    stderr = run(
        freezing_broker,
        f"""
        kept = []

        async def main():
            connection = await truenext.connect(url)
            freeze()
            for number in range(5):
                connection.send_nowait("/queue/q", "1")
            if "{destination}" == "global":
                kept.append(connection)

        asyncio.run(main())
        """,
        "-Wdefault",
    )
    lost = f"5 messages to stomp://127.0.0.1:{freezing_broker.port} were not confirmed"
    assert stderr.count(f"ResourceWarning: unclosed connection: {lost}") == 1
    # It is said without any option, too.
    assert any(line.startswith(lost) for line in stderr.splitlines())


def test_connection_that_is_collected_with_unconfirmed_messages_warns_before_the_program_ends(
    freezing_broker: BrokerProcess,
) -> None:
    """Regression: the collected driver asked for an attribute by an old name, and the warning waited for the exit."""
    stderr = run(
        freezing_broker,
        """
        import gc, sys

        async def main():
            connection = await truenext.connect(url)
            freeze()
            for number in range(5):
                connection.send_nowait("/queue/q", "1")

        asyncio.run(main())
        gc.collect()
        print("goes on", file=sys.stderr)
        """,
        "-Wdefault",
    )
    lost = f"5 messages to stomp://127.0.0.1:{freezing_broker.port} were not confirmed"
    assert 0 <= stderr.find(lost) < stderr.find("goes on")


def test_event_loop_that_ends_with_a_closed_connection_warns_of_nothing(broker: BrokerProcess, queue: str) -> None:
    stderr = run(
        broker,
        f"""
        async def main():
            async with truenext.connect(url) as connection:
                for number in range(5):
                    connection.send_nowait("/queue/{queue}", "1")

        asyncio.run(main())
        """,
        "-Wdefault",
    )
    assert stderr == ""
    broker.await_facts(queue, waiting=5)


def test_ack_that_waits_arrives_though_a_blocking_program_ends_without_close(broker: BrokerProcess, queue: str) -> None:
    stderr = run(
        broker,
        f"""
        driver.ACK_DELAY_S = 60.0
        connection = blocking.connect(url)
        connection.send_many("/queue/{queue}", ["1", "2"])
        consumer = connection.consumer("/queue/{queue}", ack="individual").__enter__()
        message = consumer.receive()
        while not len(consumer._subscription):
            pass
        message.ack()
        """,
    )
    assert stderr == ""
    broker.await_facts(queue, consumers=0)
    assert [frame.body for frame in broker.remaining_messages(queue)] == [b"2"]


def test_ack_that_waits_arrives_though_an_asyncio_program_ends_without_close(broker: BrokerProcess, queue: str) -> None:
    stderr = run(
        broker,
        f"""
        async def main():
            global connection, consumer
            connection = await truenext.connect(url)
            await connection.send_many("/queue/{queue}", ["1", "2"])
            consumer = await connection.consumer("/queue/{queue}", ack="individual")
            message = await consumer.receive()
            while not len(consumer._subscription):
                await asyncio.sleep(0)
            await message.ack()
        asyncio.run(main())
        """,
    )
    assert stderr == ""
    broker.await_facts(queue, consumers=0)
    assert [frame.body for frame in broker.remaining_messages(queue)] == [b"2"]
