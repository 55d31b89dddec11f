"""Do effects happen once, whatever dies, stands still and is lost, in whatever order? Against the naive oracle.

TRUENEXT_EXAMPLES=5000 pytest tests/stages/outbox/test_schedules.py       longer
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.stages.outbox.schedule import SCHEDULES, Schedule, play

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "12"))


def tried(examples: int, *, is_shrunk: bool) -> None:
    """Raises: Contradiction"""
    # What fails is seldom the same in each detail, since threads and sockets are real: it is made smaller all the same.
    phases = [Phase.generate, Phase.shrink] if is_shrunk else [Phase.generate]

    @settings(
        max_examples=examples,
        phases=phases,
        deadline=None,
        print_blob=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(SCHEDULES)
    def try_schedule(schedule: Schedule) -> None:
        with tempfile.TemporaryDirectory(prefix="truenext-schedule-") as folder:
            play(schedule, Path(folder))

    try_schedule()


@pytest.mark.timeout(300 + EXAMPLES * 10)
def test_effects_happen_once_whatever_happens_in_whatever_order() -> None:
    tried(EXAMPLES, is_shrunk=True)
