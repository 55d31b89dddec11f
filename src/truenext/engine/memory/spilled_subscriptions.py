"""Topic subscriptions that end with their connection and have messages on disk; and the choice of a stalled connection
to close.

    memory is short             `add` gives the queue a number and the name of an ended queue; its evicted messages are
                                stored as transient
    messages are consumed       pages are read as for any queue (reading.py)
    the subscription ends       `remove`; queues/subscription_cleanup.py then removes the messages on disk
    the broker ends             a crash drops transient messages; after a clean stop, the next start finds an ended
                                queue and removes its messages

So such a subscription is never restored, whether the broker stops or crashes. Each name contains a sequence, so no two
names are equal. Source: docs/decisions/0025-topics.md
"""

from __future__ import annotations

from collections.abc import Callable
from sys import maxsize
from typing import NamedTuple

from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.queue import Queue
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.numbers import QueueNumberAllocator
from truenext.model.destination import ENDED_PREFIX
from truenext.model.record import lane_key


class ConnectionProgress(NamedTuple):
    """Counters that change whenever a connection takes or settles a message."""

    bytes_sent: int
    """Bytes that the connection's socket has taken."""
    consumer_progress: tuple[tuple[int, int], ...]
    """For each consumer: number of messages held, and last dispatch number."""


class SpilledSubscriptions:
    def __init__(self, commit_state: CommitState, numbers: QueueNumberAllocator) -> None:
        self._commit_state = commit_state
        self._numbers = numbers
        self._queues: dict[Queue, None] = {}
        """Queues of subscriptions that have, or had, messages on disk."""
        self._progress: dict[ConnectionState, tuple[ConnectionProgress, int]] = {}
        """For each connection of `_queues`: its progress, and the time of the last change, in microseconds of the
        monotonic clock."""

    def add(self, queue: Queue) -> None:
        """Prepare the queue of a subscription for its first evicted messages: give it a number and a name in the
        store."""
        number = self._numbers.allocate()
        # No earlier name contains this sequence.
        sequence = self._commit_state.allocate_sequence()
        queue.stored_number = number
        for lane in queue.lanes:
            lane.key = lane_key(number, lane.rank)
        queue.is_known_to_store = True
        self._queues[queue] = None
        self._commit_state.batch.queues[number] = f"{ENDED_PREFIX}/{queue.destination.session},{sequence}"

    def remove(self, queue: Queue) -> bool:
        """Forget a temporary queue that has ended. Returns whether it may have messages on disk."""
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
        """Return a connection that must be closed to make space, with the reason. None if there is no such connection,
        or no space is needed. The connection has made no progress for `stalled_subscriber_ms` of its topic's policy. If
        there are several, the connection whose subscription has the most bytes is returned. Called about once a second.
        """
        now_us = self._commit_state.now_us
        before, self._progress = self._progress, {}
        found: list[tuple[int, ConnectionState, Queue]] = []
        for queue in self._queues:
            session = sessions[queue.destination.session]
            if session not in self._progress:
                of_consumers = tuple((len(each.held), each.last_dispatch_number) for each in session.consumers.values())
                now = ConnectionProgress(bytes_sent(session), of_consumers)
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
            f"the client read and acknowledged nothing for {queue.policy.stalled_subscriber_ms / 1000:g} s "
            f"(stalled_subscriber_ms), and others need the space of its subscription to {queue.destination.topic}: "
            "read and acknowledge the messages, or unsubscribe"
        )
