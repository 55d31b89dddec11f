"""Tests of a broker whose log does not confirm its rows in time: it is silent, because another broker may serve."""

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from threading import Event

import pytest

from tests.contract.fake_log import LogRows, WaitingLog
from tests.integration.broker_here import broker_here, port_of
from tests.integration.raw_client import RawClient
from tests.unit.mutation import mutated
from truenext.broker.broker import CHECK_INTERVAL_S, Broker
from truenext.clock import boottime
from truenext.errors import StoreFencedError
from truenext.server.listener import Listener
from truenext.store.log import BEAT_S, LogPosition

SILENT_AFTER_S = BEAT_S + 0.3
QUIET_S = 0.3
"""Time for which a silent broker is watched."""


class HeldLog(WaitingLog):
    """Log whose appends a test can hold."""

    def __init__(self) -> None:
        super().__init__(LogRows())
        self.may_append = Event()
        self.may_append.set()
        self._is_one = False

    def append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> bool:
        began = boottime()
        assert self.may_append.wait(20)
        if self._is_one:
            self.may_append.clear()
        is_confirmed = super().append(number, before, digest, parts)
        self.silent_from = began + SILENT_AFTER_S
        return is_confirmed

    def silence(self) -> None:
        """Hold all appends, and return once the broker is silent."""
        self.may_append.clear()
        while boottime() < self.silent_from:
            time.sleep(0.01)

    def append_one(self) -> None:
        """Append the row that is held, and hold the next one."""
        self._is_one = True
        self.may_append.set()

    def go_on(self) -> None:
        self._is_one = False
        self.may_append.set()


Rule = Callable[[HeldLog, Listener], None]

CLIENTS: list[RawClient] = []
"""Clients of the rule that is being checked."""


def check(rule: Rule, folder: Path, *, send_buffer: int = 0) -> None:
    async def run() -> None:
        log = HeldLog()
        async with broker_here(folder, log=log, send_buffer=send_buffer) as listener:
            try:
                await asyncio.to_thread(rule, log, listener)
            finally:
                log.go_on()
                close_clients()

    asyncio.run(run())


def open_socket(listener: Listener, *, receive_buffer: int = 0) -> RawClient:
    client = RawClient(port_of(listener), receive_buffer=receive_buffer)
    CLIENTS.append(client)
    return client


def connect(listener: Listener, *, heart_beat: str = "0,0", receive_buffer: int = 0) -> RawClient:
    client = open_socket(listener, receive_buffer=receive_buffer)
    client.send_connect("1.2", heart_beat)
    return client


def close_clients() -> None:
    while CLIENTS:
        CLIENTS.pop().close()


def gets_nothing(client: RawClient, seconds: float = QUIET_S) -> None:
    with pytest.raises(TimeoutError):
        client.next_frame(seconds)


def command_in_silence_waits(log: HeldLog, listener: Listener) -> None:
    """A transient message needs no row, and would be dispatched at once."""
    consumer, producer = connect(listener), connect(listener)
    consumer.subscribe("q", ack="auto")
    log.silence()
    for body in (b"1", b"2"):
        producer.send("q", body)
        producer.send("new", body)
    gets_nothing(consumer)
    assert "new" not in listener._broker._engine.queues.by_name
    log.go_on()
    assert [each.body for each in consumer.messages(2)] == [b"1", b"2"]


def login_in_silence_waits(log: HeldLog, listener: Listener) -> None:
    log.silence()
    client = open_socket(listener)
    client.send_frame("CONNECT", {"accept-version": "1.2", "host": "test"})
    gets_nothing(client)
    log.go_on()
    client.await_connected()


def receipt_of_an_append_that_took_too_long_waits_for_the_next_one(log: HeldLog, listener: Listener) -> None:
    """When the row is confirmed at last, its append has begun so long ago that another broker may serve."""
    client = connect(listener)
    client.subscribe("q")
    log.may_append.clear()
    client.send("q", b"1", persistent=True, headers={"receipt": "r"})
    time.sleep(2 * SILENT_AFTER_S)
    log.append_one()
    gets_nothing(client)
    assert listener._broker._engine.queues.by_name["q"].waiting_count() == 1
    log.go_on()
    client.await_receipt("r")
    assert client.message().body == b"1"


def bytes_that_wait_for_a_slow_client_wait_on_in_silence(log: HeldLog, listener: Listener) -> None:
    """No turn is needed to write them, only a socket that takes bytes again."""
    consumer, producer = connect(listener, receive_buffer=4096), connect(listener)
    consumer.subscribe("q", ack="auto")
    producer.send("q", bytes(2_000_000), confirmed=True)
    time.sleep(0.1)
    log.silence()
    size = 0
    with pytest.raises(TimeoutError):
        while data := consumer.read(QUIET_S):
            size += len(data)
    assert size < 1_000_000
    log.go_on()
    while size < 2_000_000:
        size += len(consumer.read())


def client_of_a_silent_broker_gets_heart_beats(log: HeldLog, listener: Listener) -> None:
    client = connect(listener, heart_beat="0,100")
    log.silence()
    beats = b"".join(client.read(1) for _ in range(5))
    log.go_on()
    assert not beats.strip(b"\n")


