"""Subscriptions that end with their connection and have messages on disk; finds the one that must end for space.

    memory is short        `add`      it gets a number, and the name of an ended queue; what leaves memory is transient
    somebody takes it      pages, as of any queue (reading.py)
    it ends                `remove`   the rest is removed like an ended durable subscription (subscription_cleanup.py)
    the broker ends        nothing    a crash drops transients; behind a clean stop a start finds an ended queue

So whatever becomes of the broker, nobody finds such a subscription. Its name contains a
sequence, so that no two are the same. Source: docs/decisions/0034-what-a-subscription-leaves-to-the-disk.md
"""

from __future__ import annotations

from collections.abc import Callable
from sys import maxsize
from typing import NamedTuple

from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.queue import Queue
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.numbers import QueueNumberAllocator
from truenext.model.destination import ENDED_PREFIX
from truenext.model.record import lane_key


class ConnectionProgress(NamedTuple):
    """What a connection has taken, acknowledged and refused so far, in numbers that change with it."""

    bytes_sent: int
    """By its socket."""
    consumer_progress: tuple[tuple[int, int], ...]
    """Of each of its consumers how many messages it holds, and when it got the last one."""


class SpilledSubscriptions:
    def __init__(self, commit_state: CommitState, numbers: QueueNumberAllocator) -> None:
        self._commit_state = commit_state
        self._numbers = numbers
        self._queues: dict[Queue, None] = {}
        """Subscriptions of which something is, or was, on disk."""
        self._progress: dict[ConnectionState, tuple[ConnectionProgress, int]] = {}
        """Of their connections, and since when that has not changed: microseconds by a clock that does not jump."""

    def add(self, queue: Queue) -> None:
        """Something of a subscription is about to leave memory."""
        number = self._numbers.allocate()
        # No name had this sequence before.
        sequence = self._commit_state.allocate_sequence()
        queue.stored_number = number
        for lane in queue.lanes:
            lane.key = lane_key(number, lane.rank)
        queue.is_known_to_store = True
        self._queues[queue] = None
        self._commit_state.batch.queues[number] = f"{ENDED_PREFIX}/{queue.destination.session},{sequence}"

    def remove(self, queue: Queue) -> bool:
        """A temporary queue goes. True if something of it may be on disk."""
        if queue not in self._queues:
            return False
        del self._queues[queue]
        return True

    def find_stalled_connection(
        self,
        sessions: dict[str, ConnectionState],
        bytes_sent: Callable[[ConnectionState], int],
        *,
        needs_space: bool,
    ) -> tuple[ConnectionState, str] | None:
        """To be called once a second or so: who has stood still for as long as the policy allows, and why it has to go:
        of all the one of which most is kept. None as long as nobody needs the room.
        """
        now_us = self._commit_state.now_us
        before, self._progress = self._progress, {}
        found: list[tuple[int, ConnectionState, Queue]] = []
        for queue in self._queues:
            session = sessions[queue.destination.session]
            if session not in self._progress:
                now = ConnectionProgress(
                    bytes_sent(session), tuple(map(_consumer_progress, session.consumers.values()))
                )
                known = before.get(session)
                self._progress[session] = known if known is not None and known[0] == now else (now, now_us)
            limit_ms = queue.policy.stalled_subscriber_ms
            waited_us = now_us - self._progress[session][1]
            size = queue.resident_bytes + queue.spilled_bytes
            if needs_space and size and limit_ms != maxsize and waited_us >= limit_ms * 1000:
                found.append((size, session, queue))
        if not found:
            return None
        _, session, queue = max(found, key=lambda each: each[0])
        return session, (
            f"took and acknowledged nothing for {queue.policy.stalled_subscriber_ms / 1000:g} seconds, and others need "
            f"the room of what waits for its subscription to {queue.destination.topic}: read and acknowledge what "
            "comes, or unsubscribe; see stalled_subscriber_ms"
        )


def _consumer_progress(consumer: BrokerConsumer) -> tuple[int, int]:
    return len(consumer.held), consumer.last_dispatch_number
