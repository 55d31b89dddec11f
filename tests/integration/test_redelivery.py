"""Tests that failed messages are tried again in time, dead-lettered after the last attempt, and re-driven once; over a
real broker."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import RawClient, UnexpectedError, bodies, numbered
from truenext.model.header_lines import ADDED_HEADERS
from truenext.model.left_messages import LEFT_TEXTS
from truenext.wire.stomp.frame import Frame

POISON, HEALTHY = 200, 2000
LATE_SECONDS = 15.0
"""Largest delay of a retry: a loaded machine is slow, not broken."""


@contextmanager
def running(folder: Path, **policy: Any) -> Iterator[BrokerProcess]:
    """Run a broker with this policy for all queues."""
    broker = BrokerProcess(folder, policy=policy)
    try:
        broker.start()
        yield broker
    finally:
        broker.clean_up()


def redrive_piece(client: RawClient, queue: str, **rest: Any) -> dict[str, Any]:
    """Re-drive one piece, by a client that has subscribed to its /temp-queue/answers, and return the answer."""
    request_piece(client, queue, **rest)
    answer = client.message()
    assert answer.headers["content-type"] == "application/json"
    piece: dict[str, Any] = json.loads(answer.body)
    return piece


def request_piece(client: RawClient, queue: str, **rest: Any) -> None:
    body = json.dumps({"queue": queue} | rest).encode()
    client.send_frame("SEND", {"destination": "/control/redrive", "reply-to": "/temp-queue/answers"}, body)


def requester(broker: BrokerProcess) -> RawClient:
    client = broker.connect()
    client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"}, confirmed=True)
    return client


def fail(broker: BrokerProcess, queue: str, count: int, **headers: str) -> None:
    """Let the next `count` messages fail once, one after the other."""
    client = broker.connect()
    client.subscribe(queue, prefetch=1)
    for _ in range(count):
        client.nack(client.message(), confirmed=True, headers=headers)
    client.disconnect()


def test_two_hundred_poison_messages_are_tried_at_their_times_while_two_thousand_healthy_ones_pass(
    tmp_path: Path,
) -> None:
    attempts_max = 4
    delays = [0.0, 0.4, 0.8]
    """Seconds from the first failure, the second and the third to the next attempt."""
    with running(tmp_path, attempts_max=attempts_max, delay_ms=400, backoff=2.0) as broker:
        producer = broker.connect()
        consumer = broker.connect()
        consumer.subscribe("q", prefetch=10)
        failed_at: dict[str, list[float]] = defaultdict(list)
        received_while_one_waited = healthy = sent = 0
        while healthy < HEALTHY or sum(map(len, failed_at.values())) < POISON * attempts_max:
            if sent < HEALTHY and sent - healthy < 20:
                if sent % (HEALTHY // POISON) == 0:
                    number = sent // (HEALTHY // POISON)
                    producer.send("q", b"poison %d" % number, persistent=bool(number % 2), priority=5 + number % 3)
                producer.send("q", b"healthy", persistent=bool(sent % 2), confirmed=sent % 2 == 1)
                sent += 1
            message = consumer.message()
            now, body = time.monotonic(), message.body.decode()
            if body == "healthy":
                healthy += 1
                received_while_one_waited += any(1 < len(each) < attempts_max for each in failed_at.values())
                consumer.ack(message)
                continue
            earlier = failed_at[body]
            assert message.headers["truenext-attempts"] == str(len(earlier))
            if earlier:
                waited, delay = now - earlier[-1], delays[len(earlier) - 1]
                assert delay <= waited < delay + LATE_SECONDS, f"{body} after {waited} s, not {delay}"
            # Before the broker knows of it: nothing may come too early by this clock.
            earlier.append(time.monotonic())
            consumer.nack(message)
        assert {len(each) for each in failed_at.values()} == {attempts_max}
        assert received_while_one_waited > HEALTHY // 4
        consumer.disconnect()
        broker.await_facts("q", waiting=0, unacknowledged=0)
        broker.await_facts("DLQ.q", waiting=POISON)
        moved_back_once_over_kills(broker)


def moved_back_once_over_kills(broker: BrokerProcess) -> None:
    """Re-drive all dead letters, with kill -9 while pieces are moved. A kill may lose transient messages that were
    moved."""
    for pieces in (1, 2, 3):
        client = requester(broker)
        after = [0, 0]
        for _ in range(pieces):
            piece = redrive_piece(client, "DLQ.q", limit=10, after=after)
            assert piece["moved"] <= 10
            after = piece["next"]
        request_piece(client, "DLQ.q", limit=10, after=after)
        broker.kill()
        broker.close_clients()
        broker.start()
    assert broker.truenext("redrive", "DLQ.q").returncode == 0
    remaining = broker.remaining_messages("DLQ.q") if "DLQ.q" in broker.queues() else []
    assert remaining == []
    there = Counter(bodies(broker.remaining_messages("q")))
    assert set(there.values()) == {1}
    persistent = {f"poison {number}" for number in range(1, POISON, 2)}
    assert persistent <= there.keys()


def test_a_failed_message_under_while_waiting_block_is_never_overtaken(tmp_path: Path) -> None:
    # C3.6
    with running(tmp_path, delay_ms=300, while_waiting="block") as broker:
        client = broker.connect()
        for number in range(20):
            client.send("q", b"%d" % number, persistent=bool(number % 2))
        client.subscribe("q", prefetch=1)
        seen: list[int] = []
        failed_at = 0.0
        while len(seen) < 23:
            message = client.message()
            body = int(message.body)
            if body == 5 and seen.count(5) >= 2:
                assert time.monotonic() - failed_at >= 0.3
            seen.append(body)
            if body == 5 and seen.count(5) < 4:
                failed_at = time.monotonic()
                client.nack(message)
            else:
                client.ack(message)
        assert seen == [0, 1, 2, 3, 4, 5, 5, 5, 5, *range(6, 20)]


@one_of("is_clean", [True, False], ids=["clean stop", "kill -9"])
@pytest.mark.parametrize("while_waiting", ["skip", "block"])
def test_a_delay_goes_on_over_a_restart(tmp_path: Path, is_clean: bool, while_waiting: str) -> None:
    with running(tmp_path, first_delay_ms=4000, while_waiting=while_waiting) as broker:
        client = broker.connect()
        client.send("q", b"failed", persistent=True, confirmed=True)
        client.send("q", b"behind", persistent=True, confirmed=True)
        # The wall clock's milliseconds are cut off, not rounded.
        due_at = time.time() + 3.999
        fail(broker, "q", 1)
        due_until = time.time() + 4
        broker.restart(is_clean=is_clean)
        client = broker.connect()
        client.subscribe("q")
        subscribed_at = time.time()
        arrived = {}
        for _ in range(2):
            message = client.message()
            arrived[message.body] = message, time.time()
        failed, failed_at = arrived[b"failed"]
        assert failed.headers["truenext-attempts"] == "1"
        assert due_at <= failed_at < max(due_until, subscribed_at) + LATE_SECONDS
        # On a loaded machine the restart takes longer than the delay: then the order is that of the queue.
        if while_waiting == "block" or subscribed_at < due_at - 2:
            assert list(arrived) == ([b"behind", b"failed"] if while_waiting == "skip" else [b"failed", b"behind"])


def test_a_transient_that_waits_survives_a_clean_stop(tmp_path: Path) -> None:
    # C10.8, C16.2
    with running(tmp_path, first_delay_ms=3000) as broker:
        broker.connect().send("q", b"failed", confirmed=True)
        fail(broker, "q", 1)
        broker.await_facts("q", waiting=1)
        broker.restart(is_clean=True)
        client = broker.connect()
        client.subscribe("q")
        assert client.message().headers["truenext-attempts"] == "1"


def test_a_retry_that_became_due_while_the_process_was_stopped_is_dispatched(tmp_path: Path) -> None:
    with running(tmp_path, first_delay_ms=300) as broker:
        client = broker.connect()
        client.send("q", b"failed")
        client.subscribe("q")
        client.nack(client.message(), confirmed=True)
        with broker.asleep():
            time.sleep(1)
        assert client.message().body == b"failed"


def test_a_nack_has_its_own_delay(broker: BrokerProcess, queue: str) -> None:
    # C9.5
    client = broker.connect()
    for body in (b"later", b"behind"):
        client.send(queue, body)
    client.subscribe(queue, prefetch=1)
    failed_at = time.monotonic()
    client.nack(client.message(), headers={"truenext-delay": "500"})
    later = client.message()
    assert later.body == b"behind"
    client.ack(later)
    assert client.message().body == b"later"
    assert time.monotonic() - failed_at >= 0.5


def test_a_nack_inside_a_transaction_has_its_delay_from_the_commit_on(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    client.send(queue, b"later")
    client.subscribe(queue)
    client.begin("t")
    client.nack(client.message(), transaction="t", headers={"truenext-delay": "500"})
    time.sleep(0.3)
    committed_at = time.monotonic()
    client.commit("t")
    assert client.message().body == b"later"
    assert time.monotonic() - committed_at >= 0.5


def test_a_message_says_the_first_and_the_last_cause_over_a_crash_and_as_a_dead_letter(tmp_path: Path) -> None:
    # C10.11, C11.3
    at_once = {"truenext-delay": "0"}
    with running(tmp_path, attempts_max=4) as broker:
        client = broker.connect()
        client.send("q", b"x", persistent=True)
        client.subscribe("q")
        message = client.message()
        assert causes_of(message) == (None, None)
        client.nack(message, headers=at_once | {"truenext-cause": "KeyError: 'row'\nin load, worker 7"})
        message = client.message()
        assert causes_of(message) == ("KeyError: 'row'\nin load, worker 7",) * 2
        client.nack(message, headers=at_once | {"truenext-cause": "x" * 4096}, confirmed=True)
        broker.kill()
        broker.start()
        client = broker.connect()
        client.subscribe("q")
        client.nack(client.message(), headers=at_once)
        message = client.message()
        assert causes_of(message) == ("KeyError: 'row'\nin load, worker 7", "x" * 4096)
        client.begin("t")
        client.nack(message, transaction="t", headers={"truenext-reject": "true", "truenext-cause": "no use"})
        client.commit("t")
        broker.await_facts("DLQ.q", waiting=1)
        (letter,) = broker.remaining_messages("DLQ.q")
        assert causes_of(letter) == (None, None)
        assert causes_of(letter, "original-") == ("KeyError: 'row'\nin load, worker 7", "no use")
        broker.truenext("redrive", "DLQ.q")
        message = client.message()
        assert causes_of(message) == causes_of(message, "original-") == (None, None)


def causes_of(message: Frame, of: str = "") -> tuple[str | None, str | None]:
    return message.headers.get(f"truenext-{of}first-cause"), message.headers.get(f"truenext-{of}last-cause")


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_rejected_message_is_a_dead_letter_at_once_with_its_origin(
    broker: BrokerProcess, queue: str, in_transaction: bool
) -> None:
    # C11.1, C11.2, C11.3
    client = broker.connect()
    expires = int(time.time() * 1000) + 3_600_000
    client.send(queue, b"poison", priority=7, headers={"expires": str(expires), "colour": "red"})
    client.subscribe(queue)
    message = client.message()
    if in_transaction:
        client.begin("t")
    client.nack(message, transaction="t" if in_transaction else None, headers={"truenext-reject": "true"})
    if in_transaction:
        assert f"DLQ.{queue}" not in broker.queues()
        client.commit("t")
    broker.await_facts(f"DLQ.{queue}", waiting=1)
    (letter,) = broker.remaining_messages(f"DLQ.{queue}")
    headers = letter.headers
    own_headers = {
        name: headers[name] for name in headers if name.startswith(("truenext-original-", "truenext-dead-letter-"))
    }
    given_up_at = int(own_headers.pop("truenext-dead-letter-timestamp"))
    assert int(message.headers["timestamp"]) <= given_up_at <= time.time() * 1000
    assert own_headers == {
        "truenext-dead-letter-cause": "rejected",
        "truenext-original-attempts": "1",
        "truenext-original-destination": f"/queue/{queue}",
        "truenext-original-expires": str(expires),
        "truenext-original-persistent": "false",
        "truenext-original-priority": "7",
        "truenext-original-timestamp": message.headers["timestamp"],
    }
    assert (headers["priority"], headers["persistent"], headers["colour"]) == ("7", "true", "red")


@pytest.mark.parametrize("answer", ["ACK", "NACK"])
@pytest.mark.parametrize("persistent", [False, True])
def test_messages_acknowledged_in_a_repeated_commit_count_attempts_until_they_are_dead_letters(
    tmp_path: Path, persistent: bool, answer: str
) -> None:
    with running(tmp_path, attempts_max=3, delay_ms=0) as broker:
        client = broker.connect()
        client.begin("used")
        client.send("used", b"x", transaction="used")
        client.commit("used", headers=numbered("p", 7))
        client.send("q", b"work", persistent=persistent, confirmed=True)
        for attempt in range(3):
            client.subscribe("q")
            message = client.message()
            assert message.headers["truenext-attempts"] == str(attempt)
            client.begin("t")
            client.send_frame(answer, {"id": message.headers["ack"], "transaction": "t"})
            client.unsubscribe()
            client.send("out", b"result", transaction="t")
            client.commit("t", confirmed=False, headers=numbered("p", 7) | {"receipt": "r"})
            assert client.await_receipt("r").headers == {"receipt-id": "r", "truenext-repeat": "true"}
        assert bodies(broker.remaining_messages("DLQ.q")) == ["work"]
        assert bodies(broker.remaining_messages("q")) == bodies(broker.remaining_messages("out")) == []


def test_a_lost_connection_returns_its_messages_at_once(tmp_path: Path) -> None:
    # C9.6
    with running(tmp_path, first_delay_ms=60_000) as broker:
        client = broker.connect()
        client.send("q", b"hello", confirmed=True)
        client.subscribe("q")
        client.message()
        client.crash()
        heir = broker.connect()
        heir.subscribe("q")
        assert heir.message().headers["truenext-attempts"] == "1"


@pytest.mark.parametrize("way", ["SEND", "in a transaction", "scheduled", "1.0, padded", "numbered"])
def test_a_client_cannot_forge_the_headers_of_a_dead_letter(broker: BrokerProcess, queue: str, way: str) -> None:
    """Otherwise an operator's re-drive would move it where a client wants."""
    # C11.3
    client = broker.connect(version="1.0" if way == "1.0, padded" else "1.2")
    forged = dict.fromkeys(ADDED_HEADERS, "7") | {"truenext-original-destination": "/queue/target"}
    if way == "1.0, padded":
        forged = {f" {name} ": value for name, value in forged.items()}
    extra: dict[str, str] = {}
    if way == "in a transaction":
        client.begin("t")
        extra = {"transaction": "t"}
    elif way == "scheduled":
        extra = {"AMQ_SCHEDULED_DELAY": "1"}
    elif way == "numbered":
        extra = {"truenext-producer": queue, "truenext-number": "1"}
    client.send(f"DLQ.{queue}", b"forged", headers={"content-length": "6"} | forged | extra, confirmed=True)
    if way == "in a transaction":
        client.commit("t")
    broker.await_facts(f"DLQ.{queue}", waiting=1)
    assert broker.output_of("redrive", f"DLQ.{queue}").startswith("0 moved\n1 left")
    (message,) = broker.remaining_messages(f"DLQ.{queue}")
    assert message.body == b"forged"
    # Only a scheduled send was due, and not when its client says.
    added = {name.strip() for name in message.headers} & ADDED_HEADERS
    assert added == ({"truenext-due"} if way == "scheduled" else set())
    assert message.headers.get("truenext-due") != "7"
    assert "target" not in broker.queues()


