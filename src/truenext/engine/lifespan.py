"""Start and stop of the engine: restores what the store has kept, and makes the final batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from truenext.engine.background.scheduled import Scheduler
from truenext.engine.memory.delays import DelayedEntries
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.queues.queues import Queues
from truenext.engine.state.queue import Entry, Lane, Queue
from truenext.engine.writing.engine_state import EngineState
from truenext.engine.writing.entries import mark, put
from truenext.model.batch import Batch
from truenext.model.destination import SCHEDULED_PREFIX, Destination, DestinationKind
from truenext.model.limits import STORE_TRANSACTION_BYTES_MAX


class EngineLifespan:
    def __init__(
        self,
        state: EngineState,
        delays: DelayedEntries,
        resident: ResidentSet,
        queues: Queues,
        scheduler: Scheduler,
    ) -> None:
        self._commit_state = state.commit_state
        self._events = state.commit_state.events
        self._delayed_entries = delays
        self._resident = resident
        self._queues = queues
        self._scheduler = scheduler
        self._producers = state.producers
        self._jms_producers = state.jms_producers
        self.unread_lanes: list[Lane] = []
        """Lanes of which nothing was read when the broker started, for broker/unread_heads.py."""

    # ---- Restoring ----

    def restore_queue(self, number: int, name: str) -> Queue:
        """Restore a queue that the store knows."""
        if name.startswith(SCHEDULED_PREFIX):
            return self._scheduler.restore_queue(number, name)
        return self._queues.restore(number, name)

    def restore_lane(self, queue: Queue, rank: int, count: int) -> None:
        """Restore a lane with `count` messages in the store. Messages are read when consumers need them."""
        lane = queue.lane(rank)
        lane.horizon = 0
        lane.unread = count
        self.unread_lanes.append(lane)

    def restore_pause(self, queue: Queue) -> None:
        queue.is_paused = True

    # ---- Start and stop ----

    def start(self, *, after_clean_stop: bool = True, epoch: int = 0, identity: str = "") -> None:
        """Add the changes of a start to the gathering batch: events, a range of sequences, and a mark that the broker
        has not stopped cleanly, which a clean stop removes. The batch must be durable before clients are served.

        `epoch` is the broker's number among those that have taken over its log; 0 if it has none. `identity` is that of
        its store, for the history; empty if it is not known.
        """
        commit_state = self._commit_state
        self._events.run_started(after_clean_stop=after_clean_stop, epoch=epoch, identity=identity)
        queues = self._queues
        for name in list(queues.hidden_by_name):
            if name and queues.scheduled_count(name) and name not in queues.by_name:
                queues.create(Destination(DestinationKind.QUEUE, name))
        all_queues = queues.all_with_ended()
        # The history knows queues by name: messages of ended queues count with those of the current queue.
        counts: Counter[str] = Counter()
        for queue in all_queues:
            counts[queue.name] += queue.waiting_count()
        for queue in all_queues:
            if count := counts.pop(queue.name, 0):
                self._events.recovered(queue, count)
            if queue.is_paused:
                self._events.paused(queue)
            queue.last_used_us = commit_state.now_us
        commit_state.batch.clean_stop = False
        commit_state.batch.redelivered_below = commit_state.redelivered_below
        commit_state.request_sequence_range()
        commit_state.is_batch_awaited = True

    def final_batches(self) -> Iterator[Batch]:
        """Yield the batches of a clean stop.

        These batches store waiting transient messages, delivery counts, and the numbers used by producers that have
        sent only transient messages. The last batch records that the stop was clean. Each batch must be durable before
        the next is taken. Call it after `Connecting.stop`, while no batch is being written.
        """
        commit_state = self._commit_state
        permanent = (queue for queue in self._queues.by_name.values() if not queue.is_temporary)
        # Lanes may be freed when messages leave memory in between.
        waiting = [entry for queue in permanent for lane in queue.lanes for entry in lane]
        for entry in waiting + self._resident.awaiting_dead_letter():
            if commit_state.batch.size >= STORE_TRANSACTION_BYTES_MAX:
                yield commit_state.close_batch()
            self._put_final_state(entry)
        for name, state in chain(self._producers.unstored_states(), self._jms_producers.unstored_states()):
            if commit_state.batch.size >= STORE_TRANSACTION_BYTES_MAX:
                yield commit_state.close_batch()
            commit_state.batch.producers[name] = state
            commit_state.batch.size += len(name)
        commit_state.batch.clean_stop = True
        yield commit_state.close_batch()

    def _put_final_state(self, entry: Entry) -> None:
        """Add a waiting message to the batch, if the store lacks it. Also add the message's delivery count, if there is
        one."""
        if entry.store_batch is None:
            put(self._commit_state.batch, entry)
        if entry.deliveries or entry.attempts:
            mark(self._commit_state.batch, entry, self._delayed_entries.due_ms(entry))
