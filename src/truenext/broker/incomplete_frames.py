"""Incomplete frames: decides which connections may send more of a large frame.

    smaller than INCOMPLETE_FRAME_BYTES     not counted
    larger, and memory is free              counted, and read on
    larger, and memory is full              counted; only the first of these frames is read on, the others wait

The first frame is the one that has been counted for longest. The broker always continues to read the first frame, so
that a frame of any permitted size can be completed. All frames together take little more than a sixteenth of the memory
limit and one frame of the largest size.

There is no I/O here: `Input` (server/input.py) reads the connections, and waits.
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
        """Bytes of each counted frame, by connection. The frame that has been counted for longest comes first."""
        self._waiting: set[ConnectionState] = set()
        """Connections that are not read because memory for frames is full."""
        self._suspended: set[ConnectionState] = set()
        """Connections that are not read because disk space is short. The frames of these connections cannot be the
        first frame."""
        self._progress: dict[ConnectionState, tuple[int, int]] = {}
        """Size of a frame when it had last grown by INCOMPLETE_FRAME_PROGRESS_BYTES, and number of checks since then,
        by connection."""
        self.is_full = False
        """True if memory for incomplete frames is full. As long as this is True, the caller must ask `bytes_to_read`
        before each read."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def bytes_to_read(self, session: ConnectionState, size: int) -> int:
        """Return how many bytes may be read from a connection at once while `is_full`. The connection has `size` bytes
        of an incomplete frame.

        If the result is 0, the caller must not read, and must call `wait`. The result is so small that the bytes read
        after the end of this frame cannot start another large frame.
        """
        if session not in self._sizes:
            return INCOMPLETE_FRAME_BYTES - size
        return INCOMPLETE_FRAME_BYTES if self._is_first(session) else 0

    def update(self, session: ConnectionState, size: int, received: int) -> bool:
        """Count an incomplete frame that has `size` bytes, `received` of them new.

        Returns True if a counted frame of the connection has ended, so that memory is free or another frame is the
        first.
        """
        before = self._sizes.get(session, 0)
        is_over = bool(before) and size < before + received
        if is_over:
            # If another frame has begun, its turn is after the others.
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
        """Note that the connection is not read, as memory for frames is full, until `may_resume` is true."""
        self._waiting.add(session)

    def suspend(self, session: ConnectionState) -> None:
        """Note that the connection is not read, as disk space is short, until `resume` is called."""
        self._suspended.add(session)

    def may_resume(self, session: ConnectionState) -> bool:
        """Return whether the connection no longer has to wait for memory for frames."""
        return session not in self._waiting or not self.is_full or self._is_first(session)

    def resume(self, session: ConnectionState) -> None:
        """Note that the connection is read again."""
        self._waiting.discard(session)
        self._suspended.discard(session)

    def find_stalled(self, unread: Container[ConnectionState]) -> ConnectionState | None:
        """Return a connection that sends almost nothing of its large frame while others wait for memory; None if there
        is none. Called once a second. `unread` are connections that the broker does not read; these are never returned.
        Calls are counted instead of seconds, because a broker process that was suspended has read nothing meanwhile.
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
