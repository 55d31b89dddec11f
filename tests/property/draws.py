"""Random draws for state machines: by Hypothesis, which shrinks failures, or plainly, at a third of the cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from random import Random
from typing import Any, Protocol

from hypothesis import strategies as st


class Draw(Protocol):
    @property
    def strategy(self) -> st.SearchStrategy[Any]: ...

    def by(self, random: Random) -> Any: ...


class OneOf:
    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    @cached_property
    def strategy(self) -> st.SearchStrategy[Any]:
        return st.sampled_from(self.values)

    def by(self, random: Random) -> Any:
        return random.choice(self.values)


class Each:
    """A tuple with one of each."""

    def __init__(self, *draws: Draw) -> None:
        self.draws = draws

    @cached_property
    def strategy(self) -> st.SearchStrategy[Any]:
        return st.tuples(*(draw.strategy for draw in self.draws))

    def by(self, random: Random) -> Any:
        return tuple(draw.by(random) for draw in self.draws)


class Several:
    """A list of at least one."""

    def __init__(self, of: Draw, most: int) -> None:
        self.of = of
        self.most = most

    @cached_property
    def strategy(self) -> st.SearchStrategy[Any]:
        return st.lists(self.of.strategy, min_size=1, max_size=self.most)

    def by(self, random: Random) -> Any:
        return [self.of.by(random) for _ in range(random.randint(1, self.most))]


class Some:
    """A set of these, or of none."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    @cached_property
    def strategy(self) -> st.SearchStrategy[Any]:
        return st.sets(st.sampled_from(self.values), max_size=len(self.values))

    def by(self, random: Random) -> Any:
        # About as many as Hypothesis would draw.
        return set(random.sample(self.values, random.randint(0, min(10, len(self.values)))))


class Named:
    """A dictionary with one of each."""

    def __init__(self, draws: dict[str, Draw]) -> None:
        self.draws = draws

    @cached_property
    def strategy(self) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries({name: draw.strategy for name, draw in self.draws.items()})

    def by(self, random: Random) -> Any:
        return {name: draw.by(random) for name, draw in self.draws.items()}
