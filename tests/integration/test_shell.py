"""Tests of the code between the sockets and the engine: time, ends of connections, and clean stops."""

import asyncio
import gc
import time
from collections.abc import Callable
from typing import ClassVar
from unittest import mock

import pytest

from tests.integration.broker_here import broker_here, port_of
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.raw_client import RawClient
from truenext.broker import write_time
from truenext.broker.config import Configuration
from truenext.broker.settings import BrokerSettings
from truenext.cli import serve
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import TruenextError
from truenext.model.batch import Batch
from truenext.server.connection import ServerConnection
from truenext.server.output import Output
from truenext.store.memory import MemoryStore
from truenext.wire.stomp.frame import Frame

LARGE = bytes(50_000)
"""Body; a few dozens of these fill the sockets between two processes."""


def numbers(messages: list[Frame]) -> list[int]:
    return [int(message.body.split()[0]) for message in messages]


# ---- Time ----


def test_a_message_that_expired_while_its_reader_was_slow_is_not_dispatched(own_broker: BrokerProcess) -> None:
    """The broker is woken by the socket that can be written to again: no frame tells it the time."""
    slow, sender = own_broker.connect(receive_buffer=4096), own_broker.connect()
    slow.subscribe("q", ack="auto")
    for number in range(150):
        sender.send("q", b"%d " % number + LARGE)
    expires_ms = time.time_ns() // 1_000_000 + 1500
    sender.send("q", b"150 expires", headers={"expires": str(expires_ms)})
    sender.arrived()
    # Read to its end, so that the broker hears nothing more from anybody.
    sender.disconnect()
    time.sleep(max(0.0, expires_ms / 1000 - time.time()) + 0.1)
    assert numbers(slow.messages(150)) == list(range(150))
    assert slow.arrived() == []
    own_broker.await_facts("q", waiting=0, unacknowledged=0)


# ---- Ends of connections ----


def test_a_client_that_closes_its_sending_half_still_gets_the_receipts_that_are_due(held_broker: BrokerProcess) -> None:
    client = held_broker.connect()
    client.subscribe("other")
    held_broker.hold_disk()
    receipts = [client.new_receipt() for _ in range(3)]
    for receipt in receipts:
        client.send("q", b"", persistent=True, headers={"receipt": receipt})
    client.hang_up()
    # The broker has seen the end, and nothing is durable yet.
    held_broker.await_facts("other", consumers=0)
    with pytest.raises(TimeoutError):
        client.next_frame(0.05)
    held_broker.resume_disk()
    for receipt in receipts:
        client.await_receipt(receipt)
    client.await_end()


def hang_up_before_connect(client: RawClient) -> None:
    client.write(b"CONN")
    client.close()


def crash_with_heart_beats(client: RawClient) -> None:
    client.send_connect("1.2", "30000,30000")
    client.subscribe("q")
    client.crash()


def close_the_sending_half(client: RawClient) -> None:
    client.send_connect("1.2", "30000,30000")
    client.hang_up()
    client.await_end()


def disconnect(client: RawClient) -> None:
    client.send_connect("1.2", "30000,30000")
    client.subscribe("q")
    client.begin("t")
    client.disconnect()


def be_refused(client: RawClient) -> None:
    client.send_connect("1.2", "30000,30000")
    client.send_frame("NONSENSE", {})
    client.error()


def crash_with_much_unread(client: RawClient) -> None:
    client.send_connect("1.2", "30000,30000")
    for number in range(150):
        client.send("large", b"%d " % number + LARGE)
    client.subscribe("large", ack="auto")
    client.crash()


def miss_the_heart_beats(client: RawClient) -> None:
    client.send_connect("1.2", "50,0")
    client.await_end()


ENDS = [
    hang_up_before_connect,
    crash_with_heart_beats,
    close_the_sending_half,
    disconnect,
    be_refused,
    crash_with_much_unread,
    miss_the_heart_beats,
]


@pytest.mark.alternates("ends of connections")
@pytest.mark.parametrize("end", ENDS)
def test_a_connection_that_is_closed_leaves_nothing_in_memory(end: Callable[[RawClient], None]) -> None:
    """Neither a timer nor any other object keeps it."""

    def use(port: int) -> None:
        for _ in range(3):
            end(RawClient(port, receive_buffer=4096))

    assert asyncio.run(objects_kept_after(use)) == []


