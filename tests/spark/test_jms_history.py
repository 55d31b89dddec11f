"""Test of messages that go between JMS and STOMP clients through a restart of the broker, judged by the audit."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess
from tests.integration.openwire.java import Programs, missing_reason
from tests.spark.queues import read_events
from truenext.spark.audit.audit import audit

REASON = missing_reason()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=REASON or ""), pytest.mark.timeout(300)]

MESSAGES = 1000
"""A megabyte in each of three queues, of which the broker keeps a sixteenth in memory."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(tmp_path, ["--queue-memory-limit", "64KiB", "--listen", "openwire://127.0.0.1:0"])
    try:
        broker.start()
        yield broker
    finally:
        broker.clean_up()


def by_urgency(numbers: range) -> list[int]:
    return sorted(numbers, key=lambda number: -(number % 10))


@pytest.mark.alternates("whole audits")
@one_of("by", [signal.SIGTERM, signal.SIGKILL], ids=["stop", "kill"])
def test_messages_between_jms_and_stomp_clients_stay_the_same_through_disk_and_restart(
    broker: BrokerProcess, by: signal.Signals, spark: SparkSession, tmp_path: Path
) -> None:
    java = Programs(tmp_path)
    sent = java.run("send_varied", broker.openwire_url, "-", str(MESSAGES), "jms.stomp", "jms.jms")
    client = broker.connect()
    for number in range(MESSAGES):
        headers = f"priority:{number % 10}\ncolour:a\\cb\\n\nsize:{number}\ncorrelation-id:c{number}\npersistent:true"
        # Without content-length it is a text.
        client.write(f"SEND\ndestination:/queue/stomp.jms\n{headers}\n\ns{number}{'x' * 1000}\0".encode())
    client.disconnect()

    broker.restart(is_clean=by is signal.SIGTERM)

    received = java.run("receive_varied", broker.openwire_url, "-", str(MESSAGES), "jms.jms", "stomp.jms")
    expected = [sent[MESSAGES + number] for number in by_urgency(range(MESSAGES))]
    assert received[:MESSAGES] == expected
    assert [line.partition("|")[2] for line in received[MESSAGES:]] == [
        f"queue://stomp.jms|{number % 10}|c{number}|{number}|a:b/|s{number}" + 1000 * "x"
        for number in by_urgency(range(MESSAGES))
    ]
    client = broker.connect()
    client.subscribe("jms.stomp", prefetch=100)
    for number in by_urgency(range(MESSAGES)):
        message = client.message()
        assert message.body.decode() == f"m{number}" + 500 * "é"
        names = ("priority", "correlation-id", "size", "colour")
        colour = "red" if number % 2 == 0 else "grün: a\nb"
        assert [message.headers[name] for name in names] == [str(number % 10), f"c{number}", str(number), colour]
        client.ack(message)
    client.disconnect()
    broker.stop()

    results = audit(read_events(spark, broker.data))
    assert results.verdict.has_contract_held, str(results.verdict)
    results.unpersist()
