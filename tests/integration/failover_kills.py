"""Cycles of load on two brokers with one log, in each of which the active one ends and the other takes over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.contract.naive_history import read_folder
from tests.integration.broker_process import PATIENCE_SECONDS
from tests.integration.log_broker import delete_folder
from tests.integration.log_kills import LogRun
from tests.integration.postgres_pair import PostgresPair
from tests.stages.postgres import Server

UNANSWERED = ("truenext: cannot open the log in PostgreSQL:", "truenext: cannot connect to PostgreSQL")


class FailoverRun(LogRun):
    """Two brokers on a schema of their own, and the ledger of their load: `broker` is active, `heir` stands by."""

    FAILOVER_AFTER_MS = 2_000

    def __init__(self, folder: Path, server: Server, seed: str, *, patience_ms: int = 30_000, fault: str = "") -> None:
        super().__init__(folder, server, seed, patience_ms=patience_ms, fault=fault)
        self.heir = self._make_broker(folder / "heir", "--member", "heir")
        self.delays: list[float] = []
        """Seconds from each kill to the open ports of the other broker."""

    def fail_over(self, strike: Callable[[FailoverRun], None]) -> None:
        """Work for some time, let `strike` end the active broker, and swap the two when the heir has taken over."""
        self._start_both()
        self.begin_cycle()
        time.sleep(self.chance.uniform(0.1, 1.2))
        strike(self)
        began = time.monotonic()
        self._await_takeover()
        self.delays.append(time.monotonic() - began)
        self.end_cycle()
        self.broker, self.heir = self.heir, self.broker
        assert not self.ledger.failures

    def _start_both(self) -> None:
        if not self.broker.is_running:
            self.broker.start()
        if self.heir.is_running:
            return
        self.heir.begin_start()
        if self.chance.random() < 0.8:
            self.await_heir()

    def await_heir(self) -> None:
        """Wait until the heir stands by and has all rows but those of the last second."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "standing by" not in [each["role"] for each in self.broker.status()["log"]["members"]]:
            assert time.monotonic() < deadline, f"no broker stands by, log:\n{self.heir.log}"
            time.sleep(0.05)

    def _await_takeover(self) -> None:
        """Wait until the heir listens. If PostgreSQL did not answer while it started, it starts again."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.heir.is_listening:
            assert time.monotonic() < deadline, f"the heir does not take over, log:\n{self.heir.log}"
            if not self.heir.is_running:
                log = self.heir.log
                assert self.heir.wait_for_end() == 1 and log.splitlines()[-1].startswith(UNANSWERED), log
                self.heir.begin_start()
            time.sleep(0.005)
        self.heir.await_start()

    def finish(self) -> str:
        """Stop the heir, drain all queues, and check all that the ledger and both histories have. Return a summary."""
        if self.heir.is_running:
            self.heir.stop()
        self._check_histories()
        delete_folder(self.heir.data)
        delays = sorted(self.delays)
        return f"{super().finish()}; {statistics.median(delays):.2f} s to open ports, {delays[-1]:.2f} at most"

    def _check_histories(self) -> None:
        """Check that no event differs between the folders, that none is missing but at the end of a run, and that the
        epochs of runs rise."""
        ours, theirs = (_events(each.data) for each in (self.broker, self.heir))
        both = ours.keys() & theirs.keys()
        differ = [number for number in both if ours[number] != theirs[number]]
        assert not differ, f"event {differ[0]} is {ours[differ[0]]} and {theirs[differ[0]]}"
        for events in (ours, theirs):
            numbers = sorted(events)
            gaps = [b for a, b in pairwise(numbers) if b != a + 1 and events[b]["kind"] != "run-started"]
            assert not gaps, f"events before {gaps[0]} are missing"
        epochs = [event["epoch"] for _, event in sorted(ours.items()) if event["kind"] == "run-started"]
        assert epochs == sorted(set(epochs)), f"epochs of the runs: {epochs}"

    def clean_up(self) -> None:
        super().clean_up()
        self.heir.clean_up()


class ReplicatedRun(FailoverRun):
    DURABILITY = "replicated"


def _events(data: Path) -> dict[int, dict[str, Any]]:
    return {event["event"]: event for event in read_folder(data / "history")}


def kill_active(run: FailoverRun) -> None:
    """Kill the active broker by kill -9."""
    run.broker.kill()


def kill_both(run: FailoverRun) -> None:
    """Kill both brokers by kill -9; the heir starts again."""
    run.heir.kill()
    run.broker.kill()
    if run.chance.random() < 0.5:
        delete_folder(run.heir.data)
    run.heir.begin_start()


def kill_active_and_primary(run: FailoverRun) -> None:
    """Kill the active broker and PostgreSQL at once. Its synchronous standby takes over, and gets one of its own."""
    pair = run.server
    assert isinstance(pair, PostgresPair)
    run.broker.kill()
    pair.fail_over()
    pair.follow()


def forget_rows(run: FailoverRun) -> None:
    """Let PostgreSQL lose the rows of some moments under the active broker, which must go on; kill it afterwards."""
    pair = run.server
    assert isinstance(pair, PostgresPair)
    pair.standby.hold_back()
    time.sleep(run.chance.uniform(0, 0.5))
    pair.fail_over()
    run.await_progress()
    pair.follow()
    run.broker.kill()
