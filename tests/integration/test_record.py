"""Tests that `truenext record` writes down what happened."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.brokers import ActiveMQ, no_activemq_reason
from tests.integration.broker_process import BrokerProcess
from truenext.errors import ConfigurationError, RemoteProtocolError
from truenext.spark.recorder import HistoryRow, Recorder, WorkloadMessage, make_mix, make_production


def silent(done: str, count: int) -> None:
    """Report no progress."""


def recorder(broker: BrokerProcess) -> Recorder:
    return Recorder(f"stomp://127.0.0.1:{broker.port}")


def sequences(events: list[HistoryRow], kind: str) -> list[int | None]:
    return [event["sequence"] for event in events if event["kind"] == kind]


@pytest.mark.parametrize("window", [1, 1000])
def test_a_recording_of_the_production_case(broker: BrokerProcess, queue: str, window: int) -> None:
    events = recorder(broker).record(make_production(40, random.Random(1)), queue=queue, window=window, report=silent)
    assert [event["event"] for event in events] == list(range(1, len(events) + 1))
    assert [event["kind"] for event in events[:42]] == ["run-started", *["accepted"] * 40, "subscribed"]
    assert events[-1]["kind"] == "drained"
    assert sequences(events, "accepted") == list(range(1, 41))
    assert sequences(events, "dispatched") == [*range(31, 41), *range(1, 31)]
    assert sequences(events, "acknowledged") == sequences(events, "dispatched")
    assert {event["deliveries"] for event in events if event["kind"] == "dispatched"} == {1}
    subscribed = events[41]
    assert (subscribed["consumer"], subscribed["mode"], subscribed["window"]) == (1, "client-individual", window)
    first = events[1]
    assert (first["priority"], first["persistent"], first["size"], first["batch"]) == (4, True, len(b"message 1"), 0)
    assert broker.queues()[queue].waiting == 0


def test_recording_confirms_all_sends_before_the_consumer_subscribes(broker: BrokerProcess, queue: str) -> None:
    messages = make_mix(1203, random.Random(5))
    events = recorder(broker).record(messages, queue=queue, window=10, report=silent)
    assert Counter(event["kind"] for event in events) == {
        **dict.fromkeys(("run-started", "subscribed", "drained"), 1),
        **dict.fromkeys(("accepted", "dispatched", "acknowledged"), 1203),
    }
    due = sorted(range(1, 1204), key=lambda sequence: (-messages[sequence - 1].priority, sequence))
    assert sequences(events, "dispatched") == due


def test_a_queue_with_messages_of_others_is_refused(broker: BrokerProcess, queue: str) -> None:
    broker.connect().send(queue, b"not ours", persistent=True, confirmed=True)
    with pytest.raises(RemoteProtocolError, match="name an empty queue"):
        recorder(broker).record(make_production(4, random.Random(1)), queue=queue, window=1, report=silent)


def test_recording_from_another_machine_needs_an_option() -> None:
    with pytest.raises(ConfigurationError, match="--remote"):
        Recorder("stomp://192.0.2.1:61613")


@pytest.fixture(scope="module")
def activemq() -> Iterator[ActiveMQ]:
    reason = no_activemq_reason()
    if reason is not None:
        pytest.skip(reason)
    broker = ActiveMQWithAnUnorderedQueue()
    with broker:
        yield broker


class ActiveMQWithAnUnorderedQueue(ActiveMQ):
    """ActiveMQ with a queue that ignores priorities."""

    def prepare(self, folder: Path) -> list[str]:
        command = super().prepare(folder)
        file = folder / "conf" / "activemq.xml"
        entry = '<policyEntry queue="unordered" prioritizedMessages="false"/>'
        file.write_text(file.read_text().replace("</policyEntries>", f"{entry}</policyEntries>", 1))
        return command


def recorded(activemq: ActiveMQ, messages: list[WorkloadMessage], *, queue: str, window: int) -> list[int | None]:
    """Record a workload, and return the sequences in the order of dispatch."""
    url = f"stomp://127.0.0.1:{activemq.port}"
    return sequences(Recorder(url).record(messages, queue=queue, window=window, report=silent), "dispatched")


def test_a_recording_of_activemq_shows_the_faults_of_the_production_case(activemq: ActiveMQ) -> None:
    received = recorded(activemq, make_production(2000, random.Random(1)), queue="production", window=100)
    assert sorted(received, key=lambda sequence: sequence or 0) == list(range(1, 2001))
    urgent = list(range(1501, 2001))
    assert [sequence for sequence in received if sequence in urgent] == urgent
    # It looks into one of its two buckets first, where nothing is urgent.
    assert received.index(urgent[0]) > 100


def test_a_recording_has_the_order_of_arrival_though_the_client_hands_out_what_is_urgent_first(
    activemq: ActiveMQ,
) -> None:
    messages = [WorkloadMessage(priority=number % 10, persistent=True) for number in range(500)]
    assert recorded(activemq, messages, queue="unordered", window=100) == list(range(1, 501))
