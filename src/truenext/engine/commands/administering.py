"""What somebody asks of the broker as a whole: to pause a queue, to take over other policies, and to be answered."""

from __future__ import annotations

from truenext.engine.lifecycle.arrivals import Arrivals
from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.queues.queues import Queues
from truenext.engine.writing.commit_state import CommitState
from truenext.model.commands import Send
from truenext.model.destination import Destination, parse_queue_name
from truenext.model.policy import Policies


class Administering:
    def __init__(
        self,
        commit_state: CommitState,
        resident: ResidentSet,
        queues: Queues,
        arrivals: Arrivals,
        settlement: Settlement,
    ) -> None:
        self._commit_state = commit_state
        self._resident = resident
        self._queues = queues
        self._arrivals = arrivals
        self._settlement = settlement

    # ---- Pausing ----

    def pause(self, name: str) -> bool:
        """Nothing is dispatched from a queue any more, which is made if it is not there; true if it was not. Durable
        with the next answer.

        Raises: RemoteProtocolError if there can be no such queue.
        """
        queue = self._queues.by_name.get(name)
        is_new = queue is None or queue.is_temporary
        if is_new:
            queue = self._queues.get_or_create(parse_queue_name(name))
        assert queue is not None, "it belongs to no connection"
        self._queues.set_paused(queue, is_paused=True)
        if queue.has_wildcards:
            # What is being committed in it holds back nobody in other queues any more.
            self._commit_state.touched_queues[queue] = None
        return is_new

    def resume(self, name: str) -> None:
        """Raises: RemoteProtocolError if there is no such queue."""
        queue = self._queues.require_permanent(name)
        self._queues.set_paused(queue, is_paused=False)
        self._commit_state.touched_queues[queue] = None

    # ---- Policies ----

    def change_policies(self, policies: Policies) -> None:
        """Give every queue its policy anew, in one step.

        What waits and has failed too often by its new policy is given up. To be followed by a turn and by `evict`.
        """
        self._queues.policies = policies
        # A dead-letter queue may be made meanwhile.
        for queue in list(self._queues.by_name.values()):
            queue.policy = policies.for_queue(queue.policy_name)
            queue.holds_dead_letters = policies.holds_dead_letters(queue.name) and not queue.is_temporary
            self._resident.on_policy_changed(queue)
            if not queue.keeps_failures:
                for lane in queue.lanes:
                    self._settlement.dead_letter_exhausted(lane)
                # What stands behind a message that had to be read is next now.
                self._commit_state.touched_queues[queue] = None

    # ---- Answers ----

    def expect_reply(self, destination: Destination) -> None:
        """Somebody asks, and is to be answered in this temporary queue, which is made if it is not there.

        Raises: RemoteProtocolError if there are too many
        """
        self._queues.get_or_create(destination)

    def reply(self, send: Send, batch: int = 0) -> None:
        """Answer a question once what it made the broker do is durable, and `batch` is, of which it speaks."""
        queue = self._queues.by_name.get(send.destination.name)
        if queue is not None:
            durable_with = max(self._commit_state.last_control_batch, batch)
            self._arrivals.accept(
                queue, send.message, 0 if durable_with <= self._commit_state.last_committed else durable_with
            )