def broker_that_was_stopped_is_silent_when_it_goes_on(log: HeldLog, listener: Listener) -> None:
    """As after SIGSTOP and SIGCONT: commands and timers are due at once."""
    consumer, producer = connect(listener), connect(listener)
    consumer.subscribe("q", ack="auto")
    is_stopped = Event()

    def stop() -> None:
        is_stopped.set()
        time.sleep(SILENT_AFTER_S + 0.1)
        log.may_append.clear()

    listener._loop.call_soon_threadsafe(stop)
    is_stopped.wait()
    producer.send("q", b"1")
    gets_nothing(consumer, SILENT_AFTER_S + QUIET_S)
    log.go_on()
    assert consumer.message().body == b"1"


def time_of_silence_makes_no_queue_stuck(log: HeldLog, listener: Listener) -> None:
    connect(listener).subscribe("q")
    broker = listener._broker
    log.silence()
    stuck_since_ms = broker._stuck_check.detector._stuck_since_ms
    stuck_since_ms[broker._engine.queues.by_name["q"]] = 0
    time.sleep(2 * CHECK_INTERVAL_S)
    assert not stuck_since_ms


RULES: dict[Rule, int] = {
    command_in_silence_waits: 0,
    login_in_silence_waits: 0,
    receipt_of_an_append_that_took_too_long_waits_for_the_next_one: 0,
    bytes_that_wait_for_a_slow_client_wait_on_in_silence: 4096,
    client_of_a_silent_broker_gets_heart_beats: 0,
    broker_that_was_stopped_is_silent_when_it_goes_on: 0,
    time_of_silence_makes_no_queue_stuck: 0,
}
"""Rules, each with the bytes that a socket of the broker takes; 0 for the usual number."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_silent_broker_follows_rule(rule: Rule, tmp_path: Path) -> None:
    # C28.9
    check(rule, tmp_path / "data", send_buffer=RULES[rule])


FAULTS: dict[str, tuple[Rule, str]] = {
    "a silent broker executes commands": (command_in_silence_waits, "execute"),
    "a silent broker has turns": (receipt_of_an_append_that_took_too_long_waits_for_the_next_one, "_turn"),
}
"""Rule that breaks, and method of the broker that does not ask whether the broker is silent."""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_breaks_its_rule(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, name = FAULTS[fault]
    monkeypatch.setattr(Broker, name, mutated(getattr(Broker, name), "self.is_silent", "False"))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(rule, tmp_path / "data")


@pytest.mark.parametrize("has_history", [True, False])
def test_broker_that_stops_in_silence_sends_its_answers_once_a_row_is_confirmed(
    has_history: bool, tmp_path: Path
) -> None:
    log = HeldLog()

    def use(listener: Listener) -> RawClient:
        client = connect(listener)
        log.may_append.clear()
        client.send("q", b"1", persistent=True, headers={"receipt": "r"})
        log.silence()
        return client

    async def run() -> RawClient:
        async with broker_here(tmp_path / "data", log=log, has_history=has_history) as listener:
            client = await asyncio.to_thread(use, listener)
            asyncio.get_running_loop().call_later(QUIET_S, log.go_on)
        return client

    client = asyncio.run(run())
    client.await_receipt("r")
    close_clients()
    assert log.heirs == [""]


def test_silent_broker_that_stops_after_a_takeover_fails_and_hands_over_to_nobody(tmp_path: Path) -> None:
    log = HeldLog()

    async def run() -> None:
        async with broker_here(tmp_path / "data", log=log):
            await asyncio.to_thread(log.silence)
            WaitingLog(log.rows).take_over(LogPosition(0, b""))
            log.go_on()

    with pytest.raises(StoreFencedError):
        asyncio.run(run())
    assert log.heirs == []


def test_idle_broker_appends_a_row_every_half_second(tmp_path: Path) -> None:
    # C28.3
    began: list[float] = []

    class TimedLog(HeldLog):
        def append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> bool:
            began.append(boottime())
            return super().append(number, before, digest, parts)

    async def run() -> None:
        async with broker_here(tmp_path / "data", log=TimedLog()):
            await asyncio.sleep(4 * BEAT_S)

    asyncio.run(run())
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert len(pauses) >= 4
    assert max(pauses) < BEAT_S + 0.3, "a loaded machine is slow"


def test_clean_stop_has_all_events_in_the_log_and_names_no_heir(tmp_path: Path) -> None:
    # C28.16
    log = HeldLog()

    def use(listener: Listener) -> None:
        client = connect(listener)
        client.subscribe("q", ack="auto")
        client.send("q", b"1", confirmed=True)
        client.message()
        close_clients()

    async def run() -> None:
        async with broker_here(tmp_path / "first", log=log) as listener:
            await asyncio.to_thread(use, listener)

    asyncio.run(run())
    assert log.heirs == [""]
    first = sorted((tmp_path / "first/history").iterdir())

    async def follow() -> None:
        async with broker_here(tmp_path / "second", log=WaitingLog(log.rows)):
            pass

    asyncio.run(follow())
    for file in first:
        assert (tmp_path / "second/history" / file.name).read_bytes() == file.read_bytes()
