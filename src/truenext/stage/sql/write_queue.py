"""Who may write to an SQLite file next? One at a time in a process: interactive work first, then in order of arrival.

SQLite lets one transaction write, and has those that come meanwhile try again and again, in no order. Tasks and threads
stand in one line, since they write to one file.
"""

import asyncio
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from pathlib import Path

Turn = Future[None]
"""Done when its turn has come."""


class WriteQueue:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_busy = False
        self._interactive: deque[Turn] = deque()
        self._others: deque[Turn] = deque()

    async def wait_in_task(self, *, is_interactive: bool) -> None:
        """Returns when it is the caller's turn, which then ends with `leave`; cancelled it has had none."""
        turn = self._enqueue(is_interactive)
        try:
            await asyncio.wrap_future(turn)
        except BaseException:
            self._cancel(turn)
            raise

    def wait_in_thread(self, *, is_interactive: bool) -> None:
        """Returns when it is the caller's turn, which then ends with `leave`."""
        turn = self._enqueue(is_interactive)
        try:
            turn.result()
        except BaseException:
            self._cancel(turn)
            raise

    def end_turn(self) -> None:
        """The turn is over, and the next one's begins; from any task or thread."""
        with self._lock:
            self._is_busy = False
            for waiting in (self._interactive, self._others):
                while waiting:
                    turn = waiting.popleft()
                    if turn.set_running_or_notify_cancel():
                        self._is_busy = True
                        turn.set_result(None)
                        return

    def _enqueue(self, is_interactive: bool) -> Turn:
        turn = Turn()
        with self._lock:
            if self._is_busy:
                (self._interactive if is_interactive else self._others).append(turn)
            else:
                self._is_busy = True
                turn.set_running_or_notify_cancel()
                turn.set_result(None)
        return turn

    def _cancel(self, turn: Turn) -> None:
        with self._lock:
            has_had_its_turn = not turn.cancel()
        if has_had_its_turn:
            # It came while the wait was being cancelled.
            self.end_turn()


_QUEUES: weakref.WeakValueDictionary[Path, WriteQueue] = weakref.WeakValueDictionary()
_QUEUES_LOCK = threading.Lock()


def write_queue_of(file: Path) -> WriteQueue:
    """The one line of this process for this file, whatever it is called."""
    with _QUEUES_LOCK:
        return _QUEUES.setdefault(file.resolve(), WriteQueue())
