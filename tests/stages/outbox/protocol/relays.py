"""Steps of a process's relay, after src/truenext/stage/outbox/relay.py and src/truenext/stage/sql/outbox_table.py.

While the relay works at a producer, that producer is in doubt. After any failure the relay starts anew with it.
"""

from __future__ import annotations

from typing import Any

from tests.stages.outbox.protocol.rules import GAP, GIVEN_UP, Steps
from tests.stages.outbox.protocol.state import (
    CHECKED,
    CLAIMED,
    DELETES,
    DELETES_OWN,
    DOUBT,
    FREE,
    GIVES_UP,
    IDLE,
    MOVES,
    NO_OWNER,
    NUMBERED,
    PROCESSES,
    READ,
    RESOLVES,
    SENDS,
    SENDS_OWN,
    SPLITS,
    UNKNOWN,
    UNNUMBERED,
    USED,
    Draft,
    State,
)
from tests.stages.outbox.protocol.workers import Workers

Units = tuple[tuple[int, int], ...]
"""Numbers, each with the set of its units."""


class Relays(Workers):
    def of_a_relay(self, state: State, process: int) -> Steps:
        doing = state[self.at.relay + process]
        if not doing:
            for producer in self.at.producers:
                yield from self._compare(state, process, producer)
                yield from self._claim(state, process, producer)
                yield from self._number(state, process, producer)
            return
        step, rest = doing[0], doing[1:]
        if step == CHECKED:
            yield from self._lock(state, process, *rest)
        elif step == CLAIMED:
            yield self._read(state, process, *rest)
        elif step == READ:
            yield self._query(state, process, *rest)
        elif step == SENDS:
            yield from self._send(state, process, *rest)
        elif step == DELETES:
            yield from self._delete(state, process, *rest)
        elif step == RESOLVES:
            yield self._resolve(state, process, *rest)
        elif step == MOVES:
            yield from self._move(state, process, *rest)
        elif step == NUMBERED:
            yield self._read_own(state, process, *rest)
        elif step == SENDS_OWN:
            yield from self._send_own(state, process, *rest)
        elif step == GIVES_UP:
            yield from self._give_up(state, process, *rest)
        elif step == SPLITS:
            yield from self._split(state, process, *rest)
        else:
            yield from self._delete_own(state, process, *rest)

    def _next_state(self, state: State, process: int, *doing: Any) -> Draft:
        after = list(state)
        after[self.at.relay + process] = doing
        return after

    # ---- Taking: Relay._claim, Outbox.take_over ----

    def _compare(self, state: State, process: int, producer: int) -> Steps:
        """Relay._find_unknown"""
        at = self.at
        if self.fault == "an unknown producer is not looked up":
            return
        if state[at.memory[process] + producer] == UNKNOWN and state[at.owner + producer] == process:
            after = list(state)
            self.doubt(after, process, producer)
            yield f"{process} finds that producer {producer} is its own", False, tuple(after)

    def _claim(self, state: State, process: int, producer: int) -> Steps:
        at = self.at
        owner = state[at.owner + producer]
        known = state[at.memory[process] + producer]
        if known == DOUBT and owner != process:
            after = list(state)
            after[at.memory[process] + producer] = UNKNOWN
            yield f"{process} finds that producer {producer} is another's", False, tuple(after)
        if known >= USED and self.fault != "a producer is claimed while its own process uses it":
            # Another process has taken it, and has died. Whoever uses it here finds that out first.
            return
        is_dead = self.is_dead(state, owner)
        is_false = owner not in (process, NO_OWNER) and not is_dead
        if not (is_dead or (owner == process and known == DOUBT) or (is_false and state[at.claims])):
            return
        how = ", whose process is alive" if is_false else ""
        if self.fault == "units are read by the locking statement":
            after = self._next_state(state, process, CHECKED, producer, self.units_of(state, producer))
            after[at.claims] -= is_false
            self.doubt(after, process, producer)
            yield f"{process} waits for producer {producer}{how}", is_false, tuple(after)
            return
        if self.is_locked(state, producer) and self.fault != "a producer is claimed while a transaction uses it":
            # Busy: later.
            return
        number = state[at.number + producer]
        after = self._next_state(state, process, CLAIMED, producer, number)
        after[at.claims] -= is_false
        after[at.owner + producer] = process
        if known == UNKNOWN or self.fault != "a producer is claimed while its own process uses it":
            self.doubt(after, process, producer)
        yield f"{process} takes producer {producer}{how}", is_false, tuple(after)
        if state[at.losses] and owner != process:
            after = list(state)
            after[at.losses] -= 1
            after[at.claims] -= is_false
            after[at.owner + producer] = process
            # What it has taken for free it does not any more.
            after[at.memory[process] + producer] = known if known == DOUBT else UNKNOWN
            yield f"{process} takes producer {producer}{how}, and does not know it", True, tuple(after)

    def _lock(self, state: State, process: int, producer: int, units: Units) -> Steps:
        """Claim with the fault planted: the units are those from before the wait for the lock."""
        at = self.at
        if not self.is_locked(state, producer):
            after = self._next_state(state, process, READ, producer, state[at.number + producer], units)
            after[at.owner + producer] = process
            yield f"{process} takes producer {producer}", False, tuple(after)

    def _read(self, state: State, process: int, producer: int, number: int) -> tuple[str, bool, State]:
        units = self.units_of(state, producer)
        after = self._next_state(state, process, READ, producer, number, units)
        return f"{process} reads units of producer {producer}: {[each for each, _ in units]}", False, tuple(after)

    # ---- Sending what it has: Relay._send_all ----

    def _query(self, state: State, process: int, producer: int, number: int, units: Units) -> tuple[str, bool, State]:
        highest = state[self.at.highest + producer]
        after = self._next_state(state, process, *self._next(state, producer, number, units, highest))
        return f"{process} asks the broker for producer {producer}: {highest}", False, tuple(after)

    def _next(self, state: State, producer: int, number: int, units: Units, highest: int) -> tuple[Any, ...]:
        """Return the next step of the relay: units that the broker knows already are deleted and not sent.
        Relay._resolve"""
        if (
            units
            and units[0][0] in state[self.at.given_up + producer]
            and self.fault != "a unit whose number was given up counts as sent"
        ):
            return (SPLITS, producer, *units[0])
        is_known = bool(units) and units[0][0] <= highest
        return (DELETES if is_known else SENDS, producer, number, units, highest)

    def _send(self, state: State, process: int, producer: int, number: int, units: Units, highest: int) -> Steps:
        at = self.at
        if not units:
            yield from self._end(state, process, producer, number, highest)
            return
        first, what = units[0]
        under = (producer, first)
        if self.fault == "a unit is sent again under a new number":
            under = (producer, state[at.highest + producer] + 1)
        label = f"{process} sends {producer}:{under[1]}"
        after = self._next_state(state, process, DELETES, producer, number, units, max(highest, first))
        if self.fault == "a unit without an answer is renumbered" and producer in PROCESSES:
            # Once: under its new number it is sent.
            after = self._next_state(state, process, MOVES, producer, number, units)
            yield f"{process} is going to move {producer}:{first}", False, tuple(after)
            return
        answer = "" if self.fault == "a unit counts as sent without an answer" else self.accept(after, under, what)
        if answer == GIVEN_UP and self.fault != "a unit whose number was given up counts as sent":
            after[at.relay + process] = (SPLITS, producer, first, what)
        elif answer == GAP:
            lacks = first - 1 - state[at.highest + producer]
            is_moved = lacks > at.bounds.resolved or self.fault == "a unit after a gap is renumbered"
            after[at.relay + process] = (MOVES if is_moved else RESOLVES, producer, number, units)
            label = f"{process} sends {producer}:{under[1]}, which is refused"
        yield label, False, tuple(after)
        yield from self._be_refused(state, process, producer, first, what)
        if state[at.cuts]:
            after = self._next_state(state, process)
            after[at.cuts] -= 1
            self.cut(after, under, what)
            if self.fault == "the relay frees a producer in doubt":
                after[at.memory[process] + producer] = FREE + number
            yield f"{process} has no answer to COMMIT of {producer}:{under[1]}", True, tuple(after)

    def _delete(self, state: State, process: int, producer: int, number: int, units: Units, highest: int) -> Steps:
        at = self.at
        first, what = units[0]
        after = self._next_state(state, process, *self._next(state, producer, number, units[1:], max(highest, first)))
        self.delete(after, what)
        yield f"{process} deletes {producer}:{first}", False, tuple(after)
        if state[at.losses]:
            after[at.losses] -= 1
            after[at.relay + process] = IDLE
            yield f"{process} deletes {producer}:{first}, and does not know it", True, tuple(after)
            after = self._next_state(state, process)
            after[at.losses] -= 1
            yield f"{process} does not delete {producer}:{first}", True, tuple(after)

    def _end(self, state: State, process: int, producer: int, number: int, highest: int) -> Steps:
        """End the work at a producer whose units are all sent. It is used again only if its last number is the
        highest that the broker knows; otherwise it is deleted: Outbox.drop.

        The real relay does not use producers of processes that are gone again, either. The model may delete any
        producer, or use it again.
        """
        at = self.at
        if highest == number:
            after = self._next_state(state, process)
            after[at.memory[process] + producer] = FREE + number
            yield f"{process} may use producer {producer}", False, tuple(after)
        if self.is_locked(state, producer):
            return
        after = self._next_state(state, process)
        if state[at.owner + producer] == process:
            after[at.owner + producer] = NO_OWNER
            if state[at.losses]:
                lost = list(after)
                lost[at.losses] -= 1
                yield f"{process} retires producer {producer}, and does not know it", True, tuple(lost)
        after[at.memory[process] + producer] = UNKNOWN
        yield f"{process} retires producer {producer}", False, tuple(after)

    def _resolve(self, state: State, process: int, producer: int, number: int, units: Units) -> tuple[str, bool, State]:
        """Use up the numbers that the broker lacks, one by one, until it is the unit's turn: Relay._send_after_gap.

        A late COMMIT under such a number is refused. Here it is a repeat, with the same effect.
        """
        at = self.at
        highest = state[at.highest + producer]
        if highest < units[0][0] - 1:
            after = list(state)
            after[at.highest + producer] = highest + 1
            return f"{process} settles {producer}:{highest + 1}", False, tuple(after)
        after = self._next_state(state, process, SENDS, producer, number, units, units[0][0] - 1)
        return f"{process} has settled what is missing before {producer}:{units[0][0]}", False, tuple(after)

    # ---- Moving to new numbers: Relay._renumber, Outbox.renumber ----

    def _move(self, state: State, process: int, producer: int, number: int, units: Units) -> Steps:
        at = self.at
        if self.is_locked(state, producer):
            return
        is_own = state[at.owner + producer] == process and state[at.number + producer] == number
        if not is_own and self.fault != "the owner is not checked":
            after = self._next_state(state, process)
            after[at.memory[process] + producer] = UNKNOWN
            yield f"{process} does not move producer {producer}, which is another's", False, tuple(after)
            return
        names = self.new_producers(state)
        if not names:
            return
        new = names[0]
        after = self._next_state(state, process)
        after[at.owner + producer] = NO_OWNER
        for to, (before, _) in enumerate(units, 1):
            for unit in self.each(self.rows_of(state, (producer, before))):
                after[at.row + unit] = (new, to)
        self.make_producer(after, new, process, len(units))
        label = f"{process} moves {[each for each, _ in units]} of producer {producer} to {new}"
        if state[at.losses]:
            lost = list(after)
            lost[at.losses] -= 1
            yield f"{label}, and does not know it", True, tuple(lost)
        after[at.memory[process] + producer] = UNKNOWN
        self.doubt(after, process, new)
        yield label, False, tuple(after)

    # ---- What programs have begun: Relay._number_some, Outbox.number ----

    def _number(self, state: State, process: int, producer: int) -> Steps:
        at = self.at
        known = state[at.memory[process] + producer]
        if not self.is_free(known):
            return
        unnumbered = sum(1 << unit for unit in at.started if state[at.row + unit] == UNNUMBERED)
        if not unnumbered or self.is_locked(state, producer):
            return
        number = known - FREE + 1
        if not self._may_use(state, process, producer, number):
            after = list(state)
            after[at.memory[process] + producer] = UNKNOWN
            yield f"{process} has lost producer {producer}", False, tuple(after)
            return
        for units in range(1, unnumbered + 1):
            # Some of them: the others may have been begun later, or be for the other lane.
            if units & ~unnumbered:
                continue
            after = self._next_state(state, process, NUMBERED, producer, number)
            after[at.number + producer] = number
            for unit in at.units:
                has_one = (
                    state[at.row + unit] not in (0, UNNUMBERED) and self.fault == "a numbered unit gets another number"
                )
                if units >> unit & 1 or (has_one and state[at.row + unit][0] == producer):
                    after[at.row + unit] = (producer, number)
            self.doubt(after, process, producer)
            label = f"{process} gives {producer}:{number} to units {list(self.each(units))}"
            yield label, False, tuple(after)
            if state[at.losses]:
                after[at.losses] -= 1
                after[at.relay + process] = IDLE
                yield f"{label}, and does not know it", True, tuple(after)

    def _read_own(self, state: State, process: int, producer: int, number: int) -> tuple[str, bool, State]:
        at = self.at
        units = self.rows_of(state, (producer, number))
        if self.fault == "all units of a producer are sent under its new number":
            units = sum(each for _, each in self.units_of(state, producer))
        if units:
            after = self._next_state(state, process, SENDS_OWN, producer, number, units)
        else:
            # Another process has taken the producer, and has sent them. The next use finds that out.
            after = self._next_state(state, process)
            after[at.memory[process] + producer] = FREE + number - 1
        return f"{process} reads units {list(self.each(units))} of {producer}:{number}", False, tuple(after)

    def _send_own(self, state: State, process: int, producer: int, number: int, units: int) -> Steps:
        at = self.at
        after = self._next_state(state, process, DELETES_OWN, producer, number, units)
        answer = self.accept(after, (producer, number), units)
        if answer == GAP:
            # It is in doubt: to be taken, and moved.
            after[at.relay + process] = IDLE
        elif answer == GIVEN_UP and self.fault != "a unit whose number was given up counts as sent":
            after[at.relay + process] = (SPLITS, producer, number, units)
        yield f"{process} sends {producer}:{number}", False, tuple(after)
        if after[at.relay + process][:1] == (DELETES_OWN,):
            after[at.relay + process] = IDLE
            for unit in self.each(units):
                self.has_sent(after, process, unit)
            after[at.memory[process] + producer] = FREE + number
            yield f"{process} sends {producer}:{number}, and deletes it later", False, tuple(after)
        yield from self._be_refused(state, process, producer, number, units)
        if state[at.cuts]:
            after = self._next_state(state, process)
            after[at.cuts] -= 1
            self.cut(after, (producer, number), units)
            yield f"{process} has no answer to COMMIT of {producer}:{number}", True, tuple(after)

    # ---- What is too much together: Relay._split_unit, Outbox.split_into_unnumbered ----

    def _be_refused(self, state: State, process: int, producer: int, number: int, units: int) -> Steps:
        at = self.at
        if state[at.refusals] and not any(unit in at.messages for unit in self.each(units)):
            step = SPLITS if self.fault == "a unit is split before its number is given up" else GIVES_UP
            after = self._next_state(state, process, step, producer, number, units)
            after[at.refusals] -= 1
            yield f"{process} sends {producer}:{number}, which is too much", True, tuple(after)

    def _give_up(self, state: State, process: int, producer: int, number: int, units: int) -> Steps:
        at = self.at
        highest = state[at.highest + producer]
        label = f"{process} gives up {producer}:{number}"
        if number in state[at.given_up + producer]:
            yield label, False, tuple(self._next_state(state, process, SPLITS, producer, number, units))
            return
        if number <= highest:
            # Somebody else has sent it.
            yield label, False, tuple(self._next_state(state, process, DELETES_OWN, producer, number, units))
            return
        after = self._next_state(state, process, SPLITS, producer, number, units)
        if number == highest + 1:
            after[at.highest + producer] = number
            after[at.given_up + producer] = (*state[at.given_up + producer], number)
        else:
            after[at.relay + process] = IDLE
        yield label, False, tuple(after)
        if state[at.cuts]:
            after[at.cuts] -= 1
            after[at.relay + process] = IDLE
            yield f"{label}, and does not know it", True, tuple(after)

    def _split(self, state: State, process: int, producer: int, number: int, units: int) -> Steps:
        at = self.at
        after = self._next_state(state, process)
        for unit in self.each(units):
            if state[at.row + unit] == (producer, number):
                after[at.row + unit] = UNNUMBERED
        yield from self._be_unanswered(state, process, after, f"{process} takes {producer}:{number} apart")
        yield f"{process} takes {producer}:{number} apart", False, tuple(after)

    def _be_unanswered(self, state: State, process: int, done: Draft, label: str) -> Steps:
        """Lose the answer of the database: the statement is executed, as in `done`, or not, and the process does not
        know. The relay starts anew."""
        losses = self.at.losses
        if state[losses]:
            lost, kept = list(done), self._next_state(state, process)
            for each in (lost, kept):
                each[losses] -= 1
            yield f"{label}, and does not know it", True, tuple(lost)
            yield f"{label}, which does not happen", True, tuple(kept)

    def _delete_own(self, state: State, process: int, producer: int, number: int, units: int) -> Steps:
        at = self.at
        after = self._next_state(state, process)
        self.delete(after, units)
        yield from self._be_unanswered(state, process, after, f"{process} deletes {producer}:{number}")
        after[at.memory[process] + producer] = FREE + number
        yield f"{process} deletes {producer}:{number}", False, tuple(after)

    # ---- After a COMMIT that was answered: OutboxConfirmer ----

    def of_confirming(self, state: State, process: int) -> Steps:
        for unit in self.each(state[self.at.sent + process]):
            after = list(state)
            self.delete(after, 1 << unit)
            yield f"{process} deletes unit {unit}", False, tuple(after)

    # ---- It dies ----

    def leave_late(self, state: State, after: Draft, process: int) -> None:
        doing = state[self.at.relay + process]
        if doing and doing[0] == SENDS and doing[3]:
            first, what = doing[3][0]
            self.cut(after, (doing[1], first), what)
        elif doing and doing[0] == SENDS_OWN:
            self.cut(after, doing[1:3], doing[3])
