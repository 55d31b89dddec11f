"""Judges of backups, of folders restored from them, and of clients that keep running while a broker of such a folder
takes the place of theirs.

Source of what is expected: docs/backup.md, "What the restored broker has"; docs/contract.md, C29.2 to C29.14;
docs/stages-database.md, "For operators".
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.raw_client import numbered
from tests.integration.tapped_broker import StoreState, check_state, state_after
from tests.integration.working_thread import WorkingThread
from tests.stages.outbox.chaos import TABLES, Web, create_tables, is_over, reported, rows, start_service
from truenext import blocking
from truenext.errors import ConfigurationError, ConnectionLost
from truenext.history.check import find_damage, last_batch_chunk
from truenext.model.batch import NO_NUMBER, ProducerState
from truenext.store.check import check
from truenext.store.restore import restore

ORDERS = 10
"""Number of orders for a restored broker."""
DUPLICATES_LOG = "Messages not known to be sent get new numbers"
"""Beginning of the log text of a relay whose broker lacks more numbers than it resolves: only then a message of the
outbox comes twice."""


def restore_and_check(backup: Path, new: Path, frames: Mapping[int, bytes]) -> StoreState | None:
    """Check that a backup is refused as cut short, or is restored and has the state after its batch, with another
    identity. Return this state; None if the backup is refused. `frames` are those of its broker."""
    try:
        restored = restore(backup, new, lambda done, total: None, last_batch_chunk)
    except ConfigurationError as error:
        assert "was cut short, and has no manifest" in str(error)
        assert not new.exists()
        return None
    assert list(find_damage(new / "history")) == []
    damage: list[object] = []
    check(new, damage.append, lambda done, total: None, last_history_chunk=last_batch_chunk(new / "history"))
    assert damage == []
    expected = state_after(frames, restored.manifest.batch)
    check_state(new, expected)
    assert json.loads((backup / "manifest").read_bytes().split(b"\n")[0])["identity"] != restored.identity
    return expected


def await_condition(holds: Callable[[], bool], failure: str, progress: Callable[[], object] = lambda: None) -> None:
    """Wait until the condition holds, for as long as `progress` returns something new now and then."""
    deadline, last = 0.0, None
    while not holds():
        if (now := progress()) != last or not deadline:
            deadline, last = time.monotonic() + 2 * PATIENCE_SECONDS, now
        assert time.monotonic() < deadline, failure
        time.sleep(0.05)


class Shop:
    """The service `chaos`, with stages that have an outbox, and a program that initiates its orders."""

    def __init__(self, folder: Path, broker_url: str, random: Random) -> None:
        self._folder, self._broker_url, self._random = folder, broker_url, random
        database = folder / "shop.db"
        database.touch()
        self._database = f"sqlite:///{database}"
        self._engine = create_tables(self._database)
        self._service = start_service(folder, broker_url, self._database)
        self._web = self._start_web(0)
        self._logs = ""

    def _start_web(self, first: int) -> Web:
        web = Web(self._database, self._random, first=first, pause_s=0.1)
        web.start()
        return web

    def kill_service(self) -> None:
        """Kill the process of the service, and start another one."""
        self._service.kill()
        self._logs += self._service.log
        self._service = start_service(self._folder, self._broker_url, self._database)

    def stop_orders(self) -> None:
        self._web.stop()

    def judge(self, broker: BrokerProcess) -> None:
        """Check that the service goes on with a restored broker: no effect comes twice, and new orders come once."""
        first = self._web.started
        self._web = self._start_web(first)
        await_condition(lambda: self._web.started >= first + ORDERS, "the program is too slow")
        self._web.stop()
        new = {number for number in self._rows("ordered") if number >= first}
        # A message that a transaction has acknowledged, and not yet committed, is in no count of its queue.
        await_condition(
            lambda: is_over(broker, self._engine) and new <= set(reported(broker)),
            "a new order is lost, or waits",
            lambda: [self._rows(each).total() for each in TABLES],
        )
        told = reported(broker)
        assert {number: times for number, times in told.items() if number >= first} == dict.fromkeys(new, 1)
        if max(told.values()) > 1:
            assert DUPLICATES_LOG in self._logs + self._service.log, "a message came twice, and its numbers were known"
        self._judge_tables()

    def _judge_tables(self) -> None:
        ordered, placed, noted, shipped = map(self._rows, TABLES)
        for effects in (ordered, placed, shipped):
            assert set(effects.values()) == {1}, "an effect that happens once has happened twice"
        assert set(shipped) <= set(noted) <= set(placed) <= set(ordered), "a stage ran without the stage before it"

    def _rows(self, table: str) -> Counter[int]:
        return rows(self._engine, table)

    def stop(self) -> None:
        assert self._service.stop() == 0, self._service.log
        self._judge_tables()

    def end(self) -> None:
        self._web.stop()
        self._service.kill()
        self._engine.dispose()


class Doubtful(WorkingThread):
    """truenext client that sends one number after the other, and each time waits for the outcome."""

    def __init__(self, broker_url: str) -> None:
        super().__init__()
        self._url = broker_url
        self._is_over = threading.Event()
        self._number = self._sent_before = self._lost_before = 0
        self.sent: list[int] = []
        """Numbers that were confirmed."""
        self.lost: list[int] = []
        """Numbers that were in doubt when the broker got another identity."""

    def work(self) -> None:
        with blocking.connect(self._url) as connection:
            while not self._is_over.wait(0.002):
                self._number += 1
                try:
                    connection.send("/queue/doubt", f"{self._number}", timeout=2 * PATIENCE_SECONDS)
                except ConnectionLost:
                    self.lost.append(self._number)
                else:
                    self.sent.append(self._number)

    def await_doubt(self) -> None:
        """Wait until a send has no answer, at a broker that is stopped and will be killed."""
        number = 0
        while number != self._number or number == len(self.sent) + len(self.lost):
            number = self._number
            # On a loaded machine the send may take its time.
            time.sleep(1.0)
        self._sent_before, self._lost_before = len(self.sent), len(self.lost)

    def judge(self) -> None:
        """Check that what was sent to a restored broker is there once, and what was in doubt is not repeated."""
        goal = self._sent_before + 10
        await_condition(lambda: len(self.sent) >= goal or not self.is_alive(), "the client does not go on")
        assert self.error is None, self.error
        assert len(self.lost) == self._lost_before + 1, "the program was not told of a send in doubt"
        sent = self.sent[self._sent_before :]
        with blocking.connect(self._url) as connection:
            there = Counter(int(each.body) for each in connection.browse("/queue/doubt"))
        assert set(there.values()) == {1}
        assert set(sent) <= there.keys()
        assert not there.keys() & set(self.lost), "a send in doubt was repeated"

    def stop(self) -> None:
        self._is_over.set()
        self.join(PATIENCE_SECONDS)
        assert self.error is None, self.error


def judge_producers(broker: BrokerProcess, producers: Mapping[str, ProducerState]) -> None:
    """Check that the numbers of producers are those of the copy: a number that it has is a repeat, the next one is
    accepted."""
    client = broker.connect()
    accepted = 0
    if (sends := producers.get("numbered")) is not None:
        for step in (0, 1):
            headers = numbered("numbered", sends.highest_send + step)
            client.send("again", b"", persistent=True, headers=headers, confirmed=True)
        accepted += 1
    commits = producers.get("transacted")
    if commits is not None and commits.highest_commit != NO_NUMBER:
        for step in (0, 1):
            client.begin("t")
            client.send("again", b"", persistent=True, transaction="t")
            client.commit("t", headers=numbered("transacted", commits.highest_commit + step))
        accepted += 1
    if accepted:
        assert broker.queues()["again"].waiting == accepted
    client.disconnect()
