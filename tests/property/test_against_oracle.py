"""Does the engine do what docs/contract.md says, whatever clients, sockets and disk do?

TRUENEXT_EXAMPLES=5000 pytest tests/property/test_against_oracle.py       longer
TRUENEXT_SEED=7 pytest tests/property/test_against_oracle.py              the same run again
"""

import os
import random

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.broker_machine import MACHINES, BrokerMachine

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "100"))
"""Of each machine."""


@pytest.mark.timeout(300 + EXAMPLES)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_engine_never_differs_from_the_oracle_in(machine: type[BrokerMachine]) -> None:
    seed_of_run = int(os.environ.get("TRUENEXT_SEED") or random.SystemRandom().randrange(2**32))
    print(f"TRUENEXT_SEED={seed_of_run} TRUENEXT_EXAMPLES={EXAMPLES}")  # pytest shows it if the test fails
    run_state_machine_as_test(
        seed(seed_of_run)(type("BrokerMachine", (machine,), {})),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=50,
            deadline=None,
            print_blob=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
