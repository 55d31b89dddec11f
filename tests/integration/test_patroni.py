"""Test that brokers go on under load with all that was confirmed when Patroni makes another server the primary.

Producers and consumers of several kinds work at full speed (kill_load.py) on two brokers with PostgreSQL on three
servers, with the settings of docs/failover.md. An administrator exchanges the primary, or what runs on its machine gets
a kill -9, with or without the active broker. It needs Debian's PostgreSQL 15, patroni, etcd-server and python3-etcd.

    TRUENEXT_PATRONI=24 TRUENEXT_SEED=7 pytest -s tests/integration/test_patroni.py
"""

import os
import random
import statistics
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS
from tests.integration.failover_kills import FailoverRun, ReplicatedRun
from tests.integration.patroni_cluster import PatroniCluster, missing_files, own_cluster
from tests.integration.test_failover_page import PAGE
from tests.integration.test_kill_log import RUN_CYCLES
from tests.integration.test_postgresql_page import blocks

STRIKES = int(os.environ.get("TRUENEXT_PATRONI", "1"))
"""Number of switchovers and kills."""
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

SECTION = "PostgreSQL with Patroni"

Strike = Callable[[PatroniCluster, random.Random], None]


class PatroniRun(ReplicatedRun):
    FAILOVER_AFTER_MS = 5_000

    def __init__(self, folder: Path, cluster: PatroniCluster, seed: str) -> None:
        (lines,) = blocks(SECTION, "toml", page=PAGE)
        settings = tomllib.loads("\n".join(lines))["broker"]
        super().__init__(folder, cluster, seed, patience_ms=settings["database_patience_ms"])
        self.cluster = cluster
        self.outages: defaultdict[str, list[float]] = defaultdict(list)
        """Seconds from each strike to the next confirmation or, if the broker died, to open ports, by strike."""

    def fail_over_by(self, strike: Strike, *, with_active: bool) -> None:
        """Let a strike hit PostgreSQL, and the active broker go on, or with `with_active` the other one."""
        self.fail_over(partial(self._hit_both if with_active else self._hit_database, strike))

    def end_cycle(self, fate: str | None = None) -> None:
        # What looks into the database takes the end of a server for an error.
        self.cluster.restore()
        super().end_cycle(fate)

    def _hit_database(self, strike: Strike, _: FailoverRun) -> None:
        """Let the active broker go on with all its connections, and kill it then."""
        began = time.monotonic()
        strike(self.cluster, self.chance)
        # Sessions of a killed server may outlive it by a statement.
        time.sleep(0.5)
        self.await_progress()
        self._note(strike.__name__, time.monotonic() - began)
        self._start_heir_again()
        time.sleep(self.chance.uniform(0, 0.4))
        self.broker.kill()

    def _hit_both(self, strike: Strike, _: FailoverRun) -> None:
        """Kill the active broker in the first seconds, or at once. The other one must take over."""
        delay = self.chance.choice([0, self.chance.uniform(0, 4)])
        began = time.monotonic()
        with ThreadPoolExecutor() as pool:
            end = pool.submit(self._kill_active, delay)
            strike(self.cluster, self.chance)
            self._note(f"{strike.__name__} with the active broker", end.result() - began)

    def _note(self, name: str, seconds: float) -> None:
        print(f"{name}: {seconds:.1f} s", flush=True)
        self.outages[name].append(seconds)

    def _kill_active(self, delay: float) -> float:
        """Kill the active broker after `delay` seconds, and return the time at which the other one listens."""
        time.sleep(delay)
        self.broker.kill()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.heir.is_listening:
            self._start_heir_again()
            assert time.monotonic() < deadline, f"no broker takes over, log:\n{self.heir.log}"
            time.sleep(0.02)
        return time.monotonic()

    def _start_heir_again(self) -> None:
        """Start the other broker if it has ended, as systemd does: an outage at its start ends it."""
        if not self.heir.is_running:
            assert self.heir.wait_for_end() == 1, self.heir.log
            self.heir.begin_start()


def switch_over(cluster: PatroniCluster, chance: random.Random) -> None:
    """Let an administrator exchange the primary."""
    cluster.switch_over()


def kill_postgres(cluster: PatroniCluster, chance: random.Random) -> None:
    """Kill the primary's PostgreSQL, which Patroni starts again."""
    cluster.await_primary().kill_postgres(with_sessions=chance.random() < 0.5)


def kill_patroni(cluster: PatroniCluster, chance: random.Random) -> None:
    """Kill the primary's Patroni. It is started again when another server is the primary, or sooner."""
    cluster.await_primary().kill_patroni()
    if chance.random() < 0.5:
        cluster.await_primary()
    time.sleep(chance.uniform(0, 5))
    cluster.start()


def kill_machine(cluster: PatroniCluster, chance: random.Random) -> None:
    """Kill all that runs on the primary's machine, which stays off until brokers have gone on."""
    cluster.await_primary().kill()


ALL_STRIKES = [
    (strike, with_active)
    for with_active in (False, True)
    for strike in (switch_over, kill_machine, kill_postgres, kill_patroni)
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[PatroniCluster]:
    (lines,) = blocks(SECTION, "yaml", page=PAGE)
    with own_cluster("\n".join(lines)) as cluster:
        yield cluster


@pytest.mark.skipif(missing_files() != "", reason=f"not installed: {missing_files()}")
@pytest.mark.timeout(180 + 120 * STRIKES)
def test_brokers_go_on_with_all_that_was_confirmed_when_patroni_changes_the_primary(
    cluster: PatroniCluster, tmp_path: Path
) -> None:
    """C28.11"""
    print(f"\nseed {SEED}, {STRIKES} strikes", flush=True)
    outages: defaultdict[str, list[float]] = defaultdict(list)
    first = random.Random(SEED).randrange(len(ALL_STRIKES))
    for done in range(0, STRIKES, RUN_CYCLES):
        run = PatroniRun(tmp_path / f"patroni-{done}", cluster, f"{SEED}-{done}")
        try:
            for number in range(done, min(STRIKES, done + RUN_CYCLES)):
                # Five goes through all eight: one of the database alone, one with the active broker.
                strike, with_active = ALL_STRIKES[(first + 5 * number) % len(ALL_STRIKES)]
                run.fail_over_by(strike, with_active=with_active)
            print(run.finish(), flush=True)
        finally:
            run.clean_up()
        for name, seconds in run.outages.items():
            outages[name] += seconds
    for name, seconds in sorted(outages.items()):
        print(f"{len(seconds)} {name}: {statistics.median(seconds):.1f} s, {max(seconds):.1f} at most", flush=True)
