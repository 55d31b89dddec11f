"""Tests of the store with a disk on which any call may fail.

A batch confirmed as durable stays so, whatever fails then or later, and no batch is confirmed after one that failed.
LMDB's own calls fail in try_crashes.py.
"""

import errno
import os

import pytest

from tests.contract.crashing import Tried, fail_everywhere
from tests.drawing import one_of

SEED = int(os.environ.get("TRUENEXT_SEED", "1"))


@pytest.mark.alternates("disks that fail")
@one_of("error", [errno.EIO, errno.ENOSPC], ["EIO", "ENOSPC"])
def test_confirmed_batches_survive_the_failure_of_any_call(error: int) -> None:
    tried = Tried()
    fail_everywhere(error, SEED, tried, batches=12)
    assert tried.states > 100
