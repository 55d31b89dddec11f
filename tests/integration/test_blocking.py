"""Tests of the client for programs with threads.

Source of what is expected: docs/client.md.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess, dying_with_us
from truenext import blocking
from truenext.errors import ClosedError, ConnectionLost, LocalProtocolError, Refused, RolledBack
from truenext.model.url import Address
from truenext.testing.blocking import blocking_broker
from truenext.tls import TlsSocket

PREFETCHES = pytest.mark.parametrize("prefetch", [None, 0, 1, 10])


def url(broker: BrokerProcess) -> str:
    return f"stomp://127.0.0.1:{broker.port}"


@pytest.fixture
def connection(broker: BrokerProcess) -> Iterator[blocking.Connection]:
    with blocking.connect(url(broker)) as connection:
        yield connection


@pytest.fixture
def destination(queue: str) -> str:
    return f"/queue/{queue}"


@pytest.fixture(autouse=True)
def no_thread_remains() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + PATIENCE_SECONDS
    while remaining := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, f"threads are left: {remaining}"
        time.sleep(0.002)


@contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run `work` in a thread during the block, and raise its error after the block."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield thread
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "it waits for ever"
    for error in errors:
        raise error


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


def text(message: blocking.Content | None) -> str:
    assert message is not None, "nothing came"
    return message.text


def fill(connection: blocking.Connection, destination: str, count: int) -> None:
    assert connection.send_many(destination, (str(number) for number in range(count))) == count


def to_main_thread(number: signal.Signals) -> None:
    """Send a signal to the main thread, as the system does with a signal for the process."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


@contextmanager
def interrupted(after: Callable[[], bool] = lambda: True, *, delay: float = 0.1) -> Iterator[None]:
    """Press Ctrl-C during the block, `delay` seconds after `after` has become true."""

    def press() -> None:
        await_true(after)
        time.sleep(delay)
        to_main_thread(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with in_thread(press):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


# ---- Sending and receiving ----


def test_connect_gives_a_connection_with_and_without_a_block(broker: BrokerProcess, destination: str) -> None:
    connection = blocking.connect(url(broker))
    connection.send(destination, b"1")
    assert connection.health().state == "connected"
    connection.close()
    assert connection.health().state == "closed"
    with pytest.raises(ClosedError):
        connection.send(destination, b"2")
    connection.close()


def test_connect_without_a_broker_raises_within_its_timeout() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionLost, match="no broker at"):
            blocking.connect(f"stomp://127.0.0.1:{listener.getsockname()[1]}", timeout=0.2)


def test_a_refused_message_raises_to_its_sender_alone(connection: blocking.Connection, destination: str) -> None:
    with pytest.raises(Refused):
        connection.send("/nowhere/at-all", b"")
    connection.send(destination, b"1")
    with connection.consumer(destination) as consumer:
        assert text(consumer.receive(5)) == "1"


@PREFETCHES
def test_consumer_hands_out_messages_in_order(
    connection: blocking.Connection, destination: str, prefetch: int | None
) -> None:
    fill(connection, destination, 50)
    connection.send(destination, "first", priority=9)
    with connection.consumer(destination, prefetch=prefetch) as consumer:
        got = [text(consumer.receive(5)) for _ in range(51)]
        assert got == ["first", *map(str, range(50))]
        assert consumer.receive(0) is None
        assert consumer.receive(0.05) is None


@PREFETCHES
def test_receive_0_returns_a_ready_message(
    connection: blocking.Connection, destination: str, prefetch: int | None
) -> None:
    with connection.consumer(destination, prefetch=prefetch) as consumer:
        for number in range(5):
            connection.send(destination, str(number))
            assert text(consumer.receive(0)) == str(number)
            assert consumer.receive(0) is None


def test_an_auto_consumer_acknowledges_a_message_when_it_asks_for_the_next(
    broker: BrokerProcess, connection: blocking.Connection, queue: str, destination: str
) -> None:
    fill(connection, destination, 3)
    with connection.consumer(destination) as consumer:
        for message in consumer:
            if message.text == "1":
                break
    broker.await_facts(queue, waiting=1, unacknowledged=0)
    with pytest.raises(ZeroDivisionError), connection.consumer(destination) as consumer:
        assert text(consumer.receive(5)) == "2"
        raise ZeroDivisionError
    with connection.consumer(destination) as consumer:
        again = consumer.receive(5)
        assert again is not None and again.attempts == 1


