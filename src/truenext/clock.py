"""Clocks that keep running when a test freezes time.

Tests that freeze time (freezegun, for example) replace `time.time`, `time.monotonic` and others in all modules, so that
the time of the tested program stands still or leaps. With such a clock, code that waits for a broker would wait for
ever, or give up at once. So code that keeps a connection alive uses this module: freezegun and its like do not replace
`clock_gettime`."""

import sys
import time

if sys.platform == "win32":
    # Windows has no clock_gettime: there a test can freeze these clocks, too.
    from time import monotonic, monotonic_ns, time_ns

    boottime = monotonic
else:
    from functools import partial
    from time import CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime, clock_gettime_ns

    monotonic = partial(clock_gettime, CLOCK_MONOTONIC)
    monotonic_ns = partial(clock_gettime_ns, CLOCK_MONOTONIC)
    time_ns = partial(clock_gettime_ns, CLOCK_REALTIME)
    # On Linux, CLOCK_MONOTONIC stands still while the machine is suspended.
    boottime = partial(clock_gettime, getattr(time, "CLOCK_BOOTTIME", CLOCK_MONOTONIC))

__all__ = ["boottime", "monotonic", "monotonic_ns", "time_ns"]
