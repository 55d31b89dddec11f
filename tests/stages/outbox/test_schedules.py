"""Tests of exactly-once processing in drawn schedules of crashes, stalls and losses, against the naive oracle.

TRUENEXT_EXAMPLES=5000 pytest tests/stages/outbox/test_schedules.py       longer
TRUENEXT_SEED=7 pytest tests/stages/outbox/test_schedules.py              the same schedules again
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from random import Random, SystemRandom

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.stages.outbox.schedule import Others, drawn, play

EXAMPLES = max(1, int(os.environ.get("TRUENEXT_EXAMPLES", "80")) // 10)
"""Number of examples; each takes as long as ten of other machines. Hypothesis draws a quarter of them, and shrinks
failures; the others are drawn at random, and are larger."""


@pytest.mark.alternates("large schedules")
@pytest.mark.timeout(300 + EXAMPLES * 10)
def test_exactly_once_holds_in_schedules_drawn_by_hypothesis() -> None:
    @seed(_seed())
    @settings(
        max_examples=max(1, EXAMPLES // 4),
        deadline=None,
        print_blob=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.randoms(use_true_random=False))
    def try_one(random: Random) -> None:
        tried(random)

    try_one()


@pytest.mark.alternates("large schedules")
@pytest.mark.timeout(300 + EXAMPLES * 10)
def test_exactly_once_holds_in_larger_schedules_drawn_at_random() -> None:
    seed_of_run = _seed()
    for each in range(EXAMPLES - EXAMPLES // 4):
        tried(Random(seed_of_run + each))


def tried(random: Random, others: Others | None = None) -> None:
    """Raises: Contradiction"""
    schedule = drawn(random, others)
    try:
        with tempfile.TemporaryDirectory(prefix="truenext-schedule-") as folder:
            play(schedule, Path(folder))
    except BaseException:
        print("\n".join(map(repr, [schedule._replace(steps=[]), *schedule.steps])))
        raise


def _seed() -> int:
    seed_of_run = int(os.environ.get("TRUENEXT_SEED") or SystemRandom().randrange(2**32))
    print(f"TRUENEXT_SEED={seed_of_run} TRUENEXT_EXAMPLES={EXAMPLES}")  # pytest shows it if the test fails
    return seed_of_run
