"""Incomplete frames: which connections may send more of a large one.

    smaller than INCOMPLETE_FRAME_BYTES     not counted
    larger, and memory is free              counted, and read on
    larger, and memory is full              counted; the first of them is read on, the others wait

The first is the one whose frame has been so large for longest. As it is always read on, a frame of any permitted size
can be completed, and all frames together take little more than their share of the memory and one such frame.

This is policy without I/O; the connections themselves read, wait and end (server/input.py).
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
        """Bytes of each counted frame, in the order in which the frames began to count."""
        self._waiting: set[ConnectionState] = set()
        """Connections that are not read because memory for frames is full."""
        self._suspended: set[ConnectionState] = set()
        """Connections that are not read because disk space is short: the next one counts as the first instead."""
        self._progress: dict[ConnectionState, tuple[int, int]] = {}
        """Bytes of a frame when it had last grown by much, and number of checks since then."""
        self.is_full = False
        """Memory for frames is full: `bytes_to_read` must be called before each read."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def bytes_to_read(self, session: ConnectionState, size: int) -> int:
        """Return how many bytes may be read of a connection at once while `is_full`, after `size` bytes of a frame.

        If 0, it must not be read (`wait`). The beginning of a frame after this one stays small, too.
        """
        if session not in self._sizes:
            return INCOMPLETE_FRAME_BYTES - size
        return INCOMPLETE_FRAME_BYTES if self._is_first(session) else 0

    def update(self, session: ConnectionState, size: int, received: int) -> bool:
        """Count an incomplete frame that has `size` bytes, `received` of them new.

        Returns True if that frees memory, or gives another connection its turn.
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
        """Note that the connection is not read until `may_resume`, as memory for frames is full."""
        self._waiting.add(session)

    def suspend(self, session: ConnectionState) -> None:
        """Note that the connection is not read until `resume`, as disk space is short."""
        self._suspended.add(session)

    def may_resume(self, session: ConnectionState) -> bool:
        """Return whether the connection does not wait for memory, or may be read now."""
        return session not in self._waiting or not self.is_full or self._is_first(session)

    def resume(self, session: ConnectionState) -> None:
        """Note that the connection is read again."""
        self._waiting.discard(session)
        self._suspended.discard(session)

    def find_stalled(self, unread: Container[ConnectionState]) -> ConnectionState | None:
        """Return a connection that sends next to nothing of its frame while others wait for memory.

        Called once a second. `unread` are the connections that are not read now, and have no fault. Checks are
        counted instead of time, because a broker that was frozen has not read either.
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
