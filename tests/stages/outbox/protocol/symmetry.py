"""Symmetry of states: two states that differ only in the numbering of processes or messages have the same future, so
the search visits one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import Any, NamedTuple

from tests.stages.outbox.protocol.state import (
    CLAIMED,
    DELETES,
    MOVES,
    NUMBERED,
    PROCESSES,
    READ,
    RESOLVES,
    SENDS,
    Draft,
    Layout,
    State,
)


class Renaming(NamedTuple):
    """New numbers: item i is renamed to [i]. Process 0 begins with producer 0, so these go together."""

    processes: Sequence[int]
    units: Sequence[int]
    producers: Sequence[int]
    sets: Sequence[int]
    """New sets of units, by old set."""


def renamings(layout: Layout) -> list[Renaming]:
    """Return all renamings except the identity."""
    found = []
    ways = product(permutations(PROCESSES), permutations(layout.messages), permutations(layout.started))
    for processes, messages, started in ways:
        units = (*messages, *started)
        sets = [sum(1 << to for unit, to in enumerate(units) if each >> unit & 1) for each in range(1 << len(units))]
        found.append(Renaming(processes, units, (*processes, *layout.producers[2:]), sets))
    return found[1:]


class Renamer:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.renamings = renamings(layout)

    def others(self, state: State) -> Iterator[State]:
        """Return the states that differ from this one in names only."""
        for renaming in self.renamings:
            yield self.renamed(state, renaming)

    def renamed(self, state: State, renaming: Renaming) -> State:
        at = self._layout
        processes, units, producers, sets = renaming
        after: Draft = list(state)
        for message in at.messages:
            to = units[message]
            holder = state[at.message + message]
            after[at.message + to] = processes[holder] if holder in PROCESSES else holder
            after[at.inbox + to] = state[at.inbox + message]
            after[at.pending + to] = _numbered(state[at.pending + message], producers)
        for unit in at.units:
            after[at.output + units[unit]] = state[at.output + unit]
            after[at.row + units[unit]] = _numbered(state[at.row + unit], producers)
        for producer in at.producers:
            to = producers[producer]
            owner = state[at.owner + producer]
            after[at.owner + to] = processes[owner] if owner in PROCESSES else owner
            after[at.number + to] = state[at.number + producer]
            after[at.highest + to] = state[at.highest + producer]
            after[at.given_up + to] = state[at.given_up + producer]
        after[at.late] = tuple(
            sorted((producers[p], n, sets[what], m if m < 0 else units[m]) for p, n, what, m in state[at.late])
        )
        for process in PROCESSES:
            to = processes[process]
            after[at.is_alive + to] = state[at.is_alive + process]
            after[at.sent + to] = sets[state[at.sent + process]]
            after[at.relay + to] = _relay(state[at.relay + process], producers, sets)
            for message in at.messages:
                doing = state[at.worker[process] + message]
                after[at.worker[to] + units[message]] = (
                    (doing[0], producers[doing[1]], doing[2]) if len(doing) == 3 else doing
                )
            for producer in at.producers:
                after[at.memory[to] + producers[producer]] = state[at.memory[process] + producer]
        return tuple(after)


def _numbered(value: Any, producers: Sequence[int]) -> Any:
    return (producers[value[0]], value[1]) if isinstance(value, tuple) else value


def _relay(doing: tuple[Any, ...], producers: Sequence[int], sets: Sequence[int]) -> tuple[Any, ...]:
    if not doing:
        return doing
    step, producer, *rest = doing
    if step in (CLAIMED, NUMBERED):
        return (step, producers[producer], *rest)
    if step in (READ, SENDS, DELETES, RESOLVES, MOVES):
        number, units, *highest = rest
        return (step, producers[producer], number, tuple((each, sets[what]) for each, what in units), *highest)
    return _relay_of_others(step, producers[producer], rest, sets)


def _relay_of_others(step: int, producer: int, rest: list[Any], sets: Sequence[int]) -> tuple[Any, ...]:
    """Rename steps of a relay with program units, and of the fault that reads units by the locking statement."""
    if len(rest) == 1:
        return (step, producer, tuple((each, sets[what]) for each, what in rest[0]))
    number, what = rest
    return (step, producer, number, sets[what])
