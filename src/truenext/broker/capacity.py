"""Capacity: which connections are read, and which wait for the disk or for memory.

    the gathering batch has space              all connections are read
    it is full, or eviction waits for a batch  each connection may still add SHARE_BYTES, all together SHARES_BYTES
    disk space is short, or a drain lasts      connections that only send wait before their next SEND
    memory for incomplete frames is full       one large frame is read on at a time (incomplete_frames.py)
    a pass has no time left to read            connections that were not read wait for a turn (read_turns.py)

While some clients fill the batch, a client that sends little may still use its share. Without a share it would wait for
several writes of the disk. SHARES_BYTES is less than a batch takes, so that eviction frees more than shares add.
"""

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable

from truenext.broker.incomplete_frames import IncompleteFrames
from truenext.broker.read_turns import ReadTurns
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import CAPACITY_CHECK_INTERVAL_S, INCOMPLETE_FRAME_BYTES, READ_BYTES
from truenext.store.store import Store

SHARE_BYTES = 32 * 1024
"""Bytes of changes, events and messages that one connection may add to a full batch. A connection that has added more
must wait until the batch is closed."""
SHARES_BYTES = 1024 * 1024
"""Bytes that all connections together may add to a full batch before all must wait."""
BATCHES_WITHOUT_SHARE = 8
"""Number of batches for which a connection has no share after it has used up its share of a batch. One command may
exceed all shares together. With a share in each batch, such a connection would make other connections, which send
little, wait again and again."""