def test_individual_messages_are_settled_one_by_one(
    broker: BrokerProcess, connection: blocking.Connection, queue: str, destination: str
) -> None:
    fill(connection, destination, 4)
    with connection.consumer(destination, ack="individual") as consumer:
        got = [consumer.receive(5) for _ in range(4)]
        first, second, third, fourth = (message for message in got if message is not None)
        first.ack()
        with pytest.raises(LocalProtocolError):
            first.ack()
        with second.process():
            pass
        third.release()
        with pytest.raises(ZeroDivisionError), fourth.process():
            raise ZeroDivisionError
        for number, attempts in (("2", 0), ("3", 1)):
            back = consumer.receive(5)
            assert back is not None and (back.text, back.attempts) == (number, attempts)
            back.ack()
    broker.await_facts(queue, waiting=0, unacknowledged=0)


def test_a_transaction_happens_or_does_not(
    broker: BrokerProcess, connection: blocking.Connection, destination: str, new_queue: Callable[[], str]
) -> None:
    done = f"/queue/{new_queue()}"
    fill(connection, destination, 2)
    with connection.session(transacted=True) as session:
        consumer = session.consumer(destination)
        with session.transaction() as transaction:
            session.send(done, text(consumer.receive(5)))
        assert transaction.outcome is blocking.Outcome.COMMITTED
        with pytest.raises(ZeroDivisionError), session.transaction() as transaction:
            session.send(done, text(session.receive(5)))
            raise ZeroDivisionError
        assert transaction.outcome is blocking.Outcome.ROLLED_BACK
        message = consumer.receive(5)
        assert text(message) == "1" and message is not None and message.attempts == 1
        session.rollback(failed=False)
    assert [shown.text for shown in connection.browse(done)] == ["0"]
    assert [shown.text for shown in connection.browse(destination)] == ["1"]


def test_a_rollback_by_another_thread_dooms_the_transaction(connection: blocking.Connection, destination: str) -> None:
    fill(connection, destination, 1)
    with connection.session(transacted=True) as session, session.consumer(destination) as consumer:
        assert text(consumer.receive(5)) == "0"
        with in_thread(lambda: session.rollback(failed=False)):
            pass
        with pytest.raises(RolledBack):
            session.commit()
        assert text(consumer.receive(5)) == "0"
        session.commit()


def test_send_nowait_does_not_wait_and_flush_does(connection: blocking.Connection, destination: str) -> None:
    sent = [connection.send_nowait(destination, str(number)) for number in range(100)]
    sent[50].wait()
    connection.flush()
    assert all(each.is_done for each in sent)
    assert len(list(connection.browse(destination))) == 100


def test_send_many_of_more_messages_than_may_be_unconfirmed_sends_all(
    connection: blocking.Connection, destination: str
) -> None:
    fill(connection, destination, 12_000)
    assert connection.health().unconfirmed == 0


def test_a_message_larger_than_the_socket_buffer_arrives(
    broker: BrokerProcess, connection: blocking.Connection, destination: str
) -> None:
    large = b"x" * (6 * 1024 * 1024)
    with in_thread(lambda: connection.send(destination, large)):
        with broker.asleep():
            time.sleep(0.3)
        connection.send(destination, b"small", priority=9)
    with connection.consumer(destination) as consumer:
        assert text(consumer.receive(10)) == "small"
        message = consumer.receive(10)
        assert message is not None and message.body == large


def test_browse_shows_and_takes_nothing(connection: blocking.Connection, destination: str) -> None:
    fill(connection, destination, 3000)
    shown = connection.browse(destination)
    assert next(shown).text == "0"
    time.sleep(0.2)
    assert [each.text for each in shown] == [str(number) for number in range(1, 3000)]
    with connection.consumer(destination) as consumer:
        assert text(consumer.receive(5)) == "0"


