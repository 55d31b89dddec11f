"""An event loop in virtual time: when nothing is left to do, its clock advances.

Sockets and threads are real, so the loop polls them for a moment before it advances the clock, and never advances it
far at once. All clocks of one example show the same time: loop, broker, program and database.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from sqlalchemy import Engine, event

from truenext.stage.context import ServiceContext
from truenext.testing import clock

MOMENT_S = 0.001
"""Real time for which the loop waits for sockets and threads."""
LEAP_S = 0.1
"""Longest leap of the clock at once: a thread may be at work."""
JULIAN_EPOCH = 2440587.5
"""1970-01-01 as SQLite counts days."""


class VirtualTime:
    def __init__(self) -> None:
        self.skipped_ns = 0
        self.database_ahead_s = 0.0
        """Seconds by which the clock of the database is ahead of the others."""

    # ---- As truenext.clock has it ----

    def time_ns(self) -> int:
        return time.time_ns() + self.skipped_ns

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.skipped_ns

    # ---- Of others ----

    def julian_day(self, _: str) -> float:
        return JULIAN_EPOCH + (self.time_ns() / 1e9 + self.database_ahead_s) / 86400

    def now_ms(self) -> int:
        return self.time_ns() // 1_000_000

    def patch_clocks(self, patch: pytest.MonkeyPatch) -> None:
        """Give the broker and the program this clock."""
        patch.setattr(clock, "time_ns", self.time_ns)
        patch.setattr(clock, "monotonic_ns", self.monotonic_ns)
        patch.setattr(ServiceContext, "now_ms", staticmethod(self.now_ms))

    def patch_database_clock(self, engine: Engine) -> None:
        """Give the connections of `engine` this clock, and no wait for the disk: no test crashes it."""

        @event.listens_for(engine, "connect")
        def prepare(connection: Any, _: object) -> None:
            if engine.dialect.is_async:
                connection.run_async(lambda inner: inner.create_function("julianday", 1, self.julian_day))
            else:
                connection.create_function("julianday", 1, self.julian_day)
            cursor = connection.cursor()
            cursor.execute("PRAGMA synchronous=OFF")
            cursor.close()


class _Selector(selectors.DefaultSelector):
    def __init__(self, virtual: VirtualTime) -> None:
        super().__init__()
        self._virtual = virtual

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        found = super().select(min(timeout, MOMENT_S))
        if not found and timeout > MOMENT_S:
            self._virtual.skipped_ns += int(min(timeout - MOMENT_S, LEAP_S) * 1e9)
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, virtual: VirtualTime) -> None:
        self._virtual = virtual
        super().__init__(_Selector(virtual))

    def time(self) -> float:
        return self._virtual.monotonic_ns() / 1e9


def run_in(virtual: VirtualTime, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: _Loop(virtual)) as runner:
        runner.run(main)
