"""Test that the client does what docs/client.md says, whatever programs, wires and time do.

TRUENEXT_EXAMPLES=5000 pytest tests/client/test_against_oracle.py       longer
TRUENEXT_SEED=7 pytest tests/client/test_against_oracle.py              the same run again
"""

import os
from random import Random, SystemRandom

import pytest

from tests.client.machine import Machine

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "100"))


@pytest.mark.timeout(300 + EXAMPLES)
def test_client_never_differs_from_the_oracle(monkeypatch: pytest.MonkeyPatch, steps: list[str]) -> None:
    seed = int(os.environ.get("TRUENEXT_SEED") or SystemRandom().randrange(2**32))
    for each in range(EXAMPLES):
        try:
            Machine.run_plainly(Random(seed + each), monkeypatch, steps)
        except BaseException:
            # That example alone is the same again.
            print(f"TRUENEXT_SEED={seed + each} TRUENEXT_EXAMPLES=1")
            raise
