"""Tests that incomplete frames stay within their share of memory, and that every connection gets its turn."""

from __future__ import annotations

from collections import deque
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from truenext.broker.incomplete_frames import IncompleteFrames
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.model.limits import (
    INCOMPLETE_FRAME_BYTES,
    INCOMPLETE_FRAME_PROGRESS_BYTES,
    INCOMPLETE_FRAME_SECONDS,
    READ_BYTES,
)

SHARE = 1024 * 1024
FRAME_MAX = 2 * SHARE
"""Size of the largest frame; the real one would only make the tests slower."""
SMALL, LARGE = INCOMPLETE_FRAME_BYTES - 1, INCOMPLETE_FRAME_BYTES


class Sender:
    """A connection of which only numbers of bytes are known, read as a ServerConnection reads its socket."""

    def __init__(self, room: Room, frames: list[int]) -> None:
        self.session = cast(ConnectionState, object())
        self._room = room
        self._frames = deque(frames)
        self.arrived = 0
        """Bytes in its socket."""
        self.unsent = sum(frames)
        self.pending = 0
        """Bytes of a frame that is not complete."""
        self.is_paused = False
        self.is_suspended = False
        """True while the sender waits for the disk."""
        self.is_ended = False

    @property
    def is_done(self) -> bool:
        return not self._frames

    def send(self, size: int) -> None:
        size = min(size, self.unsent)
        self.unsent -= size
        self.arrived += size

    def read(self) -> bool:
        """False if there is nothing to read, or it may not be read."""
        if self.is_ended or self.is_suspended or self.is_paused or not self.arrived:
            return False
        size = READ_BYTES
        if self._room.frames.is_full:
            size = min(size, self._room.frames.bytes_to_read(self.session, self.pending))
        if not size:
            self._room.frames.wait(self.session)
            self.is_paused = True
            return False
        received = min(size, self.arrived)
        self.arrived -= received
        was_large = self.pending >= LARGE
        self.pending += received
        while self._frames and self.pending >= self._frames[0]:
            self.pending -= self._frames.popleft()
        if was_large or self.pending >= LARGE:
            self._room.update(self, received)
        return True

    def end(self) -> None:
        self.is_ended = True
        self.pending = 0
        self._room.update(self, 0)


class Room:
    def __init__(self) -> None:
        self.memory = MemoryBudget(4 * SHARE)
        self.frames = IncompleteFrames(self.memory)
        self.senders: list[Sender] = []
        self._largest = 0
        """Bytes of the largest frame."""

    def connect(self, *frames: int) -> Sender:
        self.senders.append(Sender(self, list(frames)))
        self._largest = max(self._largest, *frames)
        return self.senders[-1]

    def update(self, sender: Sender, received: int) -> None:
        if self.frames.update(sender.session, sender.pending, received) and self.frames.has_waiting:
            self.resume()

    def paused(self) -> list[Sender]:
        return [sender for sender in self.senders if sender.is_paused]

    def resume(self) -> None:
        """Resume only senders for which the frames report room; no other event wakes them here."""
        for sender in self.senders:
            if sender.is_paused and self.frames.may_resume(sender.session):
                self.frames.resume(sender.session)
                sender.is_paused = False

    def read_all(self) -> None:
        """Read in turn until nothing more may be read."""
        while [sender for sender in self.senders if sender.read()]:
            self.check()

    def look(self, times: int = 1) -> Sender | None:
        """Search a stalled sender `times` times, once a second; return the last one found."""
        found = None
        for _ in range(times):
            unread = {each.session for each in self.senders if each.is_paused or each.is_suspended}
            found = self.frames.find_stalled(unread)
        return next((sender for sender in self.senders if sender.session is found), None)

    def check(self) -> None:
        counted = [sender.pending for sender in self.senders if sender.pending >= LARGE]
        assert self.memory.incomplete_bytes == sum(counted)
        # What each may have anyhow counts from its last byte on.
        assert sum(counted) <= SHARE + READ_BYTES + self._largest + len(counted) * LARGE


FRAMES = st.sampled_from([1, SMALL, LARGE, LARGE + 1, READ_BYTES, SHARE, FRAME_MAX])


@settings(deadline=None)
@given(st.data())
def test_incomplete_frames_of_honest_senders_stay_within_bounds_and_are_all_read(data: st.DataObject) -> None:
    # C24.11
    room = Room()
    for frames in data.draw(st.lists(st.lists(FRAMES, min_size=1, max_size=4), min_size=2, max_size=12)):
        room.connect(*frames)
    for _ in range(data.draw(st.integers(0, 40))):
        sender = data.draw(st.sampled_from(room.senders))
        sender.send(data.draw(st.sampled_from([1, LARGE, READ_BYTES, 4 * READ_BYTES, FRAME_MAX])))
        for _ in range(data.draw(st.sampled_from([1, 3, 200]))):
            sender.read()
            room.check()
    for sender in room.senders:
        sender.send(sender.unsent)
    room.read_all()
    assert all(sender.is_done for sender in room.senders)
    assert room.memory.incomplete_bytes == 0


