"""Rules of the broker and the database that processes rely on: their own steps, and their answers to requests.

A step is a description, a flag that marks failures, and the state afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.stages.outbox.protocol.state import (
    DONE,
    DOUBT,
    FORGOTTEN,
    FREE,
    IDLE,
    LATE,
    NO_OWNER,
    NO_ROW,
    NOT_SENT,
    PROCESSES,
    RAN,
    READY,
    SENT,
    UNKNOWN,
    USED,
    Draft,
    Layout,
    Numbered,
    State,
)

Step = tuple[str, bool, State]
Steps = Iterator[Step]

REPEAT, GAP, GIVEN_UP, ACCEPTED = "repeat", "gap", "given up", "accepted"

FAULTS: Final = (
    "a redelivered message counts its unit as sent",
    "a unit is sent again under a new number",
    "a numbered unit gets another number",
    "a unit after a gap is renumbered",
    "a unit without an answer is renumbered",
    "all units of a producer are sent under its new number",
    "a unit is deleted before the answer",
    "a unit without an answer is deleted",
    "owner and number are not checked",
    "an unknown producer is not looked up",
    "a unit counts as sent without an answer",
    "a producer is claimed while a transaction uses it",
    "a producer is claimed while its own process uses it",
    "the inbox is not checked",
    "the owner is not checked",
    "the relay frees a producer in doubt",
    "a producer has two units under way",
    "units are read by the locking statement",
    "a producer in doubt is lent again",
    "a unit whose number was given up counts as sent",
    "a unit is split before its number is given up",
)
"""Names of faults, each of which breaks one rule. An empty name breaks none."""


class Violation(Exception):
    pass


class Rules:
    def __init__(self, layout: Layout, fault: str = "") -> None:
        assert not fault or fault in FAULTS
        self.at = layout
        self.fault = fault

    # ---- The broker ----

    def accept(self, after: Draft, numbered: Numbered, units: int, acknowledged: int = -1) -> str:
        """COMMIT under a number (docs/contract.md, C18.5), without gaps.

        Raises: Violation
        """
        at = self.at
        producer, number = numbered
        highest = after[at.highest + producer]
        answer = ACCEPTED
        if number > highest + 1:
            if not at.was_restored(after):
                raise Violation(f"number {number} of producer {producer} leaves one out")
            answer = GAP
        elif number in after[at.given_up + producer]:
            answer = GIVEN_UP
        elif number <= highest:
            answer = REPEAT
        else:
            after[at.highest + producer] = number
            for unit in self.each(units):
                if after[at.output + unit] == SENT:
                    raise Violation(f"unit {unit} is sent twice, now under {producer}:{number}")
                after[at.output + unit] = SENT
        if acknowledged >= 0:
            # What a repeat, or a COMMIT that was refused, has acknowledged comes back.
            after[at.message + acknowledged] = DONE if answer is ACCEPTED else READY
        return answer

    def cut(self, after: Draft, numbered: Numbered, units: int, acknowledged: int = -1) -> None:
        """Lose the connection after this COMMIT, which the broker may execute at any time, or never.

        If it executes the COMMIT at once, only the answer is lost.
        """
        at = self.at
        late = set(after[at.late])
        late.add((*numbered, units, acknowledged))
        after[at.late] = tuple(sorted(late))
        if acknowledged >= 0:
            after[at.message + acknowledged] = LATE

    def of_the_broker(self, state: State) -> Steps:
        at = self.at
        for each in state[at.late]:
            producer, number, units, acknowledged = each
            rest = tuple(other for other in state[at.late] if other is not each)
            after = list(state)
            after[at.late] = rest
            self.accept(after, (producer, number), units, acknowledged)
            yield f"the broker executes the late COMMIT {producer}:{number}", False, tuple(after)
            after = list(state)
            after[at.late] = rest
            if acknowledged >= 0:
                after[at.message + acknowledged] = READY
            yield f"the broker never gets the late COMMIT {producer}:{number}", False, tuple(after)
        if state[at.restores]:
            after = list(state)
            after[at.restores] -= 1
            # No connection survives that, so nothing is late any more.
            after[at.late] = ()
            for message in at.messages:
                after[at.message + message] = READY
            for producer in at.producers:
                after[at.highest + producer], after[at.given_up + producer] = 0, ()
            for unit in at.units:
                if after[at.output + unit] == SENT:
                    after[at.output + unit] = FORGOTTEN
            yield "the broker is restored", True, tuple(after)

    # ---- The database ----

    def commit_work(self, after: Draft, message: int, numbered: Numbered) -> None:
        """Commit effect, inbox, unit and number in one transaction.

        Raises: Violation
        """
        at = self.at
        producer, number = numbered
        if after[at.inbox + message]:
            raise Violation(f"the effect of message {message} happens twice, now under {producer}:{number}")
        after[at.inbox + message] = 1
        after[at.row + message] = numbered
        after[at.number + producer] = number

    def of_the_database(self, state: State) -> Steps:
        at = self.at
        for message in at.messages:
            pending = state[at.pending + message]
            if pending:
                after = list(state)
                after[at.pending + message] = 0
                yield f"the database rolls back message {message}", False, tuple(after)
                after = list(state)
                after[at.pending + message] = 0
                self.commit_work(after, message, pending)
                yield f"the database commits message {message}, late", False, tuple(after)

    def is_locked(self, state: State, producer: int) -> bool:
        """True if an open transaction has changed the producer's row.

        Only transactions of messages last. All others only wait for the database between their first lock and their
        end, so they are one step each.
        """
        at = self.at
        for message in at.messages:
            pending = state[at.pending + message]
            if pending and pending[0] == producer:
                return True
            for process in PROCESSES:
                doing = state[at.worker[process] + message]
                if doing and doing[0] == RAN and doing[1] == producer:
                    return True
        return False

    def is_under_way(self, state: State, message: int) -> bool:
        """True if an open transaction has the message's row of the inbox."""
        at = self.at
        if state[at.pending + message]:
            return True
        for process in PROCESSES:
            doing = state[at.worker[process] + message]
            if doing and doing[0] == RAN:
                return True
        return False

    def delete(self, after: Draft, units: int) -> None:
        """Delete the rows of these units, under any number.

        Raises: Violation
        """
        at = self.at
        for unit in self.each(units):
            if after[at.output + unit] == NOT_SENT:
                raise Violation(f"unit {unit} is deleted, and was not sent")
            after[at.row + unit] = NO_ROW
            # Those who would delete it later have nothing to do.
            for process in PROCESSES:
                after[at.sent + process] &= ~(1 << unit)

    def rows_of(self, state: State, numbered: Numbered) -> int:
        at = self.at
        return sum(1 << unit for unit in at.units if state[at.row + unit] == numbered)

    def units_of(self, state: State, producer: int) -> tuple[tuple[int, int], ...]:
        """Return each number of the producer in the outbox, with the set of its units."""
        at = self.at
        found: dict[int, int] = {}
        for unit in at.units:
            row = state[at.row + unit]
            if row and row != 1 and row[0] == producer:
                found[row[1]] = found.get(row[1], 0) | 1 << unit
        return tuple(sorted(found.items()))

    def new_producers(self, state: State) -> list[int]:
        """Return unused names of producers, as far as the search has any left: no other part of the state mentions
        them."""
        at = self.at
        return [
            producer
            for producer in at.producers
            if state[at.owner + producer] == NO_OWNER and not self._is_mentioned(state, producer)
        ]

    def _is_mentioned(self, state: State, producer: int) -> bool:
        at = self.at
        return (
            any(state[at.memory[process] + producer] != UNKNOWN for process in PROCESSES)
            or any(each[0] == producer for each in state[at.late])
            or any(doing and doing[1] == producer for doing in state[at.relay : at.relay + 2])
            or any(row and row != 1 and row[0] == producer for row in state[at.row : at.row + len(at.units)])
            or any(each and each[0] == producer for each in state[at.pending : at.pending + len(at.messages)])
            or any(
                len(doing) > 1 and doing[1] == producer
                for process in PROCESSES
                for doing in state[at.worker[process] : at.worker[process] + len(at.messages)]
            )
        )

    def make_producer(self, after: Draft, producer: int, owner: int, number: int) -> None:
        at = self.at
        after[at.owner + producer] = owner
        after[at.number + producer] = number
        after[at.highest + producer], after[at.given_up + producer] = 0, ()

    # ---- What a process knows ----

    def doubt(self, after: Draft, process: int, producer: int) -> None:
        """Put a producer in doubt, as an answer is missing: it is not used before it is claimed anew."""
        after[self.at.memory[process] + producer] = DOUBT

    def has_sent(self, after: Draft, process: int, unit: int) -> None:
        """Note that the unit is sent: the process may delete its row at any time."""
        if after[self.at.row + unit]:
            after[self.at.sent + process] |= 1 << unit

    @staticmethod
    def is_free(memory: int) -> bool:
        return FREE <= memory < USED

    def each(self, units: int) -> Iterator[int]:
        return (unit for unit in self.at.units if units >> unit & 1)

    def is_dead(self, state: State, process: int) -> bool:
        return process != NO_OWNER and not state[self.at.is_alive + process]

    def forget_all(self, after: Draft, process: int) -> None:
        """Forget all that a dead process knew."""
        at = self.at
        after[at.is_alive + process] = 0
        after[at.relay + process] = IDLE
        after[at.sent + process] = 0
        for message in at.messages:
            after[at.worker[process] + message] = IDLE
        for producer in at.producers:
            after[at.memory[process] + producer] = UNKNOWN
