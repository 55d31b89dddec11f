"""Test of the sink by a state machine: each batch is published once, whatever dies at any time. Without Spark.

TRUENEXT_EXAMPLES=5000 pytest tests/spark/sink/test_machine.py       longer
TRUENEXT_SEED=7 pytest tests/spark/sink/test_machine.py              the same examples again
"""

from __future__ import annotations

import os
from random import Random, SystemRandom

import pytest

from tests.spark.sink.machine import Machine
from truenext.testing import blocking_broker

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "15"))


@pytest.mark.timeout(300 + EXAMPLES)
def test_sink_publishes_each_batch_once_whatever_happens() -> None:
    seed = int(os.environ.get("TRUENEXT_SEED") or SystemRandom().randrange(2**32))
    print(f"TRUENEXT_SEED={seed} TRUENEXT_EXAMPLES={EXAMPLES}")
    for each in range(EXAMPLES):
        run_example(seed + each)


def run_example(seed: int) -> None:
    """Raises: Disagreement"""
    steps: list[str] = []
    try:
        with blocking_broker() as here, pytest.MonkeyPatch.context() as patch:
            Machine(Random(seed), here, patch, steps).run()
    except BaseException:
        # That example alone is the same again.
        print("\n".join(steps))
        print(f"TRUENEXT_SEED={seed} TRUENEXT_EXAMPLES=1")
        raise
