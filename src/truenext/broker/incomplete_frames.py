"""Which connections may send more of a frame that is large and not complete yet.

    smaller than INCOMPLETE_FRAME_BYTES     not counted
    larger, and there is room               counted, and read on
    larger, and there is none               counted; the first of them is read on, the others wait

The first is the one whose frame has been so large for longest. Since the first is always read on, there is always room
for one frame of any permitted size, and all frames together take little more than their share of the memory and one
such frame.

This is policy without I/O; the connections themselves read, wait and end (server/connection.py).
"""

from collections.abc import Container

from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.model.limits import (
    INCOMPLETE_FRAME_BYTES,
    INCOMPLETE_FRAME_PROGRESS_BYTES,
    INCOMPLETE_FRAME_SECONDS,
)


class IncompleteFrames:
    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self._sizes: dict[ConnectionState, int] = {}
        """Bytes of each frame that is counted, in the order in which frames became so large."""
        self._waiting: set[ConnectionState] = set()
        """Connections that are not read because there is no room."""
        self._suspended: set[ConnectionState] = set()
        """Connections that are not read because the disk has no room: the next one is read on instead."""
        self._progress: dict[ConnectionState, tuple[int, int]] = {}
        """Bytes of a frame when it had last grown by much, and for how many looks it has not."""
        self.is_full = False
        """There is no room: `bytes_to_read` is to be asked before each read."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def bytes_to_read(self, session: ConnectionState, size: int) -> int:
        """Bytes that may be read of a connection at once while `is_full`, if `size` bytes of a frame are there.

        If 0 it is not to be read (`wait`). What begins behind the end of a frame stays small, too.
        """
        if session not in self._sizes:
            return INCOMPLETE_FRAME_BYTES - size
        return INCOMPLETE_FRAME_BYTES if self._is_first(session) else 0

    def update(self, session: ConnectionState, size: int, received: int) -> bool:
        """Count an incomplete frame that has `size` bytes after `received` bytes more have come.

        True if others may have room, or their turn, because of that.
        """
        before = self._sizes.get(session, 0)
        is_over = bool(before) and size < before + received
        if is_over:
            # If another frame has begun, its turn is behind the others.
            self._remove(session)
            before = 0
        if size >= INCOMPLETE_FRAME_BYTES:
            self._sizes[session] = size
            self._add(size - before)
        return is_over

    def _remove(self, session: ConnectionState) -> None:
        self._waiting.discard(session)
        self._suspended.discard(session)
        self._progress.pop(session, None)
        self._add(-self._sizes.pop(session))

    def wait(self, session: ConnectionState) -> None:
        """The connection has more to say, and there is no room for that until `may_resume`."""
        self._waiting.add(session)

    def suspend(self, session: ConnectionState) -> None:
        """The connection is not read, because the disk has no room, until `resume`."""
        self._suspended.add(session)

    def may_resume(self, session: ConnectionState) -> bool:
        """The connection does not wait for room, or there is room now."""
        return session not in self._waiting or not self.is_full or self._is_first(session)

    def resume(self, session: ConnectionState) -> None:
        """The connection is read again."""
        self._waiting.discard(session)
        self._suspended.discard(session)

    def find_stalled(self, unread: Container[ConnectionState]) -> ConnectionState | None:
        """Find a connection that sends next to nothing of its frame while others wait for room.

        To be called once a second.
        `unread` are the connections that are not read now, and cannot be blamed. Looks are counted instead of time,
        because a broker that was frozen has not read either.
        """
        if not self._waiting:
            self._progress.clear()
            return None
        for session, size in self._sizes.items():
            if session in unread:
                self._progress.pop(session, None)
                continue
            before, looks = self._progress.get(session, (size, 0))
            if size - before >= INCOMPLETE_FRAME_PROGRESS_BYTES:
                before, looks = size, 0
            elif looks >= INCOMPLETE_FRAME_SECONDS:
                return session
            self._progress[session] = before, looks + 1
        return None

    def _is_first(self, session: ConnectionState) -> bool:
        return session is next((each for each in self._sizes if each not in self._suspended), None)

    def _add(self, size: int) -> None:
        self._memory.incomplete_bytes += size
        self.is_full = self._memory.incomplete_bytes > self._memory.incomplete_bytes_max
