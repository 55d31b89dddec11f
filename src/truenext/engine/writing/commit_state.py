"""Commit state: the engine's time, the gathering batch, the last committed batch, and all that waits for a commit.

    tick            sets the time
    batch           the gathering batch: changes for the store, from all parts of the engine
    close_batch     returns the gathering batch, to be made durable, and begins the next one
    set_committed   notes that a batch is durable; then the queues and answers that waited for the batch continue

A message is visible once `entry.batch <= commit_state.last_committed`. All that waits for a batch is stored under the
batch's number.
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
    def __init__(self, events: EventLog, *, sequence_limit: int = 1, redelivered_below: int = 0) -> None:
        """`sequence_limit` is the first sequence that no earlier run of the broker can have used."""
        self.events = events
        """Events of all messages. Each batch carries its events to the history."""
        self.now_ms = 0
        """Time at the last call of `tick`, in milliseconds since the epoch."""
        self.is_read_long = False
        """True if the next command of the current read of a socket may take long, or the last one has. The broker sets
        this flag before each read, and after it has looked at the clock; a command that may take long sets it to
        True."""
        self.now_us = 0
        """Time at the last call of `tick`, in microseconds of a monotonic clock."""
        self.wall_clock_ahead_us = 0
        """Largest lead of the wall clock over the monotonic one so far, in microseconds."""
        self.disk_level = DiskLevel.PLENTY
        """Disk space for new messages, as sends go by: LITTLE while the broker is drained, even if there is more."""
        self.is_draining = False
        """True while the broker is drained: connections that only send wait."""
        self._is_level_of_drain = False
        """True if `disk_level` is LITTLE only because the broker is drained."""
        self.return_count = 0
        """Number of times at which messages began to wait again: a message was requeued, a delay has ended, a queue was
        resumed, or policies have changed."""
        self.is_stopped = False
        """True while the broker stops: no message is dispatched, expires or becomes due, and waiting messages are being
        stored."""
        self.batch = Batch(1)
        self.is_eviction_behind = False
        """True if memory is short and the gathering batch takes no more evicted messages."""
        self.last_committed = 0
        """Number of the last batch known to be durable. All batches before it are durable, too."""
        self.last_control_batch = 0
        """Last batch in which a control request paused a queue, or moved or removed messages. Replies wait for this
        batch."""
        self.is_batch_awaited = False
        """True if the gathering batch must be written soon, so that a message becomes visible or an answer is sent."""
        self.touched_queues: dict[Queue, bool | None] = {}
        """Queues in which a dispatch may have become possible, in order of the first touch. True if a turn has found
        the next messages of the queue's wildcard consumers, and nothing has changed since; else None."""
        self.touched_wildcards: dict[Wildcard, None] = {}
        """Wildcard consumers that may have credit again."""
        self.active_work: dict[object, None] = {}
        """Keys (`active_work_key`) of the background tasks that have work to do, now or later."""
        self.waiting_queues: dict[int, dict[Queue, None]] = {}
        """Queues in which a batch makes messages visible, by the batch's number."""
        self._answers: list[tuple[ConnectionState, Answer]] = []
        self._waiting_answers: dict[int, list[tuple[ConnectionState, Answer]]] = {}
        """Answers that wait for a batch, by the batch's number."""

        self.redelivered_below = redelivered_below
        """Messages with lower sequences may have been dispatched without a record of the dispatch."""
        self.next_sequence = sequence_limit
        self.sequence_limit = sequence_limit
        """First sequence that is not reserved durably. Only messages with lower sequences may become visible."""
        self._requested_limit = sequence_limit
        """Limit of sequences that was last requested from the store."""
        self.sequences_requested_in = 0
        """Number of the batch that requested `_requested_limit`."""
        self._first_sequences = (sequence_limit, sequence_limit)
        """First sequence of the batch that was closed last, and first sequence of the gathering batch."""

    # ---- Time ----

    def tick(self, now_us: int, steady_us: int) -> None:
        """Set the time: `now_us` is microseconds since the epoch, `steady_us` microseconds of the monotonic clock."""
        self.now_ms = now_us // 1000
        self.now_us = steady_us
        if now_us - steady_us > self.wall_clock_ahead_us:
            self.wall_clock_ahead_us = now_us - steady_us
        self.events.tick(now_us)

    def set_disk_level(self, level: DiskLevel) -> None:
        """Set the level of the disk, and with it the level that sends go by."""
        self._is_level_of_drain = self.is_draining and level is DiskLevel.PLENTY
        self.disk_level = DiskLevel.LITTLE if self._is_level_of_drain else level

    @property
    def is_disk_short(self) -> bool:
        """Whether the disk itself has little space for new messages, or none."""
        return self.disk_level is not DiskLevel.PLENTY and not self._is_level_of_drain

    # ---- Sequences ----

    @property
    def first_uncommitted_sequence(self) -> int:
        """First sequence of the batch that was handed to the store last, whether it is durable yet or not. Messages
        with lower sequences belong to earlier batches, which are durable."""
        return self._first_sequences[0]

    @property
    def last_sequence(self) -> int:
        """Last sequence that was allocated."""
        return self.next_sequence - 1

    def allocate_sequence(self) -> int:
        """Return the next sequence, for a change that is durable with the gathering batch at the earliest."""
        sequence = self.next_sequence
        self.next_sequence = sequence + 1
        if sequence >= self._requested_limit:
            self.request_sequence_range()
        return sequence

    def reserving_batch(self, sequence: int) -> int:
        """Return the batch that reserves a sequence allocated just now. A message with this sequence must not be
        visible before that batch is durable."""
        if sequence >= self._requested_limit:
            self.request_sequence_range()
        return self.sequences_requested_in

    def request_sequences_if_low(self) -> None:
        """Request a new range of sequences if few of the last range are left."""
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
        """Whether there are answers to send now."""
        return bool(self._answers)

    def answer(self, session: ConnectionState, answer: Answer) -> None:
        """Send an answer to a connection once all earlier commands of the connection are durable. Answers stay in
        order."""
        if session.last_batch <= self.last_committed:
            self._answers.append((session, answer))
        else:
            self._waiting_answers.setdefault(session.last_batch, []).append((session, answer))
            self.batch.size += PENDING_ANSWER_BYTES
            if session.last_batch == self.batch.number:
                self.is_batch_awaited = True

    def take_answers(self) -> list[tuple[ConnectionState, Answer]]:
        """Return and forget the answers to send now."""
        answers, self._answers = self._answers, []
        return answers

    # ---- Batches ----

    @property
    def has_sequences(self) -> bool:
        """Whether enough sequences are left for the commands that one read of a socket brings."""
        return self.sequence_limit - self.next_sequence >= SEQUENCE_RESERVE

    @property
    def gathering_bytes(self) -> int:
        """Bytes of the gathering batch and its events."""
        return self.batch.size + self.events.size

    @property
    def has_capacity(self) -> bool:
        """Whether more commands may be executed: enough sequences are left, the gathering batch is not too large, and
        eviction keeps up."""
        if self.is_eviction_behind or self.sequence_limit - self.next_sequence < SEQUENCE_RESERVE:
            return False
        return self.batch.size + self.events.size < GATHERING_BYTES_MAX

    @property
    def is_full(self) -> bool:
        """Whether the gathering batch is so large that background work must not add to it."""
        return self.batch.size >= GATHERING_BYTES_MAX

    @property
    def has_batch(self) -> bool:
        """Whether the gathering batch must be closed: it has changes or events, or is awaited."""
        return self.is_batch_awaited or not self.batch.is_empty() or not self.events.is_empty()

    @property
    def latest_batch(self) -> int:
        """Number of the gathering batch, or, if that is empty, of the batch before it."""
        return self.batch.number if not self.batch.is_empty() else self.batch.number - 1

    def touch(self, consumer: BrokerConsumer) -> None:
        """Note that the consumer may have credit again."""
        if isinstance(consumer, Wildcard):
            self.touched_wildcards[consumer] = None
        elif consumer.queue is not None:
            self.touched_queues[consumer.queue] = None

    def close_batch(self) -> Batch:
        """Return the gathering batch, to be made durable, and begin the next one."""
        batch = self.batch
        batch.history = self.events.close_chunk(of_batch=not batch.is_empty())
        self.batch = Batch(batch.number + 1)
        self._first_sequences = (self._first_sequences[1], self.next_sequence)
        self.is_batch_awaited = False
        return batch

    def set_committed(self, batch: Batch) -> None:
        """Note that the batch and all batches before it are durable. The caller then calls `touch_waiting_queues` and
        `queue_waiting_answers`."""
        assert batch.number > self.last_committed
        self.last_committed = batch.number
        if not batch.is_empty() or batch.number in self.waiting_queues:
            # A batch that changes nothing, and for which no message waits, gets no event: the event would cause another
            # such batch, for ever.
            self.events.on_committed(batch.number)
        if batch.sequence_limit:
            self.sequence_limit = batch.sequence_limit

    def touch_waiting_queues(self) -> None:
        """Touch the queues in which the last committed batch has made messages visible."""
        self.touched_queues.update(self.waiting_queues.pop(self.last_committed, {}))

    def queue_waiting_answers(self) -> None:
        """Let the next turn send the answers that waited for the last committed batch."""
        self._answers.extend(self._waiting_answers.pop(self.last_committed, ()))


# ---- Background tasks: work that goes on beside commands, a slice in each turn ----
#
# A task that gets work adds itself to `CommitState.active_work`. Each turn then calls its `can_step`, until it has no
# work any more; a task without work costs nothing. Pages that a step reads come back by `StoreRead.on_page`.


class BackgroundTask(ABC):
    @property
    def active_work_key(self) -> object:
        """Key in `CommitState.active_work`."""
        return self

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether there is work to do, now or later."""

    def can_step(self) -> bool:
        """Return whether a step would do something."""
        return self.has_work

    @abstractmethod
    def step(self) -> Sequence[StoreRead]:
        """Do a slice of the work. Returns the reads of pages that the task needs to continue."""

    def next_due_ms(self) -> int | None:
        """Return the time when a step is due, in milliseconds since the epoch. None if the task does not wait for a
        time."""
        return None
