"""Test that messages for a hundred durable subscriptions are on disk once, with a real broker and its restarts."""

import re
import time
from pathlib import Path

from tests.integration.broker_process import BrokerProcess
from tests.integration.forked import completed_text
from tests.integration.raw_client import RawClient
from tests.integration.test_topics import follow, known, publish

SUBSCRIPTIONS = 100
BODY = "b" * (1 << 20)
SENDS = 2
GROWTH_MAX = 40 << 20
"""Largest growth: a segment of the journal, and a little more. Copies would take two hundred MiB."""


def used(data: Path) -> int:
    """Return the bytes that a folder takes on disk."""
    return sum(path.stat().st_blocks * 512 for path in data.rglob("*") if path.is_file())


def subscribe(client: RawClient, names: range) -> None:
    for name in names:
        follow(client, "/topic/news", name=str(name), headers={"activemq.subscriptionName": str(name)})


def receive(broker: BrokerProcess, names: range, each: int) -> None:
    """Receive and acknowledge `each` messages for each subscription."""
    client = known(broker)
    subscribe(client, names)
    for _ in range(each * len(names)):
        message = client.message()
        assert message.body == BODY.encode()
        client.ack(message)
    client.disconnect()


def settled(folder: Path) -> int:
    """Return the size of the store once it is stable: spare segments are made in the background."""
    size = -1
    while size != (now := used(folder)):
        size = now
        time.sleep(0.5)
    return size


def test_message_for_a_hundred_subscriptions_is_stored_once(own_broker: BrokerProcess) -> None:
    broker = own_broker
    client = known(broker)
    subscribe(client, range(SUBSCRIPTIONS))
    client.disconnect()
    sender = broker.connect()
    publish(sender, "/queue/first", "m", {"persistent": "true"})
    before = settled(broker.data)
    for _ in range(2):
        sender = broker.connect()
        for _ in range(SENDS):
            publish(sender, "/topic/news", BODY, {"persistent": "true"})
        assert used(broker.data) - before < GROWTH_MAX
        broker.restart(is_clean=False)
        receive(broker, range(SUBSCRIPTIONS // 2), SENDS)
        broker.restart(is_clean=True)
        receive(broker, range(SUBSCRIPTIONS // 2, SUBSCRIPTIONS - 1), SENDS)
        broker.restart(is_clean=False)
        receive(broker, range(SUBSCRIPTIONS - 1, SUBSCRIPTIONS), SENDS)
        assert used(broker.data) - before < GROWTH_MAX
    broker.restart(is_clean=False)
    broker.stop()
    done = completed_text("store", "check", broker.data)
    output = done.stdout
    assert done.returncode == 0, done.stderr
    assert re.search(r": 1 message of .* bytes in 1 queue", output, re.MULTILINE)
    assert "content" not in output
    assert "has no damage" in output
