"""Eviction: moves messages from memory to the store when memory is short, and selects connections to close.

    first                              horizons move down: messages that would be served last leave first
    if memory is still short           bodies of held messages leave, then bodies of requeued and delayed messages
    if memory is still short           the connection with the largest reply queue is closed

An evicted transient message becomes a record in the store, written with the gathering batch. No client waits for this
write. Copies of one message in several subscriptions leave together, so that the content is written once.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from heapq import heappop, heappush
from itertools import groupby, islice
from operator import attrgetter

from truenext.engine.memory import horizon
from truenext.engine.memory.horizon import is_stored
from truenext.engine.memory.resident_set import NEVER_EXHAUSTED, ResidentSet
from truenext.engine.memory.spilled_subscriptions import SpilledSubscriptions
from truenext.engine.state.causes import causes_size
from truenext.engine.state.memory import size_of
from truenext.engine.state.queue import Entry, Lane, Queue
from truenext.engine.writing.engine_state import EngineState
from truenext.engine.writing.entries import put_copies
from truenext.model.limits import (
    EVICTED_BYTES_PER_TURN,
    EVICTION_QUEUES_PER_TURN,
    EVICTION_QUEUES_SORTED_PER_TURN,
    REPLIES_EXCESS_BYTES_MAX,
)
from truenext.model.order import RANKS

EVICTION_DIVISOR = 4
"""Divisor of a limit. When memory passes a limit, limit / EVICTION_DIVISOR bytes are freed, so that many messages leave
memory together."""

EVICTED_BYTES_PER_BATCH = 512 * 1024
"""Maximum bytes of evicted messages in one batch. The maximum is low, because clients may wait for the write of the
batch."""

EVICTION_GROUP_QUEUES = 500
"""Maximum number of subscriptions whose copies of a message leave together. With more subscriptions, the content is
written several times."""

_END = object()


class Eviction:
    def __init__(
        self,
        state: EngineState,
        resident: ResidentSet,
        spilling: SpilledSubscriptions,
    ) -> None:
        self._commit_state = state.commit_state
        self._memory = state.memory
        self._resident = resident
        self._clients = state.clients
        self._queues_by_name = state.queues_by_name
        self._spilling = spilling
        self._round: Generator[None, None, None] | None = None
        """Unfinished eviction, which the next call continues; None if no eviction is in progress."""
        self._round_start = NEVER_EXHAUSTED
        """Value of `_moment` when `_round` began."""
        self._batch = 0
        """Number of the last batch that has taken evicted messages."""
        self._batch_bytes = 0

    @property
    def is_unfinished(self) -> bool:
        """Whether the next turn must evict more messages."""
        return self._round is not None and not self._waits_for_batch

    @property
    def _waits_for_batch(self) -> bool:
        """Whether the gathering batch takes no more evicted messages."""
        return self._batch_bytes >= EVICTED_BYTES_PER_BATCH and self._batch == self._commit_state.batch.number

    def enforce_memory_limits(self, queues: Collection[Queue]) -> list[Queue]:
        """Evict messages until memory is within its limits, at most as many as one turn may evict. Messages that the
        store lacks are added to the gathering batch.

        Do not call it between a dispatch and the writing of the dispatched messages. Returns temporary queues whose
        connections must be closed: the largest reply queue, if nothing else can leave memory, and topic subscriptions
        above their limit.
        """
        memory, resident = self._memory, self._resident
        if (
            self._round is None
            and memory.bytes_over_limit <= 0
            and not (memory.is_page_space_short or resident.queues_over_limit)
            and not (resident.queues_still_over_limit or resident.limited_subscriptions)
        ):
            # Nothing to do, as in most turns.
            self._commit_state.is_eviction_behind = False
            return []
        if self._batch_bytes and self._batch == self._commit_state.batch.number and self._commit_state.batch.is_empty():
            # All its evicted messages were acknowledged meanwhile. Do not wait for it: an empty batch is not written.
            self._batch_bytes = 0
            resident.retry_queues_over_limit()
        too_slow = [] if self._waits_for_batch else self._evict(queues)
        self._commit_state.is_eviction_behind = memory.bytes_over_limit > 0 and self._waits_for_batch
        return too_slow

    def _evict(self, queues: Collection[Queue]) -> list[Queue]:
        too_slow = [
            queue
            for queue in self._resident.limited_subscriptions
            if queue.resident_bytes + queue.spilled_bytes > queue.policy.memory_limit
        ]
        too_large, self._resident.queues_over_limit = self._resident.queues_over_limit, {}
        for queue in too_large:
            limit = queue.policy.memory_limit
            if queue.is_temporary:
                # A pattern's limit is not meant for reply queues.
                if queue.destination.topic and queue.resident_bytes > limit and queue not in too_slow:
                    too_slow.append(queue)
                continue
            if queue.resident_bytes > limit:
                self._evict_from_queues([queue], queue.resident_bytes - limit + limit // EVICTION_DIVISOR)
            if queue.resident_bytes > limit:
                self._resident.queues_still_over_limit[queue] = None
        memory = self._memory
        is_short, memory.is_page_space_short = memory.is_page_space_short, False
        is_first_step = self._round is None
        if self._round is None:
            if memory.bytes_over_limit <= 0 and not is_short:
                return too_slow
            now = self._moment()
            if self._resident.nothing_evictable_at == now:
                return too_slow
            self._round, self._round_start = self._evict_largest_first(queues), now
        if next(self._round, _END) is not _END:
            return too_slow
        self._round = None
        if memory.bytes_over_limit + memory.limit // EVICTION_DIVISOR > 0:
            now = self._moment()
            if not (is_first_step or now == self._round_start):
                # In queues that are done, messages may have arrived or become durable since.
                self._round, self._round_start = self._evict_largest_first(queues), now
                return too_slow
            self._resident.nothing_evictable_at = now
        if memory.bytes_over_limit <= min(REPLIES_EXCESS_BYTES_MAX, memory.limit * 3 // 4):
            # A client has requested a large reply, and reads it.
            return too_slow
        largest = max(queues, key=_resident_bytes, default=None)
        return too_slow if largest is None or not largest.is_reply_queue else [*too_slow, largest]

    def _moment(self) -> tuple[int, int, int]:
        """Return three numbers that change whenever further messages may be able to leave memory."""
        return self._commit_state.last_committed, self._memory.message_bytes, self._clients.dispatch_count

    def _evict_largest_first(self, queues: Collection[Queue]) -> Generator[None, None, None]:
        """Evict messages, from the largest queues first, until limit / EVICTION_DIVISOR bytes are free. Each step is
        the work of one turn."""
        memory = self._memory
        by_size: dict[int, list[Queue]] = {}
        for number, queue in enumerate(list(queues), 1):
            queue.shrink()
            if queue.resident_bytes and not queue.is_reply_queue:
                by_size.setdefault(queue.resident_bytes.bit_length(), []).append(queue)
            if number % EVICTION_QUEUES_SORTED_PER_TURN == 0:
                yield
        done: set[Queue] = set()
        step_queues = 0
        step_bytes = max(EVICTED_BYTES_PER_TURN, memory.bytes_over_limit // 2)
        for _, alike in sorted(by_size.items(), reverse=True):
            alike.sort(key=_resident_bytes, reverse=True)
            for queue in alike:
                if queue in done:
                    continue
                step_queues += 1
                if step_queues == EVICTION_QUEUES_PER_TURN:
                    yield
                    step_queues, step_bytes = 0, max(EVICTED_BYTES_PER_TURN, memory.bytes_over_limit // 2)
                group = [queue]
                if queue.destination.topic:
                    # Copies of a message leave together.
                    least = queue.resident_bytes // 2
                    of_topics = (
                        one
                        for each in by_size.values()
                        for one in each
                        if one.destination.topic and one.resident_bytes >= least and one not in done
                    )
                    group = list(islice(of_topics, EVICTION_GROUP_QUEUES))
                done.update(group)
                while (needed := memory.bytes_over_limit + memory.limit // EVICTION_DIVISOR) > 0:
                    before = memory.bytes_over_limit
                    # Some may have ended since the last turn: nothing of them may enter the store any more.
                    group = [one for one in group if self._queues_by_name.get(one.name) is one]
                    self._evict_from_queues(group, min(needed, step_bytes))
                    step_bytes -= before - memory.bytes_over_limit
                    if step_bytes > 0 and not self._waits_for_batch:
                        # All that can leave these queues has left.
                        break
                    yield
                    step_queues, step_bytes = 0, max(EVICTED_BYTES_PER_TURN, memory.bytes_over_limit // 2)
                else:
                    return

    def _evict_from_queues(self, queues: list[Queue], needed: int) -> None:
        """Evict `needed` bytes of messages from these queues. Messages that would be served last leave first."""
        for queue in queues:
            if queue.is_subscription and not queue.is_known_to_store:
                self._spilling.add(queue)
        for rank in reversed(RANKS):
            lanes = _existing_lanes(queues, rank)
            needed -= self._lower_horizons(lanes, needed)
            if needed <= 0 or self._waits_for_batch:
                return
        held = [
            entry for queue in queues for entry in self._clients.held_by_consumers(queue) if _has_evictable_part(entry)
        ]
        freed = self._unload_bodies(held, needed, are_held=True)
        if freed:
            for queue in queues:
                queue.has_unloaded_held = True
        needed -= freed
        for rank in reversed(RANKS):
            if needed <= 0 or self._waits_for_batch:
                return
            lanes = _existing_lanes(queues, rank)
            waiting = [
                entry
                for lane in lanes
                for entry in (*lane.delayed.values(), *lane.requeued_entries())
                if _has_evictable_part(entry)
            ]
            needed -= self._unload_bodies(waiting, needed)
            for lane in lanes:
                for entry in lane.requeued_entries():
                    if entry.message is None:
                        lane.add_unloaded(entry)

    def _lower_horizons(self, lanes: list[Lane], needed: int) -> int:
        """Lower the horizons of lanes, so that messages leave memory: the last accepted ones first. Copies of a message
        leave together, because their sequences are consecutive.

        Returns how many bytes have left memory, or will leave it when the messages are durable.
        """
        freed = 0
        ends: list[tuple[int, Lane]] = []
        for lane in lanes:
            if lane.arrived and lane.queue.observer is not None:
                lane.queue.observer.on_horizon_lowering(lane)
            self._push_last_evictable(ends, lane)
        while ends and freed < needed:
            message = ends[0][1].arrived[-1].message
            assert message is not None, "arrived messages are in memory as a whole"
            copies: list[Lane] = []
            while ends and ends[0][1].arrived[-1].message is message:
                copies.append(heappop(ends)[1])
            new = [lane.arrived[-1] for lane in copies if lane.arrived[-1].store_batch is None]
            if new:
                if self._waits_for_batch:
                    break
                self._put_copies(new)
            for lane in copies:
                self._lower_horizon(lane)
                self._push_last_evictable(ends, lane)
            freed += len(copies) * size_of(message)
        for lane in lanes:
            if lane.selected is not None:
                horizon.update_horizon(lane)
            lane.shrink()
        return freed

    def _put_copies(self, entries: list[Entry]) -> None:
        batch = self._commit_state.batch
        if self._batch != batch.number:
            self._batch, self._batch_bytes = batch.number, 0
        before = batch.size
        put_copies(batch, entries)
        self._batch_bytes += batch.size - before

    def _push_last_evictable(self, ends: list[tuple[int, Lane]], lane: Lane) -> None:
        """Push the last message that can leave a lane to the heap `ends`, which has the highest sequence first."""
        observer = lane.queue.observer
        while lane.arrived:
            entry = lane.arrived[-1]
            if entry.sequence <= lane.horizon_min:
                horizon.move_arrived_to_requeued(lane)
            elif observer is not None and observer.has_found(entry):
                horizon.lower_horizon_keeping_last(lane)
            else:
                heappush(ends, (-entry.sequence, lane))
                return

    def _lower_horizon(self, lane: Lane) -> None:
        """Evict the last message of a lane that is in memory, at once or when it is durable."""
        entry = horizon.lower_horizon(lane)
        message = entry.message
        assert message is not None, "arrived messages are in memory as a whole"
        committed = self._commit_state.last_committed
        if entry.batch <= committed and is_stored(entry, committed) and not lane.is_pinned:
            self._resident.unload_to_disk(entry, is_known=False)
        else:
            (lane.unread_in_memory or lane.allocate_unread_in_memory()).appendleft(entry)
            self._memory.pending_free_bytes += size_of(message)
            self._resident.lanes_with_unread_in_memory[lane] = None

    def _unload_bodies(self, entries: list[Entry], needed: int, *, are_held: bool = False) -> int:
        """Evict the bodies of messages, but keep the entries. With `are_held`, the sizes of the bodies are kept, too,
        because a transaction that acknowledges the messages may need the sizes.

        Returns how many bytes have left memory, or can leave it when the messages are durable.
        """
        freed = 0
        entries.sort(key=_sequence)
        for _, of_message in groupby(entries, key=lambda entry: id(entry.message)):
            if freed >= needed:
                break
            new: list[Entry] = []
            for entry in of_message:
                if entry.lane.is_pinned:
                    continue
                if entry.store_batch is None:
                    new.append(entry)
                    continue
                freed += _evictable_bytes(entry)
                if entry.store_batch <= self._commit_state.last_committed and self._resident.can_unload_causes(entry):
                    if entry.message is None:
                        self._resident.unload_causes(entry)
                    else:
                        size = size_of(entry.message)
                        self._resident.unload_to_disk(entry, is_known=True)
                        if are_held:
                            entry.lane.queue.spilled_sizes[entry.sequence] = size
            if new and not self._waits_for_batch:
                freed += sum(map(_evictable_bytes, new))
                self._put_copies(new)
        return freed


def _existing_lanes(queues: list[Queue], rank: int) -> list[Lane]:
    lanes = (queue.find_lane(rank) for queue in queues)
    return [lane for lane in lanes if lane is not None]


_sequence, _resident_bytes = attrgetter("sequence"), attrgetter("resident_bytes")


def _has_evictable_part(entry: Entry) -> bool:
    """Return whether the entry's body or causes are in memory."""
    return entry.message is not None or (entry.causes is not None and entry.causes.are_in_memory)


def _evictable_bytes(entry: Entry) -> int:
    return (0 if entry.message is None else size_of(entry.message)) + causes_size(entry.causes)


def owner_close_reason(queue: Queue) -> str:
    """Return why the connection that owns a temporary queue must be closed."""
    if queue.is_reply_queue:
        return "the client does not read the messages of its temporary queues"
    return (
        f"the subscription to {queue.destination.topic} has {queue.resident_bytes + queue.spilled_bytes} bytes of "
        f"messages, memory_limit of its policy is {queue.policy.memory_limit}: read faster, or raise memory_limit"
    )
