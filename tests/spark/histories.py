"""Random histories, with every fault that an audit looks for planted in some of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from truenext.spark.schema import EVENTS

Event = dict[str, Any]

COLUMNS = tuple(EVENTS.names)
REASONS = (
    *("nacked", "released", "released", "delayed", "blocking", "nacked", "aborted and delayed", "lost", "lost"),
    "nacked and blocking",
)
"""Reasons in histories of this truenext, and of older ones."""
EPOCH = datetime(2026, 11, 21, tzinfo=UTC)


class RandomHistory:
    """A random broker that mostly works correctly, and records its events."""

    def __init__(self, seed: int, steps: int, queues: tuple[str, ...] = ("a", "b"), faults: float = 0.15) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.queues = queues
        self.now = EPOCH
        self.run = 0
        self.number = 0
        self.sequence = self.random.choice([0, 65_530])
        self.events: list[Event] = []
        self.present: dict[str, dict[int, Event]] = {queue: {} for queue in queues}
        self.visible: set[int] = set()
        self.holders: dict[int, int] = {}
        self.started: set[int] = set()
        """Held messages that are started."""
        self.attempts: dict[int, int] = {}
        self.with_cause: set[int] = set()
        self.waits: dict[int, str] = {}
        """Messages that wait for their next try: `delayed` alone, or `blocking` others."""
        self.dead: dict[str, list[int]] = {queue: [] for queue in queues}
        self.ending: dict[str, dict[int, Event]] = {queue: {} for queue in queues}
        """Messages of a queue that has ended, not expired yet."""
        self.paused: set[str] = set()
        self.consumers: dict[str, dict[int, int]] = {queue: {} for queue in queues}
        """Window of each consumer, or its open pull requests."""
        self.modes: dict[int, str] = {}
        """Modes of all consumers that ever existed."""
        self.exclusive: dict[int, tuple[int, int]] = {}
        """Order of each exclusive consumer: the lowest of a queue owns it."""
        self.batch = 1
        self.committed = 0
        self.next_consumer = 0
        self.before_gaps: list[Event] = []
        """All events, those that a crash has taken included."""
        self.start("clean")
        for _ in range(steps):
            self.step()
        self.spoil()

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def add(self, kind: str, **columns: Any) -> Event:
        self.number += 1
        self.now += timedelta(seconds=self.random.choice([0.001] * 20 + [3, 12]))
        event = dict.fromkeys(COLUMNS) | {
            "event": self.number,
            "run": self.run,
            "at": self.now,
            "kind": kind,
            "date": self.now.date(),
        }
        self.events.append(event | columns)
        return self.events[-1]

    def start(self, how: str) -> None:
        self.run += 2 if self.run and self.chance(0.1) else 1
        self.add("run-started", reason=how)
        self.consumers = {queue: {} for queue in self.queues}
        self.holders.clear()
        self.waits.clear()
        for messages in (*self.present.values(), *self.ending.values()):
            for sequence, message in list(messages.items()):
                is_durable = sequence in self.visible or (message["persistent"] and self.chance(0.5))
                if (how == "unclean" and not message["persistent"]) or not is_durable:
                    del messages[sequence]
                    if not message["persistent"]:
                        self.dead[message["queue"]].append(sequence)
                else:
                    self.visible.add(sequence)
        for queue in self.queues:
            count = len(self.present[queue]) + len(self.ending[queue])
            if self.chance(self.faults):
                count = max(0, count + self.random.choice([-2, -1, 1, 3]))
            if count:
                self.add("recovered", queue=queue, count=count)
        for queue in sorted(self.paused):
            self.add("paused", queue=queue)
        for queue in self.queues:
            if self.chance(0.7):
                self.subscribe(queue)
        self.batch, self.committed = 1, 0

    def step(self) -> None:
        queue = self.random.choice(self.queues)
        action = self.random.choices(
            [
                *(self.accept, self.commit, self.subscribe, self.unsubscribe),
                *(self.dispatch, self.finish, self.drain, self.pause, self.move_or_remove),
                *(self.end, self.expire_ended, self.start_one, self.change_credit),
            ],
            [28, 10, 8, 2, 40, 24, 2, 1, 1, 1, 4, 14, 8],
        )[0]
        action(queue)
        if self.chance(0.02):
            self.start(self.random.choice(["clean", "unclean"]))

    def accept(self, queue: str) -> None:
        self.sequence += self.random.choice([1, 1, 1, 5])
        persistent = self.chance(0.6)
        in_batch = persistent or self.chance(0.1)
        message = self.add(
            "accepted",
            queue=queue,
            sequence=self.sequence,
            priority=self.random.choice([9, 4, 4, 0]),
            persistent=persistent,
            size=10,
            batch=self.batch if in_batch else 0,
            group=self.random.choice([None, None, None, 7, 7, 8]),
        )
        self.present[queue][self.sequence] = message
        if not in_batch:
            self.visible.add(self.sequence)
        if self.chance(0.3):
            self.batch += 1

    def commit(self, _queue: str) -> None:
        upto = self.random.randint(self.committed, self.batch)
        if upto == self.committed:
            return
        self.committed = upto
        self.batch = max(self.batch, upto + 1)
        self.add("committed", batch=upto)
        for messages in (*self.present.values(), *self.ending.values()):
            for sequence, message in messages.items():
                if message["run"] == self.run and message["batch"] <= upto:
                    self.visible.add(sequence)

    def subscribe(self, queue: str) -> None:
        self.next_consumer += 1
        window = self.random.choice([None, 1, 2, 5])
        mode = "auto" if window is None else "client-individual"
        mode += " with selector" if self.chance(0.1) else ""
        if window is not None:
            mode += " with express" if self.chance(0.1) else ""
            mode += " with started" if self.chance(0.5) else ""
            if self.chance(0.2):
                mode, window = mode + " pulling", None
        is_exclusive = self.chance(0.15)
        mode += " exclusive" * is_exclusive
        priority = self.random.choice([-127, 0, 0, 5]) if is_exclusive else None
        self.consumers[queue][self.next_consumer] = 0 if "pulling" in mode else window or 100
        self.modes[self.next_consumer] = mode
        if is_exclusive:
            self.exclusive[self.next_consumer] = -(priority or 0), self.next_consumer
        self.add("subscribed", queue=queue, consumer=self.next_consumer, mode=mode, window=window, priority=priority)

    def change_credit(self, queue: str) -> None:
        """Change the credit of a consumer of the queue, or of one that does not exist."""
        known = [each for each in self.consumers[queue] if not self.modes[each].startswith("auto")]
        consumer = self.random.choice([*(known or [1]), *range(max(1, self.next_consumer - 2), self.next_consumer)])
        count = self.random.choice([0, 1, 2, 3, 6])
        if "pulling" in self.modes.get(consumer, ""):
            self.add("requested", queue=queue, consumer=consumer, count=count)
        else:
            self.add("window", queue=queue, consumer=consumer, window=count)
        if consumer in self.consumers[queue]:
            self.consumers[queue][consumer] = count

    def start_one(self, queue: str) -> None:
        held = [each for each in self.present[queue] if each in self.holders]
        if self.chance(self.faults / 2):
            held = [*self.present[queue], *self.dead[queue]]
        if not held:
            return
        sequence = self.random.choice(held)
        consumer = self.holders.get(sequence, 0)
        if self.chance(self.faults / 2):
            consumer = self.random.randint(0, self.next_consumer)
        if sequence in self.holders:
            self.started.add(sequence)
        self.add("started", queue=queue, sequence=sequence, consumer=consumer)

    def unsubscribe(self, queue: str) -> None:
        if not self.consumers[queue]:
            return
        consumer = self.random.choice(list(self.consumers[queue]))
        del self.consumers[queue][consumer]
        held = [each for each, holder in self.holders.items() if holder == consumer]
        # A transaction has some of it, or somebody has forgotten them.
        kept = [each for each in held if self.chance(0.3)]
        is_recorded_first = self.chance(0.5)
        if is_recorded_first:
            self.add("unsubscribed", queue=queue, consumer=consumer)
        for sequence in held:
            if sequence not in kept:
                del self.holders[sequence]
                is_lost = (sequence in self.started or self.chance(self.faults)) and self.chance(0.5)
                self.requeue(queue, sequence, "lost" if is_lost else "released")
        if not is_recorded_first:
            self.add("unsubscribed", queue=queue, consumer=consumer)

    def requeue(self, queue: str, sequence: int, reason: str) -> None:
        has_failed = reason.startswith(("nacked", "aborted", "lost"))
        attempts = self.attempts.get(sequence, 0) + has_failed
        if self.chance(self.faults):
            attempts = max(0, attempts + self.random.choice([-1, 1]))
        self.attempts[sequence] = attempts
        cause = self.random.choice([None, "it broke"]) if reason.startswith("nacked") else None
        if cause is not None:
            self.with_cause.add(sequence)
        self.add("returned", queue=queue, sequence=sequence, attempts=attempts, reason=reason, cause=cause)

    def receivers(self, queue: str) -> list[int]:
        """Return the consumers that have credit and are not kept from the queue by an exclusive one."""
        held = Counter(holder for holder in self.holders.values())
        exclusive = [each for each in self.consumers[queue] if each in self.exclusive]
        owner = min(exclusive, key=self.exclusive.__getitem__, default=None)
        return [
            each
            for each, credit in self.consumers[queue].items()
            if owner in (None, each) and credit > (0 if "pulling" in self.modes[each] else held[each])
        ]

    def dispatch(self, queue: str) -> None:
        if (not self.consumers[queue] or queue in self.paused) and not self.chance(self.faults):
            return
        messages = self.present[queue]
        waiting = [each for each in messages if each not in self.holders]
        keys = {each: (9 - messages[each]["priority"], each) for each in messages}
        blocking = min((keys[each] for each in messages if self.waits.get(each) == "blocking"), default=(10, 0))
        ready = [
            each
            for each in waiting
            if each in self.visible
            and each not in self.waits
            and keys[each] < blocking
            and not any(
                other < each and other not in self.visible and messages[other]["priority"] == messages[each]["priority"]
                for other in waiting
            )
        ]
        candidates = sorted(ready, key=keys.__getitem__)[:1]
        if self.chance(0.5):
            # Groups are another's.
            candidates = sorted((each for each in ready if not messages[each]["group"]), key=keys.__getitem__)[:1]
        if self.chance(self.faults):
            candidates = self.random.choice([list(messages), self.dead[queue], waiting])
        if not candidates:
            return
        sequence = self.random.choice(candidates)
        receivers = self.receivers(queue)
        if not self.consumers[queue] or self.chance(self.faults / 2):
            receivers = [self.random.randint(0, self.next_consumer)]
        elif self.chance(self.faults):
            receivers = list(self.consumers[queue])
        if not receivers:
            return
        consumer = self.random.choice(receivers)
        if "pulling" in self.modes.get(consumer, "") and consumer in self.consumers[queue]:
            self.consumers[queue][consumer] -= 1
        self.holders[sequence] = consumer
        self.started.discard(sequence)
        self.waits.pop(sequence, None)
        self.add("dispatched", queue=queue, sequence=sequence, consumer=consumer, deliveries=1)

    def finish(self, queue: str) -> None:
        held = [each for each in self.present[queue] if each in self.holders or each in self.waits]
        if self.chance(self.faults / 3):
            held = list(self.present[queue])
        if not held:
            return
        sequence = self.random.choice(held)
        consumer = self.holders.pop(sequence, 0)
        kind = self.random.choices(
            ["acknowledged", "returned", "expired", "dead-lettered", "handled"], [60, 30, 5, 5, 5]
        )[0]
        is_due = self.waits.pop(sequence, "") != "" and not self.chance(self.faults)
        if is_due:
            kind = "returned"
        extra: dict[str, Any] = {"consumer": consumer} if kind == "acknowledged" else {}
        if kind == "returned":
            reason = "due" if is_due else self.random.choice(REASONS)
            wait = reason.rpartition(" ")[2]
            if wait in ("delayed", "blocking"):
                self.waits[sequence] = wait
            self.requeue(queue, sequence, reason)
            return
        if kind in ("dead-lettered", "handled"):
            extra |= {"target_queue": "DLQ." + queue, "target_sequence": 10**9 + sequence}
            if (sequence in self.with_cause) is not self.chance(self.faults):
                extra |= {"cause": "it broke"}
        self.add(kind, queue=queue, sequence=sequence, **extra)
        reports = int(kind == "dead-lettered" and self.chance(0.5)) + self.chance(self.faults)
        for _ in range(reports):
            self.add("reported", queue=queue, sequence=sequence)
        del self.present[queue][sequence]
        self.dead[queue].append(sequence)

    def pause(self, queue: str) -> None:
        self.paused ^= {queue}
        self.add("paused" if queue in self.paused else "resumed", queue=queue)

    def move_or_remove(self, queue: str) -> None:
        """Move or remove some waiting messages."""
        waiting = [each for each in self.present[queue] if each not in self.holders]
        for sequence in waiting[: self.random.choice([1, 2, 5])]:
            moved = {"target_queue": "elsewhere", "target_sequence": 10**9 + sequence} if self.chance(0.5) else {}
            self.add("moved" if moved else "removed", queue=queue, sequence=sequence, **moved)
            self.waits.pop(sequence, None)
            del self.present[queue][sequence]
            self.dead[queue].append(sequence)

    def end(self, queue: str) -> None:
        """End the durable subscription; another one begins under its name."""
        for consumer in list(self.consumers[queue]):
            if not self.chance(self.faults):
                del self.consumers[queue][consumer]
                self.add("unsubscribed", queue=queue, consumer=consumer)
        self.add("ended", queue=queue)
        for sequence, message in self.present[queue].items():
            self.ending[queue][sequence] = message
            self.holders.pop(sequence, None)
            self.waits.pop(sequence, None)
            self.dead[queue].append(sequence)
        self.present[queue].clear()

    def expire_ended(self, queue: str) -> None:
        """Remove some messages of an ended subscription, in any order."""
        count = min(len(self.ending[queue]), self.random.choice([1, 2, 5]))
        for sequence in self.random.sample(list(self.ending[queue]), count):
            kind = "acknowledged" if self.chance(self.faults) else "expired"
            self.add(kind, queue=queue, sequence=sequence)
            del self.ending[queue][sequence]

    def drain(self, queue: str) -> None:
        if self.chance(self.faults) or not self.present[queue]:
            self.add("drained", queue=queue)

    def spoil(self) -> None:
        """Lose events: retention deletes the beginning, a crash some of the others."""
        if self.chance(0.2):
            del self.events[: self.random.randrange(len(self.events) // 2)]
        self.before_gaps = list(self.events)
        for _ in range(self.random.choice([0, 0, 1, 2])):
            begin = self.random.randrange(1, len(self.events))
            for index in range(min(begin + self.random.randint(1, 4), len(self.events) - 1) - 1, begin - 1, -1):
                # The account of what is durable is not lost, nor is that of a start.
                if self.events[index]["kind"] not in (
                    "accepted",
                    "run-started",
                    "acknowledged",
                    "expired",
                    "dead-lettered",
                    "handled",
                    "moved",
                    "removed",
                    "ended",
                    "paused",
                    "resumed",
                ):
                    del self.events[index]


def joined(histories: Iterable[list[Event]]) -> list[Event]:
    """Return the histories as one, of one broker: each begins with a run, events and sequences of its own."""
    events: list[Event] = []
    event = run = sequence = 0
    for history in histories:
        added = [each | {"event": each["event"] + event, "run": each["run"] + run} for each in history]
        for each in added:
            if each["sequence"] is not None:
                each["sequence"] += sequence
        events += added
        event, run = added[-1]["event"], added[-1]["run"]
        sequence += max(each["sequence"] or 0 for each in history)
    return events
