"""Audit of one queue: follows the queue's state event by event, and checks each event against docs/contract.md.

The audit reads the events of one queue in order, once. It keeps only messages and consumers that still exist. It is
plain Python without Spark, and `sweep.py` calls it. The whole audit of a queue is in one file, because each event
changes how others are judged.

Some messages are not certain: after a gap, or if they were accepted before the history begins. An uncertain message is
no evidence: it is never reported as overtaken, lost or delivered twice. A consumer with events in a gap is no evidence
either. A message of a group is evidence only for dispatches of its group, because the history does not say which
consumer owned the group. While such a message is being committed, later messages of its priority are no evidence
either: they may not be ready for the consumer.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import chain
from operator import attrgetter, itemgetter

from truenext.spark.audit.cut import (
    COMMON_FIELDS,
    ConsumerRow,
    IdleEdges,
    IdleTime,
    MessageRow,
    QueueCut,
    QueueRow,
    depth_mask,
)
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
    ReturnReason,
    StartFlag,
)

# Module names are faster than members of an enum; a sweep reads them a few times per event.
WAITING, HELD, DOUBTFUL, UNCERTAIN, DELAYED, ENDED = MessageState

CARRIED = AuditedMessage(NO_MESSAGE, UNKNOWN_PRIORITY, False, 0, 0)
"""In place of the message of an idle time that began in an earlier section."""

RECOVERED_STATES = (WAITING, ENDED)
"""States of messages that are certainly there after a start."""


class QueueAudit:
    def __init__(self, stuck_limit: int) -> None:
        """Start with an empty queue. A longer idle time than `stuck_limit` microseconds is a finding."""
        self.stuck_limit = stuck_limit
        self.messages: dict[int, AuditedMessage] = {}
        self.expiring: dict[int, AuditedMessage] = {}
        """Messages of an earlier durable subscription with this name, which has ended. No consumer gets these messages
        any more, but a start of the broker may still find them."""
        self.lanes: list[list[int]] = [[] for _ in range(10)]
        """For each priority, a heap of the sequences of waiting messages, visible or not. Sequences of other messages
        are dropped when they become the head."""
        self.group_lanes: dict[int, list[list[int]]] = {}
        """Lanes of each group, by the group's hash. `lanes` has only messages without a group."""
        self.unlisted_committing: list[list[int]] = [[] for _ in range(10)]
        """Heaps, one for each priority, of the sequences of messages that are being committed and are not in `lanes`:
        messages of groups, and messages that were being committed when a gap came. Sequences of committed messages are
        dropped when they become the head."""
        self.higher_lanes: list[list[list[int]]] = [self.lanes[:priority:-1] for priority in range(10)]
        """For each priority, the lanes of all higher priorities, the highest first."""
        self.committing: list[tuple[int, int]] = []
        """Heap of messages that are being committed: (visible_event, sequence)."""
        self.blocking: dict[int, tuple[int, int]] = {}
        """Delayed messages that hold back all messages after them, by sequence: (9 - priority, sequence)."""
        self.group_blocking: dict[int, dict[int, tuple[int, int]]] = {}
        """Delayed messages that hold back only later messages of their group, by group."""
        self.consumers: dict[int, AuditedConsumer] = {}
        self.knows_consumers = False
        """True if `consumers` is complete, because the history has the run from its start on."""
        self.owner: AuditedConsumer | None = None
        """Exclusive consumer that owns the queue: of all known exclusive consumers, the one with the lowest rank."""
        self.knows_exclusive = False
        """True if no unknown consumer is exclusive. Unknown consumers are older than known ones, so only a gap makes
        this False."""
        self.is_paused = False
        self.free_consumers = 0
        """Number of consumers that can take a message: they hold less than their window, have requests left, and no
        exclusive consumer keeps messages from them."""
        self.waiting = 0
        """Number of messages that are in the state WAITING, and visible, untouched ones included."""
        self.untouched = 0
        """See `QueueCut.untouched`."""
        self.untouched_in_doubt = 0
        """Number of messages that were untouched until a start found too few: each may be lost."""
        self.held = 0
        self.arrivals = 0
        self.first_dispatches = 0
        """Number of messages that were dispatched at least once."""
        self.idle_message: AuditedMessage | None = None
        """Message that was the true next when the idle time started. None without an idle time, because no consumer is
        free or no message is ready."""
        self.idle_since = 0
        """NEVER once a finding has told that the idle time is too long."""
        self.idle_event = 0
        self.carried_end: tuple[int, int] | None = None
        """End of the idle time that began in an earlier section, see IdleEdges."""
        self.expected: tuple[int, int] | None = None
        """After a start, two numbers: of messages that are certainly there, and of messages that may be there. None
        once the event `recovered` has come."""
        self.start_flags = 0
        self.start_event = 0
        self.findings: list[Finding] = []
        self.finished: list[AuditedMessage] = []
        """Messages that have ended, or were left at the end of the history."""
        self.depth_points: list[tuple[int, int, int, int, int]] = []
        """Depths at some events: (number of the event among those of the queue, event, microseconds, number of waiting
        messages, number of held messages). The first number is 0 for the end of the history."""
        self.tick = 0
        """Number of the queue's events up to now."""
        self.mask = 0
        """See `depth_mask`."""

    def on_accepted(self, event: int, at: int, message: AuditedMessage) -> None:
        self.arrivals += 1
        message.arrival = self.arrivals
        sequence, priority, visible_event = message.sequence, message.priority, message.visible_event
        self.messages[sequence] = message
        if message.group:
            self.add_waiting(message)
        else:
            heappush(self.lanes[priority], sequence)
        if visible_event <= event:
            self.waiting += 1
            if self.free_consumers and self.idle_message is None:
                self.start_idle_time(event, at)
            return
        if message.group:
            heappush(self.unlisted_committing[priority], sequence)
        if visible_event != NEVER:
            heappush(self.committing, (visible_event, sequence))

    def add_waiting(self, message: AuditedMessage) -> None:
        """Add a waiting message to the lane of its priority, and of its group if it has one."""
        lanes = self.lanes
        if message.group:
            lanes = self.group_lanes.setdefault(message.group, [[] for _ in range(10)])
        heappush(lanes[message.priority], message.sequence)

    def clear_delay(self, sequence: int) -> None:
        """Record that a message no longer holds back other messages."""
        self.blocking.pop(sequence, None)
        message = self.messages.get(sequence)
        if message is not None and message.group:
            self.group_blocking.get(message.group, {}).pop(sequence, None)

    def become_visible(self, event: int) -> None:
        """Count the messages that were committed at the time of `event` as waiting."""
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
                # A message that is being committed holds back its own lane only.
                if head is not None and head.visible_event <= event:
                    return None if self.is_blocked(head) else head
        return None

    def waits_for_commit(self, message: AuditedMessage, event: int) -> bool:
        """Return whether an earlier message of the same priority is or may be in the process of being committed, and is
        not in `lanes`."""
        committing = self.unlisted_committing[message.priority]
        while committing:
            first = self.messages.get(committing[0])
            if first is not None and first.state in (WAITING, DOUBTFUL) and first.visible_event > event:
                return first.sequence < message.sequence
            heappop(committing)
        return False

    def is_blocked(self, message: AuditedMessage) -> bool:
        """Return whether `message` is not ready because a delayed message before it holds it back."""
        return bool(self.blocking) and min(self.blocking.values()) < (9 - message.priority, message.sequence)

    def on_dispatched(self, event: int, at: int, sequence: int, consumer: int, end_code: int = 0) -> None:
        """Record and judge a dispatch. `end_code` is the code of the event by which the message had ended before, or
        0."""
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
            if receiver.requested != UNLIMITED:
                receiver.requested -= 1
                if not receiver.requested:
                    self.update_is_free(receiver)
        elif self.knows_consumers:
            self.add_finding("stale", event, at, sequence, consumer, detail="dispatched to a consumer that had ended")
        message = self.messages.get(sequence)
        if message is None:
            if end_code:
                self.add_finding("duplicate", event, at, sequence, consumer, detail=END_REASONS[EventCode(end_code)])
                self.update_idle_time(event, at)
                return
            message = AuditedMessage(sequence, UNKNOWN_PRIORITY, False, 0, at, state=DOUBTFUL, has_known_attempts=False)
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
            # The clock of the broker that has taken over may be behind that of the former one.
            is_later = message.visible_event <= event and at > message.visible_at
            message.wait = at - message.visible_at if is_later else 0
        if receiver is not None:
            receiver.held += 1
            receiver.unstarted += 1
            if receiver.held == receiver.window:
                self.update_is_free(receiver)
        if self.free_consumers and self.waiting:
            self.start_idle_time(event, at)

    def update_is_free(self, consumer: AuditedConsumer) -> None:
        """Find out whether the consumer can take a message, and update `free_consumers`."""
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
        """Report a dispatch to a consumer that had no credit, or that was not the exclusive consumer."""
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
        """Report the dispatch if the message was not the true next."""
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
            # Ready or still being committed: a message of the same priority may overtake neither.
            self.add_finding("order", event, at, message, consumer, overtaken=head)
        elif message.group:
            self.judge_group_dispatch(event, at, message, consumer)

    def judge_group_dispatch(self, event: int, at: int, message: AuditedMessage, consumer: int) -> None:
        """Report the dispatch if the message was not the next one of its group."""
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
                # An earlier message without a group holds `head` back while it is being committed. Once visible, that
                # message itself was overtaken.
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
        detail: str = "",
    ) -> Finding:
        """Add a finding about `subject`: a message, or only its sequence. The other arguments become fields of the
        Finding."""
        if isinstance(subject, int):
            finding = Finding(kind, event, at, subject)
        else:
            finding = Finding(kind, event, at, subject.sequence, subject.priority, subject.is_persistent)
        finding.consumer = consumer
        if overtaken is not None:
            finding.overtaken_sequence, finding.overtaken_priority = overtaken.sequence, overtaken.priority
        finding.detail = detail
        self.findings.append(finding)
        return finding

    def end_hold(self, message: AuditedMessage) -> None:
        """Record that the consumer no longer holds the message."""
        self.held -= 1
        holder = message.receiver
        if holder is not None and not holder.has_ended:
            holder.held -= 1
            if not message.is_started:
                holder.unstarted -= 1
            if not holder.is_free:
                self.update_is_free(holder)

    def on_started(self, event: int, at: int, sequence: int, consumer: int, end_code: int = 0) -> None:
        """Record that the client has started a message. A message acknowledged or nacked inside a transaction counts as
        started, too. `end_code` is the code of the event by which the message had ended before, or 0."""
        message = self.messages.get(sequence)
        if message is not None and message.state is HELD and message.consumer == consumer:
            if message.is_started:
                # Allowed after its subscription has ended: a transaction may nack a message that it has acknowledged.
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
            if end_code:
                detail = f"started although {END_REASONS[EventCode(end_code)]}"
                self.add_finding("stale", event, at, sequence, consumer, detail=detail)
        elif message.state is HELD or message.state is WAITING or message.state is DELAYED:
            self.add_finding("stale", event, at, message, consumer, detail="started although it did not hold it")

    def judge_return(self, event: int, at: int, message: AuditedMessage, attempts: int, reason: int) -> None:
        """Report a return that counts an attempt although it must not, or that loses an attempt. Record the message's
        attempts and cause."""
        if reason & HAS_CAUSE:
            message.has_cause = True
            reason -= HAS_CAUSE
        if attempts < message.attempts:
            # The attempt is written in one batch with its event: no crash keeps the event and loses the attempt.
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

    def end_message(
        self, event: int, at: int, sequence: int, code: EventCode, end_code: int = 0, *, has_cause: bool = False
    ) -> None:
        """Record the end of a message by ACKNOWLEDGED, EXPIRED, DEAD_LETTERED, HANDLED, MOVED or REMOVED. `end_code` is
        the code of the event by which the message had ended before, or 0. `has_cause` says whether a dead letter or
        handled message has a cause."""
        self.clear_delay(sequence)
        message = self.messages.pop(sequence, None)
        if message is None:
            self.end_after_queue_ended(event, at, sequence, code, end_code)
            return
        if code in (EventCode.DEAD_LETTERED, EventCode.HANDLED) and message.has_cause and not has_cause:
            self.add_finding("lost-failure", event, at, message, detail="a consumer had named a cause")
        if message.state is HELD:
            self.end_hold(message)
            if code == EventCode.ACKNOWLEDGED:
                message.hold = at - message.dispatched_at
                receiver = message.receiver
                # A message in a transaction counts as started; the transaction may commit after the consumer ended.
                if receiver is not None and receiver.has_ended and receiver.counts_started and not message.is_started:
                    detail = "acknowledged by a consumer that had ended"
                    self.add_finding("stale", event, at, message, message.consumer, detail=detail)
        elif message.state is WAITING or message.state is DELAYED:
            if message.state is WAITING and message.visible_event <= event:
                self.waiting -= 1
            if code == EventCode.ACKNOWLEDGED:
                self.add_finding("stale", event, at, message, detail="acknowledged although no consumer held it")
        if message.priority >= 0:
            message.end_reason = END_REASONS[code]
            self.finished.append(message)
        self.update_idle_time(event, at)

    def on_reported(self, event: int, at: int, sequence: int, end_code: int = 0) -> None:
        """Record that the dead letter of a message has sent a report (C11.7). A dead letter sends one report; a message
        that ends in another way sends none. `end_code` is DEAD_LETTERED, or 0 if the end is not known."""
        if end_code != EventCode.DEAD_LETTERED and (end_code or self.is_certain(sequence)):
            detail = "twice" if end_code == EventCode.REPORTED else "although it is no dead letter"
            self.add_finding("duplicate", event, at, sequence, detail=f"reported {detail}")

    def is_certain(self, sequence: int) -> bool:
        """Return whether a message has certainly not ended, because no gap can hide its end."""
        message = self.messages.get(sequence)
        return message is not None and message.state in (WAITING, HELD, DELAYED)

    def end_after_queue_ended(self, event: int, at: int, sequence: int, code: EventCode, end_code: int) -> None:
        """Record the end of a message that the queue does not have: its durable subscription has ended, or the message
        was never known."""
        if code != EventCode.EXPIRED and end_code == EventCode.ENDED:
            self.add_finding(
                "duplicate", event, at, sequence, detail=f"{END_REASONS[code]} although {END_REASONS[EventCode.ENDED]}"
            )
        message = self.expiring.pop(sequence, None)
        if message is not None:
            self.finish_message(message, at, END_REASONS[code])

    def on_queue_ended(self, event: int, at: int) -> None:
        """Record the end of the durable subscription to which this queue belongs. Later events belong to a new
        subscription of the same name, except that messages of the old one expire."""
        self.end_idle_time(at)
        for message in self.messages.values():
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
        """Record that a message waits for its retry. The message has just failed, or a page of the store has shown the
        message as delayed."""
        # A changed policy may have made it blocking, or no longer blocking.
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
                # A consumer had the message, so it was visible: a gap hides the commit.
                message.visible_event, message.visible_at = event, at
        self.update_idle_time(event, at)

    def on_subscribed(
        self, event: int, at: int, consumer: int, window: int, flags: ConsumerFlags = NO_FLAGS, priority: int = 0
    ) -> None:
        """Add a consumer. `priority` is its consumer priority, given only if it is exclusive."""
        subscriber = self.consumers[consumer] = AuditedConsumer(window, flags, event)
        if flags & ConsumerFlags.PULLS and window != SELECTOR_WINDOW:
            # A consumer with a selector may be a wildcard consumer, whose requests may not be in this history.
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
        """Start an idle time if a consumer is free and a message is ready."""
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
        message = self.idle_message
        if message is CARRIED:
            self.carried_end = at, self.waiting
        elif message is not None and at - self.idle_since > self.stuck_limit:
            self.findings.append(self._idle_time(message).finding(at, self.waiting))
        self.idle_message = None

    def _idle_time(self, message: AuditedMessage) -> IdleTime:
        return IdleTime(self.idle_event, self.idle_since, message.sequence, message.priority, message.is_persistent)

    def on_drained(self, event: int, at: int) -> None:
        if not self.waiting:
            return
        lost = [each for each in self.messages.values() if each.state is WAITING and each.visible_event <= event]
        for is_persistent in (True, False):
            some = [each for each in lost if each.is_persistent is is_persistent]
            if some:
                first = min(some, key=lambda each: (9 - each.priority, each.sequence))
                self.add_finding("lost", event, at, first, detail="found empty").count = len(some)
        for each in lost:
            each.state = UNCERTAIN
        self.waiting = 0
        self.update_idle_time(event, at)

    def on_gap(self, event: int) -> None:
        """Make the whole state uncertain, because it may have changed within the gap."""
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
        """Forget which messages wait, are held, or hold back other messages."""
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
            # A run is missing, and its changes are unknown.
            for message in chain(self.messages.values(), self.expiring.values()):
                self.finish_message(message, at, "unknown")
            self.messages.clear()
            self.expiring.clear()
            return
        certain, uncertain = self.recover_messages(self.messages, WAITING, event, at)
        # All of them are found again: no other is untouched after a start.
        certain += self.untouched
        self.waiting = certain
        for message in self.messages.values():
            if message.state is WAITING:
                self.add_waiting(message)
        certain_expiring, uncertain_expiring = self.recover_messages(self.expiring, ENDED, event, at)
        self.expected = (certain + certain_expiring, uncertain + uncertain_expiring + self.untouched_in_doubt)

    def recover_messages(
        self, messages: dict[int, AuditedMessage], state: MessageState, event: int, at: int
    ) -> tuple[int, int]:
        """Set `state` for all messages that are certainly there after a start. Return their number, and the number of
        messages that may be there."""
        certain = uncertain = 0
        for message in list(messages.values()):
            if message.priority < 0:
                message.state = DOUBTFUL
                uncertain += 1
            elif not message.is_persistent and not self.start_flags & StartFlag.CLEAN:
                del messages[message.sequence]
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
            finding = self.add_finding("lost", event, at, first, detail="not recovered")
            finding.count = certain - count
            # Which of them are lost is not known; this is the first that may be.
            finding.persistent = None
            for message in missing:
                message.state = UNCERTAIN
            self.untouched, self.untouched_in_doubt = 0, self.untouched_in_doubt + self.untouched
            self.waiting = 0
        elif count > certain + uncertain and self.start_flags & StartFlag.COMPLETE:
            self.add_finding("resurrected", event, at, NO_MESSAGE).count = count - certain - uncertain

    def resolve_recovered(self, at: int) -> None:
        """If the run has finished its recovery without an event `recovered` for this queue, treat the queue as
        empty."""
        if self.expected is not None and self.start_flags & StartFlag.RECOVERED:
            self.on_recovered(self.start_event, at, 0)
        self.expected = None

    def finish(self, event: int, at: int) -> None:
        """End the audit at the end of the history. All messages left get their `end_reason`."""
        self.resolve_recovered(at)
        self.end_idle_time(at)
        for message in self.messages.values():
            self.finish_message(message, at, "held" if message.state is HELD else STILL_WAITING)
        for message in self.expiring.values():
            self.finish_message(message, at, END_REASONS[EventCode.ENDED])
        self.depth_points.append((0, event, at, self.waiting, self.held))

    def finish_message(self, message: AuditedMessage, at: int, end_reason: str) -> None:
        if message.priority >= 0:
            message.end_reason = end_reason
            if message.wait is None and message.state is WAITING and message.visible_event != NEVER:
                message.wait = max(at - message.visible_at, 0)
            self.finished.append(message)

    def mark_depth(self, event: int, at: int) -> None:
        """Record the numbers of waiting and held messages. The caller calls this only if `tick & mask` is 0."""
        self.depth_points.append((self.tick, event, at, self.waiting, self.held))
        mask = depth_mask(self.tick)
        if mask != self.mask:
            self.mask = mask
            self.depth_points = [point for point in self.depth_points if not point[0] & mask]

    # ---- Cuts ----

    def stop(self, event: int, at: int) -> None:
        """Judge the state before `event`, where the history ends for now: whether the queue was recovered, and whether
        an idle time is too long already. The idle time may last, but is no finding again."""
        self.become_visible(event - 1)
        if self.expected is not None and self.start_flags & StartFlag.RECOVERED:
            self.resolve_recovered(at)
        message = self.idle_message
        if message is not None and message is not CARRIED and at - self.idle_since > self.stuck_limit:
            self.findings.append(self._idle_time(message).finding(at, self.waiting))
            self.idle_since = NEVER
        self.depth_points.append((0, event, at, self.waiting, self.held))

    def save(self, event: int) -> QueueCut:
        """Return the state before `event`, from which `begin` makes the same audit again. The findings, ended messages
        and depths of this section are no part of it."""
        self.become_visible(event - 1)
        queue = QueueRow(
            *(self.arrivals, self.first_dispatches, self.tick, self.knows_consumers, self.knows_exclusive),
            is_paused=self.is_paused,
        )
        if self.expected is not None:
            queue.expected, queue.start_flags, queue.start_event = self.expected, self.start_flags, self.start_event
        messages = [self._message_row(each) for each in self.messages.values()]
        messages += [self._message_row(each, is_expiring=True) for each in self.expiring.values()]
        messages.sort(key=attrgetter("sequence"))
        return QueueCut(event, queue, self._consumer_rows(), messages, self.edges.begun)

    @property
    def edges(self) -> IdleEdges:
        """Idle times at the edges of the section that ends here."""
        message = self.idle_message
        is_carried = message is CARRIED
        begun = None if message is None or is_carried else self._idle_time(message)
        return IdleEdges(self.carried_end, is_carried, begun)

    def _message_row(self, message: AuditedMessage, *, is_expiring: bool = False) -> MessageRow:
        row = MessageRow(*_common_fields(message))
        row.is_blocking, row.is_expiring = message.sequence in self.blocking, is_expiring
        if message.state is HELD:
            row.dispatched_at, row.is_started = message.dispatched_at, message.is_started
            if message.receiver is not None:
                row.subscription = message.receiver.since
        return row

    def _consumer_rows(self) -> list[ConsumerRow]:
        known = {consumer.since: (number, consumer) for number, consumer in self.consumers.items()}
        for message in self.messages.values():
            holder = message.receiver
            if message.state is HELD and holder is not None:
                known[holder.since] = message.consumer, holder
        rows = [_consumer_row(*known[since]) for since in sorted(known)]
        for row in rows:
            # A subscription that another one with its number has replaced has ended, too.
            row.has_ended |= self.consumers.get(row.number) is not known[row.since][1]
        return rows

    @classmethod
    def begin(cls, cut: QueueCut, stuck_limit: int) -> QueueAudit:
        """Return the audit of the section that begins at a cut. If an idle time lasts there that `cut` does not have,
        its end is in `edges`, and not judged."""
        self = cls(stuck_limit)
        row = cut.queue
        self.arrivals, self.first_dispatches, self.tick = row.arrivals, row.first_dispatches, row.ticks
        self.mask = depth_mask(self.tick)
        self.knows_consumers, self.knows_exclusive = row.knows_consumers, row.knows_exclusive
        self.is_paused = row.is_paused
        self.expected, self.start_flags, self.start_event = row.expected, row.start_flags, row.start_event
        self.untouched = self.waiting = cut.untouched
        holders = {}
        for each in cut.consumers:
            holders[each.since] = consumer = _consumer(each)
            if not each.has_ended:
                self.consumers[each.number] = consumer
        for message in cut.messages:
            self._restore_message(message, holders.get(message.subscription), cut.event)
        self.choose_owner()
        self._restore_idle_time(cut)
        return self

    def _restore_message(self, row: MessageRow, holder: AuditedConsumer | None, event: int) -> None:
        message = AuditedMessage(*_common_fields(row)[:6])
        for name in COMMON_FIELDS[6:]:
            setattr(message, name, getattr(row, name))
        if row.is_expiring:
            self.expiring[row.sequence] = message
            return
        self.messages[row.sequence] = message
        is_committing = row.visible_event >= event
        if message.state is HELD:
            message.receiver, message.is_started, message.dispatched_at = holder, row.is_started, row.dispatched_at
            self._restore_hold(message)
        elif message.state is DELAYED:
            key = (9 - row.priority, row.sequence)
            if row.group:
                self.group_blocking.setdefault(row.group, {})[row.sequence] = key
            elif row.is_blocking:
                self.blocking[row.sequence] = key
        elif message.state is WAITING:
            self.add_waiting(message)
            self.waiting += not is_committing
            if is_committing and row.visible_event != NEVER:
                heappush(self.committing, (row.visible_event, row.sequence))
        if is_committing and (message.state is DOUBTFUL or (message.state is WAITING and row.group)):
            heappush(self.unlisted_committing[row.priority], row.sequence)

    def _restore_hold(self, message: AuditedMessage) -> None:
        self.held += 1
        if message.receiver is not None:
            message.receiver.held += 1
            message.receiver.unstarted += not message.is_started

    def _restore_idle_time(self, cut: QueueCut) -> None:
        if not (self.free_consumers and self.waiting and self.true_next(cut.event - 1)):
            return
        idle = cut.idle
        if idle is None:
            self.idle_message = CARRIED
        else:
            self.idle_message = AuditedMessage(idle.sequence, idle.priority, idle.is_persistent, 0, 0)
            self.idle_event, self.idle_since = idle.event, idle.at


_common_fields = attrgetter(*COMMON_FIELDS)


def _consumer_row(number: int, consumer: AuditedConsumer) -> ConsumerRow:
    return ConsumerRow(
        *(number, consumer.since, consumer.window, consumer.flags),
        priority=-consumer.rank[0] if consumer.rank is not None else 0,
        requested=consumer.requested,
        limit=consumer.limit,
        has_ended=consumer.has_ended,
    )


def _consumer(row: ConsumerRow) -> AuditedConsumer:
    flags = ConsumerFlags(row.flags)
    consumer = AuditedConsumer(row.window, flags, row.since, row.requested, row.limit, has_ended=row.has_ended)
    if row.flags & ConsumerFlags.EXCLUSIVE:
        consumer.rank = (-row.priority, row.number)
    return consumer
