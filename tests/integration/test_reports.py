"""Tests that reports and handled messages arrive, over a real broker, its restarts and its crashes, and a full disk.

TRUENEXT_REJECTIONS=100000 pytest -s tests/integration/test_reports.py -k full        more messages on the full disk
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess, QueueFacts
from tests.integration.raw_client import RawClient
from tests.integration.test_redelivery import running
from truenext.wire.stomp.frame import Frame

COUNT = 1000
"""Number of rejected messages."""
ROUND = 500
"""Number of messages that are rejected before the broker is killed."""
NO_FACTS = QueueFacts(0, 0, 0)
REJECTIONS = int(os.environ.get("TRUENEXT_REJECTIONS", "600"))
"""Least number of messages that fill the disk."""
BODY = b"x" * 1000
CHUNK = 20
"""Number of messages that are sent before one is confirmed. Their bytes fit into a socket's buffer."""


def reported(number: int, **more: str) -> dict[str, str]:
    return {"truenext-report-to": "/queue/reports", "truenext-report-id": f"id {number}", "state": f"s {number}"} | more


def reject(client: RawClient, message: Frame, cause: str = "broken", *, confirmed: bool = False) -> None:
    headers = {"id": message.headers["ack"], "truenext-reject": "true", "truenext-cause": cause}
    client.send_frame("NACK", headers, confirmed=confirmed)


def all_of(client: RawClient, queue: str, count: int = COUNT) -> list[Frame]:
    client.subscribe(queue, ack="auto", prefetch=None)
    messages = [client.message() for _ in range(count)]
    assert client.arrived() == []
    return messages


def confirm(client: RawClient) -> None:
    """Wait until all that the client has done is durable."""
    client.send_frame("SEND", {"destination": "/queue/barrier", "persistent": "true"}, confirmed=True)


def reject_some(broker: BrokerProcess, client: RawClient, count: int, *, confirmed: bool) -> int:
    """Reject messages of queue "q", up to `count`, by a client that has subscribed to it with `ack="client"`. Return
    their number. Of what is confirmed nothing comes again."""
    rejected = 0
    while rejected < count and (held := await_held(broker)):
        *_, last = client.messages(held)
        rejected += held
        # All together: more than one turn dead-letters, so that a kill finds some that are only marked.
        reject(client, last, confirmed=confirmed or rejected < count)
    return rejected


