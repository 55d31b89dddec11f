"""Tests that kills and fences notice every planted fault of a log in PostgreSQL.

A test that never fails may be one that sees nothing. Faults that kills do not notice are in
tests/contract/postgresql/test_planted_faults.py.

    TRUENEXT_DRAW=all pytest tests/integration/test_planted_log_faults.py     all of them, not a few
"""

import random
from pathlib import Path

import pytest

from tests.integration.failover_kills import FailoverRun, forget_rows, kill_active
from tests.integration.postgres_pair import own_pair
from tests.integration.test_failover_kills import judge
from tests.integration.test_fences import fence_and_judge
from tests.integration.test_forgotten_rows import lose_and_judge
from tests.integration.test_kill_log import kill_and_judge
from tests.integration.test_zombies import wake_and_judge
from tests.stages.postgres import PostgresServer

CYCLES = 60
"""Number of cycles in which a fault must show."""
FENCES = ZOMBIES = 6

pytestmark = pytest.mark.drawn


def show(fault: str, found: str) -> None:
    """Show how a fault was noticed. An error of the broker's code is no promise that was broken."""
    assert "Traceback" not in found, found
    print(f"\n{fault}: {found.strip()[-300:]}")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "fault",
    [
        "doubtful_answer_taken_for_done",
        "row_confirmed_before_it_is_synced",
        "lost_append_taken_for_done",
        "lost_append_repeated_under_a_new_number",
        "transients_stay_after_a_crash",
        "any_folder_is_a_prefix_of_the_log",
        "compaction_leaves_out_a_row",
        "partition_dropped_above_the_position",
    ],
)
def test_kills_notice(own_postgres: PostgresServer, tmp_path: Path, fault: str) -> None:
    with pytest.raises(AssertionError) as found:
        for run in range(CYCLES // 6):
            kill_and_judge(
                own_postgres, tmp_path / f"{fault}-{run}", f"{random.random()}", range(run * 6, run * 6 + 6), fault
            )
    show(fault, str(found.value))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "fault", ["found_row_taken_without_check", "epoch_not_compared_after_a_doubt", "slow_append_not_checked_again"]
)
def test_fences_notice(own_postgres: PostgresServer, tmp_path: Path, fault: str) -> None:
    with pytest.raises(AssertionError) as found:
        fence_and_judge(own_postgres, tmp_path, random.randrange(10**9), FENCES, fault)
    show(fault, str(found.value))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["never_silent", "bytes_written_in_silence"])
def test_zombies_notice(own_postgres: PostgresServer, tmp_path: Path, fault: str) -> None:
    with pytest.raises(AssertionError) as found:
        wake_and_judge(own_postgres, tmp_path, random.randrange(10**9), ZOMBIES, fault)
    show(fault, str(found.value))


@pytest.mark.timeout(600)
def test_failovers_notice_a_history_that_is_left_out(own_postgres: PostgresServer, tmp_path: Path) -> None:
    fault = "history_of_no_batch_left_out"
    with pytest.raises(AssertionError) as found:
        judge(FailoverRun(tmp_path / "run", own_postgres, f"{random.random()}", fault=fault), [kill_active] * 4)
    show(fault, str(found.value))


@pytest.mark.timeout(600)
def test_lost_rows_show_that_they_are_not_put_back(tmp_path: Path) -> None:
    fault = "forgotten_rows_not_put_back"
    with own_pair(is_synchronous=False) as pair, pytest.raises(AssertionError) as found:
        judge(FailoverRun(tmp_path / "run", pair, f"{random.random()}", fault=fault), [forget_rows] * 4)
    show(fault, str(found.value))


@pytest.mark.timeout(600)
def test_lost_rows_show_that_another_timeline_is_passed_over(tmp_path: Path) -> None:
    fault = "another_timeline_passed_over"
    with own_pair(is_synchronous=False) as pair, pytest.raises(AssertionError) as found:
        lose_and_judge(pair, tmp_path, random.Random(), 2, fault)
    show(fault, str(found.value))
