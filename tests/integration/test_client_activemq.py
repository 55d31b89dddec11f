"""Tests of truenext's client with ActiveMQ.

Source of what is expected: docs/client.md, "Other brokers".
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import truenext
from bench.brokers import ActiveMQ, no_activemq_reason
from tests.integration.freezing_proxy import FreezingProxy
from truenext import blocking
from truenext.cli.main import main
from truenext.client.core.send_options import SendOptions
from truenext.client.core.subscriptions import ConsumerOptions
from truenext.errors import ConnectionLost, InDoubt, LocalProtocolError, Refused, RolledBack

pytestmark = pytest.mark.skipif(no_activemq_reason() is not None, reason=no_activemq_reason() or "")

PATIENCE_S = 60.0
QUIET_S = 0.2
"""Time without a message after which none is expected."""
_NUMBERS = itertools.count(1)

USERS = """\
<plugins>
  <simpleAuthenticationPlugin anonymousAccessAllowed="true">
    <users><authenticationUser username="somebody" password="right" groups="users"/></users>
  </simpleAuthenticationPlugin>
</plugins>
"""


class ActiveMQOfTests(ActiveMQ):
    """ActiveMQ with a scheduler, and a user with a password."""

    def prepare(self, folder: Path) -> list[str]:
        command = super().prepare(folder)
        file = folder / "conf" / "activemq.xml"
        configuration = file.read_text().replace('useJmx="false"', 'useJmx="false" schedulerSupport="true"', 1)
        file.write_text(configuration.replace("<destinationPolicy>", f"{USERS}<destinationPolicy>", 1))
        return command


@pytest.fixture(scope="module")
def activemq() -> Iterator[ActiveMQ]:
    broker = ActiveMQOfTests()
    with broker:
        yield broker


@pytest.fixture
def url(activemq: ActiveMQ) -> str:
    return f"stomp://127.0.0.1:{activemq.port}"


@pytest.fixture
def connection(url: str) -> Iterator[blocking.Connection]:
    with blocking.connect(url) as connection:
        yield connection


@pytest.fixture
def proxy(activemq: ActiveMQ) -> Iterator[FreezingProxy]:
    """Network between the client and ActiveMQ that can be cut."""
    with FreezingProxy(activemq.port) as proxy:
        yield proxy


@pytest.fixture
def destination() -> str:
    """Queue that no other test uses."""
    return f"/queue/of.tests.{next(_NUMBERS)}"


def fill(connection: blocking.Connection, destination: str, count: int) -> list[str]:
    bodies = [str(number) for number in range(count)]
    assert connection.send_many(destination, bodies) == count
    return bodies


def text(message: blocking.Content | None) -> str:
    assert message is not None, "nothing came"
    return message.text


def receive_all(connection: blocking.Connection, destination: str) -> list[str]:
    """Receive and acknowledge all waiting messages."""
    with connection.consumer(destination) as consumer:
        return [message.text for message in iter(lambda: consumer.receive(QUIET_S), None)]


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def through(proxy: FreezingProxy, *, heart_beat: float = 10.0) -> blocking.Connection:
    return blocking.connect(f"stomp://127.0.0.1:{proxy.port}", heart_beat=heart_beat)


# ---- Order ----


def test_messages_come_in_the_order_of_activemq_and_without_counts(
    connection: blocking.Connection, destination: str
) -> None:
    bodies = fill(connection, destination, 30)
    connection.send(destination, "urgent", priority=9, persistent=False)
    with connection.consumer(destination) as consumer:
        first = consumer.receive(PATIENCE_S)
        assert text(first) == "urgent"
        assert first is not None and (first.attempts, first.deliveries, first.priority) == (0, 0, 9)
        assert [text(consumer.receive(PATIENCE_S)) for _ in bodies] == bodies
    assert receive_all(connection, destination) == []


def test_prefetch_0_is_a_prefetch_of_1(connection: blocking.Connection, url: str, destination: str) -> None:
    fill(connection, destination, 3)
    with connection.consumer(destination, prefetch=0, ack="individual") as consumer, blocking.connect(url) as other:
        first = consumer.receive(PATIENCE_S)
        # One is held, so the others are for others.
        with other.consumer(destination, prefetch=0) as others:
            assert [text(others.receive(PATIENCE_S)) for _ in range(2)] == ["1", "2"]
            assert others.receive(QUIET_S) is None
        assert first is not None
        first.ack()
        assert consumer.receive(QUIET_S) is None
    assert receive_all(connection, destination) == []


# ---- What comes again ----


def roll_back(connection: blocking.Connection, destination: str) -> None:
    with connection.session(transacted=True) as session, session.consumer(destination):
        assert [text(session.receive(PATIENCE_S)) for _ in range(2)] == ["0", "1"]
        session.send(destination, "never sent")
        session.rollback()
        assert [text(session.receive(PATIENCE_S)) for _ in range(3)] == ["0", "1", "2"]


def raise_in_a_transaction(connection: blocking.Connection, destination: str) -> None:
    with connection.session(transacted=True) as session, session.consumer(destination):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError), session.transaction():
                assert text(session.receive(PATIENCE_S)) == "0"
                raise ZeroDivisionError


def nack(connection: blocking.Connection, destination: str) -> None:
    with connection.consumer(destination, ack="individual") as consumer:
        for _ in range(3):
            message = consumer.receive(PATIENCE_S)
            assert message is not None and (message.text, message.attempts) == ("0", 0)
            message.nack()


def release(connection: blocking.Connection, destination: str) -> None:
    with connection.consumer(destination, ack="individual") as consumer:
        for _ in range(3):
            message = consumer.receive(PATIENCE_S)
            assert text(message) == "0" and message is not None
            message.release()


def fail_in_a_block(connection: blocking.Connection, destination: str) -> None:
    with connection.consumer(destination, ack="individual") as consumer:
        for _ in range(3):
            message = consumer.receive(PATIENCE_S)
            assert message is not None
            with pytest.raises(ZeroDivisionError), message.process():
                assert message.text == "0"
                raise ZeroDivisionError


def fail_an_auto_consumer(connection: blocking.Connection, destination: str) -> None:
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), connection.consumer(destination) as consumer:
            assert text(consumer.receive(PATIENCE_S)) == "0"
            raise ZeroDivisionError


def close(connection: blocking.Connection, destination: str) -> None:
    with connection.consumer(destination, ack="individual") as consumer:
        assert [text(consumer.receive(PATIENCE_S)) for _ in range(3)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "end", [roll_back, raise_in_a_transaction, nack, release, fail_in_a_block, fail_an_auto_consumer, close]
)
def test_messages_that_were_not_processed_come_again_in_order_and_are_no_dead_letters(
    connection: blocking.Connection, destination: str, end: Callable[[blocking.Connection, str], None]
) -> None:
    bodies = fill(connection, destination, 20)
    end(connection, destination)
    assert receive_all(connection, destination) == bodies
    assert dead_letters(connection) == []


def test_a_cancelled_receive_has_taken_nothing(url: str, destination: str) -> None:
    async def main() -> None:
        async with truenext.connect(url) as connection:
            await connection.send_many(destination, [str(number) for number in range(20)])
            async with connection.session(transacted=True) as session, session.consumer(destination):
                for delay in (0.0, 0.001, 0.005, 0.02):
                    receiving = asyncio.create_task(session.receive())
                    await asyncio.sleep(delay)
                    receiving.cancel()
                    got = (await asyncio.gather(receiving, return_exceptions=True))[0]
                    assert isinstance(got, asyncio.CancelledError) or text(got) == "0"  # type: ignore[arg-type]
                    await session.rollback()
                async with session.transaction(), asyncio.timeout(PATIENCE_S):
                    bodies = [text(await session.receive()) for _ in range(20)]
                    assert bodies == [str(number) for number in range(20)]

    asyncio.run(main())


def test_a_message_that_the_program_has_is_not_handed_out_again_when_another_fails(
    connection: blocking.Connection, destination: str
) -> None:
    bodies = fill(connection, destination, 6)
    with connection.consumer(destination, ack="individual") as consumer:
        kept, failed, released = (consumer.receive(PATIENCE_S) for _ in range(3))
        assert kept is not None and failed is not None and released is not None
        failed.nack()
        again = [consumer.receive(PATIENCE_S) for _ in bodies[3:]]
        # What the program has twice over would be handled twice.
        assert [text(message) for message in again] == ["1", "3", "4"]
        released.release()
        kept.ack()
        for message in again:
            assert message is not None
            message.ack()
        last = [consumer.receive(PATIENCE_S) for _ in range(2)]
        assert [text(message) for message in last] == ["2", "5"]
        assert consumer.receive(QUIET_S) is None
    assert receive_all(connection, destination) == ["2", "5"]


def test_a_rejected_message_is_a_dead_letter_if_it_is_persistent(
    connection: blocking.Connection, destination: str
) -> None:
    connection.send(destination, "kept as a dead letter")
    connection.send(destination, "gone", persistent=False)
    with connection.consumer(destination, ack="individual") as consumer:
        for _ in range(2):
            message = consumer.receive(PATIENCE_S)
            assert message is not None
            message.reject()
        assert consumer.receive(QUIET_S) is None
    assert dead_letters(connection) == ["kept as a dead letter"]


def dead_letters(connection: blocking.Connection) -> list[str]:
    return receive_all(connection, "/queue/ActiveMQ.DLQ")


# ---- Pause ----


def test_a_paused_consumer_hands_out_nothing_and_keeps_its_buffer(
    connection: blocking.Connection, url: str, destination: str
) -> None:
    bodies = fill(connection, destination, 5)
    with connection.consumer(destination, ack="individual") as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None and message.text == "0"
        consumer.pause()
        assert consumer.receive(QUIET_S) is None
        # What the program has is not dispatched again, neither here nor elsewhere.
        with blocking.connect(url) as other:
            assert receive_all(other, destination) == []
        message.ack()
        consumer.resume()
        assert text(consumer.receive(PATIENCE_S)) == "1"
    assert receive_all(connection, destination) == bodies[1:]


# ---- Transactions and handlers ----


def test_a_commit_is_all_of_a_transaction(connection: blocking.Connection, destination: str) -> None:
    fill(connection, destination, 3)
    with connection.session(transacted=True) as session, session.consumer(destination):
        with session.transaction() as transaction:
            for _ in range(3):
                session.send(f"{destination}.done", text(session.receive(PATIENCE_S)))
        assert transaction.outcome.value == "committed"
    assert receive_all(connection, destination) == []
    assert receive_all(connection, f"{destination}.done") == ["0", "1", "2"]


def test_a_commit_with_a_failed_message_raises_and_its_messages_come_again(
    connection: blocking.Connection, destination: str
) -> None:
    bodies = fill(connection, destination, 3)
    with connection.session(transacted=True) as session, session.consumer(destination):
        refused = pytest.raises(LocalProtocolError, match="a commit after a message has failed needs a truenext broker")
        with refused, session.transaction() as transaction:
            session.send(f"{destination}.done", "never sent")
            session.receive(PATIENCE_S)
            message = session.receive(PATIENCE_S)
            assert message is not None
            transaction.mark_failed(message)
        with session.transaction():
            assert [text(session.receive(PATIENCE_S)) for _ in bodies] == bodies
    assert receive_all(connection, destination) == []
    assert receive_all(connection, f"{destination}.done") == []


@pytest.mark.parametrize("transacted", [False, True])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_consume_handles_each_message_and_failed_ones_come_again(
    url: str, *, transacted: bool, concurrency: int
) -> None:
    destination = f"/queue/consumed.{transacted}.{concurrency}"
    runs: dict[str, int] = {}
    running: set[str] = set()

    async def main() -> None:
        async with truenext.connect(url) as connection:
            await connection.send_many(destination, [str(number) for number in range(12)])
            is_done = asyncio.Event()

            async def handle(message: truenext.Message, session: truenext.Session) -> None:
                assert message.text not in running, "it runs twice at once"
                runs[message.text] = runs.get(message.text, 0) + 1
                await session.send(f"{destination}.done", message.text)
                running.add(message.text)
                await asyncio.sleep(0.02)
                running.remove(message.text)
                if message.text == "4" and runs["4"] < 3:
                    raise ZeroDivisionError
                if len(runs) == 12:
                    is_done.set()

            consuming = asyncio.create_task(
                connection.consume(destination, handle, transacted=transacted, concurrency=concurrency)
            )
            async with asyncio.timeout(PATIENCE_S):
                await is_done.wait()
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)

    asyncio.run(main())
    assert runs == {str(number): 3 if number == 4 else 1 for number in range(12)}
    with blocking.connect(url) as connection:
        assert receive_all(connection, destination) == []
        done = sorted(receive_all(connection, f"{destination}.done"), key=int)
        extra = [] if transacted else ["4", "4"]
        assert done == sorted([*(str(number) for number in range(12)), *extra], key=int)


# ---- Lost connections ----


def test_a_send_that_was_not_confirmed_raises_and_the_next_is_sent(
    proxy: FreezingProxy, connection: blocking.Connection, destination: str
) -> None:
    with through(proxy) as client:
        link = proxy.newest()
        client.send(destination, "before")
        link.down.freeze()
        sent = client.send_nowait(destination, "maybe")
        # It has arrived, and nobody has said so.
        await_true(lambda: [message.text for message in connection.browse(destination)] == ["before", "maybe"])
        link.close()
        with pytest.raises(ConnectionLost, match="it may have arrived"):
            sent.wait()
        client.send(destination, "after")
        assert client.health().reconnects == 1
    assert receive_all(connection, destination) == ["before", "maybe", "after"]


def test_a_commit_under_way_at_a_lost_connection_is_in_doubt_without_an_outcome(
    proxy: FreezingProxy, connection: blocking.Connection, destination: str
) -> None:
    with through(proxy) as client, client.session(transacted=True) as session:
        link = proxy.newest()
        session.send(destination, "maybe")
        link.down.freeze()
        cutting = threading.Timer(0.3, link.close)
        cutting.start()
        with pytest.raises(InDoubt) as doubt:
            session.commit()
        cutting.join()
        assert client.outcome(doubt.value) == "unknown"
        with session.transaction():
            session.send(destination, "next")
    assert receive_all(connection, destination) == ["maybe", "next"]


def test_messages_that_the_program_had_at_a_lost_connection_are_not_handed_out_twice(
    proxy: FreezingProxy, connection: blocking.Connection, destination: str
) -> None:
    fill(connection, destination, 5)
    with through(proxy) as client, client.consumer(destination, ack="individual") as consumer:
        link = proxy.newest()
        first, second, third, fourth = (consumer.receive(PATIENCE_S) for _ in range(4))
        assert first is not None and second is not None and third is not None and fourth is not None
        link.down.freeze()
        first.ack()
        link.close()
        second.ack()
        third.nack()
        await_true(lambda: client.health().reconnects == 1)
        got = [consumer.receive(PATIENCE_S) for _ in range(2)]
        assert [text(message) for message in got] == ["2", "4"]
        # Nor is what the program has handed out a second time.
        assert consumer.receive(QUIET_S) is None
        fourth.ack()
        for message in got:
            assert message is not None
            message.ack()
    assert receive_all(connection, destination) == []
    assert dead_letters(connection) == []


def test_a_transaction_of_a_lost_connection_is_rolled_back_and_its_messages_come_again(
    proxy: FreezingProxy, connection: blocking.Connection, destination: str
) -> None:
    bodies = fill(connection, destination, 5)
    with through(proxy) as client, client.session(transacted=True) as session, session.consumer(destination):
        link = proxy.newest()
        with pytest.raises(RolledBack), session.transaction():
            assert text(session.receive(PATIENCE_S)) == "0"
            session.send(f"{destination}.done", "never sent")
            link.close()
            await_true(lambda: client.health().reconnects == 1)
        with session.transaction():
            assert [text(session.receive(PATIENCE_S)) for _ in bodies] == bodies
    assert receive_all(connection, f"{destination}.done") == []


def test_both_sides_send_heart_beats_and_a_frozen_connection_is_seen(
    proxy: FreezingProxy, connection: blocking.Connection, destination: str
) -> None:
    fill(connection, destination, 1)
    with through(proxy, heart_beat=0.5) as client, client.consumer(destination) as consumer:
        link = proxy.newest()
        time.sleep(2.5)
        assert client.health().reconnects == 0
        link.freeze()
        await_true(lambda: client.health().reconnects == 1)
        assert text(consumer.receive(PATIENCE_S)) == "0"


# ---- What others have no words for ----


@pytest.mark.parametrize(
    "options", [{"ttl": 60.0}, {"producer": "mine", "number": 1}], ids=lambda options: next(iter(options))
)
def test_a_send_that_activemq_cannot_store_is_refused_and_holds_up_no_later_one(
    connection: blocking.Connection, destination: str, options: SendOptions
) -> None:
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match="needs a truenext broker; this broker is ActiveMQ"):
            connection.send(destination, "never sent", **options)
        connection.send(destination, "sent")
    if "ttl" in options:
        with pytest.raises(LocalProtocolError, match="a ttl needs"):
            connection.request(destination, "never sent", ttl=60)
        refused = pytest.raises(LocalProtocolError, match="a ttl needs")
        with connection.session(transacted=True) as session, refused:
            session.send(destination, "never sent", ttl=60)
    assert receive_all(connection, destination) == ["sent", "sent"]


def test_calls_that_need_answers_of_a_truenext_broker_are_refused(
    connection: blocking.Connection, destination: str
) -> None:
    with pytest.raises(LocalProtocolError, match="a control request needs a truenext broker"):
        connection.control_request("queues")
    with connection.consumer(destination, ack="individual") as consumer:
        with pytest.raises(LocalProtocolError, match=r"receive\(0\) needs a truenext broker"):
            consumer.receive(0)
        connection.send(destination, "x")
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        with pytest.raises(LocalProtocolError, match="nack with a delay needs a truenext broker"):
            message.nack(delay=1)
        # What was refused did nothing.
        message.ack()
    assert receive_all(connection, destination) == []


# ---- What STOMP brokers share ----


def test_requests_are_answered(connection: blocking.Connection, url: str, destination: str) -> None:
    def answer() -> None:
        with blocking.connect(url) as other, other.consumer(destination) as requests:
            for _ in range(2):
                request = requests.receive(PATIENCE_S)
                assert request is not None
                other.reply(request, f"{request.text}!")

    answering = threading.Thread(target=answer)
    answering.start()
    assert [connection.request(destination, body, timeout=PATIENCE_S).text for body in ("a", "b")] == ["a!", "b!"]
    answering.join()


def test_a_queue_is_browsed_and_stays(connection: blocking.Connection, destination: str) -> None:
    bodies = fill(connection, destination, 5)
    connection.send(destination, "red", headers={"colour": "red"})
    assert [message.text for message in connection.browse(destination)] == [*bodies, "red"]
    assert [message.text for message in connection.browse(destination, selector="colour = 'red'")] == ["red"]
    assert receive_all(connection, destination) == [*bodies, "red"]


def test_a_durable_subscription_collects_without_a_subscriber_and_can_be_ended(
    connection: blocking.Connection, url: str, destination: str
) -> None:
    topic = destination.replace("queue", "topic")
    options: ConsumerOptions = {"durable": "news"}
    with blocking.connect(url, client_id=f"reader of {topic}") as reader:
        with reader.consumer(topic, **options) as consumer:
            connection.send(topic, "0")
            assert text(consumer.receive(PATIENCE_S)) == "0"
        connection.send(topic, "1")
        with reader.consumer(topic, ack="individual", **options) as consumer:
            message = consumer.receive(PATIENCE_S)
            assert text(message) == "1" and message is not None
            message.nack()
            assert text(consumer.receive(PATIENCE_S)) == "1"
    with blocking.connect(url, client_id=f"reader of {topic}") as reader:
        with reader.consumer(topic, **options) as consumer:
            assert text(consumer.receive(PATIENCE_S)) == "1"
        reader.unsubscribe("news")
        connection.send(topic, "nobody collects it")
        with reader.consumer(topic, **options) as consumer:
            assert consumer.receive(QUIET_S) is None
        reader.unsubscribe("news")


def test_a_durable_subscriber_comes_back_though_activemq_takes_it_for_connected(
    proxy: FreezingProxy, connection: blocking.Connection, destination: str
) -> None:
    topic = destination.replace("queue", "topic")
    address = f"stomp://127.0.0.1:{proxy.port}"
    with blocking.connect(address, client_id=f"reader of {topic}", heart_beat=0.5) as reader:
        link = proxy.newest()
        with reader.consumer(topic, durable="news") as consumer:
            link.freeze()
            await_true(lambda: reader.health().state != "connected")
            connection.send(topic, "sent meanwhile")
            time.sleep(0.5)
            link.close()
            assert text(consumer.receive(PATIENCE_S)) == "sent meanwhile"
        reader.unsubscribe("news")


def test_a_selector_filters_and_an_invalid_one_is_refused(connection: blocking.Connection, destination: str) -> None:
    fill(connection, destination, 2)
    connection.send(destination, "red", headers={"colour": "red"})
    with connection.consumer(destination, selector="colour = 'red'") as consumer:
        assert text(consumer.receive(PATIENCE_S)) == "red"
        assert consumer.receive(QUIET_S) is None
    with pytest.raises(Refused):
        connection.consumer(destination, selector="colour = ")
    connection.send(destination, "after")
    assert receive_all(connection, destination) == ["0", "1", "after"]


def test_a_delayed_send_comes_later(connection: blocking.Connection, destination: str) -> None:
    connection.send(destination, "later", delay=0.5)
    with connection.consumer(destination) as consumer:
        assert consumer.receive(0.1) is None
        assert text(consumer.receive(PATIENCE_S)) == "later"


# ---- Credentials ----


def test_wrong_credentials_end_the_connection_and_right_ones_work(url: str, destination: str) -> None:
    started_at = time.monotonic()
    with pytest.raises(Refused, match="password"):
        blocking.connect(url, user="somebody", password="wrong")
    assert time.monotonic() - started_at < PATIENCE_S / 2
    with blocking.connect(url, user="somebody", password="right") as connection:
        connection.send(destination, "x")
        assert receive_all(connection, destination) == ["x"]


# ---- Commands ----


def test_commands_send_receive_and_browse_and_those_for_truenext_alone_are_refused(url: str, destination: str) -> None:
    def said(status: int, *words: str) -> str:
        done = CliRunner().invoke(main, [*words, "--url", url])
        assert done.exit_code == status, done.output
        return done.output

    assert said(0, "send", destination, "x") == ""
    assert said(0, "browse", destination) == "x\n"
    assert said(1, "browse", destination, "--follow").startswith("truenext: --follow needs a truenext broker")
    assert said(0, "receive", destination) == "x\n"
    assert said(2, "queues").startswith("truenext: a control request needs a truenext broker")
