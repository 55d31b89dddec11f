"""Test of the source by a state machine: each message is in the sink once, whatever dies at any time. Without Spark.

TRUENEXT_EXAMPLES=5000 pytest tests/spark/source/test_machine.py       longer
TRUENEXT_SEED=7 pytest tests/spark/source/test_machine.py              the same examples again
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random, SystemRandom

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.spark.source.machine import BrokerOfProcess, Here, Machine
from truenext.testing import blocking_broker

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "15"))


@pytest.mark.timeout(300 + EXAMPLES)
def test_a_query_reads_each_message_once_whatever_happens() -> None:
    seed = _seed()
    for each in range(EXAMPLES):
        with blocking_broker() as here:
            run_example(seed + each, here)


@pytest.mark.timeout(300 + EXAMPLES)
def test_a_query_reads_each_message_once_from_a_broker_that_is_killed(tmp_path: Path) -> None:
    seed = _seed()
    process = BrokerProcess(tmp_path)
    try:
        process.start()
        for each in range(max(1, EXAMPLES // 20)):
            run_example(seed + each, BrokerOfProcess(process), f"q{each}")
    finally:
        process.clean_up()


def run_example(seed: int, here: Here, name: str = "orders") -> None:
    """Raises: Disagreement"""
    steps: list[str] = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            Machine(Random(seed), here, patch, steps, name).run()
    except BaseException:
        # That example alone is the same again.
        print("\n".join(steps))
        print(f"TRUENEXT_SEED={seed} TRUENEXT_EXAMPLES=1")
        raise


def _seed() -> int:
    seed = int(os.environ.get("TRUENEXT_SEED") or SystemRandom().randrange(2**32))
    print(f"TRUENEXT_SEED={seed} TRUENEXT_EXAMPLES={EXAMPLES}")
    return seed
