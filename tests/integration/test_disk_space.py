"""Tests of clients while disk space for messages is short: which wait, which are refused, and which go on.

The test sets how full the disk is (held_disk.py). Source of what is expected: docs/contract.md, C24.2 to C24.4.
"""

import os
import re
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import completed
from tests.integration.raw_client import RawClient, bodies, numbered
from truenext.cli import messages
from truenext.cli.main import main
from truenext.client.core import send_buffer
from truenext.client.core.send_buffer import NO_SPACE_RETRY_S, UNCONFIRMED_MESSAGES_MAX
from truenext.model.disk_level import DiskLevel

REFUSING = pytest.mark.parametrize("options", [("--when-full", "refuse")], ids=["refuse"])
SHORT = pytest.mark.parametrize("disk_level", [DiskLevel.LITTLE, DiskLevel.NONE])
FULL = "disk is as full as it may be"


def producer(broker: BrokerProcess, queue: str, *, heart_beat: str = "0,0") -> RawClient:
    """Return a client that only sends, and has sent one message."""
    client = broker.connect(heart_beat=heart_beat)
    client.send(queue, b"first", persistent=True, confirmed=True)
    return client


def send_unconfirmed(client: RawClient, queue: str, body: bytes) -> str:
    """Send a persistent message with a receipt, and return the receipt's name."""
    receipt = client.new_receipt()
    client.send(queue, body, persistent=True, headers={"receipt": receipt})
    return receipt


def assert_waits(client: RawClient, seconds: float = 0.3) -> None:
    """Check that the client gets no frame, and is not disconnected."""
    with pytest.raises(TimeoutError):
        client.next_frame(seconds)


# ---- Those who only send ----


@SHORT
def test_a_producer_is_not_read_while_space_is_short_and_then_goes_on(
    held_broker: BrokerProcess, queue: str, disk_level: DiskLevel
) -> None:
    # C24.2
    client = producer(held_broker, queue)
    held_broker.set_disk_level(disk_level)

    receipts = [send_unconfirmed(client, queue, b"%d" % number) for number in range(100)]

    assert_waits(client)
    assert held_broker.queues()[queue].waiting == 1
    assert held_broker.status()["disk_level"] == disk_level.name.lower()
    held_broker.set_disk_level(DiskLevel.PLENTY)
    for receipt in receipts:
        client.await_receipt(receipt)
    remaining = held_broker.remaining_messages(queue, once_durable=True)
    assert bodies(remaining) == ["first", *(str(number) for number in range(100))]


def test_a_producer_that_waits_for_space_is_not_ended_for_missing_heart_beats(
    held_broker: BrokerProcess, queue: str
) -> None:
    """The heart-beats of the producer are unread in the socket, after its sends."""
    # C24.2
    client = producer(held_broker, queue, heart_beat="300,300")
    held_broker.set_disk_level(DiskLevel.LITTLE)
    receipt = send_unconfirmed(client, queue, b"second")
    # Longer than a silent client is borne with, and longer than it takes to notice a silent broker.
    for _ in range(6):
        time.sleep(0.25)
        client.write(b"\n")
    assert set(client.read()) == {ord("\n")}
    held_broker.set_disk_level(DiskLevel.PLENTY)
    client.await_receipt(receipt)
    for _ in range(3):
        time.sleep(0.25)
        client.write(b"\n")
    client.send(queue, b"third", persistent=True, confirmed=True)
    # Heard again, it is borne with as anybody else.
    client.await_silent_end()
    assert bodies(held_broker.remaining_messages(queue, once_durable=True)) == ["first", "second", "third"]


def test_a_producer_may_subscribe_and_disconnect_while_space_is_short(held_broker: BrokerProcess, queue: str) -> None:
    """The broker holds back sends alone: otherwise consumers that sent something first could never make space."""
    greeter, leaver, disconnected = (producer(held_broker, queue) for _ in range(3))
    held_broker.set_disk_level(DiskLevel.LITTLE)
    leaver.subscribe("other")
    leaver.unsubscribe()
    leaver.disconnect()
    disconnected.disconnect()
    greeter.subscribe(queue)
    for _ in range(3):
        greeter.ack(greeter.message(), confirmed=True)
    # It takes messages away now.
    greeter.send(queue, b"second", persistent=True, confirmed=True)
    assert greeter.message().body == b"second"


