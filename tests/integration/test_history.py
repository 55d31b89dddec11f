"""Tests that the history of a real broker has what its clients saw, also when the broker is killed."""

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.contract.naive_history import read_folder, read_parquet
from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT
from truenext.model.events import GAP_EVENTS


def history(broker: BrokerProcess) -> list[dict[str, Any]]:
    """Return all events of the history, exported to Parquet or not."""
    # In this order: what a killed broker's exporter, which lives on a little, exports between the two is then in both.
    own = read_folder(broker.data / "history")
    exported = read_parquet(broker.data / "history/events")
    return sorted({event["event"]: event for event in exported + own}.values(), key=lambda event: event["event"])


def sequences(events: list[dict[str, Any]], kind: str) -> list[int]:
    return [event["sequence"] for event in events if event["kind"] == kind]


def test_history_has_all_events_of_a_run(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    client.send("orders", b"low", persistent=True, priority=1, confirmed=True)
    client.send("orders", b"high", priority=9, confirmed=True)
    client.subscribe("orders", prefetch=1)
    for body in (b"high", b"low"):
        message = client.message()
        assert message.body == body
        client.ack(message, confirmed=True)
    client.disconnect()
    own_broker.stop()
    recorded = [
        (event["kind"], event.get("sequence")) for event in history(own_broker) if event.get("queue") == "orders"
    ]
    assert recorded == [
        ("accepted", 1),
        ("accepted", 2),
        ("subscribed", None),
        ("dispatched", 2),
        ("acknowledged", 2),
        ("dispatched", 1),
        ("acknowledged", 1),
        ("unsubscribed", None),
    ]


def test_history_is_written_soon_while_the_broker_runs(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    for _ in range(20):
        client.send("orders", b"x")
    client.arrived()
    own_broker.await_facts("orders", waiting=20)
    for _ in range(200):
        if len(sequences(history(own_broker), "accepted")) == 20:
            return
        own_broker.await_facts("orders", waiting=20)
    raise AssertionError(history(own_broker)[-3:])


def test_history_after_a_clean_stop_has_no_gap_and_the_remaining_messages(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    for persistent in (True, False, True):
        client.send("orders", b"x", persistent=persistent, confirmed=True)
    own_broker.restart(is_clean=True)
    identity = own_broker.connect(headers=TRUENEXT_CLIENT).connected.headers["truenext-store"]
    own_broker.stop()
    events = history(own_broker)
    assert [event["store"] for event in events if event["kind"] == "run-started"] == [identity, identity]
    assert [event["event"] for event in events] == list(range(1, len(events) + 1))
    assert [(event["run"], event["count"]) for event in events if event["kind"] == "recovered"] == [(2, 3)]
    assert [event["reason"] for event in events if event["kind"] == "run-started"] == ["clean", "clean"]


def test_serve_with_no_history_makes_no_history_folder(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from truenext.cli.main import main

    runner = CliRunner()
    failed = runner.invoke(main, ["serve", "--data", str(tmp_path), "--no-history", "--listen", "stomp://192.0.2.1:1"])
    assert failed.exit_code == 2
    assert not (tmp_path / "history").exists()


@LIMITS
def test_history_of_a_killed_broker_has_each_confirmed_send_and_acknowledgement(
    own_broker: BrokerProcess,
) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    confirmed = 0
    acknowledged: set[int] = set()
    for _ in range(3):
        client = own_broker.connect()
        client.subscribe("orders", prefetch=10)
        for _ in range(rng.randrange(5, 60)):
            if rng.random() < 0.6:
                client.send("orders", b"x" * rng.randrange(2000), persistent=True, confirmed=True)
                confirmed += 1
            elif len(acknowledged) < confirmed:
                message = client.message()
                client.ack(message, confirmed=True)
                sequence = int(message.headers["truenext-sequence"])
                assert sequence not in acknowledged
                acknowledged.add(sequence)
            client.send("orders.transient", b"x")
        own_broker.restart(is_clean=False)
    own_broker.stop()
    events = history(own_broker)
    accepted = sequences([event for event in events if event.get("queue") == "orders"], "accepted")
    assert len(set(accepted)) == len(accepted) == confirmed
    recorded = Counter(sequences(events, "acknowledged"))
    assert set(recorded) == acknowledged
    assert set(recorded.values()) <= {1}
    gaps = [later for earlier, later in pairwise(events) if later["event"] != earlier["event"] + 1]
    assert [(gap["kind"], gap["reason"]) for gap in gaps] == [("run-started", "unclean")] * 3
    assert all(later["event"] > earlier["event"] for earlier, later in pairwise(events))
    assert gaps[0]["event"] > GAP_EVENTS
