"""What did one queue know at each event, and was what it did then allowed by docs/contract.md?

The account goes through the events of one queue in order, once, and keeps only what is alive. It is plain Python and
knows no Spark; `sweep.py` feeds it. It is one file, as every event may change what each of the others is judged by.

A message that the account cannot be sure of (after a gap, or accepted before the history begins) is no evidence: it is
neither overtaken, nor lost, nor given twice. Nor is a consumer of which a gap has hidden something. A message of a
group is evidence for what happens to that group: whose the group was when it was overtaken by others is not known.
While it is being committed its equals behind it are none: for whoever could take it they are not ready.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import chain
from operator import itemgetter

from truenext.spark.audit.model import (
    END_REASONS,
    HAS_CAUSE,
    NEVER,
    NO_CONSUMER,
    NO_FLAGS,
    NO_MESSAGE,
    SELECTOR_WINDOW,
    STILL_WAITING,
    UNKNOWN_PRIORITY,
    UNLIMITED,
    AuditedConsumer,
    AuditedMessage,
    ConsumerFlags,
    EventCode,
    Finding,
    MessageState,
    RemovedMessages,
    ReturnReason,
    StartFlag,
)

POINTS_MAX = 1000
"""Depths kept per queue; when there are more, every other goes."""

# By themselves they are found faster; a sweep asks for them a few times per event.
WAITING, HELD, DOUBTFUL, UNCERTAIN, DELAYED, ENDED = MessageState

RECOVERED_STATES = (WAITING, ENDED)
"""What a start makes of what is surely there."""


class QueueAudit:
    def __init__(self, removed: RemovedMessages, stuck_limit: int) -> None:
        """`stuck_limit` in microseconds."""
        self.removed = removed
        self.stuck_limit = stuck_limit
        self.messages: dict[int, AuditedMessage] = {}
        self.expiring: dict[int, AuditedMessage] = {}
        """What was in a durable subscription of this name when that ended, and is not known to be removed: nobody gets
        it any more, but a start still finds it."""
        self.lanes: list[list[int]] = [[] for _ in range(10)]
        """By priority, a heap of the sequences that wait, visible or not; what left is dropped when it is the head."""
        self.group_lanes: dict[int, list[list[int]]] = {}
        """The same of each group; the lanes above are of what has none."""
        self.unlisted_committing: list[list[int]] = [[] for _ in range(10)]
        """By priority, a heap of the sequences of messages that are being committed and are not in `lanes`: those of
        groups, and those that were being committed when a gap came. What is not is dropped when it is the head."""
        self.higher_lanes: list[list[list[int]]] = [self.lanes[:priority:-1] for priority in range(10)]
        """The lanes that are served before, first one first."""
        self.committing: list[tuple[int, int]] = []
        """Heap of (visible_event, sequence)."""
        self.blocking: dict[int, tuple[int, int]] = {}
        """Delayed messages that hold back all behind them, by sequence: (9 - priority, sequence) of each."""
        self.group_blocking: dict[int, dict[int, tuple[int, int]]] = {}
        """The same of each group, which they hold back alone."""
        self.consumers: dict[int, AuditedConsumer] = {}
        self.knows_consumers = False
        """`consumers` are all there are: the run is known from its start on."""
        self.owner: AuditedConsumer | None = None
        """The exclusive consumer that has the queue: of those that are known the first."""
        self.knows_exclusive = False
        """No consumer is exclusive but those that are known. One that is not known is older than what is known, so once
        this is so it stays so."""
        self.is_paused = False
        """Nothing is to be dispatched."""
        self.free_consumers = 0
        """Consumers that hold less than their window, have not got all that they requested, and surely are kept from
        nothing by an exclusive one."""
        self.waiting = 0
        """Messages WAITING and visible."""
        self.held = 0
        self.arrivals = 0
        self.first_dispatches = 0
        """Messages dispatched at least once."""
        self.idle_message: AuditedMessage | None = None
        """The true next message since somebody could have taken it, and none has been dispatched."""
        self.idle_since = 0
        self.idle_event = 0
        self.expected: tuple[int, int] | None = None
        """After a start, until its `recovered`: messages surely there, and those of which that is not sure."""
        self.start_flags = 0
        self.start_event = 0
        self.findings: list[Finding] = []
        self.finished: list[AuditedMessage] = []
        """Messages that are gone, or that the history ends with."""
        self.depth_points: list[tuple[int, int, int, int]] = []
        """(event, at, waiting, held)"""
        self.tick = 0
        self.mask = 0

    def on_accepted(
        self,
        event: int,
        at: int,
        sequence: int,
        priority: int,
        is_persistent: bool,
        visible_event: int,
        visible_at: int,
        group: int = 0,
    ) -> None:
        self.arrivals += 1
        message = AuditedMessage(sequence, priority, is_persistent, visible_event, visible_at, self.arrivals)
        self.messages[sequence] = message
        if group:
            message.group = group
            self.add_waiting(message)
        else:
            heappush(self.lanes[priority], sequence)
        if visible_event <= event:
            self.waiting += 1
            if self.free_consumers and self.idle_message is None:
                self.start_idle_time(event, at)
            return
        if group:
            heappush(self.unlisted_committing[priority], sequence)
        if visible_event != NEVER:
            heappush(self.committing, (visible_event, sequence))

    def add_waiting(self, message: AuditedMessage) -> None:
        """It waits."""
        lanes = self.lanes
        if message.group:
            lanes = self.group_lanes.setdefault(message.group, [[] for _ in range(10)])
        heappush(lanes[message.priority], message.sequence)

    def clear_delay(self, sequence: int) -> None:
        """For its next try."""
        self.blocking.pop(sequence, None)
        message = self.messages.get(sequence)
        if message is not None and message.group:
            self.group_blocking.get(message.group, {}).pop(sequence, None)

    def become_visible(self, event: int) -> None:
        """What was committed up to `event` counts as waiting."""
        committing = self.committing
        while committing and committing[0][0] <= event:
            visible_event, sequence = heappop(committing)
            message = self.messages.get(sequence)
            if message is not None and message.state is WAITING and message.visible_event == visible_event:
                self.waiting += 1
                if self.free_consumers and self.idle_message is None:
                    self.start_idle_time(visible_event, message.visible_at)

    def head(self, lane: list[int]) -> AuditedMessage | None:
        while lane:
            message = self.messages.get(lane[0])
            if message is not None and message.state is WAITING:
                return message
            heappop(lane)
        return None

    def true_next(self, event: int) -> AuditedMessage | None:
        if self.is_paused:
            return None
        for lane in reversed(self.lanes):
            if lane:
                head = self.head(lane)
                # One that is still being committed holds back its lane, and no other.
                if head is not None and head.visible_event <= event:
                    return None if self.is_blocked(head) else head
        return None

    def waits_for_commit(self, message: AuditedMessage, event: int) -> bool:
        """An earlier message of its priority is, or may be, being committed, and is in no lane that would show that."""
        committing = self.unlisted_committing[message.priority]
        while committing:
            first = self.messages.get(committing[0])
            if first is not None and first.state in (WAITING, DOUBTFUL) and first.visible_event > event:
                return first.sequence < message.sequence
            heappop(committing)
        return False

    def is_blocked(self, message: AuditedMessage) -> bool:
        """A failed message that is not due yet keeps it from being ready."""
        return bool(self.blocking) and min(self.blocking.values()) < (9 - message.priority, message.sequence)

    def on_dispatched(self, event: int, at: int, sequence: int, consumer: int) -> None:
        if self.idle_message is not None:
            self.end_idle_time(at)
        if self.is_paused:
            self.add_finding("premature", event, at, sequence, consumer, detail="paused")
        receiver = self.consumers.get(consumer)
        if receiver is not None:
            if not self.knows_exclusive and receiver.rank is None:
                self.knows_exclusive = True
                self.choose_owner()
            owner = self.owner
            if (
                receiver.requested <= 0
                or receiver.unstarted >= receiver.limit
                or (owner is not None and owner is not receiver)
            ):
                self.judge_credit(event, at, sequence, consumer, receiver)
            receiver.requested -= 1
            if not receiver.requested:
                self.update_is_free(receiver)
        elif self.knows_consumers:
            self.add_finding("stale", event, at, sequence, consumer, detail="dispatched to a consumer that had ended")
        message = self.messages.get(sequence)
        if message is None:
            code = self.removed.get(sequence)
            if code:
                self.add_finding("duplicate", event, at, sequence, consumer, detail=END_REASONS[EventCode(code)])
                self.update_idle_time(event, at)
                return
            message = AuditedMessage(sequence, UNKNOWN_PRIORITY, False, 0, at, 0, DOUBTFUL, has_known_attempts=False)
            self.messages[sequence] = message
        elif message.priority >= 0 and (receiver is None or receiver.window != SELECTOR_WINDOW):
            self.judge_dispatch(event, at, message, consumer)
        if message.state is HELD:
            self.add_finding("duplicate", event, at, message, consumer, detail=f"held by consumer {message.consumer}")
            self.end_hold(message)
        elif message.state is WAITING:
            if message.visible_event <= event:
                self.waiting -= 1
            else:
                self.add_finding("premature", event, at, message, consumer)
        elif message.state is DELAYED:
            self.clear_delay(sequence)
            self.add_finding("premature", event, at, message, consumer, detail="not due yet")
        message.state = HELD
        message.consumer = consumer
        message.receiver = receiver
        message.is_started = False
        message.dispatched_at = at
        message.deliveries += 1
        self.held += 1
        if message.delivery == 0 and message.priority >= 0:
            self.first_dispatches += 1
            message.delivery = self.first_dispatches
            message.wait = at - message.visible_at if message.visible_event <= event else 0
        if receiver is not None:
            receiver.held += 1
            receiver.unstarted += 1
            if receiver.held == receiver.window:
                self.update_is_free(receiver)
        if self.free_consumers and self.waiting:
            self.start_idle_time(event, at)

    def update_is_free(self, consumer: AuditedConsumer) -> None:
        """Can it take a message?"""
        is_free = (
            consumer.held < consumer.window
            and consumer.requested > 0
            and self.knows_exclusive
            and (self.owner is None or self.owner is consumer)
        )
        if is_free != consumer.is_free:
            consumer.is_free = is_free
            self.free_consumers += 1 if is_free else -1

    def choose_owner(self) -> None:
        exclusive = [(consumer.rank, consumer) for consumer in self.consumers.values() if consumer.rank is not None]
        self.owner = min(exclusive, key=itemgetter(0))[1] if exclusive else None
        for consumer in self.consumers.values():
            self.update_is_free(consumer)

    def judge_credit(self, event: int, at: int, sequence: int, consumer: int, receiver: AuditedConsumer) -> None:
        """It has none, or another has the queue, and it gets a message."""
        owner = self.owner
        if owner is not None and owner is not receiver and owner.rank is not None:
            detail = f"although consumer {owner.rank[1]} is exclusive"
        elif receiver.requested <= 0:
            detail = "more than it had requested"
        elif receiver.limit <= 0:
            detail = "while it was suspended"
        else:
            detail = f"beyond its window of {receiver.limit}"
        self.add_finding("uncredited", event, at, sequence, consumer, detail=detail)

    def judge_dispatch(self, event: int, at: int, message: AuditedMessage, consumer: int) -> None:
        """Was it the true next message?"""
        priority = message.priority
        if self.is_blocked(message):
            rank, sequence = min(self.blocking.values())
            kind = "order" if rank == 9 - priority else "inversion"
            self.add_finding(kind, event, at, message, consumer, overtaken=self.messages[sequence])
            return
        for lane in self.higher_lanes[priority]:
            if lane:
                head = self.head(lane)
                if head is not None and head.visible_event <= event and not self.waits_for_commit(head, event):
                    self.add_finding("inversion", event, at, message, consumer, overtaken=head)
                    return
        lane = self.lanes[priority]
        if message.state is WAITING and lane and lane[0] == message.sequence:
            heappop(lane)
            return
        head = self.head(lane)
        if head is not None and head.sequence < message.sequence:
            # Ready or still being committed: neither may be overtaken by its equal.
            self.add_finding("order", event, at, message, consumer, overtaken=head)
        elif message.group:
            self.judge_group_dispatch(event, at, message, consumer)

    def judge_group_dispatch(self, event: int, at: int, message: AuditedMessage, consumer: int) -> None:
        """Was it the next of its group?"""
        priority = message.priority
        first = min(self.group_blocking.get(message.group, {}).values(), default=(10, 0))
        if first < (9 - priority, message.sequence):
            kind = "order" if first[0] == 9 - priority else "inversion"
            self.add_finding(kind, event, at, message, consumer, overtaken=self.messages[first[1]])
            return
        lanes = self.group_lanes.get(message.group, [])
        for lane, plain in zip(lanes[:priority:-1], self.higher_lanes[priority], strict=bool(lanes)):
            head = self.head(lane)
            if head is not None and head.visible_event <= event and not self.waits_for_commit(head, event):
                equal = self.head(plain)
                # One of no group that is being committed holds it back; were it visible, it had been overtaken itself.
                if equal is None or equal.sequence > head.sequence:
                    self.add_finding("inversion", event, at, message, consumer, overtaken=head)
                    return
        head = self.head(lanes[priority]) if lanes else None
        if head is not None and head.sequence < message.sequence:
            self.add_finding("order", event, at, message, consumer, overtaken=head)

    def add_finding(
        self,
        kind: str,
        event: int,
        at: int,
        subject: AuditedMessage | int,
        consumer: int = NO_CONSUMER,
        *,
        overtaken: AuditedMessage | None = None,
        count: int = 1,
        duration: int = 0,
        detail: str = "",
    ) -> Finding:
        """`subject` is a message, or its sequence where nothing else is known of it; the others are as in Finding."""
        if isinstance(subject, int):
            finding = Finding(kind, event, at, subject)
        else:
            finding = Finding(kind, event, at, subject.sequence, subject.priority, subject.is_persistent)
        finding.consumer = consumer
        if overtaken is not None:
            finding.overtaken_sequence, finding.overtaken_priority = overtaken.sequence, overtaken.priority
        finding.count, finding.duration, finding.detail = count, duration, detail
        self.findings.append(finding)
        return finding

    def end_hold(self, message: AuditedMessage) -> None:
        """Its consumer holds it no longer."""
        self.held -= 1
        holder = message.receiver
        if holder is not None and not holder.has_ended:
            holder.held -= 1
            if not message.is_started:
                holder.unstarted -= 1
            if not holder.is_free:
                self.update_is_free(holder)

    def on_started(self, event: int, at: int, sequence: int, consumer: int) -> None:
        """The client says so, or has acknowledged or nacked it inside a transaction."""
        message = self.messages.get(sequence)
        if message is not None and message.state is HELD and message.consumer == consumer:
            if message.is_started:
                # Also after its subscription: what a transaction has acknowledged it may still nack.
                return
            message.is_started = True
            receiver = message.receiver
            if receiver is not None:
                receiver.unstarted -= 1
                if receiver.has_ended:
                    self.add_finding(
                        "stale", event, at, message, consumer, detail="started by a consumer that had ended"
                    )
        elif self.knows_consumers and consumer not in self.consumers:
            self.add_finding("stale", event, at, sequence, consumer, detail="started by a consumer that had ended")
        elif message is None:
            code = self.removed.get(sequence)
            if code:
                self.add_finding(
                    "stale", event, at, sequence, consumer, detail=f"started although {END_REASONS[EventCode(code)]}"
                )
        elif message.state is HELD or message.state is WAITING or message.state is DELAYED:
            self.add_finding("stale", event, at, message, consumer, detail="started although it did not hold it")

    def judge_return(self, event: int, at: int, message: AuditedMessage, attempts: int, reason: int) -> None:
        """Does it count an attempt rightly?"""
        if reason & HAS_CAUSE:
            message.has_cause = True
            reason -= HAS_CAUSE
        if attempts < message.attempts:
            # Written in one batch with the event that says so: no crash leaves the event without the attempt.
            self.add_finding("lost-failure", event, at, message, message.consumer, detail="an attempt had been counted")
        if reason == ReturnReason.RELEASED:
            if message.has_known_attempts and attempts > message.attempts:
                self.add_finding("miscount", event, at, message, message.consumer, detail="released")
        elif reason == ReturnReason.STARTED and message.state is HELD and not message.is_started:
            receiver = message.receiver
            if receiver is not None and receiver.counts_started:
                self.add_finding("miscount", event, at, message, message.consumer, detail="not started")
        message.attempts = attempts
        message.has_known_attempts = True

    def end_message(self, event: int, at: int, sequence: int, code: EventCode, *, has_cause: bool = False) -> None:
        """ACKNOWLEDGED, EXPIRED, DEAD_LETTERED, MOVED or REMOVED; `has_cause` of a dead letter."""
        self.clear_delay(sequence)
        message = self.messages.pop(sequence, None)
        if message is None:
            self.end_after_queue_ended(event, at, sequence, code)
            return
        self.removed.add(sequence, code)
        if code == EventCode.DEAD_LETTERED and message.has_cause and not has_cause:
            self.add_finding("lost-failure", event, at, message, detail="a consumer had said why it failed")
        if message.state is HELD:
            self.end_hold(message)
            if code == EventCode.ACKNOWLEDGED:
                message.hold = at - message.dispatched_at
                receiver = message.receiver
                # What a transaction has of it, and may acknowledge after that, counts as started.
                if receiver is not None and receiver.has_ended and receiver.counts_started and not message.is_started:
                    detail = "acknowledged by a consumer that had ended"
                    self.add_finding("stale", event, at, message, message.consumer, detail=detail)
        elif message.state is WAITING or message.state is DELAYED:
            if message.state is WAITING and message.visible_event <= event:
                self.waiting -= 1
            if code == EventCode.ACKNOWLEDGED:
                self.add_finding("stale", event, at, message, detail="acknowledged although nobody held it")
        if message.priority >= 0:
            message.end_reason = END_REASONS[code]
            self.finished.append(message)
        self.update_idle_time(event, at)

    def end_after_queue_ended(self, event: int, at: int, sequence: int, code: EventCode) -> None:
        """What became of a message that is in the queue no more, if ever it was."""
        if code != EventCode.EXPIRED and self.removed.get(sequence) == EventCode.ENDED:
            self.add_finding(
                "duplicate", event, at, sequence, detail=f"{END_REASONS[code]} although {END_REASONS[EventCode.ENDED]}"
            )
        self.removed.add(sequence, code)
        message = self.expiring.pop(sequence, None)
        if message is not None:
            self.finish_message(message, at, END_REASONS[code])

    def on_queue_ended(self, event: int, at: int) -> None:
        """Its durable subscription has: what follows in this queue is of a new one of the same name, but that what was
        in the old one expires."""
        self.end_idle_time(at)
        for message in self.messages.values():
            self.removed.add(message.sequence, EventCode.ENDED)
            if message.state is HELD:
                self.end_hold(message)
            if message.state in (WAITING, HELD, DELAYED):
                message.state = ENDED
        self.expiring |= self.messages
        self.messages.clear()
        self.clear_lanes()

    def on_delayed(
        self, event: int, at: int, sequence: int, attempts: int, reason: int = ReturnReason.OTHER, *, is_blocking: bool
    ) -> None:
        """A message waits for its next try: it has just failed, or a page of the store has shown it."""
        # By another policy than it did before.
        self.clear_delay(sequence)
        message = self.messages.get(sequence)
        if message is None:
            return
        self.judge_return(event, at, message, attempts, reason)
        if message.state is HELD:
            self.end_hold(message)
        elif message.state is WAITING and message.visible_event <= event:
            self.waiting -= 1
        if message.priority < 0:
            message.state = DOUBTFUL
        else:
            message.state = DELAYED
            if message.group:
                self.group_blocking.setdefault(message.group, {})[sequence] = (9 - message.priority, sequence)
            elif is_blocking:
                self.blocking[sequence] = (9 - message.priority, sequence)
        self.update_idle_time(event, at)

    def on_returned(self, event: int, at: int, sequence: int, attempts: int, reason: int = ReturnReason.OTHER) -> None:
        self.clear_delay(sequence)
        message = self.messages.get(sequence)
        if message is None:
            return
        self.judge_return(event, at, message, attempts, reason)
        if message.state is HELD:
            self.end_hold(message)
        elif message.state is WAITING:
            return
        if message.priority < 0:
            message.state = DOUBTFUL
        else:
            message.state = WAITING
            self.add_waiting(message)
            self.waiting += 1
            if message.visible_event > event:
                # A consumer had it, so it was visible: a gap hides the commit.
                message.visible_event, message.visible_at = event, at
        self.update_idle_time(event, at)

    def on_subscribed(
        self, event: int, at: int, consumer: int, window: int, flags: ConsumerFlags = NO_FLAGS, priority: int = 0
    ) -> None:
        """`priority` is the consumer's, if it is exclusive."""
        subscriber = self.consumers[consumer] = AuditedConsumer(window, flags)
        if flags & ConsumerFlags.PULLS and window != SELECTOR_WINDOW:
            # Of one with a selector it is not known whether it is told what it requests: it may be one of a pattern.
            subscriber.requested = 0
        if subscriber.has_exact_window:
            subscriber.limit = window
        if flags & ConsumerFlags.EXCLUSIVE:
            subscriber.rank = (-priority, consumer)
            self.choose_owner()
        self.update_is_free(subscriber)
        self.update_idle_time(event, at)

    def on_window_changed(self, event: int, at: int, consumer: int, window: int) -> None:
        known = self.consumers.get(consumer)
        if known is None:
            return
        if known.window != SELECTOR_WINDOW:
            known.window = window
        known.limit = window if known.has_exact_window or not window else UNLIMITED
        self.update_is_free(known)
        self.update_idle_time(event, at)

    def on_requested(self, event: int, at: int, consumer: int, count: int) -> None:
        known = self.consumers.get(consumer)
        if known is not None:
            known.requested = count
            self.update_is_free(known)
            self.update_idle_time(event, at)

    def on_unsubscribed(self, event: int, at: int, consumer: int) -> None:
        subscriber = self.consumers.pop(consumer, None)
        if subscriber is not None:
            subscriber.has_ended = True
            self.free_consumers -= subscriber.is_free
            if subscriber is self.owner:
                self.choose_owner()
        self.update_idle_time(event, at)

    def on_paused(self, event: int, at: int, *, is_paused: bool) -> None:
        self.is_paused = is_paused
        self.update_idle_time(event, at)

    def start_idle_time(self, event: int, at: int) -> None:
        """Begin to count idle time if somebody could take a message."""
        if self.free_consumers and self.waiting:
            self.idle_message = self.true_next(event)
            self.idle_since = at
            self.idle_event = event

    def update_idle_time(self, event: int, at: int) -> None:
        if self.idle_message is None:
            self.start_idle_time(event, at)
        elif not (self.free_consumers and self.waiting and self.true_next(event)):
            self.end_idle_time(at)

    def end_idle_time(self, at: int) -> None:
        message, self.idle_message = self.idle_message, None
        if message is not None and at - self.idle_since > self.stuck_limit:
            duration = at - self.idle_since
            self.add_finding("stuck", self.idle_event, self.idle_since, message, count=self.waiting, duration=duration)

    def on_drained(self, event: int, at: int) -> None:
        if not self.waiting:
            return
        lost = [each for each in self.messages.values() if each.state is WAITING and each.visible_event <= event]
        for is_persistent in (True, False):
            some = [each for each in lost if each.is_persistent is is_persistent]
            if some:
                first = min(some, key=lambda each: (9 - each.priority, each.sequence))
                self.add_finding("lost", event, at, first, count=len(some), detail="found empty")
        for each in lost:
            each.state = UNCERTAIN
        self.waiting = 0
        self.update_idle_time(event, at)

    def on_gap(self, event: int) -> None:
        """Whatever is known may have changed unseen."""
        self.idle_message = None
        self.expected = None
        for message in chain(self.messages.values(), self.expiring.values()):
            message.has_known_attempts = False
            if message.state is not UNCERTAIN:
                if message.visible_event > event:
                    heappush(self.unlisted_committing[message.priority], message.sequence)
                message.state = DOUBTFUL
        self.clear_dispatch_state()

    def clear_dispatch_state(self) -> None:
        self.clear_lanes()
        self.consumers.clear()
        self.owner = None
        self.knows_consumers = self.knows_exclusive = False
        self.is_paused = False
        self.free_consumers = 0

    def clear_lanes(self) -> None:
        """Nothing waits, and nothing is held."""
        for lane in self.lanes:
            lane.clear()
        self.group_lanes.clear()
        self.committing.clear()
        self.blocking.clear()
        self.group_blocking.clear()
        self.waiting = self.held = 0

    def on_run_started(self, event: int, at: int, flags: int, previous_at: int) -> None:
        self.resolve_recovered(at)
        self.end_idle_time(previous_at)
        self.clear_dispatch_state()
        self.knows_consumers = self.knows_exclusive = True
        self.start_flags = flags
        self.start_event = event
        if not flags & StartFlag.CONTINUED:
            # A run is missing: nothing is known of what it did.
            for message in chain(self.messages.values(), self.expiring.values()):
                self.finish_message(message, at, "unknown")
            self.messages.clear()
            self.expiring.clear()
            return
        certain, uncertain = self.recover_messages(self.messages, WAITING, event, at)
        self.waiting = certain
        for message in self.messages.values():
            if message.state is WAITING:
                self.add_waiting(message)
        certain_expiring, uncertain_expiring = self.recover_messages(self.expiring, ENDED, event, at)
        self.expected = (certain + certain_expiring, uncertain + uncertain_expiring)

    def recover_messages(
        self, messages: dict[int, AuditedMessage], state: MessageState, event: int, at: int
    ) -> tuple[int, int]:
        """After a start, what is surely there gets this state. Returns how many these are, and how many more may be."""
        certain = uncertain = 0
        for message in list(messages.values()):
            if message.priority < 0:
                message.state = DOUBTFUL
                uncertain += 1
            elif not message.is_persistent and not self.start_flags & StartFlag.CLEAN:
                del messages[message.sequence]
                self.removed.add(message.sequence, EventCode.RUN_STARTED)
                self.finish_message(message, at, END_REASONS[EventCode.RUN_STARTED])
            elif message.state is UNCERTAIN or message.visible_event > event:
                message.state = UNCERTAIN
                uncertain += 1
            elif message.state is DOUBTFUL and not message.is_persistent:
                uncertain += 1
            else:
                message.state = state
                certain += 1
        return certain, uncertain

    def on_recovered(self, event: int, at: int, count: int) -> None:
        if self.expected is None:
            return
        certain, uncertain = self.expected
        self.expected = None
        if count < certain:
            missing = [
                each for each in chain(self.messages.values(), self.expiring.values()) if each.state in RECOVERED_STATES
            ]
            first = min(
                (each for each in missing if each.visible_event <= event),
                key=lambda each: (9 - each.priority, each.sequence),
            )
            finding = self.add_finding("lost", event, at, first, count=certain - count, detail="not recovered")
            # Which of them it was, nobody can say; this is the first that may be.
            finding.persistent = None
            for message in missing:
                message.state = UNCERTAIN
            self.waiting = 0
        elif count > certain + uncertain and self.start_flags & StartFlag.COMPLETE:
            self.add_finding("resurrected", event, at, NO_MESSAGE, count=count - certain - uncertain)

    def resolve_recovered(self, at: int) -> None:
        """A queue of which the start said nothing had no messages."""
        if self.expected is not None and self.start_flags & StartFlag.RECOVERED:
            self.on_recovered(self.start_event, at, 0)
        self.expected = None

    def finish(self, event: int, at: int) -> None:
        """The history ends here."""
        self.resolve_recovered(at)
        self.end_idle_time(at)
        for message in self.messages.values():
            self.finish_message(message, at, "held" if message.state is HELD else STILL_WAITING)
        for message in self.expiring.values():
            self.finish_message(message, at, END_REASONS[EventCode.ENDED])
        self.depth_points.append((event, at, self.waiting, self.held))

    def finish_message(self, message: AuditedMessage, at: int, end_reason: str) -> None:
        if message.priority >= 0:
            message.end_reason = end_reason
            if message.wait is None and message.state is WAITING and message.visible_event != NEVER:
                message.wait = at - message.visible_at
            self.finished.append(message)

    def mark_depth(self, event: int, at: int) -> None:
        """For each event whose `tick` has none of the bits of `mask`."""
        self.depth_points.append((event, at, self.waiting, self.held))
        if len(self.depth_points) > POINTS_MAX:
            del self.depth_points[::2]
            self.mask = self.mask * 2 + 1
