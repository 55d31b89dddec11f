"""Tests that scheduled sends are sent once, and not before their time, also when the broker is killed."""

import json
import time
from collections import Counter

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import RawClient, UnexpectedError, bodies


def later(client: RawClient, body: str, milliseconds: int, *, persistent: bool = True, confirmed: bool = False) -> None:
    headers = {"AMQ_SCHEDULED_DELAY": str(milliseconds)}
    client.send("q", body.encode(), persistent=persistent, confirmed=confirmed, headers=headers)


def scheduled(broker: BrokerProcess) -> dict[str, int]:
    return {each["name"]: each["scheduled"] for each in broker.control_request("queues")}


def test_a_delay_is_waited_for_and_its_headers_do_not_reach_the_consumer(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    client.subscribe("q")
    sent_at = time.monotonic()
    later(client, "second", 600, persistent=False)
    later(client, "first", 300, confirmed=True)
    assert scheduled(own_broker) == {"q": 2}
    client.send("q", b"at once")
    assert client.message().body == b"at once"
    first, second = client.messages(2)
    assert time.monotonic() - sent_at >= 0.6
    assert bodies([first, second]) == ["first", "second"]
    assert not any(name.startswith("AMQ_") for name in first.headers)
    assert first.headers["persistent"] == "true"
    assert scheduled(own_broker) == {"q": 0}


def test_repetitions_come_as_often_as_requested(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    client.subscribe("q")
    headers = {"AMQ_SCHEDULED_PERIOD": "50", "AMQ_SCHEDULED_REPEAT": "4"}
    client.send("q", b"tick", persistent=True, headers=headers)
    sequences = [int(each.headers["truenext-sequence"]) for each in client.messages(5)]
    assert sequences == sorted(set(sequences))
    time.sleep(0.2)
    client.only(0)


@pytest.mark.parametrize("is_clean", [True, False])
def test_scheduled_sends_survive_a_restart(own_broker: BrokerProcess, is_clean: bool) -> None:
    client = own_broker.connect()
    for number in range(20):
        later(client, f"soon {number}", 2000 + number % 3 * 200)
    later(client, "transient", 2000, persistent=False)
    later(client, "much later", 3_600_000, confirmed=True)
    client.disconnect()
    own_broker.restart(is_clean=is_clean)
    (queue,) = own_broker.control_request("queues")
    # On a slow machine the first are due by now.
    assert queue["scheduled"] + queue["waiting"] == (22 if is_clean else 21)
    client = own_broker.connect()
    client.subscribe("q")
    soon = [f"soon {number}" for rest in range(3) for number in range(20) if number % 3 == rest]
    received = bodies(client.messages(21 if is_clean else 20))
    assert [each for each in received if each != "transient"] == soon
    assert ("transient" in received) is is_clean
    assert scheduled(own_broker) == {"q": 1}


def test_kill_9_while_scheduled_sends_become_due_neither_loses_nor_doubles_one(own_broker: BrokerProcess) -> None:
    # C14.8
    count = 600
    client = own_broker.connect()
    for number in range(count):
        later(client, str(number), 1000 + number * 2, confirmed=number == count - 1)
    client.disconnect()
    time.sleep(1.0)
    for _ in range(4):
        time.sleep(0.2)
        own_broker.kill()
        own_broker.close_clients()
        own_broker.start()
    own_broker.await_facts("q", waiting=count)
    there = own_broker.remaining_messages("q")
    assert Counter(bodies(there)) == Counter(map(str, range(count)))
    assert bodies(there) == [str(number) for number in range(count)]
    assert scheduled(own_broker) == {"q": 0}


def test_a_cron_expression_is_taken_and_counted(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    client.send("q", b"", persistent=True, confirmed=True, headers={"AMQ_SCHEDULED_CRON": "0 0 1 1 *"})
    assert scheduled(own_broker) == {"q": 1}
    assert json.dumps(own_broker.queues()["q"]) == "[0, 0, 0]"


HOUR_MS = 3_600_000


def test_cron_expression_in_a_time_zone_is_shown_with_its_zone_after_a_restart(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    headers = {"AMQ_SCHEDULED_CRON": "30 12 * * *", "AMQ_SCHEDULED_ZONE": "Asia/Tokyo"}
    client.send("q", b"tick", persistent=True, confirmed=True, headers=headers)
    client.disconnect()
    own_broker.restart(is_clean=False)
    (shown,) = map(json.loads, own_broker.output_of("scheduled", "--json").splitlines())
    assert (shown["cron"], shown["zone"]) == ("30 12 * * *", "Asia/Tokyo")
    assert time.gmtime(shown["due_ms"] / 1000)[3:5] == (3, 30)
    assert "30 12 * * *, Asia/Tokyo" in own_broker.output_of("scheduled")


def test_due_time_is_kept_over_dead_letter_redrive_move_and_restart(own_broker: BrokerProcess) -> None:
    # C14.12
    client = own_broker.connect()
    before_ms = time.time_ns() // 1_000_000
    later(client, "late", 200, confirmed=True)
    client.send("q", b"plain", persistent=True, confirmed=True, headers={"truenext-due": "7"})
    client.subscribe("q")
    plain, late = client.messages(2)
    due = late.headers["truenext-due"]
    assert before_ms + 200 <= int(due) <= time.time_ns() // 1_000_000
    assert "truenext-due" not in plain.headers
    client.ack(plain)
    client.nack(late, confirmed=True, headers={"truenext-reject": "true"})
    client.disconnect()

    def due_in(queue: str) -> str:
        (message,) = own_broker.remaining_messages(queue)
        assert message.body == b"late"
        return message.headers["truenext-due"]

    assert due_in("DLQ.q") == due
    own_broker.restart(is_clean=False)
    own_broker.output_of("redrive", "DLQ.q")
    assert due_in("q") == due
    own_broker.output_of("move", "q", "other")
    assert due_in("other") == due


def test_copies_of_a_scheduled_send_say_the_same_due_time(own_broker: BrokerProcess) -> None:
    # C14.12
    client = own_broker.connect()
    client.subscribe("a", subscription="a")
    client.subscribe("b", subscription="b")
    headers = {"AMQ_SCHEDULED_DELAY": "50", "destination": "/queue/a,/queue/b", "persistent": "true"}
    client.send_frame("SEND", headers, b"copy", confirmed=True)
    assert len({each.headers["truenext-due"] for each in client.messages(2)}) == 1


def fill(broker: BrokerProcess, count: int) -> None:
    """Schedule messages that are due one second after the other, from an hour on, the last one first."""
    client = broker.connect()
    for number in range(count):
        headers = {"AMQ_SCHEDULED_DELAY": str(HOUR_MS + (count - number) * 1000), "even": str(number % 2 == 0)}
        is_persistent = bool(number % 3)
        client.send("q", b"%d" % number, persistent=is_persistent, confirmed=number == count - 1, headers=headers)
    client.disconnect()


def test_scheduled_shows_the_sends_in_the_order_in_which_they_are_due(own_broker: BrokerProcess) -> None:
    fill(own_broker, 1200)
    done = own_broker.truenext("scheduled", "q", "--count", "3", "--json")
    assert done.returncode == 0, done.stderr
    sends = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["body"] for each in sends] == ["1199", "1198", "1197"]
    assert {each["to"] for each in sends} == {"/queue/q"}
    assert sends[0]["headers"]["even"] == "False"
    assert sends[0]["due_ms"] == pytest.approx(time.time() * 1000 + HOUR_MS, abs=60_000)
    assert done.stderr == "3 of 1,200; --count shows more\n"
    assert len(own_broker.output_of("scheduled", "--count", "2000", "--json").splitlines()) == 1200
    assert "1199" in own_broker.output_of("scheduled", "/queue/q", "--count", "1")
    assert scheduled(own_broker) == {"q": 1200}


@pytest.mark.parametrize("is_clean", [True, False])
def test_cancelled_sends_stay_cancelled_after_a_restart(own_broker: BrokerProcess, is_clean: bool) -> None:
    # C14.7
    fill(own_broker, 1200)
    assert (
        own_broker.output_of("unschedule", "q", "--selector", "even = 'True'", "--dry-run")
        == "600 would be cancelled\n"
    )
    assert own_broker.output_of("unschedule", "q", "--selector", "even = 'True'") == "600 cancelled\n"
    assert scheduled(own_broker) == {"q": 600}
    own_broker.restart(is_clean=is_clean)
    remaining = [number for number in range(1, 1200, 2) if is_clean or number % 3]
    shown = own_broker.output_of("scheduled", "q", "--count", "2000", "--json").splitlines()
    assert [json.loads(line)["body"] for line in shown] == [str(number) for number in reversed(remaining)]
    number = json.loads(shown[0])["number"]
    assert own_broker.output_of("unschedule", "q", "--id", str(number)) == "1 cancelled\n"
    done = own_broker.truenext("unschedule", "q", "--id", str(number))
    assert (done.returncode, done.stderr) == (1, f"truenext: not found: id {number}\n")
    assert scheduled(own_broker) == {"q": len(remaining) - 1}


def test_unschedule_of_many_ids_cancels_each(own_broker: BrokerProcess) -> None:
    fill(own_broker, 2500)
    shown = own_broker.output_of("scheduled", "q", "--count", "2500", "--json").splitlines()
    ids = [str(json.loads(line)["number"]) for line in shown][::2]
    assert own_broker.output_of("unschedule", "q", *(f"--id={each}" for each in ids)) == "1,250 cancelled\n"
    assert scheduled(own_broker) == {"q": 1250}


def test_unschedule_cancels_sends_that_repeat_every_millisecond(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    headers = {"AMQ_SCHEDULED_PERIOD": "1", "AMQ_SCHEDULED_REPEAT": "-1"}
    for number in range(3):
        client.send("q", b"", persistent=number == 1, confirmed=True, headers=headers)
    assert own_broker.output_of("unschedule", "q") == "3 cancelled\n"
    assert scheduled(own_broker) == {"q": 0}


def test_too_many_control_requests_at_once_are_refused(own_broker: BrokerProcess) -> None:
    fill(own_broker, 3000)
    client = own_broker.connect()
    client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"}, confirmed=True)
    frame = b"SEND\ndestination:/control/scheduled\nreply-to:/temp-queue/answers\n\n" + b'{"queue":"q"}\0'
    client.write(frame * 1000)
    with pytest.raises(UnexpectedError, match="100 control requests of this connection have no answer yet"):
        client.messages(1000)
    assert own_broker.output_of("unschedule", "q") == "3,000 cancelled\n"


def test_bodies_of_scheduled_sends_are_escaped_on_a_terminal(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    client.send("q", b"\x1b]0;t\x07\n[red]x", confirmed=True, headers={"AMQ_SCHEDULED_DELAY": "60000"})
    output = own_broker.output_of("scheduled", "q")
    assert "\x1b" not in output
    assert r"\x1b]0;t\x07\x0a[red]x" in output.replace("\n", "")


def test_scheduled_sends_to_topics_are_shown_and_cancelled_by_address(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    for destination in ("/topic/t", "/queue/a,/topic/t"):
        headers = {"destination": destination, "AMQ_SCHEDULED_CRON": "0 0 1 1 *"}
        client.send_frame("SEND", headers, b"happy new year", confirmed=True)
    assert own_broker.output_of("scheduled").count("0 0 1 1 *") == 2
    assert own_broker.output_of("scheduled", "/topic/t").count("happy new year") == 1
    assert own_broker.output_of("unschedule", "/topic/t,/queue/a") == "1 cancelled\n"
    assert own_broker.output_of("scheduled", "--json").count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (("unschedule", "nosuch"), 1, "there is no queue 'nosuch'"),
        (("scheduled", "/topic/no.*"), 2, "'/topic/no.*' cannot have scheduled sends"),
        (("unschedule", "/control/q"), 2, "'/control/q' cannot have scheduled sends"),
        (("unschedule", "/temp-queue/q"), 2, "'/temp-queue/q' cannot have scheduled sends"),
        (("unschedule", "q", "--id", str(2**64)), 2, "<=9223372036854775807"),
        (("scheduled", "q", "--selector", "even ="), 2, "selector"),
        (("unschedule", "/nowhere/q"), 2, "/nowhere/q"),
    ],
)
def test_scheduled_and_unschedule_report_invalid_arguments(
    own_broker: BrokerProcess, arguments: tuple[str, ...], status: int, why: str
) -> None:
    fill(own_broker, 1)
    done = own_broker.truenext(*arguments)
    assert done.returncode == status
    assert why in done.stderr
    assert done.stderr.count("\n") == 1
    assert scheduled(own_broker) == {"q": 1}


@pytest.mark.parametrize(
    ("destination", "headers", "why"),
    [
        ("/queue/q", {"AMQ_SCHEDULED_DELAY": "soon"}, "'soon' is not a number"),
        ("/queue/q", {"AMQ_SCHEDULED_REPEAT": "-2", "AMQ_SCHEDULED_PERIOD": "1"}, "'-2' is not a number"),
        ("/queue/q", {"AMQ_SCHEDULED_CRON": ""}, "AMQ_SCHEDULED_CRON is empty"),
        ("/queue/q", {"AMQ_SCHEDULED_CRON": "* * 30 2 *"}, "30 2 .*' has no next time: its months have no such day"),
        ("/queue/q", {"AMQ_SCHEDULED_ZONE": "Europe/Oslo"}, "AMQ_SCHEDULED_ZONE is for AMQ_SCHEDULED_CRON"),
        ("/queue/q", {"AMQ_SCHEDULED_CRON": "0 3 * * *", "AMQ_SCHEDULED_ZONE": "Europe/Olso"}, "ZONE 'Europe/Olso' is"),
        ("/queue/q", {"AMQ_SCHEDULED_CRON": "0 3 * * *", "AMQ_SCHEDULED_ZONE": ""}, "AMQ_SCHEDULED_ZONE is empty"),
        ("/queue/q", {"AMQ_SCHEDULED_CRON": "* * 32 2 *"}, "not a cron expression: its day of the month is '32'"),
        ("/temp-queue/q", {"AMQ_SCHEDULED_DELAY": "1"}, "may have ended"),
    ],
)
def test_invalid_scheduling_headers_are_refused(
    broker: BrokerProcess, destination: str, headers: dict[str, str], why: str
) -> None:
    client = broker.connect()
    with pytest.raises(UnexpectedError, match=why):
        client.send_frame("SEND", {"destination": destination} | headers, confirmed=True)
