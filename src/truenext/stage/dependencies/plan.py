"""Plan of a stage's dependencies: makes their values for each message, and closes them."""

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
    """Step of a DependencyPlan: the call of one factory, which makes one value."""

    name: str
    maker: Factory
    kind: FactoryKind
    direct: Sequence[tuple[str, str]]
    """Parameters that get provided values, with the names of these values."""
    made: Sequence[tuple[str, int]]

    def call(self, provided: ProvidedValues, values: list[Any]) -> Any:
        return self.maker(**_arguments(self.direct, self.made, provided, values))


@dataclass(slots=True, eq=False)
class DependencyPlan:
    """Dependencies of one stage, in the order in which they are made.

    `make_arguments` is for a plain stage, in the thread that runs it, `make_arguments_async` for an `async` one. Both
    return the arguments by parameter, and enter resources into a stack, which the caller closes after the stage.
    `provided` has the values by the names given to `build_plan`.
    """

    steps: Sequence[FactoryStep]
    direct: Sequence[tuple[str, str]]
    made: Sequence[tuple[str, int]]
    overridden: Set[Factory]
    """Factories that were replaced by others from `overrides`."""
    required_names: frozenset[str] = field(init=False)
    """Names of the provided values that the stage and its factories take."""

    def __post_init__(self) -> None:
        direct = chain(self.direct, *(step.direct for step in self.steps))
        self.required_names = frozenset(name for _, name in direct)

    def arguments(self, provided: ProvidedValues, values: Sequence[Any] = ()) -> dict[str, Any]:
        """Return the arguments of the stage; `values` are the results of the steps."""
        return _arguments(self.direct, self.made, provided, values)

    def make_arguments(self, stack: StageExitStack, provided: ProvidedValues) -> dict[str, Any]:
        values: list[Any] = []
        for step in self.steps:
            value = step.call(provided, values)
            values.append(stack.enter(step.name, value) if step.kind is FactoryKind.ENTER else value)
        return self.arguments(provided, values)

    async def make_arguments_async(self, stack: StageExitStack, provided: ProvidedValues) -> dict[str, Any]:
        """Make the values of an `async` stage. Plain factories run in the event loop."""
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