@SHORT
def test_a_producer_with_transactions_waits_for_space(
    held_broker: BrokerProcess, queue: str, disk_level: DiskLevel
) -> None:
    # C24.2
    client = producer(held_broker, queue)
    held_broker.set_disk_level(disk_level)
    client.begin("t")
    client.send(queue, b"second", persistent=True, transaction="t")
    client.commit("t", confirmed=False)
    receipt = send_unconfirmed(client, queue, b"third")
    assert_waits(client)
    held_broker.set_disk_level(DiskLevel.PLENTY)
    client.await_receipt(receipt)
    assert bodies(held_broker.remaining_messages(queue)) == ["first", "second", "third"]


def test_an_invalid_send_that_waited_for_space_is_refused(held_broker: BrokerProcess, queue: str) -> None:
    client = producer(held_broker, queue)
    held_broker.set_disk_level(DiskLevel.LITTLE)
    send_unconfirmed(client, queue, b"second")
    client.send_frame("SEND", {"destination": "/nowhere", "receipt": "in question"})
    assert_waits(client)
    held_broker.set_disk_level(DiskLevel.PLENTY)
    error = client.error()
    assert "unknown destination '/nowhere'" in error.body.decode()
    assert error.headers["receipt-id"] == "in question"
    assert bodies(held_broker.remaining_messages(queue, once_durable=True)) == ["first", "second"]


@pytest.mark.parametrize("is_clean", [True, False], ids=["clean", "kill -9"])
def test_sends_that_wait_for_space_when_the_broker_ends_are_not_stored(
    held_broker: BrokerProcess, queue: str, is_clean: bool
) -> None:
    client = producer(held_broker, queue)
    held_broker.set_disk_level(DiskLevel.LITTLE)
    send_unconfirmed(client, queue, b"second")
    assert_waits(client)
    held_broker.restart(is_clean=is_clean)
    assert bodies(held_broker.remaining_messages(queue)) == ["first"]


