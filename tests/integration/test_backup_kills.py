"""Test that backups of a busy broker are states of exactly one batch each, although broker and command are killed.

Producers and consumers of several kinds work at full speed (kill_load.py), and so does a service of stages with an
outbox. Backups are made at random moments; during some of them the broker or the command is killed. Each backup is then
refused as cut short, or is restored, and has the state that a naive reader of the broker's frames finds after its
batch. Then brokers of restored folders take the place of the original, one after the other, while the service and other
clients go on (restored_backups.py).

    TRUENEXT_BACKUPS=200 TRUENEXT_SEED=7 pytest -s tests/integration/test_backup_kills.py
"""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.backup_broker import BackupBroker
from tests.integration.broker_process import BrokerProcess
from tests.integration.forked import Forked
from tests.integration.kill_load import Ledger, Letter, Worker, hire, resolve
from tests.integration.restored_backups import Doubtful, Shop, judge_producers, restore_and_check
from tests.integration.tapped_broker import StoreState, read_frames

COUNT = int(os.environ.get("TRUENEXT_BACKUPS", "4"))
PER_BROKER = 4
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

FATES = ["complete", "complete", "command killed", "broker killed", "stopped"]


class TopicsAndTimers(Worker):
    """Producer to a topic with durable subscriptions, of scheduled sends, and of messages that expire."""

    def __init__(self, ledger: Ledger, broker: BackupBroker, seed: str) -> None:
        super().__init__(ledger, broker.connect, seed)
        self._broker = broker

    def work(self) -> None:
        client, chance = self.client, self.chance
        for number in range(3):
            subscriber = self._broker.connect(headers={"client-id": f"{self.name}-{number}"})
            headers = {"id": "d", "destination": "/topic/news", "activemq.subscriptionName": "d", "ack": "client"}
            subscriber.send_frame("SUBSCRIBE", headers, confirmed=True)
            subscriber.close()
        while True:
            body = chance.randbytes(chance.randrange(800))
            client.send_frame("SEND", {"destination": "/topic/news", "persistent": "true"}, body)
            delay = {"AMQ_SCHEDULED_DELAY": str(chance.randrange(50, 3000))}
            client.send("later", body, persistent=True, headers=delay)
            client.send("short", body, persistent=True, headers={"truenext-ttl": str(chance.randrange(1, 2000))})
            client.send("paused", b"", persistent=True, confirmed=True)
            time.sleep(chance.random() * 0.01)


@pytest.mark.timeout(120 + 60 * COUNT)
def test_backup_of_a_busy_broker_is_the_state_of_its_batch_or_refused(tmp_path: Path) -> None:
    # C29.2, C29.3, C29.7, C29.8, C29.12 to C29.14
    print(f"\nseed {SEED}, {COUNT} backups")
    chance = random.Random(SEED)
    outcomes: Counter[str] = Counter()
    for first in range(0, COUNT, PER_BROKER):
        folder = tmp_path / str(first)
        folder.mkdir()
        broker = BackupBroker(folder, chance.choice([(), ("--queue-memory-limit", "20KB", "--page-size", "7")]))
        try:
            broker.start()
            _judge_backups(broker, chance, min(PER_BROKER, COUNT - first), outcomes)
        finally:
            broker.clean_up()
        print(f"{first + PER_BROKER} backups: {dict(outcomes)}", flush=True)
    assert outcomes["whole"] >= COUNT / 5


def _judge_backups(broker: BackupBroker, chance: random.Random, count: int, outcomes: Counter[str]) -> None:
    folder = broker.data.parent
    shop, doubtful = Shop(folder, broker.url, random.Random(chance.random())), Doubtful(broker.url)
    try:
        doubtful.start()
        markers = _make_backups(broker, chance, count)
        # Service and client connect again, and find what the backups lack.
        broker.start(broker.port)
        frames = read_frames(broker.tap)
        restored: list[tuple[Path, StoreState]] = []
        for backup in sorted(broker.backups.iterdir()):
            new = folder / f"new-{backup.name}"
            new.mkdir()
            state = restore_and_check(backup, new / "data", frames)
            outcomes["refused" if state is None else "whole"] += 1
            if state is not None:
                marker = markers[backup.name].encode()
                assert any(record.endswith(marker) for record, _ in state.messages.values())
                restored.append((new, state))
        shop.stop_orders()
        chance.shuffle(restored)
        _go_on_with(restored[: 1 if COUNT == PER_BROKER else None], broker, shop, doubtful, chance)
    finally:
        shop.end()
        doubtful.stop()


