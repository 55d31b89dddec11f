"""Tests that messages are moved and removed once, and queues stay paused, also when the broker is killed."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.broker_process import TRUENEXT, BrokerProcess
from tests.integration.raw_client import RawClient, UnexpectedError, bodies


def requester(broker: BrokerProcess) -> RawClient:
    client = broker.connect()
    client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"}, confirmed=True)
    return client


def control_request(client: RawClient, verb: str, **arguments: Any) -> None:
    body = json.dumps(arguments).encode()
    client.send_frame("SEND", {"destination": f"/control/{verb}", "reply-to": "/temp-queue/answers"}, body)


def fill(broker: BrokerProcess, queue: str, count: int, *, transient_every: int = 3) -> None:
    client = broker.connect()
    for number in range(count):
        headers = {"colour": "red" if number % 2 else "blue"}
        is_persistent = bool(number % transient_every)
        is_last = number == count - 1
        client.send(queue, b"%d" % number, persistent=is_persistent, confirmed=is_last, headers=headers)
    client.disconnect()


def test_move_keeps_order_and_persistence_of_the_messages(broker: BrokerProcess, queue: str) -> None:
    # C12.1, C12.3
    fill(broker, queue, 10)
    assert broker.output_of("move", queue, f"{queue}.new") == f"10 moved to {queue}.new\n"
    moved = broker.remaining_messages(f"{queue}.new")
    assert bodies(moved) == [str(number) for number in range(10)]
    assert {each.headers["destination"] for each in moved} == {f"/queue/{queue}.new"}
    assert [each.headers.get("persistent") for each in moved[:4]] == [None, "true", "true", None]
    broker.await_facts(queue, waiting=0)


def test_a_selector_a_limit_and_single_ids_choose_the_messages_to_move(broker: BrokerProcess, queue: str) -> None:
    fill(broker, queue, 10)
    broker.output_of("move", queue, f"{queue}.red", "--selector", "colour = 'red'", "--count", "2")
    assert bodies(broker.remaining_messages(f"{queue}.red")) == ["1", "3"]
    (third,) = [each for each in broker.remaining_messages(queue) if each.body == b"5"]
    sequence = third.headers["truenext-sequence"]
    assert broker.truenext("move", queue, f"{queue}.one", "--id", sequence).returncode == 0
    again = broker.truenext("move", queue, f"{queue}.one", "--id", sequence)
    assert (again.returncode, again.stderr) == (1, f"truenext: not found: id {sequence}\n")
    assert bodies(broker.remaining_messages(f"{queue}.one")) == ["5"]


def test_dead_letters_are_re_driven_by_the_selector_of_the_help_by_their_cause_and_by_a_header(
    broker: BrokerProcess, queue: str
) -> None:
    client = broker.connect()
    client.subscribe(queue, prefetch=10)
    for body in (b"often", b"cause", b"header", b"other"):
        client.send(queue, body, persistent=True, headers={"x-trace": body.decode()}, confirmed=True)
    for message in client.messages(4):
        fields = {"id": message.headers["ack"]}
        if message.body != b"often":
            client.send_frame(
                "NACK", fields | {"truenext-reject": "true", "truenext-cause": f"because of {message.body!r}"}
            )
            continue
        for _ in range(3):
            client.send_frame("NACK", fields | {"truenext-delay": "0"})
            fields = {"id": client.message().headers["ack"]}
        client.send_frame("NACK", fields | {"truenext-reject": "true"}, confirmed=True)
    broker.await_facts(f"DLQ.{queue}", waiting=4)
    client.disconnect()
    for command in ("redrive", "stages rerun"):
        (example,) = re.findall(r'such as "(.+?)"', " ".join(broker.output_of(*command.split(), "--help").split()))
        assert example == "truenext_original_attempts > 2"
    count = broker.output_of("stages", "rerun", f"DLQ.{queue}", "--selector", example)
    assert count == f"1 message would be sent to {queue} under new ids: use --force\n"
    for selector, body in (
        (example, b"often"),
        ("truenext_original_last_cause LIKE '%cause''%'", b"cause"),
        ("x_trace = 'header'", b"header"),
        ("hyphenated_props:x-trace = 'other'", b"other"),
    ):
        assert broker.output_of("redrive", f"DLQ.{queue}", "--selector", selector) == f"1 moved to {queue}\n"
        (back,) = broker.remaining_messages(queue)
        assert back.body == body
        broker.output_of("purge", queue, "--selector", f"x_trace = '{body.decode()}'")
    failed = broker.truenext("redrive", f"DLQ.{queue}", "--selector", "truenext-attempts > 2")
    assert failed.returncode == 2 and "for a dead letter use truenext_original_attempts" in failed.stderr


def test_a_purge_removes_waiting_messages_and_leaves_held_ones(broker: BrokerProcess, queue: str) -> None:
    # C12.1, C12.5
    fill(broker, queue, 10)
    client = broker.connect()
    client.subscribe(queue, prefetch=2)
    held = client.messages(2)
    unknown = broker.output_of("purge", queue, "--cause", "none", "--dry-run")
    hint = f"no message of such a group was found: `truenext dead-letters {queue}` shows the groups"
    assert unknown == f"0 would be removed\n{hint}\n"
    dry = json.loads(broker.output_of("purge", queue, "--dry-run", "--json"))
    assert (dry["count"], dry["dry_run"]) == (8, True)
    left = "1 left: held by consumers, or still being committed\n"
    assert broker.output_of("purge", queue, "--selector", "colour = 'red'") == f"4 removed\n{left}"
    purged = json.loads(broker.output_of("purge", queue, "--json"))
    assert (purged["count"], purged["left"]) == (4, 2)
    client.nack(held[0])
    client.nack(held[1], confirmed=True)
    assert sorted(bodies(client.messages(2))) == ["0", "1"]


@pytest.mark.parametrize("is_persistent", [True, False])
def test_move_and_purge_leave_held_messages_and_fail_only_for_named_ones(
    broker: BrokerProcess, queue: str, is_persistent: bool
) -> None:
    client = broker.connect()
    for colour in ("red", "blue", "red", "red"):
        client.send(queue, b"x", persistent=is_persistent, confirmed=True, headers={"colour": colour})
    client.subscribe(queue, prefetch=2)
    acknowledged, held = client.messages(2)
    client.begin("t")
    client.ack(acknowledged, transaction="t")
    # There is room for one more in the window.
    client.message()
    sequence = held.headers["truenext-sequence"]
    why = "held by consumers, or still being committed\n"
    for words, left in (([], 3), (["--selector", "colour = 'red'"], 2), (["--selector", "colour = 'blue'"], 1)):
        count = 0 if "colour = 'blue'" in words else 1
        fields = broker.output_of("purge", queue, *words, "--dry-run")
        assert fields == f"{count} would be removed\n{left} left: {why}"
    assert broker.output_of("move", queue, f"{queue}.new") == f"1 moved to {queue}.new\n3 left: {why}"
    assert broker.output_of("purge", queue) == f"0 removed\n3 left: {why}"
    named = broker.truenext("move", queue, f"{queue}.new", "--id", sequence)
    assert (named.returncode, named.stdout) == (1, f"0 moved\n1 left: {why}")
    assert named.stderr == f"truenext: messages not moved: id {sequence}\n"


@pytest.mark.parametrize(
    ("verb", "arguments", "why"),
    [
        ("move", {"queue": "nowhere", "to": "there"}, "there is no queue 'nowhere'"),
        ("move", {"queue": "orders"}, "missing required field `to`"),
        ("move", {"queue": "orders", "to": "orders"}, "source and target are the same queue, 'orders'"),
        ("move", {"queue": "orders", "to": "a,b"}, "its name has a comma"),
        ("purge", {"queue": "orders", "selector": "colour ="}, "selector"),
        ("pause", {}, "missing required field `queue`"),
        ("resume", {"queue": "nowhere"}, "there is no queue 'nowhere'"),
        ("pause", {"queue": ""}, "has no name"),
    ],
)
def test_impossible_bulk_work_is_refused_with_its_cause(
    broker: BrokerProcess, verb: str, arguments: dict[str, Any], why: str
) -> None:
    client = requester(broker)
    client.send("orders", b"", confirmed=True)
    with pytest.raises(UnexpectedError, match=why):
        control_request(client, verb, **arguments)
        client.message()


def test_kill_9_between_pieces_neither_loses_nor_doubles_moved_messages(own_broker: BrokerProcess) -> None:
    # C12.3
    count = 300
    fill(own_broker, "q", count, transient_every=count + 1)
    for pieces in (1, 2, 3):
        client = requester(own_broker)
        after, until = [0, 0], None
        for _ in range(pieces):
            control_request(client, "move", queue="q", to="r", limit=20, after=after, until=until)
            piece = json.loads(client.message().body)
            assert piece["moved"] == 20
            after, until = piece["next"], piece["until"]
        control_request(client, "move", queue="q", to="r", limit=20, after=after, until=until)
        own_broker.kill()
        own_broker.close_clients()
        own_broker.start()
    own_broker.output_of("move", "q", "r")
    own_broker.await_facts("q", waiting=0)
    own_broker.await_facts("r", waiting=count - 1)
    there = Counter(bodies(own_broker.remaining_messages("r")))
    # The first was transient, and a kill may lose it.
    assert there == Counter(str(number) for number in range(1, count))


def test_kill_9_between_the_pieces_of_a_purge_brings_nothing_back(own_broker: BrokerProcess) -> None:
    # C12.3
    fill(own_broker, "q", 200, transient_every=500)
    client = requester(own_broker)
    control_request(client, "purge", queue="q", limit=50)
    piece = json.loads(client.message().body)
    assert piece["moved"] == 50
    control_request(client, "purge", queue="q", limit=50, after=piece["next"])
    own_broker.kill()
    own_broker.close_clients()
    own_broker.start()
    there = bodies(own_broker.remaining_messages("q"))
    assert there in ([str(number) for number in range(start, 200)] for start in (50, 100))
    own_broker.output_of("purge", "q")
    own_broker.restart(is_clean=False)
    assert own_broker.queues().get("q") in (None, (0, 0, 0))


def test_ten_thousand_messages_are_purged_from_the_disk_while_another_queue_is_served(tmp_path: Path) -> None:
    # C12.4
    count = 10_000
    broker = BrokerProcess(tmp_path, ("--queue-memory-limit", "100KB"))
    try:
        broker.start()
        fill(broker, "q", count)
        purge = subprocess.Popen(
            [TRUENEXT, "purge", "q", "--url", f"stomp://127.0.0.1:{broker.port}"], stdout=subprocess.PIPE, text=True
        )
        client = broker.connect()
        client.subscribe("other", prefetch=1)
        served = 0
        while purge.poll() is None:
            client.send("other", b"", confirmed=True)
            client.ack(client.message(), confirmed=True)
            served += 1
        assert purge.stdout is not None
        assert purge.stdout.read() == f"{count:,} removed\n"
        purge.stdout.close()
        assert served > 3
        broker.await_facts("q", waiting=0)
    finally:
        broker.clean_up()


def test_a_paused_queue_takes_sends_and_acknowledgements_and_dispatches_nothing(own_broker: BrokerProcess) -> None:
    # C12.7
    client = own_broker.connect()
    client.send("q", b"held", persistent=True, confirmed=True)
    client.subscribe("q", prefetch=5)
    held = client.message()
    own_broker.output_of("pause", "q")
    client.send("q", b"while paused", persistent=True, confirmed=True)
    client.ack(held, confirmed=True)
    client.only(0)
    assert "q (paused)" in own_broker.output_of("queues")
    client.disconnect()
    for is_clean in (True, False):
        own_broker.restart(is_clean=is_clean)
        (facts,) = json.loads(own_broker.output_of("queues", "--json"))
        assert (facts["paused"], facts["waiting"]) == (True, 1)
        client = own_broker.connect()
        client.subscribe("q")
        client.only(0)
        client.disconnect()
    client = own_broker.connect()
    client.subscribe("q")
    own_broker.output_of("resume", "q")
    assert client.message().body == b"while paused"
    client.disconnect()
    own_broker.restart(is_clean=False)
    assert not json.loads(own_broker.output_of("queues", "--json"))[0]["paused"]


def test_a_queue_can_be_paused_before_its_first_use(own_broker: BrokerProcess) -> None:
    own_broker.output_of("pause", "new")
    own_broker.restart(is_clean=False)
    client = own_broker.connect()
    client.subscribe("new")
    client.send("new", b"first", confirmed=True)
    client.only(0)
    own_broker.output_of("resume", "new")
    assert client.message().body == b"first"
