"""Would the state machines notice if the engine were wrong?

A property test that never fails may be one that sees nothing. Every fault of planted_faults.py must be caught.

    TRUENEXT_SEED=7 pytest tests/property/test_planted_faults.py              other examples than usual
    TRUENEXT_FAULTS=all pytest tests/property/test_planted_faults.py          also those that show rarely
"""

import os
from collections.abc import Callable, Sequence
from random import Random

import pytest

from tests.property import planted_faults
from tests.property.broker_machine import MACHINES, BrokerMachine
from tests.property.oracle import Disagreement

ALL = os.environ.get("TRUENEXT_FAULTS") == "all"
SEED = int(os.environ.get("TRUENEXT_SEED", "5"))
ROUNDS = 40
"""Of 50 examples of the machine in which a fault shows soonest."""
ROUNDS_OF_ALL = 40
"""Of 50 examples of each machine, after that. Some faults need three things at once, and show in one of a thousand."""


def run_machines(rounds: int, machines: Sequence[type[BrokerMachine]], steps: list[str]) -> None:
    """Up to the first example that fails. Without Hypothesis: nothing has to be made small, and more is tried in the
    same time."""
    for each in range(rounds):
        for machine in machines:
            random = Random(SEED + 1000 * each)
            for _ in range(50):
                machine.run_plainly(random, steps)


@pytest.mark.timeout(1800 if ALL else 900)
@pytest.mark.parametrize(
    "plant",
    [each for each in planted_faults.faults() if ALL or not planted_faults.is_rare(each)],
    ids=lambda plant: plant.__name__,
)
def test_the_machines_notice_when(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    plant(monkeypatch)
    with pytest.raises(Disagreement):
        run_machines(ROUNDS, [planted_faults.machine_of(plant)], steps)
        run_machines(ROUNDS_OF_ALL, MACHINES, steps)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_plain_dispatch_that_carries_the_faults_is_not_itself_one(
    machine: type[BrokerMachine], monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    planted_faults.nothing_is_wrong(monkeypatch)
    run_machines(1, [machine], steps)
