"""Power cuts of a recorded store, LMDB's calls included, in a process of its own.

    python -m tests.contract.try_crashes STATES SEED [FAULT]

A damaged file that LMDB takes for sound may end the process that opens it. Prints the number of disk states tried, and
the number of those in which a file was about to grow; ends with 1 and the reason if a disk did not hold what it must.
FAULT is a function of planted_faults.py.
"""

import errno
import faulthandler
import logging
import random
import sys

import pytest

from tests.contract import planted_faults
from tests.contract.crashing import Held, Tried, crash_at_the_end, crash_everywhere
from tests.contract.recorded_calls import Plan, plan, record
from tests.contract.simulated_disk import Disk, Failure

LIVES = 4
"""One after the other on the same disk."""
SHARE = 0.15
"""Share of a life's operations at which it crashes; more lives are better than more crashes of one."""
FAILING_EVERY = 6
"""One in this number of calls for LMDB's files fails."""


def try_crashes(states: int, seed: int, fault: str) -> Tried:
    tried = Tried()
    number = 0
    while tried.states < states:
        rng = random.Random(f"{seed} {number}")
        number += 1
        if not fault:
            fail_lmdb(rng, tried)
        disk, may_hold = Disk(), [Held()]
        for _ in range(LIVES):
            growth = rng.choice([0, 0.5, 0.9])
            ((life, _),) = record([plan(disk, may_hold, rng, 25, growth)], [None], fault)
            at_most = rng.choice([0, 2, 64])
            crash_everywhere(life, rng, tried, at_most=at_most, share=SHARE, states_max=states)
            walk, may_hold = life.at(rng.randint(0, len(life.operations)))
            disk = rng.choice(list(walk.states(rng, 4)))
    return tried


def fail_lmdb(rng: random.Random, tried: Tried) -> None:
    """Let calls for LMDB's files fail, one in FAILING_EVERY at a time."""
    one: Plan = plan(Disk(), [Held()], rng, 10, 0.5)
    ((_, outcome),) = record([one], [None])
    first = rng.randrange(FAILING_EVERY)
    failures = [
        Failure(call, rng.choice([1, 1, 3, 1000]), error, rng.choice([0.0, 0.5, 1.0]))
        for call in range(first, outcome.calls, FAILING_EVERY)
        for error in (errno.EIO, errno.ENOSPC)
    ]
    for life, _ in record([one] * len(failures), failures):
        crash_at_the_end(life, rng, tried)


def main() -> None:
    faulthandler.enable()
    logging.disable()
    states, seed, fault = int(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:])
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            getattr(planted_faults, fault)(patch)
        tried = try_crashes(states, seed, fault)
    print(tried.states, tried.across_growth)


if __name__ == "__main__":
    main()