def test_queues_can_share_a_dead_letter_queue_in_which_failures_stay(tmp_path: Path) -> None:
    # C11.1, C11.6
    with running(tmp_path, attempts_max=1, first_delay_ms=0, delay_ms=0, dead_letters="undeliverable") as broker:
        client = broker.connect()
        for queue in ("a", "b"):
            client.send(queue, queue.encode(), persistent=True, confirmed=True)
            fail(broker, queue, 1)
        fail(broker, "undeliverable", 5)
        assert sorted(bodies(broker.remaining_messages("undeliverable"))) == ["a", "b"]
        moved = broker.truenext("redrive", "undeliverable")
        assert (moved.returncode, moved.stdout) == (0, "1 moved to a\n1 moved to b\n")
        assert bodies(broker.remaining_messages("a")) == ["a"]


# ---- Re-drive ----


def dead_letters(broker: BrokerProcess, queue: str, count: int, **headers: str) -> list[Frame]:
    """Make `count` dead letters of messages with these headers, persistent by default, and return them."""
    client = broker.connect()
    headers = {"persistent": "true"} | headers
    for number in range(count):
        client.send(queue, b"%d" % number, headers=headers, confirmed=number == count - 1)
    fail(broker, queue, count, **{"truenext-reject": "true"})
    letters = broker.remaining_messages(f"DLQ.{queue}")
    assert bodies(letters) == [str(number) for number in range(count)]
    return letters


