"""Plan of a stage's dependencies: makes the arguments of the stage for each message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from truenext.stage.dependencies.exit_stack import StageExitStack
from truenext.stage.dependencies.factory import Factory, FactoryKind

ProvidedValues = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class FactoryStep:
    """Call of one factory in a DependencyPlan. It makes one value."""

    name: str
    maker: Factory
    kind: FactoryKind
    direct: Sequence[tuple[str, str]]
    """Parameters of the factory that get provided values, each with the name of the value."""
    made: Sequence[tuple[str, int]]

    def call(self, provided: ProvidedValues, values: list[Any]) -> Any:
        return self.maker(**_arguments(self.direct, self.made, provided, values))


@dataclass(slots=True, eq=False)
class DependencyPlan:
    """Dependencies of one stage, in the order in which their values are made.

    `make_arguments` is for a plain stage, and is called in the stage's thread. `make_arguments_async` is for an `async`
    stage. Both return the arguments by parameter, and enter context managers into a stack. The caller closes the stack
    after the stage. `provided` has the provided values, by the names that `build_plan` was given.
    """

    steps: Sequence[FactoryStep]
    direct: Sequence[tuple[str, str]]
    made: Sequence[tuple[str, int]]
    overridden: Set[Factory]
    """Factories that `overrides` has replaced."""
    required_names: frozenset[str] = field(init=False)
    """Names of the provided values that the stage or one of its factories takes."""

    def __post_init__(self) -> None:
        direct = chain(self.direct, *(step.direct for step in self.steps))
        self.required_names = frozenset(name for _, name in direct)

    def arguments(self, provided: ProvidedValues, values: Sequence[Any] = ()) -> dict[str, Any]:
        """Return the arguments of the stage. `values` are the values that the steps have made."""
        return _arguments(self.direct, self.made, provided, values)

    def make_arguments(self, stack: StageExitStack, provided: ProvidedValues) -> dict[str, Any]:
        values: list[Any] = []
        for step in self.steps:
            value = step.call(provided, values)
            values.append(stack.enter(step.name, value) if step.kind is FactoryKind.ENTER else value)
        return self.arguments(provided, values)

    async def make_arguments_async(self, stack: StageExitStack, provided: ProvidedValues) -> dict[str, Any]:
        """Make the arguments of an `async` stage. Plain factories are called in the event loop."""
        values: list[Any] = []
        for step in self.steps:
            value = step.call(provided, values)
            if step.kind is FactoryKind.AWAIT:
                value = await value
            elif step.kind is FactoryKind.ENTER:
                value = stack.enter(step.name, value)
            elif step.kind is FactoryKind.ENTER_ASYNC:
                value = await stack.enter_async(step.name, value)
            values.append(value)
        return self.arguments(provided, values)


def _arguments(
    direct: Sequence[tuple[str, str]], made: Sequence[tuple[str, int]], provided: ProvidedValues, values: Sequence[Any]
) -> dict[str, Any]:
    arguments = {parameter: provided[name] for parameter, name in direct}
    for parameter, step in made:
        arguments[parameter] = values[step]
    return arguments
