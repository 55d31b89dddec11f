"""Test that a broker that stands by takes over with all that its log has, whatever is killed under load.

Producers and consumers of several kinds work at full speed (kill_load.py). At a random moment the active broker gets a
kill -9, and the other one takes over; at times both get one. Before a third of its starts a broker's data folder is
deleted, or replaced by an older copy.

    TRUENEXT_FAILOVERS=500 TRUENEXT_SEED=7 pytest -s tests/integration/test_failover_kills.py
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration.failover_kills import (
    FailoverRun,
    ReplicatedRun,
    forget_rows,
    kill_active,
    kill_active_and_primary,
    kill_both,
)
from tests.integration.postgres_pair import own_pair
from tests.integration.test_kill_log import RUN_CYCLES
from tests.stages.postgres import PostgresServer

FAILOVERS = int(os.environ.get("TRUENEXT_FAILOVERS", "10"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

PAIRS = int(os.environ.get("TRUENEXT_PAIRS", "1"))
"""Number of failovers of PostgreSQL itself."""
KILLED_S = 3.0
"""Longest median of the times from a kill to the open ports of the other broker."""
IS_TIMED = "TRUENEXT_FAILOVERS" in os.environ
"""Times mean something when no other tests run: in `make failover`."""

STRIKES = [kill_active, kill_active, kill_active, kill_both]


@pytest.mark.alternates("kills of a broker with a log")
@pytest.mark.timeout(120 + 30 * FAILOVERS)
def test_broker_that_stands_by_takes_over_and_keeps_every_promise(postgres: PostgresServer, tmp_path: Path) -> None:
    """C28.4 to C28.6, C28.8, C28.16"""
    print(f"\nseed {SEED}, {FAILOVERS} failovers", flush=True)
    for done in range(0, FAILOVERS, RUN_CYCLES):
        cycles = range(done, min(FAILOVERS, done + RUN_CYCLES))
        fail_over_and_judge(postgres, tmp_path / f"failovers-{done}", f"{SEED}-{done}", cycles)


def fail_over_and_judge(server: PostgresServer, folder: Path, seed: str, cycles: range, fault: str = "") -> None:
    """Do these failovers on one schema. Raises: AssertionError if a promise was broken"""
    run = FailoverRun(folder, server, seed, fault=fault)
    judge(run, [STRIKES[cycle % len(STRIKES)] for cycle in cycles])
    if IS_TIMED:
        median = statistics.median(run.delays)
        assert median <= KILLED_S, f"{median:.1f} s from a kill to open ports"


def judge(run: FailoverRun, strikes: Sequence[Callable[[FailoverRun], None]]) -> None:
    """Let these strikes end the active broker, one after the other. Raises: AssertionError if a promise was broken"""
    started = time.monotonic()
    try:
        for strike in strikes:
            run.fail_over(strike)
        print(f"{len(strikes)} failovers: {run.finish()}; {time.monotonic() - started:.0f} s", flush=True)
    finally:
        run.clean_up()


@pytest.mark.alternates("promoted standbys")
@pytest.mark.timeout(120 + 60 * PAIRS)
def test_loss_of_broker_and_database_at_once_loses_nothing_if_the_log_is_replicated(tmp_path: Path) -> None:
    """C28.11"""
    with own_pair(is_synchronous=True) as pair:
        judge(ReplicatedRun(tmp_path / "both", pair, f"{SEED}-both"), [kill_active_and_primary] * PAIRS)


@pytest.mark.alternates("promoted standbys")
@pytest.mark.timeout(120 + 60 * PAIRS)
def test_active_broker_repairs_the_rows_that_a_promoted_standby_lacks(tmp_path: Path) -> None:
    """C28.12"""
    with own_pair(is_synchronous=False) as pair:
        judge(FailoverRun(tmp_path / "forgotten", pair, f"{SEED}-forgotten"), [forget_rows] * PAIRS)