def test_a_dead_letter_is_moved_back_as_it_was(broker: BrokerProcess, queue: str) -> None:
    # C12.2
    expires = str(int(time.time() * 1000) + 3_600_000)
    (letter,) = dead_letters(broker, queue, 1, expires=expires, colour="red", priority="6", persistent="true")
    moved = broker.truenext("redrive", f"/queue/DLQ.{queue}")
    assert (moved.returncode, moved.stdout) == (0, f"1 moved to {queue}\n")
    (message,) = broker.remaining_messages(queue)
    assert not [name for name in message.headers if name.startswith(("truenext-original-", "truenext-dead-letter-"))]
    assert int(message.headers["truenext-sequence"]) > int(letter.headers["truenext-sequence"])
    kept = {name: message.headers[name] for name in ("expires", "colour", "priority", "persistent", "destination")}
    assert kept == {
        "expires": expires,
        "colour": "red",
        "priority": "6",
        "persistent": "true",
        "destination": f"/queue/{queue}",
    }
    assert message.headers["truenext-attempts"] == "0"


def test_an_expiry_that_is_past_does_not_come_back(broker: BrokerProcess, queue: str) -> None:
    # C12.2
    dead_letters(broker, queue, 1, expires=str(int(time.time() * 1000) + 2000))
    time.sleep(2)
    assert broker.truenext("redrive", f"DLQ.{queue}").stdout == f"1 moved to {queue}\n"
    (message,) = broker.remaining_messages(queue)
    assert "expires" not in message.headers


