"""Tests of `truenext consumers`, `connections`, `policy` and `dead-letters`, and of bulk work on groups of dead
letters, with messages in memory and on disk."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.integration.broker_process import LIMITS, PATIENCE_SECONDS, BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient

COUNT = 390
"""Number of dead letters: some pieces of DEAD_LETTERS_PER_PIECE."""


def word_of(number: int) -> str:
    """Return a word without digits for a number: a, b, ..., ba, bb, ..."""
    return (word_of(number // 26) if number >= 26 else "") + chr(ord("a") + number % 26)


def reject(broker: BrokerProcess, queue: str, count: int, *, causes: int) -> None:
    """Make dead letters of `count` messages, whose causes have `causes` different first lines, and of one without a
    cause."""
    client = broker.connect()
    client.subscribe(queue, prefetch=count + 1)
    for number in range(count):
        client.send(queue, b"%d" % number, persistent=True, priority=number % 3)
    client.send(queue, b"last", confirmed=True)
    for message in client.messages(count + 1):
        cause = (
            f"cause {word_of(int(message.body) % causes)} of message {message.body.decode()}\nsecond line"
            if message.body != b"last"
            else ""
        )
        headers = {"truenext-reject": "true"} | ({"truenext-cause": cause} if cause else {})
        client.send_frame("NACK", {"id": message.headers["ack"], **headers})
    client.disconnect()
    broker.await_facts(f"DLQ.{queue}", waiting=count + 1)


def groups_of(broker: BrokerProcess, queue: str) -> dict[str, int]:
    facts = json.loads(broker.output_of("dead-letters", f"DLQ.{queue}", "--json"))
    assert (facts["queue"], facts["others"], facts["left"]) == (f"DLQ.{queue}", None, 0)
    assert {(group["origin"], group["reason"]) for group in facts["groups"]} == {(queue, "rejected")}
    counts = [group["count"] for group in facts["groups"]]
    assert counts == sorted(counts, reverse=True)
    return {group["cause"]: group["count"] for group in facts["groups"]}


@LIMITS
def test_dead_letters_are_counted_by_cause_and_a_group_is_re_driven_moved_and_purged(
    broker: BrokerProcess, queue: str
) -> None:
    # C32.14
    reject(broker, queue, COUNT, causes=3)
    before = int(time.time() * 1000)
    facts = json.loads(broker.output_of("dead-letters", f"DLQ.{queue}", "--json"))
    assert all(before - 300_000 < group["first"] <= group["last"] <= before + 1000 for group in facts["groups"])
    each = COUNT // 3
    assert groups_of(broker, queue) == {f"cause {word} of message #": each for word in "abc"} | {"": 1}
    dry = broker.output_of("redrive", f"DLQ.{queue}", "--cause", "cause b of message #", "--dry-run")
    assert dry == f"{each} would be moved to {queue}\n"
    assert (
        broker.output_of("redrive", f"DLQ.{queue}", "--cause", "cause b of message 1") == f"{each} moved to {queue}\n"
    )
    back = [int(message.body) % 3 for message in broker.remaining_messages(queue)]
    assert back == [1] * each
    moved = broker.output_of(
        "move", f"DLQ.{queue}", f"{queue}.later", "--origin", queue, "--cause", "cause c of message 9"
    )
    assert moved == f"{each} moved to {queue}.later\n"
    assert broker.output_of("purge", f"DLQ.{queue}", "--reason", "rejected", "--cause", "") == "1 removed\n"
    none_found = broker.output_of("purge", f"DLQ.{queue}", "--reason", "expired")
    assert none_found.startswith("0 removed\nno message of such a group was found: ")
    assert groups_of(broker, queue) == {"cause a of message #": each}
    printed = broker.output_of("dead-letters", f"DLQ.{queue}").splitlines()
    assert printed[0] == f"{each} messages in DLQ.{queue}"
    assert re.fullmatch(rf" +{each}  \S+ \S+ UTC  \S+ \S+ UTC  {queue} +rejected  cause a of message 0", printed[2])
    for name in (f"DLQ.{queue}", f"{queue}.later", queue):
        broker.output_of("purge", name)


def test_more_than_a_thousand_groups_are_shown_as_others_and_held_messages_are_not_counted(
    own_broker: BrokerProcess,
) -> None:
    # C32.14
    reject(own_broker, "many", 1020, causes=1020)
    holder = own_broker.connect()
    holder.subscribe("DLQ.many", prefetch=1)
    holder.message()
    facts = json.loads(own_broker.output_of("dead-letters", "DLQ.many", "--json"))
    assert (len(facts["groups"]), facts["others"]["count"], facts["left"]) == (1000, 20, 1)
    printed = own_broker.output_of("dead-letters", "DLQ.many").splitlines()
    assert printed[0] == "1,020 messages in DLQ.many"
    assert "others, of more than 1,000 groups" in printed[-2]
    assert printed[-1] == "1 not counted: held by consumers, or still being committed"


def test_queues_with_dead_letters_are_listed_and_nothing_if_there_are_none(own_broker: BrokerProcess) -> None:
    assert own_broker.output_of("dead-letters") == ""
    assert own_broker.output_of("dead-letters", "--json") == "[]\n"
    reject(own_broker, "one", 2, causes=1)
    reject(own_broker, "two", 4, causes=1)
    own_broker.connect().send("three", b"x", confirmed=True)
    head, *rows = own_broker.output_of("dead-letters").splitlines()
    assert head.split() == ["waiting", "oldest", "queue"]
    assert [(row.split()[0], row.split()[-1]) for row in rows] == [("5", "DLQ.two"), ("3", "DLQ.one")]
    own_broker.output_of("purge", "DLQ.one")
    own_broker.output_of("purge", "DLQ.two")
    assert own_broker.output_of("dead-letters") == ""


def test_age_of_a_message_from_before_the_start_is_known_soon_after_the_start(own_broker: BrokerProcess) -> None:
    # C32.5
    own_broker.connect().send("old", b"x", persistent=True, confirmed=True)
    own_broker.stop()
    own_broker.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "oldest_s" not in own_broker.control_request("queues")[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_dead_letter_queue_of_a_policy_is_listed(tmp_path: Path) -> None:
    """Fixed: only queues DLQ. + anything were listed."""
    broker = BrokerProcess(tmp_path, policy={"dead_letters": "failed"})
    try:
        broker.start()
        client = broker.connect()
        client.send("one", b"x", persistent=True, confirmed=True)
        client.subscribe("one", prefetch=1)
        client.send_frame("NACK", {"id": client.message().headers["ack"], "truenext-reject": "true"})
        broker.await_facts("failed", waiting=1)
        assert broker.output_of("dead-letters").split()[-1] == "failed"
    finally:
        broker.clean_up()


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("dead-letters", "orders"), 1, "'orders' is not a dead-letter queue: its dead letters are in 'DLQ.orders'"),
        (("dead-letters", "DLQ.none"), 1, "there is no queue 'DLQ.none'"),
        (("dead-letters", "--selector", "a = 1"), 2, "--selector needs QUEUE"),
        (("dead-letters", "DLQ.none", "--selector", "a ="), 2, "selector"),
        (("consumers", "none"), 1, "there is no queue 'none'"),
        (("policy", "none"), 1, "there is no queue 'none'"),
        (("connections", "--close", "abc"), 1, "there is no connection 'abc': it has ended, or the broker was started"),
    ],
)
def test_impossible_inspection_is_refused_with_its_cause(
    broker: BrokerProcess, arguments: tuple[str, ...], status: int, text: str
) -> None:
    broker.connect().send("orders", b"x", confirmed=True)
    done = broker.truenext(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert text in done.stderr


def columns_of(output: str) -> list[list[str]]:
    return [re.split("  +", line.strip()) for line in output.splitlines()]


def test_consumers_and_policy_are_printed(broker: BrokerProcess, queue: str) -> None:
    # C32.10
    client = broker.connect(headers=TRUENEXT_CLIENT | {"client-id": "till \x1b[31m 7"})
    client.subscribe(queue, prefetch=3, headers={"selector": "colour = 'red'"})
    client.subscribe(queue, prefetch=None, subscription="own")
    output = broker.output_of("consumers", queue)
    head, first, second = columns_of(output)
    assert head[:5] == ["subscription", "window", "held", "held for", "last ack"]
    assert first[:4] == ["1", "3", "0", "never"]
    assert first[-1] == f"/queue/{queue} where colour = 'red'"
    assert second[1] == "10 (automatic)"
    assert "\x1b" not in output and "till \\x1b[31m 7" in output
    assert [row["id"] for row in json.loads(broker.output_of("consumers", queue, "--json"))] == ["1", "own"]
    rows = columns_of(broker.output_of("policy", queue))
    assert ["attempts_max", "7", "default"] in rows
    assert json.loads(broker.output_of("policy", queue, "--json"))["settings"]["attempts_max"]["value"] == 7


def test_connection_is_closed_by_the_name_in_the_list(own_broker: BrokerProcess) -> None:
    # C32.13
    client = own_broker.connect(headers={"client-id": "till-7"})
    (row,) = (row for row in columns_of(own_broker.output_of("connections")) if "till-7" in row)
    printed = own_broker.output_of("connections", "--close", row[0])
    assert printed == f"closed the connection from 127.0.0.1:{client.local_port}\n"
    assert client.error().headers["truenext-code"] == "closed"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "till-7" in own_broker.output_of("connections"):
        assert time.monotonic() < deadline
    json.loads(own_broker.output_of("connections", "--json"))


def test_silent_client_that_reads_nothing_is_closed(own_broker: BrokerProcess) -> None:
    # C32.13
    sender, reader = own_broker.connect(), RawClient(own_broker.port, receive_buffer=4096)
    reader.send_connect("1.2", "0,0")
    reader.subscribe("q", prefetch=1000)
    for _ in range(40):
        sender.send("q", bytes(100_000))
    sender.send("q", b"last", confirmed=True)
    own_broker.await_full_sockets()
    names = {row["address"]: row["connection"] for row in json.loads(own_broker.output_of("connections", "--json"))}
    own_broker.output_of("connections", "--close", names[f"127.0.0.1:{reader.local_port}"])
    # At once, although the socket of the reader takes no ERROR.
    other = own_broker.connect()
    other.subscribe("q", prefetch=100)
    assert len(other.messages(41)) == 41
    reader.close()
