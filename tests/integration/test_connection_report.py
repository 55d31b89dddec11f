"""Tests of a connection's report on itself: round, transactions, subscriptions, and why a subscription is idle.

Source of what is expected: docs/protocol.md, "Control requests".
"""

import json
import time
from typing import Any

import pytest

from tests.integration.broker_process import LIMITS, PATIENCE_SECONDS, BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient

pytestmark = LIMITS

REDELIVERY = {"attempts_max": 7, "first_delay_ms": 0, "delay_ms": 1000, "backoff": 1.0, "delay_max_ms": 300_000}
"""Defaults of the policies."""


@pytest.fixture
def client(broker: BrokerProcess) -> RawClient:
    return requester(broker)


def requester(broker: BrokerProcess) -> RawClient:
    client = broker.connect(headers=TRUENEXT_CLIENT)
    client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"})
    return client


def control_request(client: RawClient, body: bytes = b"") -> None:
    headers = {"destination": "/control/connection", "reply-to": "/temp-queue/answers", "correlation-id": "question"}
    client.send_frame("SEND", headers, body)


def report(client: RawClient) -> dict[str, Any]:
    control_request(client)
    while (message := client.message()).headers.get("correlation-id") != "question":
        pass
    answer: dict[str, Any] = json.loads(message.body)
    return answer


def of(client: RawClient, subscription: str = "1") -> dict[str, Any]:
    (row,) = [row for row in report(client)["subscriptions"] if row["id"] == subscription]
    return dict(row)


def idle(client: RawClient, subscription: str = "1") -> str:
    return str(of(client, subscription)["idle"])