def test_a_dry_run_of_redrive_moves_nothing(broker: BrokerProcess, queue: str) -> None:
    dead_letters(broker, queue, 3)
    assert broker.truenext("redrive", f"DLQ.{queue}", "--dry-run").stdout == f"3 would be moved to {queue}\n"
    assert len(broker.remaining_messages(f"DLQ.{queue}")) == 3


def test_redrive_tells_how_many_messages_are_transient_again(broker: BrokerProcess, queue: str) -> None:
    # C12.2
    dead_letters(broker, queue, 2, persistent="false")
    broker.connect().send(queue, b"3", persistent=True, confirmed=True)
    facts = json.loads(broker.output_of("redrive", f"DLQ.{queue}", "--json", "--dry-run"))
    assert (facts["count"], facts["transient"]) == (2, 2)
    transient = "2 of these as transient messages, as they were sent: a crash of the broker loses them"
    assert broker.output_of("redrive", f"DLQ.{queue}") == f"2 moved to {queue}\n{transient}\n"
    assert [each.headers.get("persistent") for each in broker.remaining_messages(queue)] == ["true", "false", "false"]


def test_redrive_by_id_moves_single_messages_and_names_missing_ones(broker: BrokerProcess, queue: str) -> None:
    letters = dead_letters(broker, queue, 5)
    ids = [letters[at].headers["truenext-sequence"] for at in (3, 1)]
    options = [option for each in ids for option in ("--id", each)]
    moved = broker.truenext("redrive", f"DLQ.{queue}", *options)
    assert (moved.returncode, moved.stdout) == (0, f"2 moved to {queue}\n")
    assert bodies(broker.remaining_messages(queue)) == ["1", "3"]
    again = broker.truenext("redrive", f"DLQ.{queue}", *options)
    assert (again.returncode, again.stdout) == (1, "0 moved\n")
    assert all(each in again.stderr for each in ids)


