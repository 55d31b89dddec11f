"""Cycles of load on a broker with a log in PostgreSQL, in each of which something is killed, judged by a ledger."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.integration.broker_process import PATIENCE_SECONDS, TINY_LIMITS
from tests.integration.forked import completed_text
from tests.integration.kill_load import (
    Ledger,
    Letter,
    NumberedProducer,
    Worker,
    browse_all,
    check_sequences,
    check_work,
    hire,
    resolve,
)
from tests.integration.log_broker import (
    LogBroker,
    await_server,
    copy_folder,
    delete_folder,
    make_schema,
    sessions_of_brokers,
)
from tests.stages.postgres import PostgresServer, Server

OUTAGE_S = 3.0
"""Duration of an outage. It is longer than the silence after which a broker opens a new connection."""

Victim = Callable[[Any, random.Random], None]
"""Function that lets PostgreSQL fail, one server or a pair; it accepts connections again some time after the return."""


def kill_session(server: PostgresServer, chance: random.Random) -> None:
    """Kill one of the broker's sessions by kill -9. PostgreSQL ends all others, and recovers."""
    with suppress(ProcessLookupError):
        os.kill(chance.choice(sessions_of_brokers(server)), signal.SIGKILL)


def kill_postmaster(server: PostgresServer, chance: random.Random) -> None:
    """Kill PostgreSQL, or its first process only, by kill -9. Sessions may then outlive it by a statement."""
    if chance.random() < 0.5:
        server.kill()
    else:
        os.kill(server.pid, signal.SIGKILL)
    server.start_again()


def stop_server(server: PostgresServer, chance: random.Random) -> None:
    """Stop PostgreSQL for OUTAGE_S, as an administrator does."""
    server.stop()
    time.sleep(OUTAGE_S)
    server.start()


def freeze_server(server: PostgresServer, chance: random.Random) -> None:
    """Suspend all sessions, and all that makes new ones, for OUTAGE_S. Then each goes on where it was."""
    processes = [server.pid, *sessions_of_brokers(server)]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    time.sleep(OUTAGE_S)
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


KEPT, DELETED, OLDER = "kept", "deleted", "an older copy"
"""Fates of the data folder between two cycles."""


