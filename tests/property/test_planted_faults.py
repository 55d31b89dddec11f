"""Would the state machine notice if the engine were wrong?

A property test that never fails may be one that sees nothing. Every fault of planted_faults.py must be caught.

    TRUENEXT_SEED=7 pytest tests/property/test_planted_faults.py              other examples than usual
"""

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property import planted_faults
from tests.property.broker_machine import BrokerMachine
from tests.property.oracle import Disagreement

SEED = int(os.environ.get("TRUENEXT_SEED", "5"))


def run_machine(examples: int) -> None:
    """The first example that fails will do: nothing is shrunk and nothing kept."""
    run_state_machine_as_test(
        seed(SEED)(type("BrokerMachine", (BrokerMachine,), {})),
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("plant", planted_faults.faults(), ids=lambda plant: plant.__name__)
def test_the_machine_notices_when(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Disagreement):
        run_machine(examples=1000)


def test_the_plain_dispatch_that_carries_the_faults_is_not_itself_one(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_faults.nothing_is_wrong(monkeypatch)
    run_machine(examples=50)