def test_a_limit_takes_the_true_next_ones(broker: BrokerProcess, queue: str) -> None:
    dead_letters(broker, queue, 5)
    broker.truenext("redrive", f"DLQ.{queue}", "--count", "2")
    assert bodies(broker.remaining_messages(queue)) == ["0", "1"]
    assert bodies(broker.remaining_messages(f"DLQ.{queue}")) == ["2", "3", "4"]


def test_redrive_leaves_held_messages_and_messages_that_were_not_dead_lettered(
    broker: BrokerProcess, queue: str
) -> None:
    dead_letters(broker, queue, 2)
    client = broker.connect()
    client.send(f"DLQ.{queue}", b"sent there", persistent=True, confirmed=True)
    client.subscribe(f"DLQ.{queue}", prefetch=1)
    held = client.message()
    moved = broker.truenext("redrive", f"DLQ.{queue}")
    remaining = f"2 left: {LEFT_TEXTS['redrive']}\n"
    assert (moved.returncode, moved.stdout) == (0, f"1 moved to {queue}\n{remaining}")
    client.ack(held, confirmed=True)
    assert client.message().body == b"sent there"


@pytest.mark.parametrize(
    ("queue", "arguments", "why"),
    [
        ("DLQ.nowhere", {}, "there is no queue 'DLQ.nowhere'"),
        ("orders", {}, "'orders' is not a dead-letter queue"),
        ("orders", {"limit": 0}, "Expected `int` >= 1 - at `[$].limit`"),
        ("orders", {"all": True}, "unknown field `all`"),
    ],
)
def test_an_impossible_redrive_is_refused_with_its_cause(
    broker: BrokerProcess, queue: str, arguments: dict[str, Any], why: str
) -> None:
    client = requester(broker)
    client.send("orders", b"", confirmed=True)
    with pytest.raises(UnexpectedError, match=why):
        redrive_piece(client, queue, **arguments)


def test_redrive_of_ten_thousand_from_the_disk_keeps_order_and_lets_others_be_served(tmp_path: Path) -> None:
    count = 10_000
    broker = BrokerProcess(tmp_path, ("--queue-memory-limit", "100KB"))
    try:
        broker.start()
        client = broker.connect()
        for number in range(count):
            client.send("q", b"%d" % number, persistent=True, confirmed=number % 1000 == 999)
        client.subscribe("q", prefetch=100)
        for _ in range(count):
            client.nack(client.message(), headers={"truenext-reject": "true"})
        client.unsubscribe()
        assert broker.queues()["DLQ.q"].waiting == count
        assert broker.truenext("redrive", "DLQ.q").stdout == f"{count:,} moved to q\n"
        client.subscribe("q", ack="auto")
        assert [int(client.message().body) for _ in range(count)] == list(range(count))
        broker.await_facts("DLQ.q", waiting=0)
        broker.stop()
    finally:
        broker.clean_up()
