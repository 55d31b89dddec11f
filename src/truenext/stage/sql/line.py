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

Place = Future[None]
"""Done when its turn has come."""


class Line:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._interactive: deque[Place] = deque()
        self._others: deque[Place] = deque()

    async def wait_in_task(self, *, is_interactive: bool) -> None:
        """Returns when it is the caller's turn, which then ends with `leave`; cancelled it has had none."""
        place = self._join(is_interactive)
        try:
            await asyncio.wrap_future(place)
        except BaseException:
            self._give_up(place)
            raise

    def wait_in_thread(self, *, is_interactive: bool) -> None:
        """Returns when it is the caller's turn, which then ends with `leave`."""
        place = self._join(is_interactive)
        try:
            place.result()
        except BaseException:
            self._give_up(place)
            raise

    def leave(self) -> None:
        """The turn is over, and the next one's begins; from any task or thread."""
        with self._lock:
            self._is_taken = False
            for waiting in (self._interactive, self._others):
                while waiting:
                    place = waiting.popleft()
                    if place.set_running_or_notify_cancel():
                        self._is_taken = True
                        place.set_result(None)
                        return

    def _join(self, is_interactive: bool) -> Place:
        place = Place()
        with self._lock:
            if self._is_taken:
                (self._interactive if is_interactive else self._others).append(place)
            else:
                self._is_taken = True
                place.set_running_or_notify_cancel()
                place.set_result(None)
        return place

    def _give_up(self, place: Place) -> None:
        with self._lock:
            has_had_its_turn = not place.cancel()
        if has_had_its_turn:
            # It came while the wait was being cancelled.
            self.leave()


_LINES: weakref.WeakValueDictionary[Path, Line] = weakref.WeakValueDictionary()
_LINES_LOCK = threading.Lock()


def line_of(file: Path) -> Line:
    """The one line of this process for this file, whatever it is called."""
    with _LINES_LOCK:
        return _LINES.setdefault(file.resolve(), Line())
