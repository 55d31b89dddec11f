"""Steps of a process with a message, after src/truenext/stage/worker.py and stage/outbox/exactly_once.py.

The receipt of a message and the run of its function are one step: no other process sees a state between the two.
"""

from __future__ import annotations

from tests.stages.outbox.protocol.rules import GAP, Rules, Steps
from tests.stages.outbox.protocol.state import (
    COMMITTED,
    DONE,
    FOUND,
    FREE,
    HANDLED,
    IDLE,
    NO_OWNER,
    NO_ROW,
    RAN,
    READY,
    UNKNOWN,
    USED,
    Draft,
    State,
)


class Workers(Rules):
    def of_a_worker(self, state: State, process: int, message: int) -> Steps:
        at = self.at
        doing = state[at.worker[process] + message]
        if not doing:
            if state[at.message + message] != READY:
                return
            if state[at.inbox + message] and self.fault != "the inbox is not checked":
                yield self._found(state, process, message)
            else:
                yield from self._run(state, process, message)
        elif doing[0] == RAN:
            yield from self._commit_sql(state, process, message, *doing[1:])
        elif doing[0] == COMMITTED:
            yield from self._commit_both(state, process, message, *doing[1:])
        elif doing[0] == FOUND:
            yield from self._send_found(state, process, message, *doing[1:])
        else:
            yield from self._acknowledge(state, process, message)

    def _now(self, state: State, process: int, message: int, *doing: int) -> Draft:
        after = list(state)
        after[self.at.worker[process] + message] = doing
        return after

    def _has_it(self, state: State, process: int, message: int) -> bool:
        """False if the connection was lost, so that another process may have the message."""
        return bool(state[self.at.message + message] == process)

    def _release(self, after: Draft, process: int, message: int) -> None:
        if after[self.at.message + message] == process:
            after[self.at.message + message] = READY

    # ---- It runs ----

    def _run(self, state: State, process: int, message: int) -> Steps:
        """Run the message: Once.insert_inbox_id, the function, Once.insert_unit."""
        at = self.at
        if self.is_under_way(state, message):
            # It waits for the other's row of the inbox, and has nothing meanwhile that anybody needs.
            return
        for producer in at.producers:
            known = state[at.memory[process] + producer]
            is_second = known >= USED and self.fault == "a producer has two units under way"
            if not (self.is_free(known) or is_second) or self.is_locked(state, producer):
                continue
            number = known - (USED if is_second else FREE) + 1
            if not self._may_use(state, process, producer, number):
                # Whatever else it has may be another's, too: OutboxRelay.mark_free_in_doubt.
                after = list(state)
                for each in at.producers:
                    if self.is_free(state[at.memory[process] + each]):
                        self.doubt(after, process, each)
                self.doubt(after, process, producer)
                yield f"{process} has lost producer {producer}", False, tuple(after)
                continue
            after = self._now(state, process, message, RAN, producer, number)
            after[at.message + message] = process
            after[at.memory[process] + producer] = USED + number
            yield f"{process} runs message {message} under {producer}:{number}", False, tuple(after)

    def _may_use(self, state: State, process: int, producer: int, number: int) -> bool:
        """WHERE owner = :owner AND number = :number - 1"""
        if self.fault == "owner and number are not checked":
            return True
        is_own = state[self.at.owner + producer] == process or self.fault == "the owner is not checked"
        is_next: bool = state[self.at.number + producer] == number - 1
        return is_own and state[self.at.owner + producer] != NO_OWNER and is_next

    def _commit_sql(self, state: State, process: int, message: int, producer: int, number: int) -> Steps:
        at = self.at
        what = f"SQL of message {message}"
        after = self._now(state, process, message, COMMITTED, producer, number)
        self.commit_work(after, message, (producer, number))
        yield f"{process} commits {what}", False, tuple(after)
        has_it = self._has_it(state, process, message)
        if not has_it:
            # It may find that out before.
            after = self._now(state, process, message)
            self.doubt(after, process, producer)
            yield f"{process} takes back {what}", False, tuple(after)
        if has_it and state[at.cuts]:
            after = list(state)
            after[at.cuts] -= 1
            after[at.message + message] = READY
            yield f"the connection of {process} with message {message} is lost", True, tuple(after)
        if state[at.losses]:
            after = self._now(state, process, message)
            after[at.losses] -= 1
            after[at.pending + message] = (producer, number)
            self._release(after, process, message)
            self._doubt_own(after, process, producer, number)
            yield f"{process} has no answer to COMMIT of {what}", True, tuple(after)

    def _doubt_own(self, after: Draft, process: int, producer: int, number: int) -> None:
        """BorrowedProducer.__aexit__"""
        if self.fault == "a producer in doubt is lent again":
            after[self.at.memory[process] + producer] = FREE + number
        else:
            self.doubt(after, process, producer)

    def _commit_both(self, state: State, process: int, message: int, producer: int, number: int) -> Steps:
        at = self.at
        unit = 1 << message
        what = f"message {message} under {producer}:{number}"
        if not self._has_it(state, process, message):
            # Its transaction of the broker was rolled back with its connection.
            after = self._now(state, process, message)
            self._doubt_own(after, process, producer, number)
            yield f"{process} finds that it has lost {what}", False, tuple(after)
            return
        idle = self._now(state, process, message)
        if self.fault == "a unit is deleted before the answer":
            idle[at.row + message] = NO_ROW
        after = list(idle)
        if self.accept(after, (producer, number), unit, message) == GAP:
            self.doubt(after, process, producer)
        else:
            # Also when it was a repeat: then another one has sent this unit.
            after[at.memory[process] + producer] = FREE + number
            self.has_sent(after, process, message)
        yield f"{process} commits {what}", False, tuple(after)
        if state[at.cuts]:
            after = list(idle)
            after[at.cuts] -= 1
            self.cut(after, (producer, number), unit, message)
            self._doubt_own(after, process, producer, number)
            if self.fault == "a unit without an answer is deleted":
                self.has_sent(after, process, message)
            yield f"{process} has no answer to COMMIT of {what}", True, tuple(after)

    # ---- It was already processed: ExactlyOnce.ensure_sent ----

    def _found(self, state: State, process: int, message: int) -> tuple[str, bool, State]:
        """Find a message in the inbox. The inbox forgets nothing, so checking it and reading the unit are one step."""
        row = state[self.at.row + message]
        after = self._now(state, process, message, *((FOUND, *row) if row else (HANDLED,)))
        after[self.at.message + message] = process
        return (
            f"{process} finds message {message} in the inbox, and reads its unit: {row or 'none'}",
            False,
            tuple(after),
        )

    def _send_found(self, state: State, process: int, message: int, producer: int, number: int) -> Steps:
        at = self.at
        unit = 1 << message
        what = f"what message {message} has under {producer}:{number}"
        after = self._now(state, process, message, HANDLED)
        if self.fault == "a redelivered message counts its unit as sent":
            self.has_sent(after, process, message)
        elif self.accept(after, (producer, number), unit) == GAP:
            # Its relay sees to that.
            after[at.worker[process] + message] = IDLE
            self._release(after, process, message)
        else:
            self.has_sent(after, process, message)
        yield f"{process} sends {what}", False, tuple(after)
        if state[at.cuts]:
            after = self._now(state, process, message)
            after[at.cuts] -= 1
            self.cut(after, (producer, number), unit)
            self._release(after, process, message)
            yield f"{process} has no answer to COMMIT of {what}", True, tuple(after)

    def _acknowledge(self, state: State, process: int, message: int) -> Steps:
        """Acknowledge by a COMMIT without a number, whose outcome the client finds out."""
        at = self.at
        after = self._now(state, process, message)
        if self._has_it(state, process, message):
            after[at.message + message] = DONE
            if state[at.cuts]:
                back = self._now(state, process, message)
                back[at.cuts] -= 1
                back[at.message + message] = READY
                yield f"{process} does not acknowledge message {message}", True, tuple(back)
        yield f"{process} acknowledges message {message}", False, tuple(after)

    # ---- Its producers: Relay.borrow ----

    def of_borrowing(self, state: State, process: int) -> Steps:
        """Make a producer if the process has none free."""
        at = self.at
        memory = state[at.memory[process] : at.memory[process] + len(at.producers)]
        if any(self.is_free(each) for each in memory):
            return
        if READY not in state[at.message : at.message + len(at.messages)] and not any(
            state[at.row + unit] == 1 for unit in at.started
        ):
            return
        names = self.new_producers(state)
        if len(names) < 2:
            # The search's last name is for what is to be moved.
            return
        producer = names[0]
        after = list(state)
        self.make_producer(after, producer, process, 0)
        after[at.memory[process] + producer] = FREE
        yield f"{process} makes producer {producer}", False, tuple(after)
        if state[at.losses]:
            after[at.losses] -= 1
            after[at.memory[process] + producer] = UNKNOWN
            yield f"{process} makes producer {producer}, and does not know it", True, tuple(after)

    # ---- It dies ----

    def of_dying(self, state: State, process: int) -> Steps:
        """Kill the process. Its last COMMIT of SQL or of the broker may have been executed, or not."""
        at = self.at
        if not state[at.deaths]:
            return
        after = list(state)
        after[at.deaths] -= 1
        self.forget_all(after, process)
        for message in at.messages:
            doing = state[at.worker[process] + message]
            self._release(after, process, message)
            if doing and doing[0] == RAN:
                after[at.pending + message] = doing[1:]
            elif doing and doing[0] == COMMITTED and self._has_it(state, process, message):
                self.cut(after, doing[1:], 1 << message, message)
            elif doing and doing[0] == FOUND:
                self.cut(after, doing[1:], 1 << message)
        self.leave_late(state, after, process)
        yield f"{process} dies", True, tuple(after)

    def leave_late(self, state: State, after: Draft, process: int) -> None:
        """Leave on its way the COMMIT that the relay of a dying process was sending."""
        raise NotImplementedError
