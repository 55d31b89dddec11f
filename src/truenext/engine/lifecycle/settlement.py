"""Settlement: counts attempts, and completes, requeues or dead-letters dispatched and expired messages.

acknowledged          completed
nacked, aborted       counts an attempt; requeued, due after a delay; dead-lettered after too many attempts
lost, closed          counts an attempt; requeued, due at once; dead-lettered after too many attempts
released              requeued, due at once
expired               dead-lettered, or removed

A message that would be dead-lettered goes to its next handler instead, if it has one. A dead letter may send a report.

One event may give up very many messages. Each turn dead-letters at most DEAD_LETTERS_PER_TURN of these; the others have
marks in the store, which say that they are given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

from truenext.engine.lifecycle.arrivals import Arrivals
from truenext.engine.lifecycle.redelivery import (
    EXHAUSTED,
    EXPIRED,
    REJECTED,
    FailedMessage,
    make_dead_letter,
    make_report,
    retry_delay_ms,
)
from truenext.engine.lifecycle.topic_reports import TopicReports
from truenext.engine.memory.delays import DelayedEntries
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.queues.queues import Queues
from truenext.engine.state.queue import (
    NEVER_STARTED,
    STARTED,
    UNSTARTED,
    Entry,
    Lane,
    Queue,
    RequeueReason,
    is_undeliverable,
)
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.entries import mark, remove
from truenext.model.batch import DUE_NEVER, NO_CAUSES, Causes
from truenext.model.commands import Nack
from truenext.model.failure_headers import REPORT_TO
from truenext.model.limits import DEAD_LETTERS_PER_TURN
from truenext.model.message import SentMessage
from truenext.model.policy import ExpiryAction

_RELEASED = RequeueReason.RELEASED
"""Copy of the enumeration's member, for speed: very many messages may be requeued at once."""
_REPORT_TO = REPORT_TO.encode()
"""Name of the header as bytes, to find it in header lines. No character of the name is escaped there."""


