"""Tests of truenext.testing: its broker keeps the contract, and each fault does what docs/testing.md says."""

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop

from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, bodies, numbered
from truenext import testing
from truenext.testing import BlockingBroker

ROOT = Path(__file__).parent.parent.parent


class Clients:
    """Clients of a test, closed at its end."""

    def __init__(self) -> None:
        self._all: list[RawClient] = []

    def connect(self, url: str, heart_beat: str = "0,0", headers: dict[str, str] | None = None) -> RawClient:
        client = RawClient(int(url.rpartition(":")[2]))
        self._all.append(client)
        client.send_connect("1.2", heart_beat, headers=headers)
        return client

    def close(self) -> None:
        for client in self._all:
            client.close()


@pytest.fixture
def clients() -> Iterator[Clients]:
    with contextlib.closing(Clients()) as clients:
        yield clients


@pytest.fixture
def broker(clients: Clients) -> Iterator[BlockingBroker]:
    with testing.blocking_broker() as broker:
        yield broker


def session_of(client: RawClient) -> str:
    return client.connected.headers["session"]


def is_silent(client: RawClient, seconds: float = 0.1) -> bool:
    """Return whether neither bytes nor the end of the connection come within `seconds`."""
    try:
        client.read(seconds)
    except TimeoutError:
        return True
    return False


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def lost(client: RawClient) -> bool:
    """Return whether the connection ends without another frame."""
    try:
        client.next_frame(5)
    except (EOFError, ConnectionError):
        return True
    return False


# ---- What it is ----