def test_a_request_gets_its_reply_from_another_thread(connection: blocking.Connection, destination: str) -> None:
    def answer() -> None:
        with connection.consumer(destination, prefetch=0) as consumer:
            message = consumer.receive(5)
            assert message is not None
            connection.reply(message, f"{message.text}!")

    with in_thread(answer):
        assert connection.request(destination, "hello", timeout=10).text == "hello!"
    with pytest.raises(TimeoutError):
        connection.request(destination, "nobody", timeout=0.1)


def test_sixteen_threads_use_one_connection(connection: blocking.Connection, new_queue: Callable[[], str]) -> None:
    errors: list[BaseException] = []

    def work(destination: str) -> None:
        try:
            with connection.consumer(destination, prefetch=5) as consumer:
                for number in range(100):
                    connection.send(destination, str(number), priority=number % 10, persistent=number % 2 == 0)
                    assert text(consumer.receive(10)) == str(number)
                assert connection.send_many(destination, map(str, range(50))) == 50
                assert [text(consumer.receive(10)) for _ in range(50)] == [str(number) for number in range(50)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"/queue/{new_queue()}",)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it waits for ever"
    assert not errors


def test_threads_that_share_a_consumer_get_each_message_once(connection: blocking.Connection, destination: str) -> None:
    fill(connection, destination, 400)
    got: list[str] = []
    with connection.consumer(destination, ack="individual") as consumer:

        def work() -> None:
            while (message := consumer.receive(0.5)) is not None:
                got.append(message.text)
                message.ack()

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(got, key=int) == [str(number) for number in range(400)]


# ---- The end ----


def test_close_ends_the_waiting_calls_of_other_threads(broker: BrokerProcess, destination: str) -> None:
    connection = blocking.connect(url(broker))
    consumer = connection.consumer(destination)
    raised: list[type[BaseException]] = []
    iterated: list[object] = []

    def receive() -> None:
        try:
            consumer.receive()
        except BaseException as error:
            raised.append(type(error))

    with in_thread(receive), in_thread(lambda: iterated.extend([*consumer, "end"])):
        time.sleep(0.1)
        connection.close()
    assert raised == [ClosedError]
    assert iterated == ["end"]
    with pytest.raises(ClosedError):
        consumer.receive(0)


def test_messages_handed_out_are_released_when_the_connection_closes(
    broker: BrokerProcess, connection: blocking.Connection, queue: str, destination: str
) -> None:
    fill(connection, destination, 3)
    other = blocking.connect(url(broker))
    consumer = other.consumer(destination, ack="individual")
    assert text(consumer.receive(5)) == "0"
    other.close()
    broker.await_facts(queue, waiting=3, unacknowledged=0)
    assert [shown.attempts for shown in connection.browse(destination)] == [0, 0, 0]


def test_a_forked_child_touches_nothing(connection: blocking.Connection, destination: str) -> None:
    fill(connection, destination, 2)
    holds, released = threading.Event(), threading.Event()

    def hold_lock() -> None:
        # The worst moment for a fork.
        with connection._driver.state_lock():
            holds.set()
            released.wait()

    with connection.consumer(destination, ack="individual") as consumer:
        assert text(consumer.receive(5)) == "0"
        with in_thread(hold_lock):
            assert holds.wait(PATIENCE_SECONDS)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                child = os.fork()
            if not child:
                os._exit(_use_in_child(connection, consumer, destination))
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                time.sleep(0.01)
            released.set()
        assert os.waitstatus_to_exitcode(ended[1]) == 0, "the child was not refused, or waited"
        message = consumer.receive(5)
        assert message is not None and message.text == "1"
        message.ack()
        connection.send(destination, "2")
        assert text(consumer.receive(5)) == "2"
    assert connection.health().reconnects == 0


