"""Breadth-first search of all states that the steps of the protocol lead to.

It also checks that every state leads to a good end once nothing more fails.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from tests.stages.outbox.protocol.relays import Relays
from tests.stages.outbox.protocol.rules import Steps, Violation
from tests.stages.outbox.protocol.state import PROCESSES, Bounds, Layout, State
from tests.stages.outbox.protocol.symmetry import Renamer


class Protocol(Relays):
    def steps(self, state: State) -> Steps:
        """Yield the possible next steps. Raises: Violation"""
        at = self.at
        yield from self.of_the_broker(state)
        yield from self.of_the_database(state)
        for process in PROCESSES:
            if not state[at.is_alive + process]:
                continue
            for message in at.messages:
                yield from self.of_a_worker(state, process, message)
            yield from self.of_borrowing(state, process)
            yield from self.of_a_relay(state, process)
            yield from self.of_confirming(state, process)
            yield from self.of_dying(state, process)


class Found(NamedTuple):
    states: int
    steps: int
    good: int

    def __str__(self) -> str:
        return f"{self.states:,} states, {self.steps:,} steps, {self.good:,} good ends"


class Graph:
    """Graph of states, the nearest first, with one of all states that differ in names only."""

    def __init__(self, bounds: Bounds, fault: str) -> None:
        self.layout = Layout(bounds)
        self.protocol = Protocol(self.layout, fault)
        self._renamer = Renamer(self.layout)
        self.states = [self.layout.initial_state()]
        self._known = {self.states[0]: 0}
        self._came_from = array("i", [-1])
        self.steps = 0
        # Steps with which nothing goes wrong.
        self.sources, self.targets = array("i"), array("i")

    def search(self) -> None:
        """Raises: Violation"""
        at = 0
        while at < len(self.states):
            try:
                for _, is_fault, after in self.protocol.steps(self.states[at]):
                    self.steps += 1
                    to = self._index(after)
                    if to is None:
                        to = self._known[after] = len(self.states)
                        self.states.append(after)
                        self._came_from.append(at)
                    if not is_fault:
                        self.sources.append(at)
                        self.targets.append(to)
            except Violation as violation:
                raise Violation(f"{violation}\n{self.way(at)}") from violation
            at += 1

    def _index(self, state: State) -> int | None:
        index = self._known.get(state)
        if index is None:
            for other in self._renamer.others(state):
                index = self._known.get(other)
                if index is not None:
                    # To rename it once more would take longer than to remember it.
                    self._known[state] = index
                    break
        return index

    def way(self, to: int) -> str:
        """Return the shortest way to a state. It executes the steps once more: their descriptions would need more
        memory than the states, and a state may be known under other names than those by which it was reached."""
        indexes = [to]
        while (before := self._came_from[indexes[-1]]) >= 0:
            indexes.append(before)
        labels = []
        state = self.states[0]
        for index in reversed(indexes[:-1]):
            following = self.protocol.steps(state)
            label, is_fault, state = next(step for step in following if self._index(step[2]) == index)
            labels.append(f"{label} (a fault)" if is_fault else label)
        return "\n".join(f"{number}. {label}" for number, label in enumerate(labels, 1))


def search(bounds: Bounds, fault: str = "") -> Found:
    """Search all states, and check that each can end well.

    Raises: Violation, with the shortest way to it
    """
    graph = Graph(bounds, fault)
    graph.search()
    good = [index for index, state in enumerate(graph.states) if graph.layout.is_good(state)]
    bad = _first_that_cannot_end_well(len(graph.states), graph.sources, graph.targets, good)
    if bad is not None:
        unfinished = graph.layout.unfinished(graph.states[bad])
        raise Violation(f"it cannot end well any more: {unfinished}\n{graph.way(bad)}")
    return Found(len(graph.states), graph.steps, len(good))


def _first_that_cannot_end_well(count: int, sources: array[int], targets: array[int], good: list[int]) -> int | None:
    """Return a state that cannot reach a good end, searching backwards over steps without a failure.

    That is enough: without failures the search never leaves these states, and they are finitely many. If every
    possible step is taken again and again, a good end is reached, as no circle avoids it for ever.
    """
    # The steps that lead to a state, one behind the other: fewer objects than a list for each.
    first = array("i", [-1]) * count
    following = array("i", [-1]) * len(targets)
    for step, to in enumerate(targets):
        following[step] = first[to]
        first[to] = step
    can = bytearray(count)
    rest = list(good)
    for each in good:
        can[each] = 1
    while rest:
        step = first[rest.pop()]
        while step >= 0:
            source = sources[step]
            if not can[source]:
                can[source] = 1
                rest.append(source)
            step = following[step]
    bad = can.find(0)
    return None if bad < 0 else bad