def by_queue(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries grouped by queue. Within a queue their order stays. Requeueing took a quarter more time when
    entries of several queues were mixed."""
    found: dict[Queue, list[Entry]] = {}
    for entry in entries:
        queue = entry.lane.queue
        if queue in found:
            found[queue].append(entry)
        else:
            found[queue] = [entry]
    return [entry for each in found.values() for entry in each]


class Settlement:
    def __init__(
        self,
        commit_state: CommitState,
        delays: DelayedEntries,
        resident: ResidentSet,
        queues: Queues,
        arrivals: Arrivals,
        topic_reports: TopicReports,
        random: Callable[[], float],
    ) -> None:
        """`random` returns random numbers from 0 to 1, for the jitter of delays."""
        self._commit_state = commit_state
        self._events = commit_state.events
        self._delays = delays
        self._resident = resident
        self._queues = queues
        self._arrivals = arrivals
        self._topic_reports = topic_reports
        self._random = random
        self._dead_letters_left = DEAD_LETTERS_PER_TURN
        """Number of given-up messages that this turn may still dead-letter."""

    # ---- Completion ----

    def acknowledge(self, entry: Entry) -> bool:
        """Acknowledge a message. Returns whether answers to the client must wait until its removal is durable."""
        self._events.acknowledged(entry)
        entry.lane.queue.counts.acknowledged += 1
        return self.complete(entry)

    def complete(self, entry: Entry) -> bool:
        """Complete an acknowledged, expired or moved message: free its memory and remove it from the store. Returns
        whether answers to the client must wait until the removal is durable."""
        self._resident.unload(entry)
        if entry.lane.selected is not None:
            self._resident.forget_selected(entry)
        if entry.store_batch is None:
            return False
        remove(self._commit_state.batch, entry)
        # A temporary queue does not survive the broker, however that ends.
        return entry.persistent or not entry.lane.queue.is_temporary

    # ---- Requeueing ----

    def fail(
        self, entry: Entry, reason: RequeueReason, nack: Nack | None = None, *, reports_started: bool = False
    ) -> None:
        """Requeue a nacked or aborted message, after the delay that the NACK names or else the queue's policy.

        `reports_started` is `BrokerConsumer.reports_started` of the consumer that held the message; False if a
        transaction had the message.
        """
        delay_ms = None
        cause = ""
        if nack is not None:
            cause = nack.cause
            if nack.is_rejected:
                entry.due_us = DUE_NEVER
            delay_ms = nack.delay_ms
        if delay_ms is None:
            policy = entry.lane.queue.policy
            # A shortcut for the usual case: one event may requeue very many.
            is_at_once = not (entry.attempts or policy.first_delay_ms)
            delay_ms = 0 if is_at_once else retry_delay_ms(policy, entry.attempts + 1, self._random)
        self.requeue(entry, reason, delay_ms=delay_ms, cause=cause, reports_started=reports_started)

    def requeue(
        self,
        entry: Entry,
        reason: RequeueReason,
        *,
        delay_ms: int = 0,
        cause: str = "",
        reports_started: bool = False,
    ) -> None:
        """Requeue a message, due after `delay_ms`, or dead-letter it. Every `reason` but RELEASED counts an attempt.

        `cause` is the cause that the consumer gave. `reports_started` is `BrokerConsumer.reports_started` of the
        consumer that held the message; False if a transaction had the message.
        """
        lane = entry.lane
        queue = lane.queue
        # Queues.exists, inlined for speed.
        if self._queues.by_name.get(queue.destination.name) is not queue:
            # A temporary queue that was removed with its connection.
            self._resident.unload(entry)
            return
        self._commit_state.return_count += 1
        has_failed = reason is not _RELEASED
        # True if there was no earlier dispatch, or none that a program can have received.
        was_fresh = entry.deliveries == 1 or entry.start_state is NEVER_STARTED
        is_unseen = reports_started and was_fresh and entry.start_state is not STARTED
        entry.start_state = NEVER_STARTED if is_unseen else UNSTARTED
        if has_failed:
            entry.attempts += 1
            entry.was_lost = reason is RequeueReason.LOST
            if cause:
                self._resident.add_cause(entry, cause)
            if entry.persistent:
                # A crash before the batch is durable forgets the attempt: do not let the batch gather for longer.
                self._commit_state.is_batch_awaited = True
        # Also for a dead letter: the group of a suspended consumer may be free now.
        self._commit_state.touched_queues[queue] = None
        # Also without a failure: the policy may have changed while the message was held.
        # The first condition of is_undeliverable, inlined for speed.
        may_be_dead = entry.attempts >= queue.policy.attempts_max or entry.due_us == DUE_NEVER
        if may_be_dead and is_undeliverable(queue, entry.attempts, entry.due_us):
            self._give_up(entry)
            return
        counts = queue.counts
        rare = counts.known_rare or counts.rare
        rare.returned += 1
        is_set_aside = False
        if has_failed:
            rare.failed_again += entry.attempts > 1
            entry.due_us = 0
            is_set_aside = delay_ms > 0 and self._delays.delay(entry, delay_ms)
            if entry.store_batch is not None:
                mark(self._commit_state.batch, entry, self._delays.due_ms(entry))
        if entry.due_us:
            self._events.delayed(entry, reason, is_blocking=not is_set_aside, cause=cause)
        else:
            self._events.returned(entry, reason, cause)
        if is_set_aside:
            lane.delay(entry)
        else:
            # _requeue, inlined for speed.
            lane.requeue(entry)
            if queue.observer is not None:
                queue.observer.on_requeued(entry)
        self._resident.on_requeued(entry)

    def end_delay(self, entry: Entry) -> None:
        """Note that the delay of a message has ended. Moves a message in `Lane.delayed` back to its position in the
        lane."""
        lane = entry.lane
        queue = lane.queue
        self._commit_state.return_count += 1
        if lane.delayed.get(entry.sequence) is entry:
            lane.end_delay(entry.sequence)
            self._requeue(entry)
            self._events.became_due(entry)
        elif entry.message is not None or lane.unloaded.get(entry.sequence) is entry:
            # It blocked its lane, and is still in its queue.
            self._events.became_due(entry)
        if self._queues.exists(queue):
            self._commit_state.touched_queues[queue] = None

    def _requeue(self, entry: Entry) -> None:
        lane = entry.lane
        lane.requeue(entry)
        if lane.queue.observer is not None:
            lane.queue.observer.on_requeued(entry)

    # ---- Dead letters and expiry ----

    def _give_up(self, entry: Entry, *, is_marked: bool = False) -> None:
        """Dead-letter a message that is in no lane and has failed too often: at once, or later if its body was evicted
        or this turn may dead-letter no more messages. Messages of one lane keep their order. `is_marked` is True if a
        batch has the last failure of the message already."""
        if entry.message is not None and self._dead_letters_left > 0 and not self._resident.given_up:
            self._dead_letters_left -= 1
            self.dead_letter(entry)
            return
        if entry.store_batch is not None and not is_marked:
            # If the broker ends before it dead-letters the message, the next run does so when it reads the message.
            mark(self._commit_state.batch, entry, self._delays.due_ms(entry))
        self._resident.await_dead_letter(entry)

    def begin_turn(self) -> None:
        """Reset the number of messages that may be dead-lettered, because a new turn begins."""
        self._dead_letters_left = DEAD_LETTERS_PER_TURN

    def dead_letter_given_up(self) -> None:
        """Dead-letter messages that were given up in earlier turns, as many as this turn may."""
        given_up = self._resident.given_up
        while given_up and self._dead_letters_left > 0:
            for entry in given_up.pop(self._dead_letters_left):
                self._dead_letters_left -= 1
                self.dead_letter(entry)

    def dead_letter(self, entry: Entry, reason: str = "") -> None:
        """Move a message that is in memory, but in no lane, to the dead-letter queue, or to its next handler."""
        message: SentMessage | None = entry.message
        assert message is not None, "it was read"
        origin = entry.lane.queue
        if not reason:
            reason = REJECTED if entry.due_us == DUE_NEVER else EXHAUSTED
        known = entry.causes
        failed = make_dead_letter(
            message,
            origin.name,
            origin.policy,
            attempts=entry.attempts,
            causes=NO_CAUSES if known is None else Causes(known.first, known.last),
            reason=reason,
            now_ms=self._commit_state.now_ms,
        )
        target = self._queues.ensure(failed.destination)
        if failed.is_handled:
            origin.counts.rare.handled += 1
            self._events.handled(entry, target, self._commit_state.next_sequence)
        else:
            origin.counts.rare.add_dead_letter(reason)
            self._events.dead_lettered(entry, target, self._commit_state.next_sequence)
        self.complete(entry)
        self._arrivals.accept(target, failed.message, self._commit_state.batch.number)
        if _REPORT_TO in message.header and not failed.is_handled:
            self._send_report(entry, failed)

    def _send_report(self, entry: Entry, failed: FailedMessage) -> None:
        """Send the report of a dead letter: to a queue in the batch of the dead letter, to a topic in a later step.
        `entry` is the message that has failed."""
        report = make_report(failed)
        if report is None:
            return
        destination, message = report
        if destination.is_multi_queue:
            self._events.reported(entry)
            self._topic_reports.add(destination, message)
        else:
            self._events.reported(entry, self._queues.ensure(destination), self._commit_state.next_sequence)
            self._arrivals.accept_with_batch(destination.name, "", message)

    def dead_letter_exhausted(self, lane: Lane) -> None:
        """Dead-letter those messages of a lane that are in memory and have failed too often by the queue's current
        policy."""
        failed = [entry for entry in lane if is_undeliverable(lane.queue, entry.attempts, entry.due_us)]
        if not failed:
            return
        failed.sort(key=attrgetter("sequence"))
        self._resident.remove_entries(lane, failed)
        for entry in failed:
            # The message's mark has its failures already, unless the message was stored only after these.
            self._give_up(entry, is_marked=entry.has_mark)

    def expire(self, entry: Entry) -> None:
        """Remove or dead-letter an expired message that is in no lane."""
        queue = entry.lane.queue
        if is_undeliverable(queue, entry.attempts, entry.due_us):
            # It had failed too often already, and only had to be read.
            self.dead_letter(entry)
            return
        if queue.policy.expired is ExpiryAction.DEAD_LETTER and not queue.keeps_failures:
            self.dead_letter(entry, EXPIRED)
            return
        queue.counts.rare.expired += 1
        self._events.expired(entry)
        self.complete(entry)