def test_broker_hands_out_the_true_next_message(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    client.send("orders", b"low", persistent=True)
    client.send("orders", b"high", priority=9, confirmed=True)
    client.subscribe("orders")
    assert bodies(client.only(2)) == ["high", "low"]


def test_queue_has_waiting_bodies_in_order_and_counts_of_the_other_messages(
    broker: BlockingBroker, clients: Clients
) -> None:
    client = clients.connect(broker.url)
    client.send("orders", b"held", priority=9)
    client.subscribe("orders", prefetch=1)
    client.message()
    client.send("orders", b"second")
    client.send("orders", b"first", priority=5, headers={"color": "red"})
    client.send("orders", b"later", headers={"AMQ_SCHEDULED_DELAY": "60000"})
    contents = broker.queue("orders")
    assert contents.bodies == [b"first", b"second"] and contents.waiting == 2
    assert contents.messages[0].headers["color"] == "red"
    assert (contents.unacknowledged, contents.scheduled) == (1, 1)


def test_queue_includes_all_that_was_sent_before(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    broker.freeze()
    client.write(b"SEND\ndestination:/queue/orders\n\n\0" * 5_000)
    broker.thaw()
    assert broker.queue("orders").waiting == 5_000


def test_a_queue_that_is_not_there_is_empty_and_is_not_made(broker: BlockingBroker) -> None:
    for _ in range(2):
        contents = broker.queue("nowhere")
        assert (contents.bodies, contents.unacknowledged, contents.scheduled) == ([], 0, 0)


def test_a_name_that_no_queue_can_have_is_an_error(broker: BlockingBroker) -> None:
    with pytest.raises(ValueError, match="destination"):
        broker.queue("")


# ---- COMMIT ----


@pytest.mark.parametrize("connect_headers", [{}, TRUENEXT_CLIENT], ids=["plain", "keep open"])
def test_a_commit_that_is_lost_before_has_not_happened(
    broker: BlockingBroker, clients: Clients, connect_headers: dict[str, str]
) -> None:
    client = clients.connect(broker.url, headers=connect_headers)
    broker.lose_commit("before")
    broker.freeze()
    client.begin("t")
    client.send("orders", b"in it", persistent=True, transaction="t")
    client.send_frame("COMMIT", {"transaction": "t", "receipt": "r"} | numbered("shop", 1))
    client.send("orders", b"behind it")
    # All is read at once.
    broker.thaw()
    assert lost(client)
    assert broker.queue("orders").bodies == []
    again = clients.connect(broker.url)
    again.begin("t")
    again.send("orders", b"in it", persistent=True, transaction="t")
    again.send_frame("COMMIT", {"transaction": "t", "receipt": "r"} | numbered("shop", 1))
    assert "truenext-repeat" not in again.await_receipt("r").headers
    assert broker.queue("orders").bodies == [b"in it"]


def test_a_commit_that_is_lost_after_is_durable_and_unanswered(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    broker.lose_commit("after")
    broker.freeze()
    client.begin("t")
    client.send("orders", b"in it", persistent=True, transaction="t")
    client.send_frame("COMMIT", {"transaction": "t", "receipt": "r"} | numbered("shop", 1))
    client.send("orders", b"behind it")
    # All is read at once.
    broker.thaw()
    assert lost(client)
    assert broker.queue("orders").bodies == [b"in it"]
    broker.crash()
    again = clients.connect(broker.url)
    again.begin("t")
    again.send("orders", b"in it", persistent=True, transaction="t")
    again.send_frame("COMMIT", {"transaction": "t", "receipt": "r"} | numbered("shop", 1))
    assert again.await_receipt("r").headers["truenext-repeat"] == "true"
    assert broker.queue("orders").bodies == [b"in it"]


def test_receipts_before_a_commit_that_is_lost_still_come(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    broker.lose_commit("after")
    broker.freeze()
    client.send("orders", b"before it", persistent=True, headers={"receipt": "earlier"})
    client.begin("t")
    client.commit("t", confirmed=False, headers={"receipt": "r"})
    # All is read at once.
    broker.thaw()
    client.await_receipt("earlier")
    assert lost(client)


def test_a_commit_that_is_lost_after_delivers_no_message_before_the_loss(
    broker: BlockingBroker, clients: Clients
) -> None:
    client = clients.connect(broker.url)
    client.subscribe("orders")
    broker.lose_commit("after")
    client.begin("t")
    client.send("orders", b"in it", transaction="t")
    client.commit("t", confirmed=False)
    assert lost(client)
    assert broker.queue("orders").bodies == [b"in it"]


def test_a_commit_that_is_lost_after_waits_for_a_slow_disk(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    broker.slow_disk(60)
    broker.lose_commit("after")
    client.begin("t")
    client.send("orders", b"in it", persistent=True, transaction="t")
    client.commit("t", confirmed=False)
    assert is_silent(client)
    broker.advance(seconds=60)
    assert lost(client)
    assert broker.queue("orders").bodies == [b"in it"]


def test_a_commit_that_is_refused_does_not_use_up_the_fault(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url, headers=TRUENEXT_CLIENT)
    broker.lose_commit("after")
    client.send_frame("COMMIT", {"transaction": "never begun"})
    assert client.next_error().headers["truenext-code"] == "no-transaction"
    client.begin("t")
    client.commit("t", confirmed=False)
    assert lost(client)


def test_only_one_commit_is_lost(broker: BlockingBroker, clients: Clients) -> None:
    for when in ("before", "after"):
        broker.lose_commit("before" if when == "before" else "after")
        client = clients.connect(broker.url)
        client.begin("t")
        client.commit("t", confirmed=False)
        assert lost(client)
        client = clients.connect(broker.url)
        client.begin("t")
        client.commit("t")


def test_a_commit_is_lost_before_or_after_and_nowhere_else(broker: BlockingBroker) -> None:
    with pytest.raises(ValueError, match="when must be 'before' or 'after', not 'befor'"):
        broker.lose_commit("befor")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="required must be True or False, not 'no'"):
        broker.lose_commit("before", required="no")  # type: ignore[arg-type]


def test_several_commits_are_lost_one_after_the_other(broker: BlockingBroker, clients: Clients) -> None:
    broker.lose_commit("before")
    broker.lose_commit("after")
    for remaining in ([], [b"1"]):
        client = clients.connect(broker.url)
        client.begin("t")
        client.send("orders", b"1", persistent=True, transaction="t")
        client.commit("t", confirmed=False)
        assert lost(client)
        assert broker.queue("orders").bodies == remaining


def test_lose_commit_that_is_never_reached_fails_the_test_with_its_place() -> None:
    with pytest.raises(testing.NeverReached) as failed, testing.blocking_broker() as broker:
        broker.lose_commit("before")
    line = sys._getframe().f_lineno - 1
    assert f'lose_commit("before"), ordered at {__file__}:{line}' in str(failed.value)
    assert "required=False" in str(failed.value)

    async def main() -> None:
        async with testing.broker() as broker:
            broker.lose_commit("after")

    with pytest.raises(testing.NeverReached, match=r'lose_commit\("after"\), ordered at .*test_testing.py'):
        asyncio.run(main())


def test_lose_commit_that_is_not_required_may_never_be_reached() -> None:
    with testing.blocking_broker() as broker:
        broker.lose_commit("before", required=False)

    async def main() -> None:
        async with testing.broker() as broker:
            broker.lose_commit("after", required=False)

    asyncio.run(main())


def test_an_error_of_the_test_is_raised_instead_of_an_unreached_fault() -> None:
    with pytest.raises(BodyFailed), testing.blocking_broker() as broker:
        broker.lose_commit("before")
        raise BodyFailed

    async def main() -> None:
        async with testing.broker() as broker:
            broker.lose_commit("before")
            raise BodyFailed

    with pytest.raises(BodyFailed):
        asyncio.run(main())


def test_a_commit_that_is_lost_is_reached_though_the_broker_crashes_behind_it(
    broker: BlockingBroker, clients: Clients
) -> None:
    client = clients.connect(broker.url)
    broker.lose_commit("after")
    broker.crash()
    client = clients.connect(broker.url)
    client.begin("t")
    client.commit("t", confirmed=False)
    assert lost(client)


# ---- The network ----


def test_a_connection_that_is_dropped_is_reset_and_no_other(broker: BlockingBroker, clients: Clients) -> None:
    first, second = clients.connect(broker.url), clients.connect(broker.url)
    first.subscribe("orders")
    first.send("orders", b"1", confirmed=True)
    first.message()
    broker.drop(SimpleNamespace(session_id=session_of(first)))
    with pytest.raises(ConnectionResetError):
        first._sock.recv(1)
    assert second.arrived() == []
    assert broker.queue("orders").messages[0].headers["truenext-attempts"] == "1"


def test_drop_without_a_connection_drops_all(broker: BlockingBroker, clients: Clients) -> None:
    both = [clients.connect(broker.url) for _ in range(2)]
    broker.drop()
    assert all(map(lost, both))


@pytest.mark.parametrize("fault", ["drop", "freeze", "thaw"])
def test_a_connection_that_is_not_there_is_an_error(broker: BlockingBroker, clients: Clients, fault: str) -> None:
    client = clients.connect(broker.url)
    client.disconnect()
    # The broker sees the end of the client's side.
    broker.advance(seconds=0)
    with pytest.raises(LookupError, match=session_of(client)):
        getattr(broker, fault)(session_of(client))


@pytest.mark.parametrize("fault", ["drop", "freeze", "thaw"])
def test_faults_refuse_an_argument_that_is_no_connection(broker: BlockingBroker, fault: str) -> None:
    for wrong in (7, SimpleNamespace(), SimpleNamespace(session_id=None)):
        with pytest.raises(ValueError, match="connection must be a connection of truenext's client, or its session id"):
            getattr(broker, fault)(wrong)


def test_a_queue_is_named_without_its_kind(broker: BlockingBroker) -> None:
    """Regression: the contents were those of a queue named "/queue/orders", which is always empty."""
    for name in ("/queue/orders", "/topic/orders", "queue/orders", "queue://orders"):
        with pytest.raises(ValueError, match="use the name of the queue alone, 'orders'"):
            broker.queue(name)


@pytest.mark.parametrize("name", ["", "/temp-queue/orders", "orders.*", "a,b", b"orders", None])
def test_queue_refuses_an_invalid_name(broker: BlockingBroker, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        broker.queue(name)


def test_frames_of_a_frozen_connection_are_carried_out_when_it_thaws(broker: BlockingBroker, clients: Clients) -> None:
    frozen, other = clients.connect(broker.url), clients.connect(broker.url)
    broker.freeze(session_of(frozen))
    frozen.send("orders", b"1", headers={"receipt": "r"})
    assert is_silent(frozen)
    assert other.arrived() == [] and broker.queue("orders").bodies == []
    broker.thaw(session_of(frozen))
    frozen.await_receipt("r")
    assert broker.queue("orders").bodies == [b"1"]


def test_frames_for_a_frozen_connection_come_when_it_thaws(broker: BlockingBroker, clients: Clients) -> None:
    frozen, other = clients.connect(broker.url), clients.connect(broker.url)
    frozen.subscribe("orders", ack="auto")
    broker.freeze()
    broker.thaw(session_of(other))
    other.send("orders", b"1", confirmed=True)
    assert is_silent(frozen)
    broker.thaw()
    assert bodies(frozen.only(1)) == ["1"]


def test_a_frozen_client_is_disconnected_and_notices_it_when_it_thaws(broker: BlockingBroker, clients: Clients) -> None:
    frozen, other = clients.connect(broker.url, "10000,0"), clients.connect(broker.url)
    frozen.subscribe("orders")
    other.send("orders", b"1", confirmed=True)
    frozen.message()
    broker.freeze(session_of(frozen))
    frozen.send("orders", b"2")
    broker.advance(seconds=60)
    assert broker.queue("orders").bodies == [b"1"]
    assert is_silent(frozen)
    broker.thaw(session_of(frozen))
    assert lost(frozen)


def test_a_client_that_closes_while_frozen_is_noticed_when_it_thaws(broker: BlockingBroker, clients: Clients) -> None:
    frozen, other = clients.connect(broker.url), clients.connect(broker.url)
    frozen.subscribe("orders")
    other.send("orders", b"1", confirmed=True)
    frozen.ack(frozen.message())
    other.send("orders", b"2", confirmed=True)
    frozen.message()
    broker.freeze(session_of(frozen))
    frozen.crash()
    broker.advance(seconds=60)
    assert broker.queue("orders").unacknowledged == 1
    broker.thaw(session_of(frozen))
    assert broker.queue("orders").bodies == [b"2"]


def test_a_client_that_sent_disconnect_does_not_see_its_end_while_it_is_frozen(
    broker: BlockingBroker, clients: Clients
) -> None:
    client = clients.connect(broker.url)
    broker.slow_disk(60)
    client.send("orders", b"1", persistent=True)
    client.send_frame("DISCONNECT", {})
    assert is_silent(client)
    broker.freeze()
    broker.advance(seconds=60)
    assert is_silent(client)
    broker.thaw()
    broker.advance(seconds=3)
    assert lost(client)


def test_a_frozen_connection_can_be_dropped(broker: BlockingBroker, clients: Clients) -> None:
    silent, given_up = clients.connect(broker.url), clients.connect(broker.url, "10000,0")
    broker.freeze()
    broker.advance(seconds=60)
    broker.drop()
    assert lost(silent) and lost(given_up)
    with pytest.raises(LookupError):
        broker.thaw(session_of(given_up))


# ---- The disk ----


def test_a_producer_waits_on_a_full_disk_until_there_is_space(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    client.send("orders", b"0", persistent=True, confirmed=True)
    broker.fill_disk()
    client.send("orders", b"1", persistent=True, headers={"receipt": "r"})
    assert is_silent(client)
    broker.free_disk()
    broker.advance(seconds=1)
    client.await_receipt("r")


def test_a_producer_that_does_not_wait_is_refused_on_a_full_disk(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url, headers=TRUENEXT_CLIENT)
    broker.fill_disk()
    client.send("orders", b"1", persistent=True)
    assert client.next_error().headers["truenext-code"] == "no-space"
    broker.free_disk()
    client.send("orders", b"2", persistent=True, confirmed=True)
    assert broker.queue("orders").bodies == [b"2"]


def test_consumers_go_on_on_a_full_disk(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    client.send("orders", b"1", persistent=True, confirmed=True)
    broker.fill_disk()
    client.subscribe("orders")
    client.ack(client.message(), confirmed=True)


def test_a_slow_disk_takes_its_time_by_the_brokers_clock(broker: BlockingBroker, clients: Clients) -> None:
    client, other = clients.connect(broker.url), clients.connect(broker.url)
    other.subscribe("orders")
    broker.slow_disk(60)
    client.send("orders", b"1", persistent=True, headers={"receipt": "r"})
    broker.advance(seconds=59)
    assert is_silent(client) and is_silent(other)
    other.send("others", b"transient", confirmed=True)
    broker.advance(seconds=2)
    client.await_receipt("r")
    assert bodies(other.only(1)) == ["1"]


def test_a_slow_disk_takes_its_time_without_an_advance_of_the_clock(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    broker.slow_disk(0.2)
    started = time.monotonic()
    client.send("orders", b"1", persistent=True, confirmed=True)
    assert time.monotonic() - started >= 0.19


def test_a_disk_that_is_no_longer_slow_finishes_its_write_at_once(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    broker.slow_disk(600)
    client.send("orders", b"1", persistent=True, headers={"receipt": "r"})
    assert is_silent(client)
    broker.slow_disk(0)
    client.await_receipt("r")
    client.send("orders", b"2", persistent=True, confirmed=True)


def test_messages_that_a_slow_disk_has_not_written_are_lost_by_a_crash(
    broker: BlockingBroker, clients: Clients
) -> None:
    client = clients.connect(broker.url)
    client.send("orders", b"1", persistent=True, confirmed=True)
    broker.slow_disk(600)
    client.send("orders", b"2", persistent=True)
    assert is_silent(client)
    broker.crash()
    assert broker.queue("orders").bodies == [b"1"]


# ---- Time ----


def test_scheduled_sends_come_when_the_clock_was_advanced(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    client.subscribe("orders")
    client.send("orders", b"1", headers={"AMQ_SCHEDULED_DELAY": "3600000"})
    broker.advance(seconds=3599)
    assert client.arrived() == []
    broker.advance(seconds=1)
    assert bodies(client.only(1)) == ["1"]


def test_repeating_scheduled_sends_come_each_time(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    client.subscribe("orders")
    repeats = {"AMQ_SCHEDULED_DELAY": "10000", "AMQ_SCHEDULED_PERIOD": "10000", "AMQ_SCHEDULED_REPEAT": "-1"}
    client.send("orders", b"1", persistent=True, headers=repeats)
    broker.advance(seconds=60.5)
    assert len(client.arrived()) == 6


def test_messages_expire_when_the_clock_was_advanced(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    client.send("orders", b"1", headers={"truenext-ttl": "60000"})
    broker.advance(seconds=55)
    assert broker.queue("orders").bodies == [b"1"]
    broker.advance(seconds=10)
    assert broker.queue("orders").bodies == []


def test_delayed_retries_come_when_the_clock_was_advanced(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    client.subscribe("orders")
    client.send("orders", b"1")
    client.nack(client.message(), headers={"truenext-delay": "60000"})
    broker.advance(seconds=59)
    assert client.arrived() == []
    broker.advance(seconds=1)
    assert client.only(1)[0].headers["truenext-attempts"] == "1"


def test_heart_beats_go_by_the_clock(broker: BlockingBroker, clients: Clients) -> None:
    speaks, listens = clients.connect(broker.url, "10000,0"), clients.connect(broker.url, "0,10000")
    broker.advance(seconds=11)
    assert listens.read() == b"\n"
    broker.freeze(session_of(speaks))
    broker.advance(seconds=60)
    broker.thaw(session_of(speaks))
    assert lost(speaks)


def test_a_client_is_not_disconnected_when_the_brokers_clock_is_advanced(
    broker: BlockingBroker, clients: Clients
) -> None:
    client = clients.connect(broker.url, "10000,0")
    broker.advance(seconds=600)
    client.send("orders", b"1", confirmed=True)


def test_a_client_without_heart_beats_is_disconnected_by_its_own_clock(
    broker: BlockingBroker, clients: Clients
) -> None:
    client = clients.connect(broker.url, "250,0")
    broker.advance(seconds=600)
    assert lost(client)


def test_clock_goes_on_by_itself(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    broker.advance(seconds=100)
    client.subscribe("orders")
    client.send("orders", b"1", headers={"AMQ_SCHEDULED_DELAY": "200"})
    assert bodies([client.message()]) == ["1"]


def test_advanced_clock_survives_a_restart(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    client.send("orders", b"1", persistent=True, headers={"AMQ_SCHEDULED_DELAY": "60000"}, confirmed=True)
    broker.advance(seconds=30)
    broker.crash()
    broker.advance(seconds=29)
    assert broker.queue("orders").bodies == []
    broker.advance(seconds=2)
    assert broker.queue("orders").bodies == [b"1"]


def test_advance_and_slow_disk_refuse_negative_times(broker: BlockingBroker) -> None:
    with pytest.raises(ValueError, match="-1"):
        broker.advance(seconds=-1)
    with pytest.raises(ValueError, match="-1"):
        broker.slow_disk(-1)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "1", None, True])
def test_advance_and_slow_disk_refuse_invalid_times(broker: BlockingBroker, wrong: float) -> None:
    with pytest.raises(ValueError, match=f"the time to advance must be a number of seconds, 0 or more, not {wrong!r}"):
        broker.advance(seconds=wrong)
    with pytest.raises(
        ValueError, match=f"the delay of the disk must be a number of seconds, 0 or more, not {wrong!r}"
    ):
        broker.slow_disk(wrong)


# ---- Runs ----


def test_persistent_messages_are_there_after_a_crash_at_the_same_address(
    broker: BlockingBroker, clients: Clients
) -> None:
    client = clients.connect(broker.url)
    client.send("orders", b"persistent", persistent=True, confirmed=True)
    client.send("orders", b"transient", confirmed=True)
    url = broker.url
    broker.crash()
    assert broker.url == url
    assert lost(client)
    contents = broker.queue("orders")
    assert contents.bodies == [b"persistent"]
    again = clients.connect(url)
    again.subscribe("orders")
    assert again.connected.headers["session"] != session_of(client)
    assert bodies(again.only(1)) == ["persistent"]


def test_all_messages_are_there_after_a_restart(broker: BlockingBroker, clients: Clients) -> None:
    client = clients.connect(broker.url)
    client.subscribe("orders")
    client.send("orders", b"persistent", persistent=True)
    client.send("orders", b"transient")
    client.messages(2)
    hangs_up = threading.Thread(target=client.await_silent_end)
    hangs_up.start()
    broker.restart()
    hangs_up.join()
    contents = broker.queue("orders")
    assert contents.bodies == [b"persistent", b"transient"]
    assert {message.headers["truenext-attempts"] for message in contents.messages} == {"0"}


def test_a_restart_waits_for_clients_to_hang_up(broker: BlockingBroker, clients: Clients) -> None:
    broker.queue("orders")
    client = clients.connect(broker.url)
    ends_at = []

    def hang_up_late() -> None:
        while client.read():
            pass
        time.sleep(0.2)
        ends_at.append(time.monotonic())
        client.close()

    hangs_up = threading.Thread(target=hang_up_late)
    hangs_up.start()
    broker.restart()
    ended_at = time.monotonic()
    hangs_up.join()
    assert ends_at and ended_at >= ends_at[0]


def test_a_restart_on_a_slow_and_full_disk_with_frozen_connections_takes_no_time(
    broker: BlockingBroker, clients: Clients
) -> None:
    client = clients.connect(broker.url)
    broker.slow_disk(600)
    client.send("orders", b"1", persistent=True)
    assert is_silent(client)
    broker.fill_disk()
    broker.freeze()
    hangs_up = threading.Thread(target=client.await_silent_end)
    hangs_up.start()
    broker.restart()
    hangs_up.join()
    assert broker.queue("orders").bodies == [b"1"]
    # The faults go on.
    client = clients.connect(broker.url, headers=TRUENEXT_CLIENT)
    client.send("orders", b"2")
    assert client.next_error().headers["truenext-code"] == "no-space"


# ---- In the running loop ----


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_async_broker_runs_in_the_running_loop(clients: Clients, factory: type[asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        async with testing.broker() as broker:
            client = await asyncio.to_thread(clients.connect, broker.url)
            scheduled = {"AMQ_SCHEDULED_DELAY": "60000", "receipt": "sent"}
            client.send("orders", b"1", persistent=True, headers=scheduled)
            await asyncio.to_thread(client.await_receipt, "sent")
            # A wall clock may be set back by a little while the test runs.
            await broker.advance(seconds=61)
            assert (await broker.queue("orders")).bodies == [b"1"]
            await broker.crash()
            assert (await broker.queue("orders")).bodies == [b"1"]
            client = await asyncio.to_thread(clients.connect, broker.url)
            broker.freeze(session_of(client))
            client.send("orders", b"2", headers={"receipt": "r"})
            await broker.advance(seconds=1)
            assert (await broker.queue("orders")).bodies == [b"1"]
            broker.thaw(session_of(client))
            await asyncio.to_thread(client.await_receipt, "r")
            broker.freeze()
            client.crash()
            await broker.advance(seconds=1)
            broker.thaw()
            await broker.advance(seconds=1)
            with pytest.raises(LookupError):
                broker.drop(session_of(client))
            client = await asyncio.to_thread(clients.connect, broker.url)
            broker.drop(session_of(client))
            assert await asyncio.to_thread(lost, client)
            client = await asyncio.to_thread(clients.connect, broker.url)
            broker.lose_commit("after")
            client.begin("t")
            client.send("orders", b"3", persistent=True, transaction="t")
            client.commit("t", confirmed=False)
            assert await asyncio.to_thread(lost, client)
            await asyncio.gather(broker.restart(), broker.advance(seconds=1), broker.advance(seconds=1))
            assert (await broker.queue("orders")).bodies == [b"1", b"2", b"3"]

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


def test_two_concurrent_advances_add_up(clients: Clients) -> None:
    async def main() -> None:
        async with testing.broker() as broker:
            client = await asyncio.to_thread(clients.connect, broker.url)
            client.send("orders", b"1", headers={"AMQ_SCHEDULED_DELAY": "60000", "receipt": "sent"})
            await asyncio.to_thread(client.await_receipt, "sent")
            await asyncio.gather(broker.advance(seconds=30), broker.advance(seconds=30))
            assert (await broker.queue("orders")).bodies == [b"1"]

    asyncio.run(main())


def test_delay_that_ends_with_an_advance_is_over_after_it(
    broker: BlockingBroker, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the broker may wake a millisecond after a delay has ended. This was after the advance."""
    for clock in ("time_ns", "monotonic_ns"):
        monkeypatch.setattr(f"truenext.testing.clock.{clock}", lambda: 10**18)
    client = clients.connect(broker.url)
    client.subscribe("orders")
    client.send("orders", b"1", headers={"AMQ_SCHEDULED_DELAY": "60000"}, confirmed=True)
    broker.advance(seconds=60)
    assert bodies(client.only(1)) == ["1"]


@pytest.mark.parametrize("first", ["advance", "queue"])
def test_a_crash_waits_for_calls_that_were_started_before(clients: Clients, first: str) -> None:
    async def main() -> None:
        async with testing.broker() as broker:
            client = await asyncio.to_thread(clients.connect, broker.url)
            broker.slow_disk(600)
            client.send("orders", b"2", persistent=True)
            await asyncio.sleep(0.1)
            started = broker.advance(seconds=60) if first == "advance" else broker.queue("orders")
            await asyncio.gather(started, broker.crash())
            assert (await broker.queue("orders")).bodies == []

    asyncio.run(asyncio.wait_for(main(), 20))


# ---- The end ----


class BodyFailed(Exception):
    pass


def wreck(broker: BlockingBroker, clients: Clients) -> None:
    """Leave clients, faults and transactions for the broker to clean up."""
    broker.slow_disk(600)
    client, frozen = clients.connect(broker.url, "10000,10000"), clients.connect(broker.url)
    frozen.subscribe("orders")
    broker.freeze(session_of(frozen))
    client.send("orders", b"1", persistent=True)
    client.begin("t")
    broker.lose_commit("after", required=False)
    client.commit("t", confirmed=False)
    broker.fill_disk()


@pytest.mark.parametrize("raises", [False, True])
def test_broker_leaves_no_thread_file_or_log_at_its_end(
    clients: Clients, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder, raises: bool
) -> None:
    threads, files = set(threading.enumerate()), open_files()
    started = time.monotonic()
    with contextlib.suppress(BodyFailed), testing.blocking_broker() as broker:
        url = broker.url
        wreck(broker, clients)
        if raises:
            raise BodyFailed
    assert time.monotonic() - started < 5
    assert set(threading.enumerate()) == threads
    clients.close()
    assert open_files() == files
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not recwarn.list
    caplog.clear()
    with pytest.raises(ConnectionRefusedError):
        RawClient(int(url.rpartition(":")[2]))
    time.sleep(0.1)
    assert not caplog.records


def test_exception_of_the_body_comes_out(clients: Clients) -> None:
    with pytest.raises(BodyFailed), testing.blocking_broker() as broker:
        wreck(broker, clients)
        raise BodyFailed


def test_async_broker_leaves_no_thread_or_task_in_the_running_loop(clients: Clients) -> None:
    async def main() -> None:
        threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
        with pytest.raises(BodyFailed):
            async with testing.broker() as broker:
                broker.slow_disk(600)
                sock = await asyncio.open_connection("127.0.0.1", int(broker.url.rpartition(":")[2]))
                sock[1].close()
                await broker.advance(seconds=1)
                raise BodyFailed
        assert set(threading.enumerate()) == threads and asyncio.all_tasks() == tasks

    asyncio.run(main(), debug=True)


def test_a_bug_of_the_broker_comes_out_at_the_end(clients: Clients, caplog: pytest.LogCaptureFixture) -> None:
    with (
        pytest.raises(Exception, match="broken by a test"),
        testing.blocking_broker() as broker,
        pytest.MonkeyPatch.context() as patch,
    ):

        def fail(*_: object) -> None:
            raise RuntimeError("broken by a test")

        patch.setattr("truenext.store.memory.MemoryStore._write", fail)
        client = clients.connect(broker.url)
        client.send("orders", b"1", persistent=True)
        with pytest.raises(Exception, match="broken by a test"):
            broker.advance(seconds=1)
    # Of what its thread has raised the store may speak, too.
    reasons = [str(getattr(record, "reason", "")) for record in caplog.records]
    assert "broken by a test" in "\n".join([caplog.text, *reasons])


# ---- The fixture ----

A_TEST = """
import sys

def test_without_a_broker():
    assert not [name for name in sys.modules if name.partition(".")[0] == "truenext"]

def test_with_a_broker(truenext_broker):
    truenext_broker.advance(seconds=1)
    assert truenext_broker.queue("orders").bodies == []
"""


def pytest_output(folder: Path) -> str:
    """Run pytest on test_it.py of a folder, and return its output."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "pytest_truenext", "-p", "no:cacheprovider", "test_it.py"],
        cwd=folder,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout + ran.stderr


def test_the_fixture_imports_nothing_before_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(A_TEST)
    assert "2 passed" in pytest_output(tmp_path)


def test_the_fixture_fails_a_test_that_does_not_reach_its_ordered_fault(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("""
def test_it(truenext_broker):
    truenext_broker.lose_commit("before")
""")
    output = pytest_output(tmp_path)
    assert "1 passed, 1 error" in output
    assert re.search(r'NeverReached: .*\n.*lose_commit\("before"\), ordered at .*test_it.py:3', output)


def test_the_fixture_reports_no_unreached_fault_if_the_test_has_raised(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("""
import pytest

def test_fails(truenext_broker):
    truenext_broker.lose_commit("before")
    raise ZeroDivisionError

@pytest.mark.xfail
def test_fails_as_expected(truenext_broker):
    truenext_broker.lose_commit("before")
    raise ZeroDivisionError

def test_need_not(truenext_broker):
    truenext_broker.lose_commit("before", required=False)
""")
    output = pytest_output(tmp_path)
    assert "1 failed, 1 passed, 1 xfailed" in output
    assert "NeverReached" not in output


def test_examples_of_the_page_run(tmp_path: Path) -> None:
    page, _, _ = (ROOT / "docs" / "testing.md").read_text().partition("\n## Services of stages\n")
    (tmp_path / "test_it.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    assert "3 passed" in pytest_output(tmp_path)


def test_pytest_finds_the_fixture() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"truenext": "pytest_truenext"}
    assert project["tool"]["setuptools"]["py-modules"] == ["pytest_truenext"]
