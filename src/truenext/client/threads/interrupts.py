"""Lock of a connection that defers Ctrl-C while the state of the connection is being changed.

Python runs signal handlers in the main thread, between any two steps of the program. If Ctrl-C's handler raised there,
it would leave the state half changed. If a handler called the connection, it would wait for a lock that its own thread
holds. So the main thread takes the lock with this class. A due handler runs when the lock has been released, or at once
while the thread waits.
"""

from __future__ import annotations

import importlib
import signal
from threading import Lock
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Handler = Callable[[int, FrameType | None], object]

DEFERRED_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))
"""Signals that usually end a program. Their handlers are deferred."""

# C functions of `signal`: the Python ones take ten times as long, because they make enumeration members.
_signal_module = importlib.import_module("_signal")
_set_handler = cast("Callable[[int, Handler], object]", _signal_module.signal)
_get_handler = cast("Callable[[int], object]", _signal_module.getsignal)


class SignalSafeLock:
    """Wrapper of a connection's lock, which the main thread uses for one `with` block. It defers signal handlers."""

    __slots__ = ("_deferred_signals", "_handlers", "_is_waiting", "_lock")

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._handlers: dict[int, Handler] = {}
        """The program's own signal handlers, by signal number, while the lock has replaced them."""
        self._is_waiting = False
        self._deferred_signals: list[int] = []

    def __enter__(self) -> None:
        defer = self._on_signal
        try:
            for number in DEFERRED_SIGNALS:
                handler = _get_handler(number)
                # SIG_DFL, SIG_IGN and a handler set in C (None) do not run between two steps.
                if callable(handler):
                    self._handlers[number] = cast("Handler", handler)
                    _set_handler(number, defer)
        except BaseException:
            # Raised by a handler that was not replaced yet.
            self._restore_handlers()
            raise
        self._lock.acquire()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._lock.release()
        try:
            self._restore_handlers()
        except BaseException:
            # Raised by a handler that is restored already.
            self._restore_handlers()
            raise
        self._run_deferred_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            if _get_handler(number) == self._on_signal:
                _set_handler(number, handler)

    def wait(self, waiter: Lock, timeout: float) -> None:
        """Release the lock while waiting for `waiter`. Signal handlers run meanwhile, and may raise."""
        self._lock.release()
        try:
            self._is_waiting = True
            self._run_deferred_handlers()
            waiter.acquire(True, timeout)
        finally:
            self._is_waiting = False
            self._lock.acquire()

    def run_due_handlers(self) -> None:
        """Run the signal handlers that are due, with the lock released. The handlers may raise."""
        if self._deferred_signals:
            # The new lock is free, so this does not wait.
            self.wait(Lock(), 0.0)

    def _run_deferred_handlers(self) -> None:
        while self._deferred_signals:
            number = self._deferred_signals.pop(0)
            self._handlers[number](number, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_waiting:
            self._handlers[number](number, frame)
        else:
            self._deferred_signals.append(number)