def test_a_heart_beat_that_finds_its_connection_closed_is_the_last() -> None:
    flush = Output.flush

    def flush_and_close(self: Output) -> None:
        is_beat = self._parts == [b"\n"]
        flush(self)
        if is_beat:
            self._ending.on_socket_broken("closed by a test")

    def use(port: int) -> None:
        client = RawClient(port)
        client.send_connect("1.2", "0,50")
        assert client.read() == b"\n"
        client.await_end()

    with mock.patch.object(Output, "flush", flush_and_close):
        assert asyncio.run(objects_kept_after(use)) == []


def connections_and_sessions() -> list[object]:
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, ServerConnection | ConnectionState)]


async def objects_kept_after(use: Callable[[int], None]) -> list[object]:
    """Return the connections and sessions that a broker still has after the clients of `use` have gone."""
    # Those of tests that ran in this process before.
    others = set(map(id, connections_and_sessions()))
    async with broker_here() as listener:
        await asyncio.get_running_loop().run_in_executor(None, use, port_of(listener))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while listener._connections:
            assert time.monotonic() < deadline, "a connection is not closed"
            await asyncio.sleep(0.01)
        # Once around the loop for what it was told to do soon.
        await asyncio.sleep(0.05)
        return [one for one in connections_and_sessions() if id(one) not in others]


# ---- A clean stop ----


@pytest.mark.parametrize("persistent", [False, True])
def test_a_clean_stop_keeps_all_that_the_socket_of_a_slow_auto_reader_has_not_taken(
    own_broker: BrokerProcess, persistent: bool
) -> None:
    count = 200
    slow, sender = own_broker.connect(receive_buffer=4096), own_broker.connect()
    slow.subscribe("q", ack="auto")
    for number in range(count):
        sender.send("q", b"%d " % number + LARGE, persistent=persistent)
    sender.arrived()
    own_broker.stop()
    received = []
    with pytest.raises(EOFError):
        while True:
            received.append(slow.message())
    # Half of one more has come: the end was in the middle of a message.
    assert 0 < len(received) < count
    own_broker.start()
    reader = own_broker.connect()
    reader.subscribe("q")
    remaining = reader.messages(count - len(received))
    assert reader.arrived() == []
    assert numbers(received + remaining) == list(range(count))
    assert remaining[0].headers["redelivered"] == "true"
    assert "truenext-attempts" not in remaining[0].headers or remaining[0].headers["truenext-attempts"] == "0"


# ---- The end of a broker that failed ----


class StoreThatSeesItsEnd(MemoryStore):
    """Store during whose first batch the event loop of the broker raises an error."""

    is_applying = False
    loop: ClassVar[asyncio.AbstractEventLoop]

    @classmethod
    def new_event_loop(cls) -> asyncio.AbstractEventLoop:
        cls.loop = asyncio.new_event_loop()
        return cls.loop

    def apply(self, batch: Batch) -> None:
        self.is_applying = True
        self.loop.call_soon_threadsafe(self.find_a_bug)
        time.sleep(0.2)
        super().apply(batch)
        self.is_applying = False

    def find_a_bug(self) -> None:
        raise ZeroDivisionError("a bug")

    def close(self) -> None:
        assert not self.is_applying, "closed in the middle of a batch"
        super().close()


def test_a_store_is_not_closed_in_the_middle_of_a_batch_when_the_broker_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        mock.patch.object(serve, "MemoryStore", StoreThatSeesItsEnd),
        mock.patch.object(serve, "new_event_loop", StoreThatSeesItsEnd.new_event_loop),
        mock.patch.object(write_time, "INLINE_SMALL_WRITE_SECONDS_MAX", -1),
        mock.patch.object(serve, "_tune_garbage_collector"),
        mock.patch("sys.setswitchinterval"),
        pytest.raises(TruenextError, match=r"internal error, the broker stops: .*a bug"),
    ):
        serve.serve(Configuration(broker=BrokerSettings(memory=True, listen=("stomp://127.0.0.1:0",))))
    (record,) = caplog.records
    assert record.message == "internal error"
    assert "find_a_bug" in vars(record)["reason"]
