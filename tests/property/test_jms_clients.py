"""Tests of JMS clients from their bytes to the broker's: random commands of several clients against an oracle, and
planted faults that this must notice.

    TRUENEXT_EXAMPLES=5000 pytest tests/property/test_jms_clients.py       longer
    TRUENEXT_SEED=7 pytest tests/property/test_jms_clients.py              the same run again
"""

import os
from collections.abc import Callable
from random import SystemRandom

import pytest

from tests.property.jms_faults import faults
from tests.property.jms_machine import run_example
from tests.property.oracle import Disagreement

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "40"))
SEED = int(os.environ.get("TRUENEXT_SEED") or SystemRandom().randrange(2**32))
EXAMPLES_OF_A_FAULT = 1000


@pytest.mark.timeout(300 + EXAMPLES)
def test_clients_are_sent_what_the_oracle_expects() -> None:
    for number in range(EXAMPLES):
        run_example(SEED + number)


@pytest.mark.drawn
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", faults(), ids=lambda plant: plant.__name__)
def test_machine_notices_when(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Disagreement):
        for seed in range(EXAMPLES_OF_A_FAULT):
            run_example(seed)
