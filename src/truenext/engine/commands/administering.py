"""Control requests about the whole broker: pause and resume queues, change policies, send replies."""

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
        """Pause a queue, and create it if it is missing. Returns whether it was created.

        The pause is durable before the next answer to a control request is sent.

        Raises: RemoteProtocolError if the queue cannot be created.
        """
        queue = self._queues.by_name.get(name)
        is_new = queue is None or queue.is_temporary
        if is_new:
            queue = self._queues.get_or_create(parse_queue_name(name))
        assert queue is not None, "it belongs to no connection"
        self._queues.set_paused(queue, is_paused=True)
        if queue.has_wildcards:
            # Its uncommitted messages no longer hold back wildcard consumers in other queues.
            self._commit_state.touched_queues[queue] = None
        return is_new

    def resume(self, name: str) -> None:
        """Resume a paused queue.

        Raises: RemoteProtocolError if there is no such queue.
        """
        queue = self._queues.require_permanent(name)
        self._queues.set_paused(queue, is_paused=False)
        self._commit_state.touched_queues[queue] = None

    # ---- Policies ----

    def change_policies(self, policies: Policies) -> None:
        """Replace the policies of all queues, in one step.

        Messages that have failed too often by the new policies are dead-lettered. After this call, run a turn and
        `Engine.evict`.
        """
        self._queues.policies = policies
        self._commit_state.return_count += 1
        # A copy: dead-lettering may create a queue.
        for queue in list(self._queues.by_name.values()):
            queue.policy = policies.for_queue(queue.destination.topic or queue.name)
            queue.holds_dead_letters = policies.holds_dead_letters(queue.name) and not queue.is_temporary
            self._resident.on_policy_changed(queue)
            if not queue.keeps_failures:
                for lane in queue.lanes:
                    self._settlement.dead_letter_exhausted(lane)
                # An exhausted message that had to be read blocked those after it; they may be ready now.
                self._commit_state.touched_queues[queue] = None

    # ---- Answers ----

    def expect_reply(self, destination: Destination) -> None:
        """Create the temporary queue for the reply to a control request, if the queue is missing.

        Raises: RemoteProtocolError if the connection has too many queues, or memory for queues is full.
        """
        self._queues.get_or_create(destination)

    def reply(self, send: Send, batch: int = 0) -> None:
        """Send the reply to a control request. The reply is visible once the request's changes and `batch` are
        durable."""
        queue = self._queues.by_name.get(send.destination.name)
        if queue is not None:
            durable_with = max(self._commit_state.last_control_batch, batch)
            self._arrivals.accept(
                queue, send.message, 0 if durable_with <= self._commit_state.last_committed else durable_with
            )
