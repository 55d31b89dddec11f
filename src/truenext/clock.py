"""The time, also in a test that has stopped it.

Tests that freeze time, with freezegun for example, replace `time.time`, `time.monotonic` and the like in all modules. A
program's own time is to stand still then, or to leap by days; but what waits for a broker would wait for ever, or give
up at once. So what keeps a connection alive takes its time from here: `clock_gettime` is replaced by nobody.
"""

import sys

if sys.platform == "win32":
    # It has no clock_gettime: there time can be stopped.
    from time import monotonic, monotonic_ns, time_ns
else:
    from functools import partial
    from time import CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime, clock_gettime_ns

    monotonic = partial(clock_gettime, CLOCK_MONOTONIC)
    monotonic_ns = partial(clock_gettime_ns, CLOCK_MONOTONIC)
    time_ns = partial(clock_gettime_ns, CLOCK_REALTIME)

__all__ = ["monotonic", "monotonic_ns", "time_ns"]