def _go_on_with(
    restored: list[tuple[Path, StoreState]],
    original: BrokerProcess,
    shop: Shop,
    doubtful: Doubtful,
    chance: random.Random,
) -> None:
    """Let a broker of each folder take the place of the one before, and judge what its clients meet."""
    active = original
    try:
        for folder, state in restored:
            active.send_signal(signal.SIGSTOP)
            doubtful.await_doubt()
            active.kill()
            active.close_clients()
            if chance.random() < 0.1:
                shop.kill_service()
            active = BrokerProcess(folder)
            active.start(original.port)
            judge_producers(active, state.producers)
            doubtful.judge()
            shop.judge(active)
        doubtful.stop()
        shop.stop()
    finally:
        active.clean_up()


def _make_backups(broker: BackupBroker, chance: random.Random, count: int) -> dict[str, str]:
    """Make backups while the broker works, and return by name of the backup a text that was confirmed before. At the
    end the broker is killed."""
    assert broker.truenext("pause", "paused").returncode == 0
    ledger = Ledger()
    unconfirmed: list[tuple[Letter, bytes]] = []
    markers: dict[str, str] = {}
    crew: list[Worker] = []
    for number in range(count):
        if not crew:
            ledger.cycle += 1
            resolve(broker, ledger)
            crew = hire(broker, ledger, unconfirmed, f"{SEED}-{number}-{broker.port}")
            crew.append(TopicsAndTimers(ledger, broker, f"topics-{number}-{broker.port}"))
            for worker in crew:
                worker.start()
        time.sleep(chance.uniform(0.2, 1.0))
        marker = f"marker {number} of {chance.random()}"
        client = broker.connect()
        client.send("markers", marker.encode(), persistent=True, confirmed=True)
        client.disconnect()
        before = set(broker.backups.iterdir())
        # The first one is whole in any run.
        fate = chance.choice(FATES) if number else "complete"
        rate = chance.choice(["2MiB", "8MiB", "64MiB"])
        _make_backup(broker, fate, rate, chance)
        for made in set(broker.backups.iterdir()) - before:
            markers[made.name] = marker
        if fate == "broker killed":
            for worker in crew:
                worker.join()
            crew = []
            broker.close_clients()
            broker.start(broker.port)
        assert not ledger.failures, ledger.failures[0]
    broker.kill()
    for worker in crew:
        worker.join()
    broker.close_clients()
    assert not ledger.failures, ledger.failures[0]
    return markers


def _make_backup(broker: BackupBroker, fate: str, rate: str, chance: random.Random) -> None:
    if fate == "complete":
        options = ("--history",) if chance.random() < 0.5 else ()
        assert "the state after batch" in broker.truenext("backup", "--rate", rate, *options).stderr
        return
    out = broker.data.parent / "command.out"
    command = Forked(["backup", "--rate", rate, "--history", "--url", broker.url], stdout=out, stderr=out)
    deadline = time.monotonic() + 30
    while (report := broker.request_backup(action="show"))["state"] != "running" and command.poll() is None:
        assert time.monotonic() < deadline, out.read_text()
    time.sleep(chance.choice([0, chance.random() * 0.2, chance.random() * 2]))
    if fate == "broker killed":
        broker.kill()
    elif fate == "command killed":
        command.kill()
        while (report := broker.request_backup(action="show"))["state"] == "running":
            time.sleep(0.01)
        assert report["state"] == "done", report
    else:
        broker.truenext("backup", "--stop")
        while (report := broker.request_backup(action="show"))["state"] == "running":
            time.sleep(0.01)
        assert report["state"] in ("stopped", "done"), report
    command.wait(30)