@settings(deadline=None, max_examples=30)
@given(st.lists(st.booleans(), min_size=2, max_size=12))
def test_incomplete_frames_of_stalled_senders_are_given_up_until_all_others_are_read(are_stalled: list[bool]) -> None:
    room = Room()
    for is_stalled in are_stalled:
        sender = room.connect(FRAME_MAX)
        sender.send(FRAME_MAX - 1 if is_stalled else FRAME_MAX)
    seconds = 0
    room.read_all()
    while room.paused():
        seconds += 1
        stalled = room.look()
        if stalled is not None:
            stalled.end()
            room.read_all()
        assert seconds <= len(are_stalled) * (INCOMPLETE_FRAME_SECONDS + 1)
    for sender, is_stalled in zip(room.senders, are_stalled, strict=True):
        assert sender.is_done or is_stalled
        assert is_stalled or not sender.is_ended


def test_small_incomplete_frames_of_many_connections_stay_small_while_room_is_short() -> None:
    room = Room()
    first, *others = [room.connect(FRAME_MAX) for _ in range(200)]
    first.send(SHARE + 1)
    room.read_all()
    assert room.frames.is_full
    for sender in others:
        sender.send(READ_BYTES)
    room.read_all()
    assert all(sender.pending == LARGE and sender.is_paused for sender in others)


def test_frames_that_begin_behind_complete_ones_stay_small_while_room_is_short() -> None:
    room = Room()
    for _ in range(SHARE // LARGE + 1):
        room.connect(LARGE + 1, FRAME_MAX).send(LARGE)
    room.read_all()
    assert room.frames.is_full
    for sender in room.senders:
        sender.send(READ_BYTES)
    room.read_all()


def test_the_frame_behind_a_complete_one_has_its_turn_behind_the_others() -> None:
    """A sender of one large frame after the other does not keep other senders from being read."""
    room = Room()
    greedy, other = room.connect(*[FRAME_MAX] * 3), room.connect(FRAME_MAX)
    greedy.send(SHARE + READ_BYTES)
    room.read_all()
    other.send(FRAME_MAX)
    room.read_all()
    assert other.is_paused
    greedy.send(greedy.unsent)
    for _ in range(3 * FRAME_MAX // LARGE):
        if not other.is_done:
            greedy.read()
            other.read()
            room.check()
    assert other.is_done
    assert not greedy.is_done


def test_sender_of_next_to_nothing_is_not_stalled_while_no_connection_waits() -> None:
    room = Room()
    alone = room.connect(FRAME_MAX)
    alone.send(SHARE + READ_BYTES)
    room.read_all()
    assert room.look(5 * INCOMPLETE_FRAME_SECONDS) is None


def test_a_sender_that_makes_progress_is_not_stalled_and_one_that_drips_is() -> None:
    # C24.12
    room = Room()
    first, other = room.connect(10 * INCOMPLETE_FRAME_PROGRESS_BYTES), room.connect(FRAME_MAX)
    first.send(SHARE + READ_BYTES)
    room.read_all()
    other.send(FRAME_MAX)
    room.read_all()
    for _ in range(5):
        assert room.look(INCOMPLETE_FRAME_SECONDS) is None
        first.send(INCOMPLETE_FRAME_PROGRESS_BYTES)
        room.read_all()
    for _ in range(INCOMPLETE_FRAME_SECONDS):
        assert room.look() is None
        first.send(1)
        room.read_all()
    assert room.look() is first


def test_a_sender_that_is_not_read_is_not_stalled_and_has_its_time_once_it_is() -> None:
    room = Room()
    first, other, last = [room.connect(FRAME_MAX) for _ in range(3)]
    first.send(SHARE + READ_BYTES)
    other.send(LARGE)
    last.send(LARGE)
    room.read_all()
    other.send(1)
    last.send(1)
    room.read_all()
    assert room.paused() == [other, last]
    assert room.look(INCOMPLETE_FRAME_SECONDS) is None
    assert room.look() is first
    first.end()
    room.read_all()
    assert room.paused() == []
    assert room.look(2 * INCOMPLETE_FRAME_SECONDS) is None


def test_a_sender_that_was_not_read_meanwhile_has_its_whole_time_again() -> None:
    room = Room()
    first, other = room.connect(FRAME_MAX), room.connect(FRAME_MAX)
    first.send(SHARE + READ_BYTES)
    room.read_all()
    other.send(FRAME_MAX)
    room.read_all()
    assert room.look(INCOMPLETE_FRAME_SECONDS) is None
    first.is_suspended = True
    assert room.look() is None
    first.is_suspended = False
    assert room.look(INCOMPLETE_FRAME_SECONDS) is None
    assert room.look() is first


def test_the_next_sender_is_read_on_while_the_first_waits_for_the_disk() -> None:
    room = Room()
    first, other = room.connect(FRAME_MAX), room.connect(FRAME_MAX)
    first.send(SHARE + READ_BYTES)
    room.read_all()
    other.send(FRAME_MAX)
    room.read_all()
    assert other.is_paused
    first.is_suspended = True
    room.frames.suspend(first.session)
    room.resume()
    room.read_all()
    assert other.is_done
    first.is_suspended = False
    room.frames.resume(first.session)
    first.send(first.unsent)
    room.read_all()
    assert first.is_done
