"""Breadth-first search of all states that the steps of a model lead to: that of a log, or that of a failover."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import pytest

from tests.contract.postgresql.log_model import LogModel, Violation
from tests.contract.postgresql.log_state import Bounds, Broker, Content, Life, State

is_long = pytest.mark.skipif("TRUENEXT_SEARCH" not in os.environ, reason="minutes: make search")

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "50"))

AnyState = TypeVar("AnyState", bound=Hashable)
Steps = Callable[[AnyState], Iterator[tuple[str, AnyState]]]


class Found(NamedTuple):
    states: int
    steps: int

    def __str__(self) -> str:
        return f"{self.states:,} states, {self.steps:,} steps"


def search(bounds: Bounds, fault: str = "") -> Found:
    """Search all states of a log. Raises: Violation, with the shortest way to it"""
    return Search(LogModel(fault).steps, bounds.initial_state(), _canonical).run()


def walk(steps: Steps[AnyState], state: AnyState, choices: Sequence[int]) -> None:
    """Go one way, a step for each choice. Raises: Violation, with the way to it"""
    way: list[str] = []
    try:
        for choice in choices:
            following = list(steps(state))
            if not following:
                return
            # Failures come last, so that smaller choices are simpler.
            label, state = following[choice % len(following)]
            way.append(label)
    except Violation as violation:
        raise Violation("\n".join([str(violation), *way])) from violation


class Search(Generic[AnyState]):
    """States in the order in which they are found. Of states with the same future only one is kept: those that
    `canonical` makes equal."""

    def __init__(
        self,
        steps: Steps[AnyState],
        initial: AnyState,
        canonical: Callable[[AnyState], AnyState] = lambda state: state,
    ) -> None:
        self._steps = steps
        self._initial = initial
        self._canonical = canonical
        self._known = {hash(canonical(initial))}
        self._came_from = array("i", [-1])
        self._step_indexes = array("h", [-1])

    def run(self) -> Found:
        """Raises: Violation, with the shortest way to it"""
        level, first, steps = [self._initial], 0, 0
        while level:
            following: list[AnyState] = []
            for at, state in enumerate(level, first):
                index = -1
                try:
                    for index, (_, after) in enumerate(self._steps(state)):
                        self._add(after, at, index, following)
                except Violation as violation:
                    raise Violation(f"{violation}\n{self._way(at)}") from violation
                steps += index + 1
            first += len(level)
            level = following
        return Found(first, steps)

    def _add(self, state: AnyState, came_from: int, index: int, following: list[AnyState]) -> None:
        # A set of states would not fit into memory.
        key = hash(self._canonical(state))
        if key not in self._known:
            self._known.add(key)
            self._came_from.append(came_from)
            self._step_indexes.append(index)
            following.append(state)

    def _way(self, to: int) -> str:
        """Return the shortest way to a state."""
        indexes: list[int] = []
        while to:
            indexes.append(self._step_indexes[to])
            to = self._came_from[to]
        labels, state = [], self._initial
        for index in reversed(indexes):
            label, state = list(self._steps(state))[index]
            labels.append(label)
        return "\n".join(f"{number}. {label}" for number, label in enumerate(labels, 1))


def _canonical(state: State) -> State:
    """Return the state without what no later step depends on, and with its brokers in one order."""
    brokers = (_canonical_broker(each, state) for each in state.brokers)
    state = state._replace(brokers=tuple(sorted(brokers, key=hash)))
    if state.failovers_left:
        return state
    return state._replace(confirmed=0, database=state.database._replace(replicated=0))


def _canonical_broker(broker: Broker, state: State) -> Broker:
    if not broker.steps_left:
        return Broker(0, late=broker.late, compaction=broker.compaction if broker.life is Life.OFF else None)
    folder = broker.folder
    if folder is None or state.failures_left:
        return broker
    # Nothing tears it any more.
    return broker._replace(folder=folder._replace(synced_number=0, synced_digest=b"", synced_content=Content()))