def _use_in_child(connection: blocking.Connection, consumer: blocking.Consumer, destination: str) -> int:
    """Return the number of calls that were not refused."""
    uses: list[Callable[[], object]] = [
        lambda: connection.send(destination, b""),
        lambda: connection.send_many(destination, [b""]),
        lambda: connection.send_nowait(destination, b""),
        lambda: connection.consumer(destination),
        lambda: connection.session(),
        lambda: connection.health(),
        lambda: connection.close(),
        lambda: next(connection.browse(destination)),
        lambda: consumer.receive(1),
        lambda: consumer.receive(0),
        lambda: next(consumer),
        lambda: consumer.pause(),
        lambda: consumer.close(),
    ]
    remaining = len(uses)
    for use in uses:
        try:
            use()
        except ClosedError:
            remaining -= 1
    with connection, consumer:
        pass
    return remaining


# ---- Ctrl-C ----


@PREFETCHES
def test_ctrl_c_ends_a_receive_that_waits(
    connection: blocking.Connection, destination: str, prefetch: int | None
) -> None:
    with connection.consumer(destination, prefetch=prefetch) as consumer:
        with pytest.raises(KeyboardInterrupt), interrupted():
            consumer.receive()
        connection.send(destination, "1")
        assert text(consumer.receive(5)) == "1"


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_while_a_commit_is_in_doubt_waits_for_it_and_a_second_one_leaves_it_undecided(
    when: Literal["before", "after"], presses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {"before": "rolled back", "after": "committed"}[when]
    with blocking_broker() as broker, blocking.connect(broker.url) as other:
        with blocking.connect(broker.url) as connection, connection.session(transacted=True) as session:
            may_return = threading.Event()
            reach = connection._driver._connect

            def reach_later(address: Address) -> socket.socket | TlsSocket | None:
                if not may_return.is_set():
                    raise OSError("nobody is there")
                return reach(address)

            def press() -> None:
                await_true(lambda: connection.health().state != "connected")
                for _ in range(presses):
                    time.sleep(0.1)
                    to_main_thread(signal.SIGINT)
                time.sleep(0.1)
                if presses == 1:
                    may_return.set()

            monkeypatch.setattr(connection._driver, "_connect", reach_later)
            broker.lose_commit(when)
            transaction = session.transaction()
            handler = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                with pytest.raises(KeyboardInterrupt), in_thread(press), transaction:
                    session.send("/queue/out", "1")
            finally:
                signal.signal(signal.SIGINT, handler)
            assert transaction.outcome.value == (expected if presses == 1 else "in doubt")
        if presses == 1:
            assert transaction.token == ""
        else:
            assert other.outcome(transaction.token) == expected
        assert [shown.text for shown in other.browse("/queue/out")] == (["1"] if when == "after" else [])


class Storm:
    """Presses of Ctrl-C, a hundred at most, each at any place of the main thread once the test is ready."""

    MOST = 100

    def __init__(self) -> None:
        self.count = 0
        self._is_ready = False
        self._stops = threading.Event()

    def ready(self) -> None:
        self._is_ready = self.count < self.MOST

    def _on_signal(self, number: int, frame: object) -> None:
        if self._is_ready:
            self._is_ready = False
            self.count += 1
            raise KeyboardInterrupt

    def _press(self) -> None:
        while not self._stops.wait(0.003):
            to_main_thread(signal.SIGINT)

    def through(self, work: Callable[[], bool]) -> None:
        """Repeat `work` until it returns true."""
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            with in_thread(self._press):
                try:
                    is_done = False
                    while not is_done:
                        with suppress(KeyboardInterrupt):
                            self.ready()
                            is_done = work()
                            self._is_ready = False
                finally:
                    self._is_ready = False
                    self._stops.set()
        finally:
            signal.signal(signal.SIGINT, before)


def test_ctrl_c_at_any_moment_loses_no_message_and_counts_no_attempt(
    broker: BrokerProcess, connection: blocking.Connection, queue: str, destination: str
) -> None:
    """Messages that were received and not handled are released, wherever in the client the signal comes."""
    count = 3000
    fill(connection, destination, count)
    got: list[int] = []

    def work() -> bool:
        with connection.consumer(destination, ack="individual", prefetch=10) as consumer:
            while (message := consumer.receive(0.5)) is not None:
                with message.process():
                    assert message.attempts == 0
                    got.append(int(message.text))
        return len(set(got)) == count

    storm = Storm()
    storm.through(work)
    assert storm.count == storm.MOST
    assert set(got) == set(range(count))
    assert connection.health().reconnects == 0
    connection.send(destination, "last")
    with connection.consumer(destination) as consumer:
        rest = list(iter(lambda: text(consumer.receive(5)), "last"))
    # What was handled when the signal came before the client could say so.
    assert len(rest) <= storm.count
    broker.await_facts(queue, waiting=0, unacknowledged=0)


def test_ctrl_c_at_any_moment_leaves_each_transaction_done_once(
    connection: blocking.Connection, destination: str, new_queue: Callable[[], str]
) -> None:
    """This holds also in a program that goes on in the same session."""
    done = f"/queue/{new_queue()}"
    count = 500
    fill(connection, destination, count)

    def work() -> bool:
        with connection.session(transacted=True) as session:
            session.consumer(destination, prefetch=10)
            while True:
                with suppress(KeyboardInterrupt):
                    storm.ready()
                    with session.transaction():
                        message = session.receive(0.5)
                        if message is None:
                            return True
                        assert message.attempts == 0
                        session.send(done, message.text)

    storm = Storm()
    storm.through(work)
    assert storm.count == storm.MOST
    assert connection.health().reconnects == 0
    assert sorted(int(shown.text) for shown in connection.browse(done)) == list(range(count))
    assert list(connection.browse(destination)) == []


def test_a_handler_of_another_signal_may_use_the_connection(connection: blocking.Connection, destination: str) -> None:
    """The main thread may be at any place of a call."""
    count = 0

    def on_signal(number: int, frame: object) -> None:
        nonlocal count
        count += 1
        connection.health()

    stops = threading.Event()

    def press() -> None:
        while not stops.wait(0.002):
            to_main_thread(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        with in_thread(press), connection.consumer(destination) as consumer:
            try:
                for number in range(1000):
                    connection.send(destination, str(number))
                assert [text(consumer.receive(5)) for _ in range(1000)] == [str(number) for number in range(1000)]
            finally:
                stops.set()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert count > 10
    assert list(connection.browse(destination)) == []


# ---- Handlers ----


def test_consume_handles_several_at_once_and_ends_with_the_connection(
    broker: BrokerProcess, queue: str, destination: str
) -> None:
    connection = blocking.connect(url(broker))
    fill(connection, destination, 20)
    together = threading.Barrier(4)
    handled: list[str] = []

    def handle(message: blocking.Message, session: blocking.Session) -> None:
        if int(message.text) < 4:
            together.wait(PATIENCE_SECONDS)
        handled.append(message.text)

    with in_thread(lambda: connection.consume(destination, handle, concurrency=4)):
        await_true(lambda: len(handled) == 20)
        connection.close()
    assert sorted(handled, key=int) == [str(number) for number in range(20)]
    broker.await_facts(queue, waiting=0, unacknowledged=0)


def test_a_handler_that_raises_counts_an_attempt_and_its_transaction_is_rolled_back(
    connection: blocking.Connection, destination: str, new_queue: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    done = f"/queue/{new_queue()}"
    fill(connection, destination, 3)
    handled: list[tuple[str, int]] = []

    def handle(message: blocking.Message, session: blocking.Session) -> None:
        handled.append((message.text, message.attempts))
        session.send(done, message.text)
        if message.text == "1" and not message.attempts:
            raise ZeroDivisionError
        if message.text == "2":
            session.commit()
            session.close()

    connection.consume(destination, handle, transacted=True)
    assert handled == [("0", 0), ("1", 0), ("1", 1), ("2", 0)]
    assert [shown.text for shown in connection.browse(done)] == ["0", "1", "2"]
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"the handler of {destination} has failed with message ")


def test_a_handler_may_close_the_connection(
    broker: BrokerProcess, queue: str, destination: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection = blocking.connect(url(broker))
    fill(connection, destination, 3)

    def handle(message: blocking.Message, session: blocking.Session) -> None:
        if message.text == "1":
            connection.close()

    connection.consume(destination, handle, prefetch=1)
    broker.await_facts(queue, waiting=2, unacknowledged=0)
    assert "has failed with message" not in caplog.text


def test_close_waits_for_handlers_up_to_its_timeout(broker: BrokerProcess, queue: str, destination: str) -> None:
    connection = blocking.connect(url(broker))
    fill(connection, destination, 1)
    started, released = threading.Event(), threading.Event()

    def handle(message: blocking.Message, session: blocking.Session) -> None:
        started.set()
        released.wait()

    with in_thread(lambda: connection.consume(destination, handle)) as consuming:
        assert started.wait(PATIENCE_SECONDS)
        connection.close(timeout=0.1)
        consuming.join(PATIENCE_SECONDS)
        assert not consuming.is_alive()
        broker.await_facts(queue, waiting=1, unacknowledged=0)
        released.set()


def test_sys_exit_in_a_handler_ends_consume(connection: blocking.Connection, destination: str) -> None:
    fill(connection, destination, 1)

    def handle(message: blocking.Message, session: blocking.Session) -> None:
        sys.exit(7)

    with pytest.raises(SystemExit):
        connection.consume(destination, handle, concurrency=2)
    with connection.consumer(destination) as consumer:
        message = consumer.receive(5)
        assert message is not None and message.attempts == 0


def test_an_async_handler_is_refused(connection: blocking.Connection, destination: str) -> None:
    async def handle(message: blocking.Message, session: blocking.Session) -> None: ...

    with pytest.raises(TypeError, match="async"):
        connection.consume(destination, handle)  # type: ignore[arg-type]


@pytest.mark.parametrize("transacted", [False, True])
def test_ctrl_c_in_consume_waits_for_the_handlers_that_run(
    broker: BrokerProcess, connection: blocking.Connection, queue: str, destination: str, transacted: bool
) -> None:
    """Idle workers may end before."""
    fill(connection, destination, 1)
    started = threading.Event()
    ended: list[str] = []

    def handle(message: blocking.Message, session: blocking.Session) -> None:
        started.set()
        time.sleep(0.5)
        ended.append(message.text)

    with pytest.raises(KeyboardInterrupt), interrupted(started.is_set):
        connection.consume(destination, handle, concurrency=3, transacted=transacted)
    assert ended == ["0"]
    broker.await_facts(queue, waiting=0, unacknowledged=0, consumers=0)


def test_a_second_ctrl_c_ends_consume_at_once(
    broker: BrokerProcess, connection: blocking.Connection, queue: str, destination: str
) -> None:
    fill(connection, destination, 2)
    started, released = threading.Event(), threading.Event()

    def handle(message: blocking.Message, session: blocking.Session) -> None:
        started.set()
        released.wait()

    with pytest.raises(KeyboardInterrupt), interrupted(started.is_set), interrupted(started.is_set, delay=0.5):
        connection.consume(destination, handle)
    broker.await_facts(queue, waiting=2, unacknowledged=0, consumers=0)
    released.set()


_PROGRAM = """
import sys, time
from truenext import blocking

def handle(message, session):
    print("begun", flush=True)
    time.sleep(0.5)
    session.send(sys.argv[3], message.text)
    print("ended", flush=True)

with blocking.connect(sys.argv[1]) as connection:
    connection.consume(sys.argv[2], handle, transacted=True, concurrency=2)
"""


def test_a_program_that_is_interrupted_ends_cleanly(
    broker: BrokerProcess, connection: blocking.Connection, queue: str, destination: str, new_queue: Callable[[], str]
) -> None:
    done = f"/queue/{new_queue()}"
    fill(connection, destination, 1)
    program = subprocess.Popen(
        dying_with_us([sys.executable, "-c", _PROGRAM, url(broker), destination, done]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    program.send_signal(signal.SIGINT)
    said, errors = program.communicate(timeout=PATIENCE_SECONDS)
    assert said == "ended\n" and errors.rstrip().endswith("KeyboardInterrupt")
    broker.await_facts(queue, waiting=0, unacknowledged=0, consumers=0)
    assert [shown.text for shown in connection.browse(done)] == ["0"]


@pytest.mark.parametrize("after", [0.0, 0.002, 0.005, 0.01])
def test_ctrl_c_while_consume_starts_ends_consume(
    connection: blocking.Connection, destination: str, after: float
) -> None:
    """Ctrl-C may come between the starts of two threads."""

    def handle(message: blocking.Message, session: blocking.Session) -> None: ...

    with pytest.raises(KeyboardInterrupt), interrupted(delay=after):
        connection.consume(destination, handle, concurrency=200)
    assert connection.health().consumers == []


def test_ctrl_c_in_close_ends_close_at_once(
    broker: BrokerProcess, connection: blocking.Connection, queue: str, destination: str
) -> None:
    fill(connection, destination, 1)
    started, released = threading.Event(), threading.Event()
    other = blocking.connect(url(broker))

    def handle(message: blocking.Message, session: blocking.Session) -> None:
        started.set()
        released.wait()

    with in_thread(lambda: other.consume(destination, handle)):
        assert started.wait(PATIENCE_SECONDS)
        with pytest.raises(KeyboardInterrupt), interrupted():
            other.close(timeout=60)
        broker.await_facts(queue, waiting=1, unacknowledged=0, consumers=0)
        assert [shown.attempts for shown in connection.browse(destination)] == [0]
        released.set()


# ---- Lost connections ----


@pytest.mark.parametrize("is_clean", [True, False], ids=["stopped", "killed"])
def test_calls_made_while_the_broker_is_away_are_done_when_it_is_back(
    own_broker: BrokerProcess, queue: str, destination: str, is_clean: bool
) -> None:
    port = own_broker.port
    own_broker.options = [*own_broker.options, "--listen", f"stomp://127.0.0.1:{port}"]
    with (
        blocking.connect(url(own_broker)) as connection,
        connection.consumer(destination, ack="individual") as consumer,
    ):
        connection.send(destination, "0")
        held = consumer.receive(5)
        assert text(held) == "0" and held is not None
        own_broker.stop() if is_clean else own_broker.kill()
        await_true(lambda: connection.health().state == "connecting")
        got: list[str] = []
        with (
            in_thread(lambda: connection.send(destination, "1")),
            in_thread(lambda: got.append(text(consumer.receive()))),
        ):
            # Of the last dispatch; it is told with the next.
            held.ack()
            time.sleep(0.2)
            own_broker.start()
        assert got == ["1"]
        assert connection.health().reconnects == 1
        own_broker.await_facts(queue, waiting=0, unacknowledged=1)


def test_a_long_handler_costs_no_heart_beat(broker: BrokerProcess, destination: str) -> None:
    def keeps_connection() -> bool:
        with blocking.connect(url(broker), heart_beat=0.5) as connection:
            fill(connection, destination, 1)

            def handle(message: blocking.Message, session: blocking.Session) -> None:
                time.sleep(3)
                session.close()

            connection.consume(destination, handle)
            return connection.health().reconnects == 0 and connection.health().state == "connected"

    # A loaded machine may not run the broker for half a second: then the heart-beats of the broker are missed.
    assert any(keeps_connection() for _ in range(3))


@pytest.mark.parametrize("closed", ["consumer", "session", "connection"])
def test_iteration_over_a_consumer_ends_when_the_consumer_session_or_connection_is_closed(
    broker: BrokerProcess, destination: str, closed: str
) -> None:
    """Regression: closing a consumer or a session raised ClosedError in the loop."""
    connection = blocking.connect(url(broker))
    session = connection.session()
    consumer = session.consumer(destination)
    close = {"consumer": consumer.close, "session": session.close, "connection": connection.close}[closed]
    timer = threading.Timer(0.1, close)
    timer.start()
    assert list(consumer) == []
    timer.join()
    connection.close()


def test_iteration_over_a_consumer_whose_session_has_ended_otherwise_raises(
    connection: blocking.Connection, destination: str
) -> None:
    session = connection.session()
    consumer = session.consumer(destination)
    consumer._core.is_closed = consumer._core.is_expired = True
    with pytest.raises(ClosedError, match="handler"):
        next(consumer)
