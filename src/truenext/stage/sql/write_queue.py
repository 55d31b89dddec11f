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

WriteGrant = Future[None]
"""Done when its turn has come."""


class WriteQueue:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_busy = False
        self._interactive_waiting: deque[WriteGrant] = deque()
        self._others_waiting: deque[WriteGrant] = deque()

    async def wait_in_task(self, *, is_interactive: bool) -> None:
        """Returns when it is the caller's turn, which then ends with `end_write`; cancelled it has had none."""
        grant = self._enqueue(is_interactive)
        try:
            await asyncio.wrap_future(grant)
        except BaseException:
            self._cancel(grant)
            raise

    def wait_in_thread(self, *, is_interactive: bool) -> None:
        """Returns when it is the caller's turn, which then ends with `end_write`."""
        grant = self._enqueue(is_interactive)
        try:
            grant.result()
        except BaseException:
            self._cancel(grant)
            raise

    def end_write(self) -> None:
        """The turn is over, and the next one's begins; from any task or thread."""
        with self._lock:
            self._is_busy = False
            for waiting in (self._interactive_waiting, self._others_waiting):
                while waiting:
                    grant = waiting.popleft()
                    if grant.set_running_or_notify_cancel():
                        self._is_busy = True
                        grant.set_result(None)
                        return

    def _enqueue(self, is_interactive: bool) -> WriteGrant:
        grant = WriteGrant()
        with self._lock:
            if self._is_busy:
                (self._interactive_waiting if is_interactive else self._others_waiting).append(grant)
            else:
                self._is_busy = True
                grant.set_running_or_notify_cancel()
                grant.set_result(None)
        return grant

    def _cancel(self, grant: WriteGrant) -> None:
        with self._lock:
            was_granted = not grant.cancel()
        if was_granted:
            # It came while the wait was being cancelled.
            self.end_write()


_QUEUES: weakref.WeakValueDictionary[Path, WriteQueue] = weakref.WeakValueDictionary()
_QUEUES_LOCK = threading.Lock()


def write_queue_of(file: Path) -> WriteQueue:
    """The one line of this process for this file, whatever it is called."""
    with _QUEUES_LOCK:
        return _QUEUES.setdefault(file.resolve(), WriteQueue())
