"""Test of the audit on durable subscriptions that end and begin anew, also when the broker is killed meanwhile."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import RawClient, bodies
from tests.spark.queues import read_events
from truenext.spark.audit.audit import audit
from truenext.wire.stomp.frame import Frame, Version, encode

pytestmark = pytest.mark.timeout(300)

MESSAGES = 2000
NEWS = {"id": "1", "destination": "/topic/news", "activemq.subscriptionName": "n", "activemq.prefetchSize": "10"}
SUBSCRIBE = Frame("SUBSCRIBE", NEWS | {"ack": "client-individual"}, b"")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(tmp_path, ["--queue-memory-limit", "64KiB"])
    try:
        broker.start()
        yield broker
    finally:
        broker.clean_up()


def known(broker: BrokerProcess) -> RawClient:
    client = broker.connect(sends_connect=False)
    client.send_connect("1.2", "0,0", client_id="me")
    return client


def restart_subscription(client: RawClient) -> None:
    """End the subscription, begin another one of its name, and send to it, all in one write."""
    end = Frame("UNSUBSCRIBE", {"id": "1", "activemq.subscriptionName": "n"}, b"")
    new = Frame("SEND", {"destination": "/topic/news", "persistent": "true", "receipt": "sent"}, b"new")
    client.write(b"".join(encode(frame, Version.V1_2) for frame in (end, SUBSCRIBE, new)))
    client.await_receipt("sent")


@pytest.mark.alternates("whole audits")
@one_of("kills", [0, 2], ["0", "2"])
def test_a_subscription_that_ends_and_begins_anew_in_one_breath_is_no_finding(
    broker: BrokerProcess, kills: int, spark: SparkSession, tmp_path: Path
) -> None:
    client = known(broker)
    client.write(encode(SUBSCRIBE, Version.V1_2))
    for number in range(MESSAGES):
        sent = {"destination": "/topic/news", "persistent": "true", "priority": str(number % 10)}
        client.send_frame("SEND", sent, b"old", confirmed=number == MESSAGES - 1)
    assert bodies(client.messages(10)) == ["old"] * 10
    restart_subscription(client)
    for _ in range(kills):
        # It may be anywhere in the removal of what has ended, and goes on with that.
        broker.kill()
        broker.start()
    if kills:
        client = known(broker)
        client.write(encode(SUBSCRIBE, Version.V1_2))
    message = client.message()
    assert message.body == b"new"
    client.ack(message, confirmed=True)
    broker.stop()

    events = read_events(spark, broker.data)
    kinds = Counter(row["kind"] for row in events.select("kind").collect())
    assert kinds["ended"] == 1
    assert kinds["acknowledged"] == 1
    results = audit(events)
    assert results.verdict.has_contract_held, str(results.verdict)
    results.unpersist()
