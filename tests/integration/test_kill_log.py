"""Test that a broker with a log in PostgreSQL keeps its contract, whatever is killed under load, again and again.

Producers and consumers of several kinds work at full speed (kill_load.py). At a random moment the broker, one of its
sessions, or PostgreSQL gets a kill -9, in turn. Before a third of the starts the data folder is deleted, or replaced by
an older copy.

    TRUENEXT_LOG_CYCLES=500 TRUENEXT_SEED=7 pytest -s tests/integration/test_kill_log.py
"""

import os
import random
import time
from pathlib import Path

import pytest

from tests.integration.log_kills import LogRun, Victim, freeze_server, kill_postmaster, kill_session, stop_server
from tests.stages.postgres import PostgresServer

CYCLES = int(os.environ.get("TRUENEXT_LOG_CYCLES", "10"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

RUN_CYCLES = 20
"""Largest number of cycles on one schema. With more, the ledger takes longer than the load."""
VICTIMS: list[Victim | None] = [None, kill_session, kill_postmaster]


@pytest.mark.alternates("kills of a broker with a log")
@pytest.mark.timeout(120 + 30 * CYCLES)
def test_broker_with_a_log_keeps_every_promise_whatever_is_killed(postgres: PostgresServer, tmp_path: Path) -> None:
    """C27.2, C27.3, C27.7, C27.8"""
    print(f"\nseed {SEED}, {CYCLES} cycles", flush=True)
    for done in range(0, CYCLES, RUN_CYCLES):
        kill_and_judge(
            postgres, tmp_path / f"kills-{done}", f"{SEED}-{done}", range(done, min(CYCLES, done + RUN_CYCLES))
        )


def kill_and_judge(server: PostgresServer, folder: Path, seed: str, cycles: range, fault: str = "") -> None:
    """Do these cycles on one schema. Raises: AssertionError if a promise was broken"""
    started = time.monotonic()
    run = LogRun(folder, server, seed, fault=fault)
    try:
        for cycle in cycles:
            run.cycle(VICTIMS[cycle % len(VICTIMS)])
        print(f"cycle {cycles.stop}/{CYCLES}: {run.finish()}; {time.monotonic() - started:.0f} s", flush=True)
    finally:
        run.clean_up()


@pytest.mark.alternates("outages of a log")
@pytest.mark.parametrize("outage", [stop_server, freeze_server], ids=["stopped", "frozen"])
def test_outage_of_the_database_costs_no_connection_and_no_message(
    postgres: PostgresServer, tmp_path: Path, outage: Victim
) -> None:
    """C27.7"""
    run = LogRun(tmp_path / f"outage-{outage.__name__}", postgres, f"{SEED}-outage")
    try:
        run.cycle(outage, can_doubt=False)
        print(run.finish())
    finally:
        run.clean_up()


@pytest.mark.alternates("outages of a log")
def test_broker_whose_patience_has_ended_goes_on_after_a_restart(postgres: PostgresServer, tmp_path: Path) -> None:
    """C27.7"""
    run = LogRun(tmp_path / "patience", postgres, f"{SEED}-patience", patience_ms=5000)
    try:
        run.begin_cycle()
        time.sleep(0.5)
        postgres.stop()
        try:
            assert run.broker.wait_for_end() == 1
        finally:
            postgres.start()
        line = run.broker.log.splitlines()[-1]
        assert line.startswith("truenext: PostgreSQL was not available for 5 seconds ("), run.broker.log
        assert line.endswith(": start the broker again when it is") and "Traceback" not in run.broker.log
        run.end_cycle()
        run.cycle(None)
        print(run.finish())
    finally:
        run.clean_up()
