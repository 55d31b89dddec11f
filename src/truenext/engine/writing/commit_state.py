"""What time it is, which batch gathers, what is durable, and who waits for that: the one owner of all of it.

    tick            sets the time
    batch           what the store must do next; every room adds to it
    close_batch     it is made durable; the next one gathers
    committed       it is durable: what waited for it is touched, or said

A message is visible once `entry.batch <= commit_state.last_committed`. What waits for a batch keeps its number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.pages import StoreRead
from truenext.engine.state.queue import Queue
from truenext.engine.state.wildcard import Wildcard
from truenext.engine.writing.event_log import EventLog
from truenext.model.answers import Answer
from truenext.model.batch import Batch
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import GATHERING_BYTES_MAX, PENDING_ANSWER_BYTES, SEQUENCE_BLOCK, SEQUENCE_RESERVE


class CommitState:
    def __init__(self, events: EventLog, *, sequence_limit: int = 1) -> None:
        """No sequence from `sequence_limit` on was ever given out."""
        self.events = events
        """What happened to every message; batches carry it to the history."""
        self.now_ms = 0
        """Milliseconds since the epoch."""
        self.now_us = 0
        """Microseconds since whenever, of a clock that does not jump."""
        self.wall_clock_ahead_us = 0
        """By how much the wall clock was ahead of that one, when it was most."""
        self.disk_level = DiskLevel.PLENTY
        """For what senders bring."""
        self.is_stopped = False
        """Nothing is dispatched, expires or becomes due any more: what waits is being written down."""
        self.batch = Batch(1)
        """The one that gathers."""
        self.last_committed = 0
        """The last one that is known to be durable; so are all before it."""
        self.last_control_batch = 0
        """The last one in which somebody has paused a queue, or moved or removed messages: answers wait for it."""
        self.is_batch_awaited = False
        """Somebody waits for the gathering batch: a message to become visible, or an answer."""
        self.touched_queues: dict[Queue, None] = {}
        """Queues in which a dispatch may have become possible, in order of the first touch."""
        self.touched_wildcards: dict[Wildcard, None] = {}
        """Consumers of many queues that may have credit again."""
        self.active_work: dict[object, None] = {}
        """The sources of work that has something to do, now or later: see BackgroundTask."""
        self.waiting_queues: dict[int, dict[Queue, None]] = {}
        """By the batch that makes messages visible in them."""
        self._answers: list[tuple[ConnectionState, Answer]] = []
        self._waiting_answers: dict[int, list[tuple[ConnectionState, Answer]]] = {}
        """By the batch they wait for."""

        self.next_sequence = sequence_limit
        self.sequence_limit = sequence_limit
        """Sequences below it are reserved durably: what has one of these may be seen."""
        self._requested_limit = sequence_limit
        """What the store was last asked to reserve."""
        self.sequences_requested_in = 0
        """The batch that asked for it."""
        self._first_sequences = (sequence_limit, sequence_limit)
        """Of the batch that was handed over last, and of the gathering one."""

    # ---- Time ----

    def tick(self, now_us: int, steady_us: int) -> None:
        """It is so many microseconds since the epoch, and by a clock that does not jump."""
        self.now_ms = now_us // 1000
        self.now_us = steady_us
        if now_us - steady_us > self.wall_clock_ahead_us:
            self.wall_clock_ahead_us = now_us - steady_us
        self.events.tick(now_us)

    # ---- Sequences ----

    @property
    def first_uncommitted_sequence(self) -> int:
        """What has a sequence below it is durable."""
        return self._first_sequences[0]

    @property
    def last_sequence(self) -> int:
        """The last that was given out."""
        return self.next_sequence - 1

    def allocate_sequence(self) -> int:
        """The next one, for what is durable with the gathering batch at the earliest."""
        sequence = self.next_sequence
        self.next_sequence = sequence + 1
        if sequence >= self._requested_limit:
            self.request_sequence_range()
        return sequence

    def reserving_batch(self, sequence: int) -> int:
        """The batch with which a sequence is reserved that was just given out and is not reserved yet: nobody may see
        what has it before that."""
        if sequence >= self._requested_limit:
            self.request_sequence_range()
        return self.sequences_requested_in

    def request_sequences_if_low(self) -> None:
        """If few are left that were asked for."""
        if self._requested_limit - self.next_sequence < SEQUENCE_BLOCK // 2:
            self.request_sequence_range()

    def request_sequence_range(self) -> None:
        self._requested_limit = self.next_sequence + SEQUENCE_BLOCK
        self.sequences_requested_in = self.batch.number
        self.batch.sequence_limit = self._requested_limit
        self.is_batch_awaited = True

    # ---- Answers ----

    @property
    def has_answers(self) -> bool:
        """That are to be said now."""
        return bool(self._answers)

    def answer(self, session: ConnectionState, answer: Answer) -> None:
        """Say something to a connection once all that it asked for so far is durable, in order."""
        if session.last_batch <= self.last_committed:
            self._answers.append((session, answer))
        else:
            self._waiting_answers.setdefault(session.last_batch, []).append((session, answer))
            self.batch.size += PENDING_ANSWER_BYTES
            if session.last_batch == self.batch.number:
                self.is_batch_awaited = True

    def take_answers(self) -> list[tuple[ConnectionState, Answer]]:
        """What is to be said now."""
        answers, self._answers = self._answers, []
        return answers

    # ---- Batches ----

    @property
    def has_capacity(self) -> bool:
        """More commands may be taken: sequences are left, and the gathering batch is not too large."""
        if self.sequence_limit - self.next_sequence < SEQUENCE_RESERVE:
            return False
        return self.batch.size + self.events.size < GATHERING_BYTES_MAX

    @property
    def is_full(self) -> bool:
        """What can wait is not added to the gathering batch any more."""
        return self.batch.size >= GATHERING_BYTES_MAX

    @property
    def has_batch(self) -> bool:
        """There is something to write, or somebody waits for what need not be written any more."""
        return self.is_batch_awaited or not self.batch.is_empty() or not self.events.is_empty()

    @property
    def latest_batch(self) -> int:
        """The last batch with anything in it."""
        return self.batch.number if not self.batch.is_empty() else self.batch.number - 1

    def touch(self, consumer: BrokerConsumer) -> None:
        """It may have credit again."""
        if isinstance(consumer, Wildcard):
            self.touched_wildcards[consumer] = None
        elif consumer.queue is not None:
            self.touched_queues[consumer.queue] = None

    def close_batch(self) -> Batch:
        """The gathering batch, to be made durable."""
        batch = self.batch
        batch.history = self.events.close_chunk(of_batch=not batch.is_empty())
        self.batch = Batch(batch.number + 1)
        self._first_sequences = (self._first_sequences[1], self.next_sequence)
        self.is_batch_awaited = False
        return batch

    def set_committed(self, batch: Batch) -> None:
        """The batch is durable, and so are all before it. Call `queue_waiting_answers` after it, once whatever was only
        waiting for that has been settled."""
        assert batch.number > self.last_committed
        self.last_committed = batch.number
        if not batch.is_empty():
            # One that only carries history makes nothing visible, and would else be followed by another for ever.
            self.events.on_committed(batch.number)
        if batch.sequence_limit:
            self.sequence_limit = batch.sequence_limit

    def touch_waiting_queues(self) -> None:
        """What has become visible is looked at in the next turn."""
        self.touched_queues.update(self.waiting_queues.pop(self.last_committed, {}))

    def queue_waiting_answers(self) -> None:
        """What waited for the batch is said in the next turn."""
        self._answers.extend(self._waiting_answers.pop(self.last_committed, ()))


# ---- What all work has in common that goes on beside commands, a piece in each turn ----
#
# Whoever comes to have some says so (`CommitState.active_work`), and is then asked in each turn whether a step would
# do something, until it has none any more. So work costs nothing while there is none. What a step wants to be read
# comes back by `StoreRead.on_page`.


class BackgroundTask(ABC):
    @property
    def active_work_key(self) -> object:
        """What stands for it in `CommitState.active_work`."""
        return self

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """There is something to do, now or later."""

    @abstractmethod
    def can_step(self) -> bool:
        """A step would do something."""

    @abstractmethod
    def step(self) -> Sequence[StoreRead]:
        """Do a piece of it. Returns the pages that are wanted to go on."""

    def next_due_ms(self) -> int | None:
        """When a step is needed though nothing else happens, in milliseconds since the epoch; None if never, or if that
        is known only when something else has happened."""
        return None