@REFUSING
def test_a_producer_is_refused_while_space_is_short_with_when_full_refuse(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C24.2
    client, newcomer = producer(held_broker, queue), held_broker.connect()
    held_broker.set_disk_level(DiskLevel.LITTLE)

    receipt = send_unconfirmed(client, queue, b"refused")
    error = client.error()
    assert FULL in error.body.decode()
    assert error.headers["receipt-id"] == receipt
    newcomer.send(queue, b"refused")
    assert FULL in newcomer.error().body.decode()

    held_broker.set_disk_level(DiskLevel.PLENTY)
    producer(held_broker, queue)
    assert bodies(held_broker.remaining_messages(queue, once_durable=True)) == ["first", "first"]


def test_a_transient_send_needs_space_too(held_broker: BrokerProcess, queue: str) -> None:
    """A transient message may have to leave memory."""
    # C24.3
    client = held_broker.connect()
    client.subscribe("other")
    held_broker.set_disk_level(DiskLevel.NONE)
    client.send(queue, b"transient")
    assert FULL in client.error().body.decode()


# ---- What the broker says of it ----

LITTLE_SPACE_LOG, NO_SPACE_LOG = (
    "disk is almost full",
    "disk is full: sends are refused, except in transactions that free as much as they send",
)
SPACE_AGAIN_LOG = "disk has free space for messages again"


def await_log_lines(broker: BrokerProcess, count: int, *texts: str) -> list[str]:
    """Return the log lines about disk space, or with one of `texts`, once there are `count`."""
    expected = texts or (LITTLE_SPACE_LOG, NO_SPACE_LOG, SPACE_AGAIN_LOG)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        lines = [line for line in broker.log.splitlines() if any(text in line for text in expected)]
        if len(lines) >= count:
            return lines
        assert time.monotonic() < deadline, broker.log
        time.sleep(0.01)


def test_a_broker_that_starts_with_too_little_space_reports_how_much_it_needs(held_broker: BrokerProcess) -> None:
    held_broker.set_disk_level(DiskLevel.LITTLE)
    held_broker.restart(is_clean=True)
    (line,) = await_log_lines(held_broker, 1)
    assert re.search(rf" WARNING {LITTLE_SPACE_LOG}.* disk_level='little' free_bytes=\d+ needed_bytes=\d+$", line)
    facts = held_broker.status()
    assert f"needed_bytes={facts['disk_bytes']['needed']}" in line
    shown = held_broker.output_of("status")
    assert "level: little, connections that only send wait or are refused; " in shown
    assert f"{facts['disk_bytes']['needed']:,} needed" in shown
    assert "`truenext queues --order waiting`" in shown


def test_the_log_says_once_that_producers_wait_and_once_that_they_go_on(held_broker: BrokerProcess, queue: str) -> None:
    producers = [producer(held_broker, queue) for _ in range(3)]
    held_broker.set_disk_level(DiskLevel.LITTLE)
    receipts = [send_unconfirmed(client, queue, b"second") for client in producers]
    assert len(await_log_lines(held_broker, 1)) == 1
    held_broker.set_disk_level(DiskLevel.NONE)
    assert len(await_log_lines(held_broker, 2)) == 2
    assert (
        "level: none, sends are refused, except in transactions that free as much as they send; "
        in held_broker.output_of("status")
    )
    held_broker.set_disk_level(DiskLevel.LITTLE)
    assert_waits(producers[0])
    held_broker.set_disk_level(DiskLevel.PLENTY)
    for client, receipt in zip(producers, receipts, strict=True):
        client.await_receipt(receipt)
    short, none, again = await_log_lines(held_broker, 3)
    assert LITTLE_SPACE_LOG in short and f"{NO_SPACE_LOG} disk_level='none' " in none and SPACE_AGAIN_LOG in again


@pytest.mark.parametrize(
    ("words", "count"),
    [(["x"], "1 message was"), (["--lines", "--file", "numbers"], "3 messages were")],
    ids=["one", "lines"],
)
def test_truenext_send_says_that_the_disk_is_full_and_nothing_was_taken(
    held_broker: BrokerProcess,
    queue: str,
    words: list[str],
    count: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "numbers").write_text("1\n2\n3\n")
    monkeypatch.chdir(tmp_path)
    # Between two tries, in the pause of a client that was refused; a busy machine takes its time for a try.
    monkeypatch.setattr(send_buffer, "NO_SPACE_RETRY_S", 1.0)
    monkeypatch.setattr(messages, "SEND_TIMEOUT_S", 1.6)
    held_broker.set_disk_level(DiskLevel.LITTLE)
    url = f"stomp://127.0.0.1:{held_broker.port}"
    done = CliRunner().invoke(main, ["send", queue, *words, "--url", url])
    assert done.exit_code == 1
    waits, *_, ends = done.stderr.splitlines()
    assert waits.startswith(f"truenext: sends wait until {url} has space: the broker's {FULL}")
    assert ends.startswith(f"truenext: {count} not accepted: the broker's {FULL}")
    held_broker.set_disk_level(DiskLevel.PLENTY)
    assert held_broker.remaining_messages(queue, once_durable=True) == []


def test_truenext_send_of_more_lines_than_may_be_under_way_says_how_many_are_confirmed_when_the_disk_is_full(
    held_broker: BrokerProcess, queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "SEND_TIMEOUT_S", 2.5 * NO_SPACE_RETRY_S)
    pipe = tmp_path / "lines"
    os.mkfifo(pipe)

    def write_lines() -> None:
        with pipe.open("w", buffering=1) as lines:
            lines.write("x\n" * 500)
            while queue not in held_broker.queues() or held_broker.queues()[queue].waiting < 500:
                time.sleep(0.05)
            held_broker.set_disk_level(DiskLevel.LITTLE)
            # As much as the pipe takes without a reader, so that this thread ends.
            lines.write("x\n" * 2 * UNCONFIRMED_MESSAGES_MAX)

    writer = threading.Thread(target=write_lines, daemon=True)
    writer.start()
    url = f"stomp://127.0.0.1:{held_broker.port}"
    done = CliRunner().invoke(main, ["send", queue, "--lines", "--file", str(pipe), "--url", url])
    writer.join(PATIENCE_SECONDS)
    assert done.exit_code == 1
    ends = done.stderr.splitlines()[-1]
    what = r"not (accepted|confirmed and may have arrived), after 500 that are confirmed"
    assert re.match(rf"truenext: 10,000 messages were {what}: the broker's {FULL}", ends)


@pytest.mark.parametrize("command", ["move", "redrive"])
def test_move_without_space_leaves_the_messages_and_reports_it(
    held_broker: BrokerProcess, queue: str, command: str
) -> None:
    source = f"DLQ.{queue}" if command == "redrive" else queue
    client = producer(held_broker, queue)
    if command == "redrive":
        client.subscribe(queue)
        client.send_frame("NACK", {"id": client.message().headers["ack"], "truenext-reject": "true"}, confirmed=True)
    held_broker.set_disk_level(DiskLevel.NONE)
    words = [command, source, *(["other"] if command == "move" else [])]
    done = completed(*words, "--url", f"stomp://127.0.0.1:{held_broker.port}")
    assert done.returncode == 1
    assert f"truenext: the broker's {FULL}".encode() in done.stderr
    assert held_broker.queues()[source].waiting == 1


# ---- Those who also take messages away ----


def fill(broker: BrokerProcess, queue: str, count: int) -> None:
    sender = broker.connect()
    for number in range(count):
        sender.send(queue, b"%d" % number, persistent=number % 2 == 0)
    sender.send("barrier", b"", persistent=True, confirmed=True)
    sender.disconnect()


def test_a_consumer_that_sends_without_any_space_is_refused_and_counts_no_attempt(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C24.3, C24.4
    fill(held_broker, queue, 6)
    worker = held_broker.connect()
    worker.subscribe(queue, prefetch=4)
    held = worker.messages(4)
    worker.begin("t")
    worker.ack(held[0], transaction="t")
    worker.nack(held[1], transaction="t")
    worker.send("target", b"never", persistent=True, transaction="t", confirmed=True)
    held_broker.set_disk_level(DiskLevel.NONE)

    worker.send("target", b"refused", persistent=True, transaction="t")

    assert FULL in worker.error().body.decode()
    remaining = held_broker.remaining_messages(queue)
    assert bodies(remaining) == [str(number) for number in range(6)]
    assert {message.headers["truenext-attempts"] for message in remaining} == {"0"}
    # Six of which two had waited for credit that the acknowledgements in the transaction gave.
    assert {message.headers["truenext-deliveries"] for message in remaining} == {"2"}
    assert "target" not in held_broker.queues() or held_broker.remaining_messages("target") == []


def test_acknowledgements_commits_and_aborts_get_through_without_any_space(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C24.3
    fill(held_broker, queue, 10)
    worker = held_broker.connect()
    worker.subscribe(queue, prefetch=10)
    worker.subscribe("other", subscription="other")
    held = worker.messages(10)
    worker.begin("with sends")
    worker.send("target", b"sent before", persistent=True, transaction="with sends", confirmed=True)
    held_broker.set_disk_level(DiskLevel.NONE)

    worker.ack(held[0], transaction="with sends")
    worker.commit("with sends")
    worker.ack(held[1], confirmed=True)
    worker.begin("acknowledges")
    for message in held[2:5]:
        worker.ack(message, transaction="acknowledges")
    worker.commit("acknowledges")
    worker.begin("aborts")
    worker.ack(held[5], transaction="aborts")
    worker.abort("aborts")
    worker.nack(held[6], confirmed=True)
    assert bodies(worker.only(2)) == ["5", "6"]
    worker.unsubscribe()
    worker.disconnect()

    held_broker.restart(is_clean=False)
    # The transients among 5 to 9 went with the crash.
    remaining = held_broker.remaining_messages(queue)
    assert bodies(remaining) == ["6", "8"]
    assert [message.headers["truenext-attempts"] for message in remaining] == ["1", "0"]
    assert bodies(held_broker.remaining_messages("target")) == ["sent before"]


def test_acknowledgements_get_through_when_the_history_finds_the_disk_full(
    held_broker: BrokerProcess, queue: str
) -> None:
    fill(held_broker, queue, 6)
    worker = held_broker.connect()
    worker.subscribe(queue, prefetch=6)
    held = worker.messages(6)
    held_broker.fill_disk()
    for message in held[:4]:
        worker.ack(message, confirmed=True)
    # The history is written a moment later.
    await_log_lines(held_broker, 1, "the disk is full: sends are refused until there is free space")
    worker.ack(held[4], confirmed=True)
    worker.disconnect()
    assert bodies(held_broker.remaining_messages(queue)) == ["5"]


def test_a_refused_numbered_send_is_accepted_when_it_is_repeated(held_broker: BrokerProcess, queue: str) -> None:
    client = held_broker.connect()
    client.subscribe("other")
    held_broker.set_disk_level(DiskLevel.NONE)
    client.send(queue, b"numbered", persistent=True, headers=numbered("p", 1))
    assert FULL in client.error().body.decode()
    held_broker.set_disk_level(DiskLevel.PLENTY)

    client = held_broker.connect()
    for _ in range(2):
        client.send(queue, b"numbered", persistent=True, headers=numbered("p", 1), confirmed=True)
    assert bodies(held_broker.remaining_messages(queue)) == ["numbered"]


def test_replies_and_control_requests_need_no_space(held_broker: BrokerProcess) -> None:
    # C24.3
    requester = held_broker.connect()
    requester.subscribe("requests", subscription="requests")
    requester.send_frame("SUBSCRIBE", {"id": "replies", "destination": "/temp-queue/replies"}, confirmed=True)
    held_broker.set_disk_level(DiskLevel.NONE)
    requester.send_frame("SEND", {"destination": "/temp-queue/replies"}, b"an answer")
    assert requester.message().body == b"an answer"
    assert held_broker.status()["disk_level"] == "none"


def test_a_copier_on_one_connection_finishes_while_producers_wait_for_space(held_broker: BrokerProcess) -> None:
    """Otherwise no client would ever make space."""
    fill(held_broker, "a", 300)
    producers = [producer(held_broker, "input") for _ in range(3)]
    held_broker.set_disk_level(DiskLevel.LITTLE)
    receipts = [
        [send_unconfirmed(client, "input", b"%d-%d" % (name, number)) for number in range(50)]
        for name, client in enumerate(producers)
    ]
    copier = held_broker.connect()
    copier.subscribe("a", prefetch=20)
    for number in range(300):
        message = copier.message()
        assert message.body == b"%d" % number
        if number % 3:
            copier.send("b", message.body, persistent=True)
            copier.ack(message, confirmed=number % 50 == 0)
        else:
            copier.begin("t")
            copier.send("b", message.body, persistent=True, transaction="t")
            copier.ack(message, transaction="t")
            copier.commit("t")
    copier.disconnect()

    assert held_broker.queues()["input"].waiting == 3
    for client in producers:
        assert_waits(client, 0.01)
    assert held_broker.queues()["a"].waiting == 0
    assert bodies(held_broker.remaining_messages("b")) == [str(number) for number in range(300)]
    held_broker.set_disk_level(DiskLevel.PLENTY)
    for client, awaited in zip(producers, receipts, strict=True):
        for receipt in awaited:
            client.await_receipt(receipt)
    received = bodies(held_broker.remaining_messages("input"))[3:]
    assert sorted(received) == sorted(f"{name}-{number}" for name in range(3) for number in range(50))
    for name in range(3):
        assert [body for body in received if body.startswith(f"{name}-")] == [
            f"{name}-{number}" for number in range(50)
        ]


def test_a_producer_that_is_slowed_again_and_again_loses_nothing(held_broker: BrokerProcess, queue: str) -> None:
    """Consumers go on meanwhile, and get each message once, in order."""
    count = 2000
    client, receiver = producer(held_broker, queue), held_broker.connect()
    receiver.subscribe(queue, prefetch=50)

    def produce() -> None:
        for number in range(count):
            client.send(queue, b"%d" % number, persistent=number % 2 == 0, confirmed=number % 100 == 99)

    sending = threading.Thread(target=produce)
    sending.start()
    try:
        seen = []
        for number in range(count + 1):
            if number % 100 == 50:
                held_broker.set_disk_level(DiskLevel.LITTLE)
            if number % 100 == 75:
                held_broker.set_disk_level(DiskLevel.PLENTY)
            try:
                message = receiver.message(0.2)
            except TimeoutError:
                held_broker.set_disk_level(DiskLevel.PLENTY)
                message = receiver.message()
            receiver.ack(message)
            seen.append(message.body)
    finally:
        held_broker.set_disk_level(DiskLevel.PLENTY)
        sending.join()
    assert seen == [b"first", *(b"%d" % number for number in range(count))]