class LogRun:
    """Broker on a schema of its own, and the ledger of its load. One run has some cycles."""

    FAILOVER_AFTER_MS = 5_000
    DURABILITY = "local"

    def __init__(
        self,
        folder: Path,
        server: Server,
        seed: str,
        *,
        patience_ms: int = 30_000,
        fault: str = "",
    ) -> None:
        """Prepare a run, whose random choices follow from `seed`. `fault` is the name of a planted fault."""
        self.server = server
        self.chance = random.Random(seed)
        self.is_small = self.chance.random() < 0.6
        self._limits = TINY_LIMITS if self.chance.random() < 0.5 else ()
        self._schema = f"run_{folder.name.replace('-', '_')}"
        self._patience_ms = patience_ms
        self._fault = fault
        make_schema(server, self._schema, is_small=self.is_small)
        self.broker = self._make_broker(folder)
        self.ledger = Ledger()
        self.fates: Counter[str] = Counter()
        self.doubts = 0
        """Number of cycles in which the broker was killed together with PostgreSQL."""
        self._seed = seed
        self._older = folder / "older"
        self._unconfirmed: list[tuple[Letter, bytes]] = []
        self._crew: list[Worker] = []

    def _make_broker(self, folder: Path, *options: str) -> LogBroker:
        return LogBroker(
            folder,
            self.server,
            self._schema,
            (*self._limits, *options),
            patience_ms=self._patience_ms,
            failover_after_ms=self.FAILOVER_AFTER_MS,
            durability=self.DURABILITY,
            is_small=self.is_small,
            fault=self._fault,
        )

    def cycle(self, victim: Victim | None, *, can_doubt: bool = True) -> None:
        """Work for some time, let the victim fail (None: the broker only), and kill the broker after it. Workers keep
        their connections until then. With `can_doubt` the broker may be killed before PostgreSQL is back."""
        self.begin_cycle()
        chance, ledger = self.chance, self.ledger
        time.sleep(chance.uniform(0.1, 1.2))
        if victim is not None:
            victim(self.server, chance)
            if can_doubt and chance.random() < 0.35:
                self.doubts += 1
                time.sleep(chance.uniform(0, 0.3))
            else:
                self.await_progress()
                time.sleep(chance.uniform(0, 0.4))
        self.broker.kill()
        self.end_cycle()
        assert not ledger.failures

    def begin_cycle(self) -> None:
        """Start the broker, check what it has, and start the workers.

        Raises: AssertionError if the broker lacks anything, or ends; that may be as it has found its rows wrong
        """
        broker, ledger = self.broker, self.ledger
        if not broker.is_running:
            await_server(self.server)
            broker.start()
        ledger.cycle += 1
        try:
            resolve(broker, ledger)
            browse_all(broker, ledger, consumes=False)
        except EOFError as error:
            raise AssertionError(f"the broker ended: {broker.log}") from error
        self._crew = hire(broker, ledger, self._unconfirmed, f"{self._seed}-{ledger.cycle}")
        for worker in self._crew:
            worker.start()

    def end_cycle(self, fate: str | None = None) -> None:
        """Join the workers of a broker that has ended, check the log, and do something to the data folder."""
        for worker in self._crew:
            worker.join()
        if self.ledger.failures:
            raise self.ledger.failures[0]
        self.broker.close_clients()
        await_server(self.server)
        self.broker.check_database()
        self._treat_folder(fate or self.chance.choice([KEPT, KEPT, KEPT, KEPT, DELETED, OLDER]))

    def _treat_folder(self, fate: str) -> None:
        data = self.broker.data
        if fate == OLDER and self._older.exists():
            delete_folder(data)
            shutil.copytree(self._older, data, dirs_exist_ok=True)
        elif fate != KEPT:
            fate = DELETED
            delete_folder(data)
        if data.exists() and self.chance.random() < 0.5:
            copy_folder(data, self._older)
        self.fates[fate] += 1

    def await_progress(self) -> None:
        """Wait until messages are confirmed again, and check that all connections have stayed."""
        before = self._confirmed_count()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._confirmed_count() == before:
            assert time.monotonic() < deadline, f"nothing is confirmed any more, log:\n{self.broker.log}"
            self._check_crew()
            time.sleep(0.02)
        self._check_crew()

    def _check_crew(self) -> None:
        if self.ledger.failures:
            raise self.ledger.failures[0]
        lost = [type(worker).__name__ for worker in self._crew if not worker.is_working]
        assert not lost, f"{lost} lost their connections, log:\n{self.broker.log}"

    def _confirmed_count(self) -> int:
        with self.ledger.lock:
            return sum(letter.confirmed for letter in self.ledger.letters.values())

    def finish(self) -> str:
        """Drain all queues and check all that the ledger has; then make the folder anew. Return a summary."""
        broker, ledger = self.broker, self.ledger
        await_server(self.server)
        if not broker.is_running:
            broker.start()
        ledger.cycle += 1
        resolve(broker, ledger)
        NumberedProducer(ledger, broker.connect, "the end", self._unconfirmed).finish()
        broker.kill()
        broker.close_clients()
        self._treat_folder(DELETED)
        broker.start()
        drained = browse_all(broker, ledger, consumes=True)
        check_work(ledger)
        check_sequences(ledger)
        broker.restart(is_clean=True)
        assert all(facts.waiting == 0 for facts in broker.queues().values())
        log = broker.status()["log"]
        broker.stop()
        broker.check_database()
        done = completed_text("store", "check", broker.data)
        assert done.returncode == 0, done.stdout + done.stderr
        letters = ledger.letters.values()
        return (
            f"{len(letters)} sent, {sum(letter.confirmed for letter in letters)} confirmed, "
            f"{sum(letter.done for letter in letters)} acknowledged for certain, {drained} drained; "
            f"row {log['number']}, compacted up to {log['position']}, epoch {log['epoch']}; folders: "
            f"{', '.join(f'{count} {fate}' for fate, count in sorted(self.fates.items()))}; "
            f"{self.doubts} kills of both"
        )

    def clean_up(self) -> None:
        self.broker.clean_up()