class Capacity:
    def __init__(
        self,
        engine: Engine,
        store: Store,
        loop: AbstractEventLoop,
        monotonic_ns: Callable[[], int],
        *,
        user_name_of: Callable[[ConnectionState], str],
        resume: Callable[[ConnectionState], None],
        schedule_turn: Callable[[], object],
    ) -> None:
        """`resume` executes the waiting commands of a connection, and reads its socket again."""
        self._engine = engine
        self._commit_state = engine.state.commit_state
        self._memory = engine.state.memory
        self._store = store
        self._loop = loop
        self._resume = resume
        self.incomplete_frames = IncompleteFrames(engine.state.memory)
        """Large frames that have arrived in part; updated by `note_incomplete_frame`."""
        self.read_turns = ReadTurns(
            loop,
            monotonic_ns,
            user_name_of=user_name_of,
            resume=self._resume_in_turn,
            schedule_turn=schedule_turn,
        )
        self._waiting: dict[ConnectionState, bool] = {}
        """Connections that are not read, the one that waits longest first; True for those that wait for disk space."""
        self._timer: TimerHandle | None = None
        self._full_batch = 0
        """Number of the batch that the bytes in `_shares` were added to."""
        self._shares: dict[ConnectionState, int] = {}
        """Bytes that each connection has added to batch `_full_batch` since the batch was full."""
        self._shared_bytes = 0
        self._without_share: dict[ConnectionState, int] = {}
        """Connections that have used up their share, each with the number of the first batch in which the connection
        has a share again."""

    @property
    def added_bytes(self) -> int:
        """Bytes of the gathering batch, of its events, and of messages in memory: these three grow with each
        command."""
        return self._commit_state.gathering_bytes + self._memory.message_bytes

    def may_read(self, session: ConnectionState) -> bool:
        """Return whether the commands of a connection may be executed now. If not, the caller must call `wait`."""
        state = self._commit_state
        if state.has_capacity:
            return True
        if not state.has_sequences:
            return False
        if self._full_batch != state.batch.number:
            self._full_batch = state.batch.number
            self._shares.clear()
            self._shared_bytes = 0
        return self._shared_bytes < SHARES_BYTES and self._has_share(session)

    def count_added(self, session: ConnectionState, size: int) -> None:
        """Count bytes that a connection has added, while `CommitState.has_capacity` is false, towards its share."""
        if size > 0:
            share = self._shares[session] = self._shares.get(session, 0) + size
            self._shared_bytes += size
            if share >= SHARE_BYTES:
                self._without_share[session] = self._commit_state.batch.number + BATCHES_WITHOUT_SHARE

    def wait(self, session: ConnectionState, *, needs_disk: bool = False) -> None:
        """Resume the connection once its commands may be executed. With `needs_disk`, there must be disk space, too."""
        self._waiting[session] = needs_disk
        if self._timer is None:
            self._timer = self._loop.call_later(CAPACITY_CHECK_INTERVAL_S, self._check)

    def remove(self, session: ConnectionState) -> None:
        """Forget a connection that is not read any more."""
        self._waiting.pop(session, None)
        self.read_turns.remove(session)
        self._shares.pop(session, None)
        self._without_share.pop(session, None)

    def on_batch_closed(self) -> None:
        """Resume, after this pass, the waiting connections that have a share of the new batch. Connections without a
        share wait until the closed batch is durable, because the disk is quicker if nothing is read meanwhile."""
        if self._waiting:
            self._loop.call_soon(self._resume_with_share)

    def resume_waiting(self) -> None:
        """Resume the connections that may be read, in the order in which they began to wait."""
        if not self._waiting:
            return
        has_disk_space = not self._must_producers_wait()
        for session in [one for one, needs_disk in self._waiting.items() if has_disk_space or not needs_disk]:
            self._resume_one(session)

    def find_stalled_sender(self) -> ConnectionState | None:
        """Return a connection that sends a large frame too slowly while others wait for the memory of this frame; None
        if there is none. Called once a second."""
        return self.incomplete_frames.find_stalled(self._waiting)

    def _check(self) -> None:
        """Resume the connections that may be read. Called at an interval, because the broker is not notified when disk
        space becomes free."""
        self._timer = None
        self.resume_waiting()
        if self._waiting:
            self._timer = self._loop.call_later(CAPACITY_CHECK_INTERVAL_S, self._check)

    def _resume_with_share(self) -> None:
        for session in [one for one, needs_disk in self._waiting.items() if not needs_disk and self._has_share(one)]:
            self._resume_one(session)

    def _has_share(self, session: ConnectionState) -> bool:
        return self._without_share.get(session, 0) <= self._commit_state.batch.number

    def _resume_one(self, session: ConnectionState) -> None:
        # A connection resumed before may have ended this one, or used up the capacity.
        if session in self._waiting and self.incomplete_frames.may_resume(session) and self.may_read(session):
            del self._waiting[session]
            self.incomplete_frames.resume(session)
            if self.read_turns.has_time(session):
                self._resume(session)
            else:
                self.read_turns.wait(session)

    def _resume_in_turn(self, session: ConnectionState) -> None:
        if self.may_read(session):
            self._resume(session)
        else:
            self.wait(session)

    # ---- Frames that are not complete ----

    def bytes_to_read(self, session: ConnectionState, size: int) -> int:
        """Return how many bytes may be read from a connection at once. The caller may skip this call if the connection
        has no large incomplete frame and `IncompleteFrames.is_full` is false.

        The connection has `size` bytes of an incomplete frame. If the result is 0, `Capacity` resumes the connection
        later.
        """
        frames = self.incomplete_frames
        if size >= INCOMPLETE_FRAME_BYTES and self._waits_for_disk(session):
            # Wait before the frame is complete: a complete frame that waits is not counted.
            frames.suspend(session)
            self.wait(session, needs_disk=True)
            return 0
        if not frames.is_full:
            return READ_BYTES
        count = frames.bytes_to_read(session, size)
        if not count:
            frames.wait(session)
            self.wait(session)
        return count

    def _waits_for_disk(self, session: ConnectionState) -> bool:
        """Return whether the next SEND of the connection would wait for disk space."""
        return (
            self._must_producers_wait()
            and self._engine.commands.sending.waits_with_send(session)
            and not session.stays_after_refusal
        )

    def _must_producers_wait(self) -> bool:
        return self._store.disk_level is not DiskLevel.PLENTY or self._commit_state.is_draining

    def note_incomplete_frame(self, session: ConnectionState, size: int, received: int) -> None:
        """Count an incomplete frame that has `size` bytes now, `received` of them new. `size` is 0 if the frame is
        complete or was dropped."""
        if self.incomplete_frames.update(session, size, received) and self.incomplete_frames.has_waiting:
            self._loop.call_soon(self.resume_waiting)