def await_empty(client: RawClient, subscription: str) -> None:
    """Wait until the subscription is idle with "empty"; until then messages that others took are read and compared."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (why := idle(client, subscription)) != "empty":
        assert why in ("scanning", "reading") and time.monotonic() < deadline


def fill(broker: BrokerProcess, queue: str, count: int, **headers: str) -> None:
    sender = broker.connect()
    for number in range(count):
        sender.send(queue, b"%d" % number, persistent=True, headers=headers)
    sender.arrived()
    sender.disconnect()


def test_report_has_round_transactions_and_subscriptions_of_a_connection(
    broker: BrokerProcess, queue: str, client: RawClient
) -> None:
    fill(broker, queue, 5)
    client.subscribe(queue, prefetch=5)
    messages = client.only(5)
    client.send_frame("SUBSCRIBE", {"id": "b", "destination": f"/queue/{queue}", "browser": "true"}, confirmed=True)
    client.send_frame("SUBSCRIBE", {"id": "t", "destination": "/temp-topic/own"}, confirmed=True)
    client.subscribe(f"{queue}.*", subscription="p", prefetch=None, headers={"truenext-pull": "true"})
    client.pull(3, subscription="p")
    client.release("p")
    client.pull(2, subscription="p")
    client.started(messages[0])
    client.begin("a")
    client.begin("b")
    client.send(queue, b"", transaction="b")
    client.ack(messages[1], transaction="b")
    client.ack(messages[2], transaction="b")
    client.nack(messages[2], transaction="b")
    client.send_frame("SEND", {"destination": "/queue/", "transaction": "a"})
    answer = report(client)
    assert answer["round"] == 1
    assert answer["user"] is None
    assert answer["transactions"] == [
        {"name": "a", "sends": 0, "acknowledged": 0, "nacked": 0, "rollback_only": True},
        {"name": "b", "sends": 1, "acknowledged": 1, "nacked": 1, "rollback_only": False},
    ]
    nothing = {"held": 0, "started": 0, "window": None, "requested": None, "idle": "empty", "redelivery": None}
    own = {"redelivery": REDELIVERY | {"attempts_max": None, "dead_letters": None}}
    assert {row.pop("id"): row for row in answer["subscriptions"]} == {
        "answers": nothing | own | {"destination": "/temp-queue/answers"},
        "1": {
            "destination": f"/queue/{queue}",
            "held": 3,
            "started": 1,
            "window": 5,
            "requested": None,
            "idle": "empty",
            "redelivery": REDELIVERY | {"dead_letters": f"DLQ.{queue}"},
        },
        "b": nothing | {"destination": f"/queue/{queue}", "idle": "browses"},
        "t": nothing | own | {"destination": "/temp-topic/own"},
        "p": nothing | {"destination": f"/queue/{queue}.*", "requested": 2},
    }


def test_report_is_about_the_connection_that_asks(broker: BrokerProcess, queue: str, client: RawClient) -> None:
    other = requester(broker)
    client.begin("mine")
    other.begin("other")
    for each in (client, other, client):
        control_request(each)
    answers = [json.loads(each.message().body) for each in (client, other, client)]
    assert [[one["name"] for one in answer["transactions"]] for answer in answers] == [["mine"], ["other"], ["mine"]]


@pytest.mark.parametrize("body", [b"{}", b" ", b'{"connection": "1"}'])
def test_request_with_a_body_is_refused(client: RawClient, body: bytes) -> None:
    control_request(client, body)
    assert client.next_error().headers["truenext-code"] == "control-request"
    assert report(client)["round"] == 0


# ---- Why nothing comes ----


def test_idle_is_suspended_after_a_release_and_no_credit_with_a_full_window(
    broker: BrokerProcess, queue: str, client: RawClient
) -> None:
    fill(broker, queue, 3)
    client.subscribe(queue, prefetch=2)
    client.messages(2)
    assert idle(client) == "no credit"
    client.release("1", suspend=True)
    row = of(client)
    assert (row["idle"], row["held"], row["window"]) == ("suspended", 0, 2)
    client.wake()
    client.messages(2)
    assert idle(client) == "no credit"


def test_idle_is_no_credit_for_a_pulling_subscription_without_requests(
    broker: BrokerProcess, queue: str, client: RawClient
) -> None:
    client.subscribe(queue, prefetch=None, headers={"truenext-pull": "true"})
    assert idle(client) == "no credit"
    client.pull(2)
    assert idle(client) == "empty"
    fill(broker, queue, 3)
    client.messages(2)
    row = of(client)
    assert (row["idle"], row["requested"], row["held"]) == ("no credit", 0, 2)


def test_idle_is_paused_for_a_paused_queue_with_messages(broker: BrokerProcess, queue: str, client: RawClient) -> None:
    client.subscribe(queue)
    client.subscribe(f"{queue}.*", subscription="p")
    for name in (queue, f"{queue}.a"):
        broker.output_of("pause", name)
    assert (idle(client), idle(client, "p")) == ("paused", "empty")
    fill(broker, f"{queue}.a", 1)
    assert idle(client, "p") == "paused"
    broker.output_of("resume", f"{queue}.a")
    client.message()
    assert idle(client, "p") == "empty"


def test_idle_is_exclusive_beside_an_exclusive_consumer(broker: BrokerProcess, queue: str, client: RawClient) -> None:
    other = broker.connect()
    other.subscribe(queue, prefetch=1, headers={"activemq.exclusive": "true"})
    client.subscribe(queue)
    client.subscribe(f"{queue}.*", subscription="p")
    fill(broker, queue, 3)
    assert idle(client) == "exclusive"
    other.subscribe(f"{queue}.a", prefetch=1, subscription="2", headers={"activemq.exclusive": "true"})
    fill(broker, f"{queue}.a", 3)
    assert idle(client, "p") == "exclusive"


def test_idle_is_scanning_or_reading_while_pages_are_read(held_broker: BrokerProcess, queue: str) -> None:
    broker = held_broker
    fill(broker, queue, 3, n="1")
    fill(broker, f"{queue}.a", 3, n="1")
    broker.restart(is_clean=True)
    broker.hold_pages()
    client = requester(broker)
    client.subscribe(queue, subscription="s", headers={"selector": "n = '1'"})
    client.subscribe(f"{queue}.*", subscription="p")
    assert (idle(client, "s"), idle(client, "p")) == ("scanning", "reading")
    client.subscribe(queue, subscription="q")
    assert idle(client, "q") == "reading"
    broker.resume_pages()
    client.messages(6)
    for name in "spq":
        await_empty(client, name)


def test_idle_is_committing_while_a_message_is_not_durable(held_broker: BrokerProcess, queue: str) -> None:
    broker = held_broker
    client = requester(broker)
    client.subscribe(queue)
    client.subscribe(queue, subscription="s", headers={"selector": "n = '1'"})
    client.subscribe(f"{queue}.*", subscription="p")
    client.subscribe(queue, subscription="other", headers={"selector": "n = '2'"})
    broker.hold_disk()
    for name in (queue, f"{queue}.a"):
        client.send(name, b"", persistent=True, headers={"n": "1"})
    assert [idle(client, name) for name in ("1", "s", "p", "other")] == ["committing"] * 3 + ["empty"]
    broker.resume_disk()
    client.messages(2)
    assert idle(client) == "empty"


def test_idle_is_group_while_another_consumer_has_the_group(
    broker: BrokerProcess, queue: str, client: RawClient, options: tuple[str, ...]
) -> None:
    other = broker.connect()
    for name in (queue, f"{queue}.a"):
        other.subscribe(name, subscription=name, prefetch=1)
        fill(broker, name, 3, JMSXGroupID="g")
        other.message()
    client.subscribe(queue)
    client.subscribe(queue, subscription="s", headers={"selector": "JMSXGroupID = 'h'"})
    client.subscribe(f"{queue}.*", subscription="p")
    assert (idle(client), idle(client, "p")) == ("group", "group")
    # What has left memory counts as wanted.
    assert idle(client, "s") in (("empty", "group") if options else ("empty",))
    other.disconnect()
    client.messages(6)
    assert idle(client) == "empty"


@pytest.mark.parametrize("while_waiting", ["skip", "block"])
@pytest.mark.parametrize("group", [{}, {"JMSXGroupID": "g"}], ids=["no group", "group"])
def test_idle_is_delayed_while_a_message_waits_for_its_retry(
    own_broker: BrokerProcess, queue: str, while_waiting: str, group: dict[str, str]
) -> None:
    broker = own_broker
    broker.stop()
    settings = broker.data.parent / "truenext.toml"
    settings.write_text(f'[policy]\nwhile_waiting = "{while_waiting}"\n')
    broker.options = [*broker.options, "--config", str(settings)]
    broker.start()
    client = requester(broker)
    client.subscribe(queue)
    client.subscribe(queue, subscription="other", headers={"selector": "n = '2'"})
    fill(broker, queue, 1, n="1", **group)
    client.nack(client.message(), headers={"truenext-delay": "60000"})
    assert (idle(client), idle(client, "other")) == ("delayed", "empty")
    fill(broker, queue, 1, n="1", **group)
    holds = while_waiting == "block" or bool(group)
    assert len(client.arrived()) == (not holds)
    assert idle(client) == "delayed"


def test_idle_is_empty_without_a_message_for_the_subscription(
    broker: BrokerProcess, queue: str, client: RawClient
) -> None:
    client.subscribe(queue)
    client.subscribe(queue, subscription="s", headers={"selector": "n = '2'"})
    assert (idle(client), idle(client, "s")) == ("empty", "empty")
    client.unsubscribe()
    fill(broker, queue, 3, n="1")
    assert idle(client, "s") == "empty"