def await_held(broker: BrokerProcess) -> int:
    """Wait until the consumer of queue "q" has its window full, or nothing waits, and return how many it holds.

    What was rejected before a kill waits until it is read, and never comes (C10.5).
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        facts = broker.queues().get("q", NO_FACTS)
        if facts.unacknowledged == ROUND or not facts.waiting:
            return facts.unacknowledged
        assert time.monotonic() < deadline, f"the queue has {facts}"
        time.sleep(0.002)


@pytest.mark.parametrize("is_clean", [True, False], ids=["stopped", "killed"])
def test_headers_and_what_comes_of_them_survive_the_end_of_the_broker(tmp_path: Path, *, is_clean: bool) -> None:
    # C11.7 to C11.11
    with running(tmp_path) as broker:
        client = broker.connect()
        headers = reported(7, persistent="false" if is_clean else "true") | {"truenext-on-failure": "/queue/h"}
        client.send("q", b"body", headers=headers, confirmed=True)
        broker.restart(is_clean=is_clean)
        client = broker.connect()
        client.subscribe("q")
        reject(client, client.message())
        confirm(client)
        broker.restart(is_clean=is_clean)
        client = broker.connect()
        client.subscribe("h")
        handled = client.message()
        assert (handled.body, handled.headers["truenext-failure"]) == (b"body", "handled")
        assert handled.headers["truenext-original-last-cause"] == "broken"
        reject(client, handled, "another")
        confirm(client)
        broker.restart(is_clean=is_clean)
        (report,) = broker.remaining_messages("reports")
        (letter,) = broker.remaining_messages("DLQ.h")
        assert (report.body, report.headers["correlation-id"], report.headers["state"]) == (b"", "id 7", "s 7")
        facts = {name: value for name, value in letter.headers.items() if name.startswith("truenext-original-")}
        assert facts["truenext-original-destination"] == "/queue/q"
        assert facts["truenext-original-last-cause"] == "broken"
        assert facts.items() <= report.headers.items()
        assert letter.body == b"body"


def test_re_driven_message_is_reported_once_more(tmp_path: Path) -> None:
    # C11.11
    with running(tmp_path) as broker:
        client = broker.connect()
        client.send("q", b"body", headers=reported(7), confirmed=True)
        client.subscribe("q")
        reject(client, client.message())
        broker.await_facts("DLQ.q", waiting=1)
        assert broker.output_of("redrive", "DLQ.q").startswith("1 moved")
        again = client.message()
        assert again.headers["truenext-report-id"] == "id 7"
        assert "truenext-dead-letter-cause" not in again.headers
        reject(client, again, "once more")
        broker.await_facts("reports", waiting=2)
        causes = [each.headers["truenext-original-last-cause"] for each in broker.remaining_messages("reports")]
        assert causes == ["broken", "once more"]


def test_report_to_a_topic_reaches_the_subscriptions_that_are_there(tmp_path: Path) -> None:
    # C11.9
    with running(tmp_path) as broker:
        asker, client = broker.connect(), broker.connect()
        asker.send_frame("SUBSCRIBE", {"id": "1", "destination": "/topic/replies.*", "ack": "auto"}, confirmed=True)
        client.subscribe("q")
        to_topic = reported(7) | {"truenext-report-to": "/topic/replies.one"}
        client.send("q", b"body", headers=to_topic, confirmed=True)
        reject(client, client.message())
        report = asker.message()
        assert (report.body, report.headers["correlation-id"], report.headers["state"]) == (b"", "id 7", "s 7")
        assert report.headers["truenext-original-last-cause"] == "broken"


def test_refused_headers_are_named_and_their_send_does_nothing(tmp_path: Path) -> None:
    # C11.12
    with running(tmp_path) as broker:
        for headers, code in (
            ({"truenext-report-to": "/queue/r"}, "header"),
            ({"truenext-on-failure": "/topic/t"}, "destination"),
            ({"truenext-on-failure": " ".join(["/queue/h"] * 9)}, "header"),
        ):
            client = broker.connect()
            client.send_frame("SEND", {"destination": "/queue/q"} | headers, b"x")
            error = client.next_frame()
            assert (error.command, error.headers["truenext-code"]) == ("ERROR", code)
            assert next(iter(headers)) in error.headers["message"]
        assert "q" not in broker.queues()


def test_each_of_many_rejected_messages_has_one_dead_letter_and_one_report_after_kills(tmp_path: Path) -> None:
    # C11.7, C18.1
    with running(tmp_path) as broker:
        client = broker.connect()
        for number in range(COUNT):
            client.send(
                "q", b"body %d" % number, headers=reported(number, persistent="true"), confirmed=number == COUNT - 1
            )
        rounds = 0
        while broker.queues().get("q", NO_FACTS).waiting:
            client = broker.connect()
            client.subscribe("q", ack="client", prefetch=ROUND)
            rounds += bool(reject_some(broker, client, ROUND, confirmed=rounds % 2 == 1))
            assert rounds <= 2 * COUNT // ROUND, "rejected messages come again and again"
            broker.restart(is_clean=False)
        letters, reports = (all_of(broker.connect(), queue) for queue in ("DLQ.q", "reports"))
        assert Counter(letter.headers["truenext-report-id"] for letter in letters) == {
            f"id {number}": 1 for number in range(COUNT)
        }
        assert Counter(report.headers["correlation-id"] for report in reports) == {
            f"id {number}": 1 for number in range(COUNT)
        }
        assert {report.body for report in reports} == {b""}


def fill_disk(broker: BrokerProcess) -> int:
    """Send messages with reports until the broker refuses one. Return the number of messages that it has accepted."""
    client, confirmed = broker.connect(), 0
    while True:
        for number in range(confirmed, confirmed + CHUNK):
            headers = reported(number, persistent="true")
            if number == confirmed + CHUNK - 1:
                headers["receipt"] = client.new_receipt()
            client.send("q", BODY, headers=headers)
        answer = client.next_frame()
        if answer.command == "ERROR":
            assert "disk is as full as it may be" in answer.headers["message"] + answer.body.decode()
            accepted = broker.queues()["q"].waiting
            assert confirmed <= accepted < confirmed + CHUNK
            return accepted
        confirmed += CHUNK
        assert confirmed <= 10 * REJECTIONS, "the disk is never full"


def is_refused(broker: BrokerProcess) -> bool:
    client = broker.connect()
    client.send("q", BODY, persistent=True, headers={"receipt": client.new_receipt()})
    return client.next_frame().command == "ERROR"


@pytest.mark.timeout(120 + REJECTIONS / 50)
def test_messages_that_are_rejected_with_reports_on_a_full_disk_are_not_lost(tmp_path: Path) -> None:
    # C11.9, C24.3
    # The journal may take as much as the messages.
    (tmp_path / "limit").write_text(f"{4 * 1024 * 1024 + REJECTIONS * 2 * (len(BODY) + 250)}")
    broker = BrokerProcess(tmp_path, ("--when-full", "refuse"), can_hold_disk=True)
    try:
        broker.start()
        accepted = fill_disk(broker)
        assert accepted >= REJECTIONS
        rejected, rounds = 0, 0
        size = max(ROUND, accepted // 20)
        while broker.queues().get("q", NO_FACTS).waiting:
            client = broker.connect()
            client.subscribe("q", ack="client", prefetch=ROUND)
            some = reject_some(broker, client, size, confirmed=rounds % 2 == 0)
            rejected += some
            rounds += bool(some)
            assert rounds <= 3 * accepted // size + 3, "rejected messages come again and again"
            broker.restart(is_clean=False)
        assert is_refused(broker), "the disk was not full"
        print(f"{accepted} messages, {rejected} rejections, {rounds} kills")
        expected = Counter(f"id {number}" for number in range(accepted))
        letters, reports = (all_of(broker.connect(), queue, accepted) for queue in ("DLQ.q", "reports"))
        assert Counter(letter.headers["truenext-report-id"] for letter in letters) == expected
        assert Counter(report.headers["correlation-id"] for report in reports) == expected
        assert {len(letter.body) for letter in letters} == {len(BODY)}
        assert {report.body for report in reports} == {b""}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while is_refused(broker):
            assert time.monotonic() < deadline, "no space again, though all was consumed"
            time.sleep(0.1)
        broker.close_clients()
        broker.stop()
    finally:
        broker.clean_up()
